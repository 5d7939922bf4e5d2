"""docs/architecture.md names files and functions that exist, and docs/internals/cache.md messages that are logged."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_streaming"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
READMES = sorted(PACKAGE.glob("*/README.md"))
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")  # not the fences of blocks, behind which every name would be missed
_PATH = re.compile(r"(?:[a-z]\w*/)+\w+\.(?:py|md)")
_LISTED = re.compile(r"^ {4}([a-z]\w*)/? {2,}(?:[A-Z]\w+:? +)?[a-z\"`.:]", re.MULTILINE)


def rows() -> Iterator[list[str]]:
    """The cells of each row of a table."""
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Every class, function and constant of a file, and methods as ``Class.method``."""
    names = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef))
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return frozenset(names)


def test_each_file_exists() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    paths = {code for code in _CODE.findall(PAGE + guide) if _PATH.fullmatch(code)}
    assert len(paths) > 60
    assert [path for path in sorted(paths) if not (PACKAGE / path).exists() and not (ROOT / path).exists()] == []


def test_each_function_of_a_walk_is_in_a_file_of_its_row() -> None:
    walks = [cells for cells in rows() if len(cells) == 3 and ".py`" in cells[1]]
    assert len(walks) > 35
    for _, files, functions in walks:
        known = frozenset[str]().union(*(names_in(PACKAGE / path) for path in _CODE.findall(files)))
        assert set(_CODE.findall(functions)) - known == set(), files


def test_the_glossary_has_at_most_32_terms() -> None:
    glossary = PAGE.partition("\n## Glossary\n")[2]
    assert glossary.count("\n| ") - 1 <= 32


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_the_readme_of_a_room_names_files_that_exist(path: Path) -> None:
    listed = _LISTED.findall(path.read_text())
    assert [name for name in listed if not [*path.parent.glob(f"{name}.py"), *path.parent.glob(name)]] == []


def test_each_message_on_a_second_download_is_logged() -> None:
    page = (ROOT / "docs" / "internals" / "cache.md").read_text()
    table = page.partition("\n## Why was a shard downloaded twice?\n")[2]
    table = table.partition("\n## ")[0].partition("|---")[2]
    logged = "".join(path.read_text() for path in sorted((PACKAGE / "cache").glob("*.py")))
    quoted = _CODE.findall("".join(row.split(" | ")[1] for row in table.splitlines() if row.startswith("| ")))
    parts = {part.strip() for code in quoted for part in re.split(r"[A-Z]{3,}|[()=]|\.\.\.", code)}
    parts = {part for part in parts if " " in part and not part.startswith(("attempt", "lightning-"))}
    assert len(parts) > 8
    assert [part for part in sorted(parts) if part not in logged] == []
