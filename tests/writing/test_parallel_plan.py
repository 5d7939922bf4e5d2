from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError
from lightning_streaming.writing.part_plan import PartPlan, check_same, dump_plan, make_plan, parse_plan, tell_apart
from lightning_streaming.writing.settings import parse_settings

SETTINGS = parse_settings("zstd", ["sha1"], "1mb")


@dataclass
class Shot:
    folder: Path
    scale: float


def plan(*inputs: Any, **changes: Any) -> PartPlan:
    return replace(make_plan(inputs or (1, 2), {"b": "int", "a": "str"}, SETTINGS), **changes)


@given(st.lists(st.text() | st.binary() | st.floats() | st.tuples(st.integers(), st.text()), min_size=1))
@budget(max_examples=50)
def test_a_plan_comes_back_and_is_the_same(inputs: list[Any]) -> None:
    made = make_plan(inputs, None, SETTINGS)
    read = parse_plan(dump_plan(made), "plan")
    assert read == made
    check_same(read, made, "plan")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", 1),
        ("x" * 500, "x" * 499 + "y"),
        (np.arange(5000), np.where(np.arange(5000) == 2500, 0, np.arange(5000))),
        (np.array([0.1]), np.array([0.1 + 1e-15])),
        (Shot(Path("a"), 1.0), Shot(Path("a"), 2.0)),
        (range(10), range(11)),
        ("\ud800" * 200, "\ud801" * 200),
    ],
)
def test_inputs_are_told_apart_in_few_words(one: Any, other: Any) -> None:
    assert tell_apart(one) != tell_apart(other)
    assert tell_apart(one) == tell_apart(one)
    assert max(len(tell_apart(one)), len(tell_apart(other))) < 200


def test_an_input_with_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="the same in every run"):
        tell_apart([object()])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (plan(1, 3), "input 1 is 3, but was 2"),
        (plan(1), "there are 1 inputs, but there were 2"),
        (plan(settings={"compression": None}), "compression is None, but was 'zstd'"),
    ],
)
def test_the_first_difference_is_named(wanted: PartPlan, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words} when writing began, as there/plan tells"):
        check_same(plan(), wanted, "there/plan")


def test_every_setting_that_differs_is_named() -> None:
    other = plan(1, 3, 4, settings={"columns": {"a": "int"}, "compression": None, "hashes": [], "size_limit": 5})
    with pytest.raises(ConfigError) as told:
        check_same(plan(), other, "there/plan")
    for words in ("columns is ", "compression is None", "hashes is ", "size_limit is 5", "there are 3 inputs"):
        assert words in str(told.value)


def test_columns_are_compared_without_their_order() -> None:
    check_same(plan(), make_plan((1, 2), {"a": "str", "b": "int"}, SETTINGS), "plan")


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"{}", b'{"version": 1, "settings": 3, "inputs": []}'])
def test_a_damaged_plan_is_refused(damaged: bytes) -> None:
    with pytest.raises(ConfigError, match="there/plan is damaged"):
        parse_plan(damaged, "there/plan")


def test_a_plan_of_another_version_is_refused() -> None:
    other = json.dumps({"version": 2, "settings": {}, "inputs": []}).encode()
    with pytest.raises(ConfigError, match="has version 2"):
        parse_plan(other, "plan")
