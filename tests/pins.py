"""Versions that ``make lock`` pinned, compared with what is installed.

``python -m tests.pins`` prints the differences as a Markdown table: what changed since the lock was renewed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.declared import PROJECT

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "constraints.txt"
_NOT_PINNED = {PROJECT, "pip"}


def read_requirements(path: Path, environment: Mapping[str, str] | None = None) -> list[Requirement]:
    """Return the requirements of a file that apply.

    Args:
        path: A file of requirements, such as constraints.txt.
        environment: Values of markers that differ from those of this Python and system, such as ``python_version``.
    """
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    applies = dict(environment or {})
    return [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(applies)]


def read_pins(path: Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the pinned version of each package by name; the arguments are those of :func:`read_requirements`.

    Raises:
        ValueError: A requirement is not a pin, or two pins of one package apply.
    """
    pins: dict[str, str] = {}
    for requirement in read_requirements(path, environment):
        name, specifiers = canonicalize_name(requirement.name), list(requirement.specifier)
        if name in pins or len(specifiers) != 1 or specifiers[0].operator != "==":
            raise ValueError(f"{path.name}: {requirement} is not the only pin of {name}")
        pins[name] = specifiers[0].version
    return pins


def installed() -> dict[str, str]:
    """Return the installed version of each package by name, without the local part that marks a build."""
    found = {canonicalize_name(one.name): one.version.partition("+")[0] for one in distributions()}
    return {name: version for name, version in found.items() if name not in _NOT_PINNED}


def differences() -> list[tuple[str, str | None, str]]:
    """Return name, pinned version and installed version of each package whose two versions differ."""
    pins = read_pins(LOCK)
    return [(name, pins.get(name), here) for name, here in sorted(installed().items()) if pins.get(name) != here]


def main() -> None:
    """Print the differences."""
    rows = [f"| {name} | {pinned or 'not in the lock'} | {here} |\n" for name, pinned, here in differences()]
    sys.stdout.write("".join(["| package | lock | installed |\n|---|---|---|\n", *rows]))


if __name__ == "__main__":
    main()
