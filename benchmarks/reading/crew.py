"""The children of a run, one for each system, and the datasets that they have written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.reading.case import Case
from benchmarks.reading.children import Child
from benchmarks.reading.systems import SYSTEMS


class Crew:
    """Starts each child when it is first wanted, and again where it failed.

    Args:
        pythons: The interpreter of each system.
        logs: Directory for what they write to stderr.
    """

    def __init__(self, pythons: Mapping[str, str], logs: Path) -> None:
        self.versions: dict[str, dict[str, str]] = {}
        self._pythons, self._logs = pythons, logs
        self._children: dict[str, Child] = {}
        self._written: set[Path] = set()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_error: object) -> None:
        for child in self._children.values():
            child.close()

    def child(self, system: str) -> Child:
        """The process of a system."""
        if system not in self._children:
            log = self._logs / f"{system}.log"
            self._children[system] = Child(system, self._pythons[system], log, SYSTEMS[system].is_peer)
            self.versions[system] = self._children[system].versions
        return self._children[system]

    def write(self, system: str, case: Case) -> None:
        """Let a system write its dataset, unless it has.

        Raises:
            TurnFailedError: It cannot.
        """
        folder = case.folder(system)
        if folder not in self._written:
            child = self.child(system)
            child.open("write", case)
            child.turn()
            child.end()
            self._written.add(folder)

    def dismiss(self, system: str) -> None:
        """End the process of a system that failed."""
        if system in self._children:
            self._children.pop(system).close()
