"""What the package imports is what ``pyproject.toml`` declares: for every install, or as an extra."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_streaming
from tests.declared import PROJECT, closure, project_requires
from tests.pins import read_pins

PACKAGE = Path(lightning_streaming.__file__).parent
ROOT = PACKAGE.parent
EXTRAS = "all,oci"
"""Every extra that is for users."""
NOT_IMPORTED = {
    "s3fs": "fsspec finds it",
    "gcsfs": "fsspec finds it",
    "adlfs": "fsspec finds it",
    "ocifs": "fsspec finds it",
    "matplotlib": "for the pictures of examples and benchmarks",
}
COMES_WITH = {"botocore": "s3fs", "oci": "ocifs"}
"""What is looked at only where the package that brings it is in use."""
THEIRS = {"accelerate"}
"""What has called us where we import it."""
_IMPORTED_BY_NAME = re.compile(r"(?:import_module|find_spec)\(\s*\"(\w+)|^_PACKAGES = \{(.+)\}$", re.MULTILINE)


def imported(path: Path) -> Iterator[str]:
    """Top-level packages that a module imports when it runs, by statements or by name."""
    text = path.read_text()
    for one, several in _IMPORTED_BY_NAME.findall(text):
        yield from [one] if one else re.findall(r": \"(\w+)\"", several)
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module.partition(".")[0]
        pending += ast.iter_child_nodes(node)


def of_others(distributions: Mapping[str, list[str]]) -> set[str]:
    """The packages of others that the library imports, by the names they are installed by."""
    found = {name for path in PACKAGE.rglob("*.py") for name in imported(path)}
    own = {PACKAGE.name, *COMES_WITH, *THEIRS}
    return {
        canonicalize_name(distributions[name][0] if name in distributions else name)
        for name in found - own
        if name not in sys.stdlib_module_names
    }


def declared() -> set[str]:
    """What is declared for users, by name."""
    return {name for name in closure(PROJECT, EXTRAS, depth=1) if name != PROJECT}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    assert of_others(packages_distributions()) == declared() - set(NOT_IMPORTED)


def test_what_comes_with_others_does() -> None:
    for brought, by in COMES_WITH.items():
        if by in {canonicalize_name(name) for names in packages_distributions().values() for name in names}:
            assert brought in closure(by, "")


def test_every_lower_bound_has_its_reason_and_those_of_every_install_are_run() -> None:
    reasons = (ROOT / "docs" / "decisions" / "0003-dependencies.md").read_text()
    told: dict[str, str] = {}
    for names, bounds in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", reasons, re.MULTILINE):
        several, one = names.split(", "), bounds.split(", ")
        told.update(zip(map(canonicalize_name, several), one if len(one) > 1 else one * len(several), strict=True))
    lowest = read_pins(ROOT / "constraints-lowest.in")
    for asked in map(Requirement, project_requires()):
        name, bound = canonicalize_name(asked.name), str(asked.specifier).removeprefix(">=")
        if name == PROJECT or (asked.marker and re.search("test|check", str(asked.marker))):
            continue
        assert told.get(name) == bound, f"{name}>={bound} in pyproject.toml"
        if asked.marker is None and name != "torch":
            assert lowest[name].startswith(bound), f"{name}=={lowest[name]} in constraints-lowest.in"
