"""HTML pages of the tools: Jinja templates with everything escaped, which the extra ``pages`` installs.

    templates/base.html     the frame of a page: head, top with tabs, content, foot; pages extend it
    templates/parts.html    macros that several pages use
    templates/style.css     the style, for light and dark mode, from the width of a phone on; colours of series are the
                            classes s0 to s7. The style of charts, in charts.py, precedes it

A page has no script and loads nothing from other hosts. The viewer's pages forbid inline style too (``style=""``), so
SVG uses classes and presentation attributes only. A page in a single file contains the style, see :func:`fill`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_streaming.errors import MissingDependencyError
from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.report.charts import STYLE, Markup
from lightning_streaming.units import format_bytes

if TYPE_CHECKING:
    import jinja2

_TEMPLATES = Path(__file__).parent / "templates"
_SERIES_COLOURS = 8


def import_jinja() -> Any:
    """Return the module of Jinja, whose import takes a while.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        return import_module("jinja2")
    except ImportError:
        raise MissingDependencyError(
            "pages need the jinja2 and markupsafe packages", hint="run: pip install 'lightning-streaming[pages]'"
        ) from None


def style() -> str:
    """Return the style sheet of pages and charts."""
    return f"{STYLE}\n" + (_TEMPLATES / "style.css").read_text(encoding="utf-8")


def icon() -> bytes:
    """Return the icon of a page, an SVG file."""
    return (_TEMPLATES / "icon.svg").read_bytes()


def fill(template: str, values: Mapping[str, Any], *, single_file: bool = False) -> str:
    """Return the HTML of a page.

    Args:
        template: Name of its template, such as ``"plan.html"``.
        values: Variables of the template. Texts are escaped; charts are ``markupsafe.Markup``. Every page needs
            ``title`` and ``tool``; ``root`` is the address below which ``style.css`` and ``icon.svg`` are served.
        single_file: Whether to write style and icon into the page, so that it needs no other file.
    """
    values = dict(values)
    if single_file:
        values["inline_style"] = Markup(style())
        values["icon"] = f"data:image/svg+xml;base64,{base64.b64encode(icon()).decode()}"
    return _environment().get_template(template).render(values)


@cache
def _environment() -> jinja2.Environment:
    jinja = import_jinja()
    environment: jinja2.Environment = jinja.Environment(
        loader=jinja.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count="{:,}".format,
        size=format_bytes,
        share="{:.1%}".format,
        series=lambda number: f"s{number % _SERIES_COLOURS}",
        name=printable_name,
    )
    return environment
