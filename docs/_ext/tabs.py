"""Tabs on pages: blocks of code that follow ``<!-- tabs -->``, one tab for each, named by its language.

In the Markdown they stay blocks below each other, as other viewers show them. The tabs are radio buttons and style.
"""

from __future__ import annotations

import re
from itertools import count
from typing import Any

from sphinx.application import Sphinx

_NAMES = {"bash": "Command line", "console": "Command line", "python": "Python", "yaml": "YAML"}
_BLOCK = r"(?:<!-- [^>]* -->\n)?```(\w+)\n.*?\n```\n"
_TABS = re.compile(rf"^<!-- tabs -->\n+((?:{_BLOCK}\n*)+)", re.MULTILINE | re.DOTALL)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}


def _read(_: Sphinx, __: str, source: list[str]) -> None:
    source[0] = with_tabs(source[0])


def with_tabs(text: str) -> str:
    """Return a page with each group of blocks as tabs."""
    groups = count()

    def tabs(match: re.Match[str]) -> str:
        group, lines = next(groups), list[str]()
        for number, block in enumerate(re.finditer(_BLOCK, match[1], re.DOTALL)):
            mark, checked = f"tab-{group}-{number}", " checked" if number == 0 else ""
            lines += [
                # A tag alone on its line: otherwise Markdown makes a paragraph of it.
                f'<input type="radio" class="tab" name="tabs-{group}" id="{mark}"{checked}>\n'
                f'<label for="{mark}">{_NAMES[block[1]]}</label>\n\n<div class="tabbed">\n',
                block[0],
                "</div>\n",
            ]
        return "\n".join(['<div class="tabs">\n', *lines, "</div>\n\n"])

    return _TABS.sub(tabs, text)
