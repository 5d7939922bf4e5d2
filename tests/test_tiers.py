"""A rotation leaves out combinations and no value; ``make test-all`` leaves out nothing."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests import tiers

PRODUCTS: list[list[Any]] = [
    list(product("abcdefg", [0, 2])),
    list(product([0, 2], "abcdefg", "xyz")),
    list(product("ab", [0, 2], "xy")),
    list(zip("aabbc", [0, 2, 0, 2, 0], strict=True)),
]


def chosen_of(cases: list[Any], *count: int) -> list[Any]:
    return [cases[number] for number in sorted(tiers.rotation(cases, *count))]


@pytest.mark.parametrize("cases", PRODUCTS, ids=["two", "three", "small", "no product"])
def test_a_rotation_has_each_value_of_each_factor(cases: list[Any]) -> None:
    chosen = chosen_of(cases)
    assert len(chosen) == max(len(set(values)) for values in zip(*cases, strict=True))
    assert [set(values) for values in zip(*chosen, strict=True)] == [set(values) for values in zip(*cases, strict=True)]
    assert chosen == chosen_of(cases)


def test_of_a_product_each_value_occurs_equally_often() -> None:
    for values in zip(*chosen_of(list(product(range(44), range(3)))), strict=True):
        counts = Counter(values).values()
        assert max(counts) - min(counts) <= 1


def test_a_rotation_of_many_cases_has_each_pair_of_values() -> None:
    chosen = chosen_of(list(product(range(12), "ab", "xy", [True, False])))
    for first, second in combinations((1, 2, 3), 2):
        assert len({(one[first], one[second]) for one in chosen}) == 4


def test_a_number_of_cases_is_evenly_spaced() -> None:
    assert chosen_of([(number,) for number in range(10)], 4) == [(0,), (2,), (5,), (7,)]
    assert chosen_of([(1,), (2,)], 4) == [(1,), (2,)]
    assert chosen_of([]) == []


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


class _Item:
    path = ""

    def __init__(self, name: str, mark: str, *fixtures: str) -> None:
        self.name, self.fixturenames = name, fixtures
        self.get_closest_marker = {mark: getattr(pytest.mark, mark)}.get


def item(name: str, mark: str, *fixtures: str) -> Any:
    return _Item(name, mark, *fixtures)


@pytest.mark.parametrize(
    ("everything", "args", "left"),
    [
        (False, ["tests"], ["b"]),
        (True, ["tests"], ["a", "b", "c"]),
        (False, ["tests/test_x.py::test_a"], ["a", "b", "c"]),
    ],
)
def test_the_nightly_cases_run_with_all_or_by_name(everything: bool, args: list[str], left: list[str]) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(all=everything, markexpr=""), args=args, hook=_Hook())
    items: list[Any] = [item("a", "nightly"), item("b", "fast"), item("c", "fast", "tmp_path", "site")]
    tiers.deselect_nightly(config, items)
    assert [item.name for item in items] == left
    assert [item.name for item in config.hook.deselected] == sorted({"a", "b", "c"} - set(left))


ROOT = Path(__file__).parents[1]


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def test_nothing_is_published_before_every_case_has_passed() -> None:
    jobs = workflow("publish")["jobs"]
    assert "make test-all" in [step.get("run") for step in jobs["test"]["steps"]]
    assert "test" in jobs["publish"]["needs"]


def test_what_changes_runs_its_nightly_cases() -> None:
    affected = workflow("affected")
    on = affected[True]  # YAML reads `on` as a boolean
    assert on["push"]["paths"] == on["pull_request"]["paths"]
    assert [path for path in on["push"]["paths"] if not (ROOT / path.removesuffix("/**")).exists()] == []
    command = next(step["run"] for step in affected["jobs"]["test"]["steps"] if "pytest" in step.get("run", ""))
    assert "--all" in command.split()
    run = [word for word in command.split() if word.startswith("tests/")]
    assert [word for word in run if word not in {path.removesuffix("/**") for path in on["push"]["paths"]}] == []
