"""The documents tell the truth: their Python runs, prints what they say it prints, and their links lead somewhere.

Each ``python`` block of a document is run, in order, in an empty directory, with the names of the blocks before it. A
``text`` block right after one is exactly what it prints. A block after ``<!-- not run -->`` need only be Python, and so
here one after ``<!-- with PACKAGE -->``: guides that have such are run by ``test_migration_guides.py``.
README and quick start, with their commands, are run by ``test_readme.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_streaming.formats import encodings

ROOT = Path(__file__).parents[2]
WITH_SNIPPETS = [
    ROOT / "CONTRIBUTING.md",
    *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "quickstart.md"}),
    *sorted((ROOT / "docs" / "internals").glob("*.md")),
]
WITH_LINKS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "lightning_streaming").rglob("*.md")),
]
_SNIPPET = re.compile(
    r"^(?P<not_run><!-- (?:not run|raises[^>]*?|with (?P<package>[\w.]+)) -->\s*)?"
    r"^```python\n(?P<code>.*?)^```\n(?:\s*^```text\n(?P<prints>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\]\((?P<target>[^)#\s]+)[^)]*\)")
_IS_GUIDE = re.compile(r"^<!-- with ", re.MULTILINE)
_REFERENCE = re.compile(r"\[([^\]\n]+)\]\[([^\]\n]*)\]")
_DEFINITION = re.compile(r"^\[([^\]\n]+)\]: (\S+)$", re.MULTILINE)


class Snippet(NamedTuple):
    """A block of Python in a document."""

    code: str
    """Its lines, where they stand in the document, so that a traceback points there."""
    prints: str | None
    """What it prints; None if the document does not say."""
    is_run: bool
    """Whether it can be run as it stands."""
    package: str | None = None
    """What it is a program for, of another library."""


def snippets(document: str) -> Iterator[Snippet]:
    """The blocks of a document, in order."""
    found = list(_SNIPPET.finditer(document))
    assert len(found) == document.count("```python"), "a block is indented or not closed, and would not be run"
    for match in found:
        lines_before = document.count("\n", 0, match.start("code"))
        yield Snippet("\n" * lines_before + match["code"], match["prints"], not match["not_run"], match["package"])


def run(document: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a document, and compare what it prints."""
    names = {"__name__": "__main__"}
    for code, prints, is_run, _ in snippets(document):
        compiled = compile(code, name, "exec")
        if is_run:
            exec(compiled, names)
            printed = capsys.readouterr().out
            assert prints is None or printed == prints


@pytest.mark.rotate(6)
@pytest.mark.parametrize(
    "path",
    [path for path in WITH_SNIPPETS if not _IS_GUIDE.search(path.read_text())],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_its_python_runs_and_prints_what_it_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(encodings, "_REGISTERED", {})
    run(path.read_text(), str(path), capsys)


@pytest.mark.parametrize("path", WITH_LINKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_its_links_lead_somewhere(path: Path) -> None:
    targets = [match["target"] for match in _LINK.finditer(path.read_text()) if ":" not in match["target"]]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_readme_leads_to_its_files_also_where_it_is_shown_without_them() -> None:
    page = re.search(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    text = (ROOT / "README.md").read_text()
    targets = dict(_DEFINITION.findall(text))
    assert page is not None
    assert len(targets) > 20
    assert {name or shown for shown, name in _REFERENCE.findall(text)} == set(targets)
    assert [match["target"] for match in _LINK.finditer(text) if ":" not in match["target"]] == []
    site = targets.pop("site")
    assert f'Documentation = "{site}"' in (ROOT / "pyproject.toml").read_text()
    files = {name: target.removeprefix(f"{page[1]}/blob/main/") for name, target in targets.items()}
    assert [name for name, file in files.items() if not (ROOT / file).exists()] == []
    pictures = re.findall(rf"{page[1]}/main/(\S+?)\"".replace("github.com", "raw.githubusercontent.com"), text)
    assert [(ROOT / picture).stat().st_size > 0 for picture in pictures] == [True]
    assert re.findall(r"^git clone (.+)$", text, re.MULTILINE) == [page[1]]


def test_the_readme_can_be_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_a_block_that_prints_something_else_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    document = "```python\nx = 1\n```\n\nwords\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n"
    with pytest.raises(AssertionError):
        run(document, "example", capsys)
    run(document.replace("\n2\n", "\n1\n"), "example", capsys)


def test_a_block_that_is_not_run_must_still_be_python(capsys: pytest.CaptureFixture[str]) -> None:
    document = "<!-- not run -->\n```python\nraise SystemExit\n```\n"
    run(document, "example", capsys)
    with pytest.raises(SyntaxError):
        run(document.replace("Exit", "Exit("), "example", capsys)


def test_a_block_that_would_be_overlooked_is_found() -> None:
    with pytest.raises(AssertionError, match="indented"):
        list(snippets("- as here:\n\n  ```python\n  x = 1\n  ```\n"))
