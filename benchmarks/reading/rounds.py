"""Turns of all systems, one after another, round after round, and what the rounds say together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.reading.case import Case
from benchmarks.reading.children import TurnFailedError
from benchmarks.reading.crew import Crew
from benchmarks.reading.suite import Measurement

HIGHER_IS_BETTER = frozenset({"rate"})
VALUES = ("rate", "seconds", "rss")
"""What a turn is judged by: the first of these that it has."""


@dataclass
class Result:
    """A measurement of one case: what each turn of each system gave."""

    measurement: Measurement
    case: Case
    turns: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """By system, one for each round."""
    failed: dict[str, str] = field(default_factory=dict)
    """By system, why it has no turns."""

    @property
    def value(self) -> str:
        """The name of what is compared."""
        return next(name for name in VALUES if name in self.turns["ours"][0])

    def median(self, system: str, value: str | None = None) -> float:
        """Of all rounds."""
        return statistics.median(turn[value or self.value] for turn in self.turns[system])

    def times(self, other: str) -> float:
        """How many times better ours is: the median of the rounds' ratios."""
        pairs = zip(self.turns["ours"], self.turns[other], strict=True)
        ratios = [ours[self.value] / its[self.value] for ours, its in pairs]
        return statistics.median(ratio if self.value in HIGHER_IS_BETTER else 1 / ratio for ratio in ratios)


def measure(crew: Crew, measurement: Measurement, case: Case, systems: Sequence[str], rounds: int) -> Result:
    """Let the systems take turns, each round in another order.

    A first round is thrown away, but where the first epochs are what is looked at. A system that fails drops out.

    Args:
        crew: Their processes.
        measurement: What is measured.
        case: Of what.
        systems: Names; "ours" is one.
        rounds: How many turns each takes.

    Returns:
        The turns.

    Raises:
        TurnFailedError: Ours failed.
    """
    result = Result(measurement, case)
    for system in systems:
        with _dropping_out(system, result, crew):
            crew.write(system, case)
            crew.child(system).open(measurement.probe, case)
            result.turns[system] = []
    thrown_away = 0 if measurement.from_the_first_epoch else 1
    for number in range(thrown_away + rounds):
        for system in _rotated([*result.turns], number):
            with _dropping_out(system, result, crew):
                result.turns[system].append(crew.child(system).turn())
    for system, turns in result.turns.items():
        crew.child(system).end()
        del turns[:thrown_away]
    return result


def _rotated(systems: list[str], by: int) -> list[str]:
    first = by % len(systems)
    return systems[first:] + systems[:first]


@contextmanager
def _dropping_out(system: str, result: Result, crew: Crew) -> Iterator[None]:
    try:
        yield
    except TurnFailedError as error:
        if system == "ours":
            raise
        result.turns.pop(system, None)
        result.failed[system] = str(error)
        crew.dismiss(system)
