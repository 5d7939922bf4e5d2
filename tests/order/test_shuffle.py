from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, UnsupportedError
from lightning_streaming.order.shuffle import SHUFFLES, SHUFFLES_LATER, shuffle_map
from lightning_streaming.order.shuffle.sorting import argsort_within
from lightning_streaming.order.shuffle.spans import Spans, cut
from tests.order.reference import assert_is, load

COMPONENTS = load("order_components.json")
SERVED = [case for case in COMPONENTS["shuffles"] if case["algo"] in ("naive", "py1s", "py1e")]
LATER = [case for case in COMPONENTS["shuffles"] if case["algo"] in ("py1b", "py1br", "py2s")]


def shuffle_case(case: dict[str, Any]) -> NDArray[np.int64]:
    units = np.asarray(COMPONENTS["unit_sets"][case["units"]], np.int64)
    return shuffle_map(case["algo"], units, case["canonical"], case["seed"], case["epoch"], case["block"])


def name(case: dict[str, Any]) -> str:
    return f"{case['algo']}-{case['units']}-{case['canonical']}-{case['epoch']}"


def test_all_golden_shuffles_are_here() -> None:
    assert (len(SERVED), len(LATER)) == (21, 21)
    assert len(SERVED) + len(LATER) == len(COMPONENTS["shuffles"])


@pytest.mark.parametrize("case", SERVED, ids=name)
def test_a_shuffle_is_that_of_the_reference(case: dict[str, Any]) -> None:
    assert_is(shuffle_case(case), case["out"])


@pytest.mark.parametrize("case", LATER, ids=name)
def test_a_shuffle_that_is_not_served_yet_says_so(case: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=case["algo"]):
        shuffle_case(case)


def test_no_shuffle_is_both_served_and_not() -> None:
    assert not set(SHUFFLES) & set(SHUFFLES_LATER)


@given(
    algo=st.sampled_from(sorted(SHUFFLES)),
    units=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    canonical=st.integers(1, 12),
    seed=st.integers(0, 2**60),
    epoch=st.integers(0, 9),
    block=st.integers(1, 100),
)
def test_a_shuffle_reads_every_sample_once(
    algo: str, units: list[int], canonical: int, seed: int, epoch: int, block: int
) -> None:
    canonical = min(canonical, sum(units))
    shuffled = shuffle_map(algo, np.asarray(units, np.int64), canonical, seed, epoch, block)
    assert sorted(shuffled.tolist()) == list(range(sum(units)))


@pytest.mark.parametrize("algo", ["py1e", "py1s"])
def test_a_canonical_node_reads_the_same_samples_in_every_epoch(algo: str) -> None:
    units = np.asarray([7, 5, 9, 4, 11, 3, 8, 6], np.int64)
    first, second = (np.split(shuffle_map(algo, units, 4, 1, epoch, 20), [13, 26, 39]) for epoch in (0, 1))
    for once, again in zip(first, second, strict=True):
        assert once.tolist() != again.tolist()
        assert sorted(once.tolist()) == sorted(again.tolist())


def test_py1e_needs_a_sample_for_each_canonical_node() -> None:
    units = np.asarray([2, 1], np.int64)
    with pytest.raises(ConfigError, match="fewer canonical nodes"):
        shuffle_map("py1e", units, 4, 0, 0, 10)
    assert sorted(shuffle_map("py1s", units, 4, 0, 0, 10).tolist()) == [0, 1, 2]


@pytest.mark.parametrize("argument", ["num_canonical_nodes", "block_size", "seed", "epoch"])
def test_a_number_that_cannot_work_is_refused(argument: str) -> None:
    numbers = {"num_canonical_nodes": 1, "seed": 0, "epoch": 0, "block_size": 1, argument: -1}
    with pytest.raises(ConfigError, match="-1"):
        shuffle_map("py1s", np.asarray([1], np.int64), **numbers)


def walk_and_cut(sizes: list[int], num_parts: int) -> list[list[tuple[int, int]]]:
    """``cut`` spelled out: walk the spans, cutting the one that reaches across a part's end."""
    spans = [(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(len(sizes))]
    parts, done = [], 0
    for part in range(1, num_parts + 1):
        end, pieces = sum(sizes) * part // num_parts, []
        while spans and done + spans[0][1] - spans[0][0] <= end:
            pieces.append(spans.pop(0))
            done += pieces[-1][1] - pieces[-1][0]
        if spans and done < end:
            start, stop = spans[0]
            pieces.append((start, start + end - done))
            spans[0], done = (start + end - done, stop), end
        parts.append(pieces)
    return parts


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=15), num_parts=st.integers(1, 20))
@example(sizes=[4, 6], num_parts=2)
@example(sizes=[9], num_parts=4)
def test_cutting_at_once_equals_walking(sizes: list[int], num_parts: int) -> None:
    lengths = np.asarray(sizes, np.int64)
    parts = cut(Spans(np.cumsum(lengths) - lengths, lengths), num_parts)
    as_pairs = [list(zip(part.firsts.tolist(), (part.firsts + part.sizes).tolist(), strict=True)) for part in parts]
    assert as_pairs == walk_and_cut(sizes, num_parts)


@given(shares=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=50))
@example(shares=[0.5, 0.5, 0.0, 0.5])
@example(shares=[0.5, 0.5 - 1e-15, 0.5 + 1e-15, 0.5])  # alike in fixed point, yet in an order of their own
def test_argsort_within_is_numpys_stable_argsort(shares: list[float]) -> None:
    values = np.nextafter(np.asarray(shares) * len(shares), 0.0)
    assert argsort_within(values).tolist() == np.argsort(values, kind="stable").tolist()


def test_argsort_within_orders_what_fixed_point_cannot_tell_apart() -> None:
    generator = np.random.default_rng(0)
    values = 1000 + generator.random(100_000) * 1e-9
    values[::7] = generator.random(len(values[::7])) * len(values)
    values[5::9] = values[5]
    assert (argsort_within(values) == np.argsort(values, kind="stable")).all()
