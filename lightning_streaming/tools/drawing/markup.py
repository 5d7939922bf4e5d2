"""``Markup``, a text that is HTML already, and Jinja, which fills pages; the extra ``pages`` installs both."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_streaming.errors import MissingDependencyError

if TYPE_CHECKING:
    from markupsafe import Markup as Markup
else:
    try:
        from markupsafe import Markup
    except ImportError:
        Markup = str  # tools import this also where they show no page; Jinja does not work without markupsafe


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
