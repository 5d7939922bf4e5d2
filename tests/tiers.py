"""The two tiers of the suite: ``make test`` runs each behaviour, ``make test-all`` every case of it.

``make test`` leaves out:

* what has the mark ``nightly``, or needs a fixture of :data:`NIGHTLY_FIXTURES`;
* of a test with the mark ``rotate`` all cases but a rotation: each value of each of its parameters occurs, not each
  combination. ``rotate(5)`` keeps 5 cases, which differ between tests with the same parameters;
* of places within one test all but :func:`some`, and of the examples of a property three quarters (:func:`examples`).

A test that is named on the command line (``FILE::TEST``) runs with all its cases.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

NIGHTLY_FIXTURES = {
    "cluster",  # of Ray
    "release",  # wheel and sdist
    "site",  # of the documentation
    *("chromium", "opened", "window"),  # of a browser
}
"""What takes long to start or build: a test that asks for one of these is nightly."""
EXAMPLES = {"fast": 12, "test": 25, "all": 300}
"""Examples of a property that says no number of its own, by tier."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--all``."""
    parser.addoption("--all", action="store_true", help="run every case of every test, and more examples")


def tier(config: pytest.Config) -> str:
    """Return the tier of a run: ``fast``, ``test`` or ``all``."""
    return "all" if config.option.all else "fast" if config.option.markexpr == "fast" else "test"


_tier = "test"
"""Of this process; in the module because tests read it where no fixture reaches, as hypothesis does its profile."""


def load_profile(config: pytest.Config) -> None:
    """Let hypothesis try the tier's number of examples, and hold none of them to a time."""
    global _tier
    _tier = name = tier(config)
    slow_is_fine = [HealthCheck.too_slow]  # on a busy machine
    settings.register_profile(name, deadline=None, max_examples=EXAMPLES[name], suppress_health_check=slow_is_fine)
    settings.load_profile(name)


def examples(percent: int) -> int:
    """Return a share of the tier's examples, at least 5; for ``max_examples`` of a property that is dear or cheap."""
    return max(5, settings().max_examples * percent // 100)


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


def kills(by_day: int, at_night: int) -> int:
    """Return how many processes a test kills; LIGHTNING_STREAMING_KILLS says another number."""
    return int(os.environ.get("LIGHTNING_STREAMING_KILLS", amount(by_day, at_night)))


def amount(by_day: int, at_night: int) -> int:
    """Return one of two numbers, for what a test does many times."""
    return at_night if _tier == "all" else by_day


def deselect_nightly(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ``make test`` does not run, unless the run has ``--all`` or names a test."""
    if tier(config) == "all" or any("::" in name for name in config.args):
        return
    rotated = defaultdict[Any, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("rotate"):
            rotated[item.path, getattr(item, "cls", None), getattr(item, "originalname", item.name)].append(item)
    nightly = {item for item in items if _is_nightly(item)}
    for (*_, test), cases in rotated.items():
        left = [item for item in cases if item not in nightly]
        marker = left[0].get_closest_marker("rotate") if left else None
        # Not of each test the same cases, of formats say.
        chosen = rotation(
            [_values(item) for item in left], *(marker.args if marker else ()), first=crc32(test.encode())
        )
        nightly.update(item for number, item in enumerate(left) if number not in chosen)
    if nightly:
        config.hook.pytest_deselected(items=[item for item in items if item in nightly])
        items[:] = [item for item in items if item not in nightly]


def rotation(cases: Sequence[Sequence[Any]], count: int | None = None, *, first: int = 0) -> set[int]:
    """Choose cases that differ as much as they can: first in the values of their factors, then in pairs of these.

    Args:
        cases: The value of each factor, for each case.
        count: How many to choose; None for as many as the factor of most values has.
        first: Where to begin, of cases that differ equally.

    Returns:
        Indexes of the chosen cases.
    """
    if count is None:
        count = max((len(set(values)) for values in zip(*cases, strict=True)), default=1)
    chosen, used = set[int](), Counter[Any]()
    for turn in range(min(count, len(cases))):
        start = first + turn * len(cases) // count  # so that cases of one factor are evenly spaced
        left = [number for number in range(len(cases)) if number not in chosen]
        best = min(left, key=lambda number: (_uses(cases[number], used), (number - start) % len(cases)))
        chosen.add(best)
        used.update(_features(cases[best]))
    return chosen


def _is_nightly(item: pytest.Item) -> bool:
    needs = NIGHTLY_FIXTURES & set(getattr(item, "fixturenames", ()))
    return bool(needs) or item.get_closest_marker("nightly") is not None


def _values(item: pytest.Item) -> tuple[int, ...]:
    """Return the identity of each value of a case: the cases of a product share the objects."""
    return tuple(map(id, item.callspec.params.values())) if hasattr(item, "callspec") else ()


def _features(case: Sequence[Any]) -> Iterable[Any]:
    """Return values and pairs of values, each with its factors."""
    values = list(enumerate(case))
    return [*values, *combinations(values, 2)]


def _uses(case: Sequence[Any], used: Counter[Any]) -> tuple[int, int]:
    """Count how often values and pairs of values of a case have been chosen."""
    values = list(enumerate(case))
    return sum(used[one] for one in values), sum(used[pair] for pair in combinations(values, 2))
