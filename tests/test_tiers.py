"""A rotation leaves out combinations and no value; ``make test-all`` leaves out nothing."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiers

FACTORS: list[tuple[list[Any], ...]] = [
    (list("abcdefg"), [0, 2]),
    (list("ab"), [0, 2], ["x", "y"]),
    (list("abcdefg"), [0, 2], ["x", "y", "z"]),
]


def daily(parameters: list[Any]) -> list[tuple[Any, ...]]:
    return [one.values for one in parameters if not one.marks]


@pytest.mark.parametrize("factors", FACTORS, ids=str)
@pytest.mark.parametrize("times", [1, 2])
def test_a_rotation_has_each_value_and_keeps_the_whole_product(factors: tuple[list[Any], ...], times: int) -> None:
    parameters = tiers.rotation(*factors, times=times)
    assert [one.values for one in parameters] == list(product(*factors))
    chosen = daily(parameters)
    assert len(chosen) == times * len(factors[0])
    for number, factor in enumerate(factors):
        counts = [sum(one[number] == value for one in chosen) for value in factor]
        assert min(counts) > 0
        assert max(counts) - min(counts) <= 1


def test_a_rotation_of_many_rows_has_each_pair_of_the_other_factors() -> None:
    chosen = daily(tiers.rotation(range(12), "ab", "xy", [True, False]))
    for first, second in ((1, 2), (1, 3), (2, 3)):
        assert len({(one[first], one[second]) for one in chosen}) == 4


def test_every_nth_and_chosen_values_keep_the_others_for_the_night() -> None:
    parameters = tiers.every_nth(3, range(7), offset=1)
    assert [one.values[0] for one in parameters] == list(range(7))
    assert daily(parameters) == [(1,), (4,)]
    assert daily(tiers.nightly_unless(lambda value: value > 4, range(7))) == [(5,), (6,)]


def test_names_and_marks_of_parameters_are_kept() -> None:
    given = pytest.param(2, True, id="two")
    (first, second) = tiers.rotation(["a"], [given, pytest.param(0, False, id="none")])
    assert [(one.values, one.id) for one in (first, second)] == [(("a", 2, True), "a-two"), (("a", 0, False), "a-none")]
    assert [mark.name for one in (first, second) for mark in one.marks] == ["nightly"]


def test_some_places_are_tried_by_day_and_all_at_night(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_tier", "test")
    tried = set()
    for test in range(20):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"test_{test}")
        found = tiers.some(range(10), 3)
        assert len(set(found)) == 3
        tried.update(found)
    assert tried == set(range(10))
    monkeypatch.setattr(tiers, "_tier", "all")
    assert tiers.some(range(10), 3) == list(range(10))


class _Hook:
    def __init__(self) -> None:
        self.deselected: list[Any] = []

    def pytest_deselected(self, items: list[Any]) -> None:
        self.deselected += items


@pytest.mark.parametrize(
    ("everything", "args", "left"),
    [(False, ["tests"], ["b"]), (True, ["tests"], ["a", "b"]), (False, ["tests/test_x.py::test_a"], ["a", "b"])],
)
def test_the_nightly_cases_run_with_all_or_by_name(everything: bool, args: list[str], left: list[str]) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(all=everything, markexpr=""), args=args, hook=_Hook())
    items: list[Any] = [SimpleNamespace(name="a", get_closest_marker="nightly".__eq__)]
    items.append(SimpleNamespace(name="b", get_closest_marker="fast".__eq__))
    tiers.deselect_nightly(config, items)
    assert [item.name for item in items] == left
    assert len(config.hook.deselected) == 2 - len(left)
