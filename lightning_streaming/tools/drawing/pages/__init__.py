"""What tools show in a browser: one base for all pages, filled in here, by Jinja with everything escaped.

    base.html     the frame of a page: head, top with tabs, content, foot; pages extend it
    parts.html    macros that several pages use
    style.css     the style; light and dark, from a phone's width up; colours of series are classes s0 to s7. It
                  follows that of charts, which is in tools/drawing/charts.py

A page has no script and loads nothing from elsewhere. The viewer's pages forbid inline style too (``style=""``), so SVG
has classes and presentation attributes alone. A page that is one file has the style within it: see :func:`fill`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_streaming.tools.console import printable_name
from lightning_streaming.tools.drawing.charts import STYLE
from lightning_streaming.tools.drawing.markup import Markup, import_jinja
from lightning_streaming.units import format_bytes

if TYPE_CHECKING:
    import jinja2

_HERE = Path(__file__).parent
_SERIES = 8


def style() -> str:
    """The text of the style sheet, that of charts included."""
    return f"{STYLE}\n" + (_HERE / "style.css").read_text(encoding="utf-8")


def icon() -> bytes:
    """The icon of a page: an SVG file."""
    return (_HERE / "icon.svg").read_bytes()


def fill(template: str, values: Mapping[str, Any], *, is_one_file: bool = False) -> str:
    """The HTML of a page.

    Args:
        template: Its file here, such as ``"plan.html"``.
        values: What it shows. Texts are escaped; charts come as ``markupsafe.Markup``. ``title`` and ``tool`` must be
            there; ``root`` is where ``style.css`` and ``icon.svg`` are found.
        is_one_file: Whether style and icon are written into the page, so that it needs no other file.
    """
    values = dict(values)
    if is_one_file:
        values["inline_style"] = Markup(style())
        values["icon"] = f"data:image/svg+xml;base64,{base64.b64encode(icon()).decode()}"
    return _environment().get_template(template).render(values)


@cache
def _environment() -> jinja2.Environment:
    jinja = import_jinja()
    environment: jinja2.Environment = jinja.Environment(
        loader=jinja.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=_count, size=format_bytes, share=_share, series=_series, name=printable_name)
    return environment


def _count(number: int) -> str:
    return f"{number:,}"


def _share(part: float) -> str:
    return f"{part:.1%}"


def _series(place: int) -> str:
    """The class that gives the colour of a series, by its place."""
    return f"s{place % _SERIES}"
