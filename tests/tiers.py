"""The two tiers of the suite: ``make test`` runs a sample of the slow cases, ``make test-all`` runs every case.

A case with the mark ``nightly`` runs only with ``--all``. These set the mark or scale the work:

    rotation(...)   a product of factors; ``make test`` runs each value, not each combination
    every_nth(...)  a list of cases; ``make test`` runs some of them
    some(...)       places within one test; ``make test`` tries a few
    examples(...)   how many examples hypothesis tries: a share of the tier's number
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any
from zlib import crc32

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import settings

EXAMPLES = {"fast": 20, "test": 25, "all": 300}
"""Examples of a property that says no number of its own, by tier."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--all``."""
    parser.addoption("--all", action="store_true", help="run the cases marked nightly too, and more examples")


def tier(config: pytest.Config) -> str:
    """Return the tier of a run: ``fast``, ``test`` or ``all``."""
    return "all" if config.option.all else "fast" if config.option.markexpr == "fast" else "test"


_tier = "test"
"""Of this process; in the module because tests read it where no fixture reaches, as hypothesis does its profile."""


def load_profile(config: pytest.Config) -> None:
    """Let hypothesis try the tier's number of examples, and hold none of them to a time."""
    global _tier
    _tier = name = tier(config)
    settings.register_profile(name, deadline=None, max_examples=EXAMPLES[name])
    settings.load_profile(name)


def deselect_nightly(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the nightly cases unless the run has ``--all`` or names a test."""
    if tier(config) == "all" or any("::" in name for name in config.args):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def examples(percent: int) -> int:
    """Return a share of the tier's examples, at least 5; for ``max_examples`` of a property that is dear or cheap."""
    return max(5, settings().max_examples * percent // 100)


def rotation(*factors: Iterable[Any], times: int = 1) -> list[ParameterSet]:
    """Return the product of some factors as parameters, all but a rotation of it marked nightly.

    The rotation has each value of the first factor ``times``, and with each the combination of the other factors
    that has occurred least so far: first by its pairs, then by its values. So each value of each factor occurs where
    the first factor has as many values as any other.

    Args:
        *factors: Values, or ``pytest.param`` of one or several values.
        times: How many combinations of the other factors each value of the first factor gets.
    """
    first, *others = [[_parameter(value) for value in factor] for factor in factors]
    rest = list(product(*others))
    seen = Counter[Any]()
    chosen = set[tuple[int, int]]()
    for turn in range(times):
        for row in range(len(first)):
            left = [number for number in range(len(rest)) if (row, number) not in chosen]
            if not left:
                continue
            # A later turn begins elsewhere, or equal counts would always fall to the same combinations.
            number = min(left, key=lambda one: (_uses(rest[one], seen), (one - turn) % len(rest)))
            chosen.add((row, number))
            seen.update(_features(rest[number]))
    return [
        _joined((value, *combination), nightly=(row, number) not in chosen)
        for row, value in enumerate(first)
        for number, combination in enumerate(rest)
    ]


def every_nth(step: int, values: Iterable[Any], offset: int = 0) -> list[ParameterSet]:
    """Return values as parameters, all but each n-th marked nightly."""
    return [_joined((_parameter(value),), nightly=number % step != offset) for number, value in enumerate(values)]


def nightly_unless(is_daily: Any, values: Iterable[Any]) -> list[ParameterSet]:
    """Return values as parameters, marked nightly unless ``is_daily(value)``."""
    return [_joined((_parameter(value),), nightly=not is_daily(value)) for value in values]


def some(values: Sequence[Any], most: int) -> list[Any]:
    """Return evenly spaced values, which differ between tests and cases; every value in ``make test-all``.

    Args:
        values: Places to resume from, say.
        most: How many ``make test`` tries.
    """
    if _tier == "all" or len(values) <= most:
        return list(values)
    first = crc32(os.environ["PYTEST_CURRENT_TEST"].encode())  # the test's name, the same in every run
    indexes = sorted((first + turn * len(values) // most) % len(values) for turn in range(most))
    return [values[index] for index in indexes]


def _parameter(value: Any) -> ParameterSet:
    return value if isinstance(value, ParameterSet) else pytest.param(value)


def _features(combination: Sequence[ParameterSet]) -> Iterable[Any]:
    """Values with their factors, and pairs of these."""
    values = list(enumerate(map(repr, (one.values for one in combination))))
    return [tuple(values), *values, *combinations(values, 2)]


def _uses(combination: Sequence[ParameterSet], seen: Counter[Any]) -> int:
    return sum(seen[feature] for feature in _features(combination))


def _joined(parts: Sequence[ParameterSet], nightly: bool) -> ParameterSet:
    """One parameter set of the values of several."""
    marks = [mark for part in parts for mark in part.marks] + ([pytest.mark.nightly] if nightly else [])
    ids = [part.id for part in parts]
    named = "-".join(one or "-".join(map(str, part.values)) for one, part in zip(ids, parts, strict=True))
    return pytest.param(
        *(value for part in parts for value in part.values), marks=marks, id=named if any(ids) else None
    )
