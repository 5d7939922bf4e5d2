"""What an install of a distribution brings, told from ``pyproject.toml`` and the metadata of what is installed here."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "lightning-streaming"


def closure(distribution: str, extras: str, depth: int = 100) -> set[str]:
    """Names of all that it requires, and what these require, as far as that is installed.

    Args:
        distribution: Its name.
        extras: Which of its extras are asked for, with commas between.
        depth: How far to follow; 1 for what it asks for itself.
    """
    found: set[str] = set()
    pending = [(distribution, extra, 0) for extra in ["", *extras.split(",")]]
    done = set()
    while pending:
        name, extra, level = one = pending.pop()
        if one[:2] in done or level >= depth:
            continue
        done.add(one[:2])
        for asked in map(Requirement, _requires(name)):
            if asked.marker is None or asked.marker.evaluate({"extra": extra}):
                wanted = canonicalize_name(asked.name)
                found.add(wanted)
                below = level if wanted == canonicalize_name(distribution) else level + 1
                pending += [(wanted, more, below) for more in ["", *asked.extras]]
    return found


def _requires(name: str) -> list[str]:
    try:
        return project_requires() if name == PROJECT else requires(name) or []
    except PackageNotFoundError:  # an extra that is not installed here
        return []


def project_requires() -> list[str]:
    """What the project asks for now, and not when it was last installed here, where Python can read that."""
    if sys.version_info < (3, 11):
        return requires(PROJECT) or []
    tomllib = import_module("tomllib")  # which mypy does not know of, as it checks for Python 3.10
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    return [*project["dependencies"], *(f'{one}; extra == "{extra}"' for extra, asked in extras for one in asked)]
