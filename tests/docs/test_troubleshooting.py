"""Each error of docs/troubleshooting.md really happens, with the message that stands there.

A block after ``<!-- raises -->`` must raise what the ``text`` block below it shows; ``without PACKAGE`` hides a package
from it, ``with NAME=VALUE`` sets a variable of the environment. Run as a script, this file writes the messages.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lightning_streaming.errors import StreamingError
from tests.servers import HttpStore, fresh_store, http_server

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
HOST = "https://data.example.com"
"""Where the page has a store; it answers that nobody may read it."""
HOME = "/home/me"
"""Where the page is tried out."""
_BLOCK = re.compile(
    r"^(?:<!-- (?P<raises>raises)(?:, without (?P<package>\w+)|, with (?P<variable>\w+=\w+))? -->\n)?"
    r"```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<told>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


def raised(block: re.Match[str], names: dict[str, object], store: HttpStore) -> str:
    """What a block raises, as the page shows it."""
    with pytest.MonkeyPatch.context() as patch:
        if block["package"]:
            patch.setitem(sys.modules, block["package"], None)
        if block["variable"]:
            patch.setenv(*block["variable"].split("="))
        with pytest.raises(StreamingError) as caught:
            exec(block["code"].replace(HOST, store.url), names)
    told = f"{caught.type.__name__}: {caught.value}"
    return told.replace(store.url, HOST).replace(str(Path.cwd()), HOME)


def errors(page: str, store: HttpStore) -> Iterator[tuple[re.Match[str], str]]:
    """Each block that is to raise, and what it does raise."""
    store.fail("private/index.json", "status", status=403)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in _BLOCK.finditer(page):
        if block["raises"]:
            yield block, raised(block, names, store)
        else:
            exec(block["code"], names)


def test_each_error_happens_and_says_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, http_store: HttpStore
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    found = list(errors(page, http_store))
    assert [told for _, told in found] == [block["told"] and block["told"].rstrip("\n") for block, _ in found]
    assert len(found) == page.count("<!-- raises") >= 20


if __name__ == "__main__":
    text = PAGE.read_text()
    with TemporaryDirectory() as home, TemporaryDirectory() as root, http_server(Path(root)) as url:
        os.chdir(home)
        for one, message in list(errors(text, fresh_store(url, Path(root)))):
            head = one[0][: one.start("told") - one.start() - len("\n```text\n")] if one["told"] else one[0]
            text = text.replace(one[0], f"{head}\n```text\n{message}\n```\n", 1)
    PAGE.write_text(text)
