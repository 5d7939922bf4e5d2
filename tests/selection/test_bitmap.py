"""Which samples are asked for, and the bits that say which they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise
from json import loads
from textwrap import shorten
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.dataset.stream import Stream, StreamDefaults, cache_config_of
from lightning_streaming.errors import ConfigError
from lightning_streaming.options import selection as selection_config
from lightning_streaming.options.column_functions import WHERE
from lightning_streaming.options.selection import HashSlice, SelectionConfig, parse_fraction
from lightning_streaming.selection import bitmap as selection
from lightning_streaming.selection.bitmap import Selection, bits_of
from tests.helpers import assert_error


@st.composite
def wanted(draw: st.DrawFn) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Truth values: few or many, with long stretches of one kind."""
    runs = draw(
        st.lists(st.tuples(st.integers(1, 700), st.sampled_from([0.0, 0.01, 0.5, 1.0])), min_size=1, max_size=8)
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return np.concatenate([rng.random(length) < share for length, share in runs])


@given(wanted=wanted(), cuts=st.lists(st.integers(0, 6000), max_size=5))
def test_bits_answer_as_a_list_of_numbers_does(wanted: Any, cuts: list[int]) -> None:
    numbers, stored = np.flatnonzero(wanted), np.arange(len(wanted))
    made = Selection(bits_of(wanted), len(wanted))
    assert len(made) == len(numbers)
    assert made.stored(np.arange(len(numbers))).tolist() == numbers.tolist()
    assert made.has(stored).tolist() == wanted.tolist()
    assert made.before(np.arange(len(wanted) + 1)).tolist() == [0, *np.cumsum(wanted).tolist()]
    edges = sorted({0, len(wanted), *(cut % len(wanted) for cut in cuts)})
    counts = [int(wanted[start:stop].sum()) for start, stop in pairwise(edges)]
    assert made.per_shard(np.diff(edges)).tolist() == counts


@given(wanted=wanted(), gone=st.lists(st.integers(0, 6000), max_size=20))
def test_samples_are_left_out_of_a_selection(wanted: Any, gone: list[int]) -> None:
    numbers = np.array([one % len(wanted) for one in gone], np.int64)
    made = Selection(bits_of(wanted), len(wanted))
    rest = made.without(numbers)
    left = wanted.copy()
    left[numbers] = False
    assert rest.has(np.arange(len(wanted))).tolist() == left.tolist()
    assert (len(rest), len(made)) == (int(left.sum()), int(wanted.sum()))


@given(st.integers(1, 3000) | st.integers(1, 8).map(lambda blocks: 512 * blocks))
def test_all_samples_are_selected_of_any_number(count: int) -> None:
    whole = Selection.whole(count)
    assert len(whole) == count
    assert whole.digest == Selection(bits_of(np.ones(count, np.bool_)), count).digest


def test_bits_are_counted_alike_without_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.default_rng(0).integers(0, 2**64, (7, 8), np.uint64)
    expected = [[bin(word).count("1") for word in row] for row in words.tolist()]
    assert selection._ones(words).tolist() == expected
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert selection._ones(words).tolist() == expected


def test_selections_of_other_samples_have_other_names() -> None:
    bits = [bits_of(np.arange(1000) % 7 == rest) for rest in range(7)]
    assert len({Selection(one, 1000).digest for one in bits}) == 7
    assert Selection(bits[0], 1000).digest == Selection(bits[0].copy(), 1000).digest


@pytest.mark.parametrize(
    ("fraction", "borders"),
    [(":98%", (0, 98)), ("98%:", (98, 100)), (" 12.5% : 13% ", (12.5, 13)), ("0%:100%", (0, 100))],
)
def test_a_fraction_is_a_range(fraction: str, borders: tuple[float, float]) -> None:
    assert parse_fraction(fraction) == HashSlice(*(Fraction(border) / 100 for border in borders))


@pytest.mark.parametrize(
    "fraction",
    [
        *(":5", "0.1:", "5%", "%:", "-1%:", ":", "a:b", "[:5%]", "train:5%", "5%:5%", "90%:10%", ":101%"),
        pytest.param(f":{'9' * 5000}%", id="long"),
        *(5, True, ["5%"], b"5%:"),
    ],
)
def test_what_is_no_fraction_is_refused(fraction: Any) -> None:
    with assert_error(ConfigError, option="selection.fraction"):
        SelectionConfig(fraction=fraction)


@pytest.mark.parametrize("split", ["train", "a/b", "train[:98%]", "98%:", "2024-05-01T10:20", "100%/train"])
def test_a_split_is_a_directory_whatever_its_signs(split: str) -> None:
    assert cache_config_of(Stream(local="data", split=split), "0", StreamDefaults()).local == f"data/{split}"


@pytest.mark.parametrize("split", [5, True, ["train"], b"train", "\ud800", "a\0b"])
def test_a_split_is_a_text(split: Any) -> None:
    with assert_error(ConfigError, option="split"):
        Stream(local="data", split=split)


@pytest.mark.parametrize("where", [5, b"a > 1", "a = '\ud800'"])
def test_a_condition_is_a_text_or_a_function(where: Any) -> None:
    with assert_error(ConfigError, option="selection.where"):
        SelectionConfig(where=where)


@given(cut=st.integers(1, 9999))
def test_slices_that_meet_share_their_border(cut: int) -> None:
    first, second = map(parse_fraction, (f":{cut / 100:.2f}%", f"{cut / 100:.2f}%:"))
    assert (first.thresholds()[0], second.thresholds()[1]) == (0, 2**64)
    assert first.thresholds()[1] == second.thresholds()[0]


LEAST = 0.5


def _beyond(score: float) -> bool:
    return score > LEAST


def test_an_outcome_has_another_name_whenever_it_may_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def request(**asked: Any) -> str:
        return SelectionConfig(**asked).key("data", None)

    def above(least: float) -> Callable[..., bool]:
        return lambda score: score > least

    keys = [
        request(where="a > 1"),
        request(where="a > 2"),
        request(where=above(1)),
        request(where=above(2)),
        request(where=lambda score: score < 1),
        request(where=lambda lang: lang < 1),
        request(where=lambda score: _beyond(score)),
        request(fraction=":50%"),
        request(fraction="50%:"),
        request(fraction=":50%", seed=1),
        request(fraction=":50%", group_by="doc"),
        SelectionConfig(where="a > 1").key("other data", None),
        SelectionConfig(indices=[1]).key("data", np.array([1])),
        SelectionConfig(indices=[2]).key("data", np.array([2])),
        SelectionConfig(indices=[True]).key("data", np.array([True])),
    ]
    assert len(set(keys)) == len(keys)
    assert request(where=above(1)) == keys[2]
    condition = SelectionConfig(where=lambda score: _beyond(score))
    before = condition.key("data", None)
    monkeypatch.setitem(globals(), "LEAST", 0.6)
    assert condition.key("data", None) != before
    monkeypatch.setattr(selection_config, "_VERSION", 0)
    assert request(where="a > 1") not in keys


@pytest.mark.parametrize(
    ("function", "name", "values"),
    [
        (lambda lang: lang in GOOD, "GOOD", (("en",), ("en", "de"), frozenset({"en"}), re.compile("en"), b"en")),
        (lambda lang: min(lang), "min", (2, lambda of: of, lambda of: not of)),  # which hides a builtin
        (lambda lang: [GOOD for _ in lang], "GOOD", (1, 2, True)),
    ],
)
def test_what_a_function_names_is_part_of_its_name(
    function: Callable[..., Any], name: str, values: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()
    for value in values:
        monkeypatch.setitem(globals(), name, value)
        keys.add(SelectionConfig(where=function).key("data", None))
    assert len(keys) == len(values)


GOOD: Any = ("en",)


@pytest.mark.parametrize("value", [{"en"}, ["en"], {"en": 1}, partial(_beyond, 1), object(), (1, [2])])
def test_what_may_change_is_not_named(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "GOOD", value)
    with pytest.raises(ConfigError, match=r"may change without notice \('GOOD' of .*; use numbers or text, or a tu"):
        SelectionConfig(where=lambda lang: lang in GOOD).key("data", None)
    assert SelectionConfig(where=lambda lang: lang.GOOD).key("data", None)  # its own, not that of the module


def test_functions_of_libraries_are_followed_as_far_as_can_be() -> None:
    assert SelectionConfig(where=lambda lang: loads(lang) and urlparse(lang) and shorten(lang, 9)).key("data", None)


def test_a_function_that_calls_itself_has_a_name() -> None:
    def depth(meta: Any) -> int:
        return 1 + max(map(depth, meta), default=0) if isinstance(meta, list) else 0

    with pytest.raises(ConfigError, match="encloses a function, which may change"):
        SelectionConfig(where=depth).key("data", None)
    assert SelectionConfig(where=_even).key("data", None)


def _even(number: int) -> bool:
    return number == 0 or _odd(number - 1)


def _odd(number: int) -> bool:
    return number != 0 and _even(number - 1)


def test_what_has_no_name_is_refused() -> None:
    seen: list[int] = []
    with pytest.raises(ConfigError, match="encloses a list, which may change without notice"):
        SelectionConfig(where=lambda score: seen.append(score)).key("data", None)
    with pytest.raises(ConfigError, match="a plain Python function"):
        SelectionConfig(where=int).key("data", None)


def test_parameters_are_columns() -> None:
    assert WHERE.columns(lambda score, *, lang: score) == ("score", "lang")
    for function in (lambda: True, lambda *all_: True, lambda **all_: True, lambda score, /: True):
        with pytest.raises(ConfigError, match="named like the columns"):
            WHERE.columns(function)
