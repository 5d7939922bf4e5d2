"""Runs of consecutive sample ids: the id at each place, and ids of four bytes up to their limit."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.sequence import runs as run_ids
from lightning_streaming.sequence.runs import RunLookup, write_runs


def assert_finds_as_spelled_out(sizes: list[int]) -> None:
    expected = np.repeat(np.arange(len(sizes)), sizes)
    lookup = RunLookup(np.cumsum(np.asarray(sizes, np.int64)))
    assert len(lookup) == len(expected)
    assert lookup.find(np.arange(len(expected))).tolist() == expected.tolist()
    within = [place for size in sizes for place in range(size)]
    assert [lookup.find_single(place) for place in range(len(expected))] == list(
        zip(expected.tolist(), within, strict=True)
    )


def test_places_are_found_in_the_example() -> None:
    lookup = RunLookup(np.asarray([4, 5, 12]))
    assert lookup.find(np.asarray([11, 0, 3, 4, 5, 6])).tolist() == [2, 0, 0, 1, 2, 2]
    assert [lookup.find_single(place) for place in (11, 0, 3, 4, 5)] == [(2, 6), (0, 0), (0, 3), (1, 0), (2, 0)]


@given(st.lists(st.integers(0, 40), max_size=60))
def test_every_place_is_found(sizes: list[int]) -> None:
    assert_finds_as_spelled_out(sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [0, 0, 1],
        [1, 0, 0],
        [100_000] + [1] * 5_000,  # a bucket of the guide holds many runs
        [1] * 5_000 + [100_000],
        [0] * 3_000 + [7, 0, 50_000, 0, 0],
        [4096] * 50,
    ],
    ids=lambda sizes: f"{len(sizes)} runs of {sum(sizes)}",
)
def test_skewed_runs_are_found(sizes: list[int]) -> None:
    assert_finds_as_spelled_out(sizes)


@given(st.lists(st.integers(0, 10**11), min_size=1, max_size=50).filter(any), st.data())
def test_far_places_are_found(sizes: list[int], data: st.DataObject) -> None:
    stops = np.cumsum(np.asarray(sizes, np.int64))
    place = data.draw(st.integers(0, int(stops[-1]) - 1))
    borders = np.unique(np.clip(np.concatenate([stops - 1, stops, [place]]), 0, stops[-1] - 1))
    assert RunLookup(stops).find(borders).tolist() == np.searchsorted(stops, borders, side="right").tolist()
    assert [RunLookup(stops).find_single(border)[0] for border in borders[:500].tolist()] == [
        *np.searchsorted(stops, borders[:500], side="right")
    ]


def test_a_lookup_goes_to_another_process() -> None:
    lookup = pickle.loads(pickle.dumps(RunLookup(np.array([4, 5, 12]))))
    assert [lookup.find_single(place) for place in (0, 4, 11)] == [(0, 0), (1, 0), (2, 6)]


runs = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 40)), max_size=20)


@given(runs=runs, chunk=st.integers(1, 60), dtype=st.sampled_from([np.uint32, np.int64]))
def test_runs_follow_each_other_whatever_is_written_at_once(
    runs: list[tuple[int, int]], chunk: int, dtype: type[np.integer]
) -> None:
    firsts, sizes = np.asarray(runs, np.int64).reshape(-1, 2).T
    out = np.empty(int(sizes.sum()), dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_ids, "_CHUNK", chunk)
        write_runs(firsts, sizes, out)
    assert out.tolist() == [first + step for first, size in runs for step in range(size)]


def test_four_bytes_hold_ids_up_to_their_end() -> None:
    out = np.empty(3, np.uint32)
    write_runs(np.asarray([2**32 - 2, 0]), np.asarray([2, 1]), out)
    assert out.tolist() == [2**32 - 2, 2**32 - 1, 0]
