"""Slices of a stream's passes: whole passes between them, however they are cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.sequence.stream_slices import (
    SliceUnits,
    StreamPasses,
    StreamSlice,
    TruncatedEpochs,
    slice_units,
)

shard_lists = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
streams = st.builds(lambda sizes: np.asarray(sizes, np.int64), shard_lists)


def taken(sizes: np.ndarray, start: int, stop: int, *, is_shuffled: bool = True, seed: int = 3) -> SliceUnits:
    stream_slice = StreamSlice(stream="web", first_id=100, start=start)
    return slice_units([sizes], [stop - start], [stream_slice], seed, is_shuffled=is_shuffled)


def ids_of(units: SliceUnits) -> list[int]:
    out = np.empty(int(units.sizes.sum()), np.int64)
    units.write_ids(out)
    return list(out.tolist())


@st.composite
def cuts(draw: st.DrawFn, passes: int = 4) -> tuple[np.ndarray, list[int]]:
    """A stream, and places in its passes, rising."""
    sizes = draw(streams)
    places = draw(st.lists(st.integers(0, passes * int(sizes.sum())), min_size=2, max_size=8, unique=True))
    return sizes, sorted(places)


@given(case=cuts(), is_shuffled=st.booleans(), seed=st.integers(0, 5))
def test_samples_come_again_only_after_all_others(
    case: tuple[np.ndarray, list[int]], is_shuffled: bool, seed: int
) -> None:
    sizes, places = case
    total = int(sizes.sum())
    counts = np.zeros(total, np.int64)
    for start, stop in pairwise([0, *places] if places[0] else places):
        units = taken(sizes, start, stop, is_shuffled=is_shuffled, seed=seed)
        ids = np.asarray(ids_of(units)) - 100
        assert len(ids) == stop - start
        counts += np.bincount(ids, minlength=total)
        assert (counts.min(), counts.max()) == (stop // total, -(-stop // total))


@given(case=cuts(), seed=st.integers(0, 5))
def test_a_slice_is_the_same_however_those_before_it_are_cut(case: tuple[np.ndarray, list[int]], seed: int) -> None:
    sizes, places = case
    start, stop = places[0], places[-1]
    pieces = [ids_of(taken(sizes, *between, seed=seed)) for between in pairwise(places)]
    assert sorted(chain(*pieces)) == sorted(ids_of(taken(sizes, start, stop, seed=seed)))


@given(case=cuts(passes=2))
def test_unshuffled_passes_read_what_is_stored_in_its_order(case: tuple[np.ndarray, list[int]]) -> None:
    sizes, places = case
    total = int(sizes.sum())
    for start, stop in pairwise(places):
        if start // total == (stop - 1) // total:  # within one pass
            ids = ids_of(taken(sizes, start, stop, is_shuffled=False))
            assert ids == [100 + place % total for place in range(start, stop)]


@given(case=cuts())
def test_units_are_whole_shards_but_for_those_at_its_ends(case: tuple[np.ndarray, list[int]]) -> None:
    sizes, places = case
    units = taken(sizes, places[0], places[-1])
    assert (units.sizes > 0).all()
    assert (units.offsets + units.sizes <= units.shard_sizes).all()
    assert (units.are_parts == (units.sizes < units.shard_sizes)).all()
    # At each end of the passes that it begins or ends within.
    assert units.are_parts.sum() <= 2


@pytest.mark.rotate(2)
@pytest.mark.parametrize(("start", "stop"), [(0, 150_000), (1_234, 151_000), (60_000, 260_000), (7_000, 9_500)])
@pytest.mark.parametrize("first_id", [0, 10**12])
def test_a_long_part_of_a_shard_is_what_short_ones_are_together(start: int, stop: int, first_id: int) -> None:
    sizes = np.asarray([100_000, 3, 90_000, 2_047, 4_000])
    stream_slice = StreamSlice(stream="web", first_id=first_id, start=0)

    def ids(first: int, last: int) -> list[int]:
        return ids_of(slice_units([sizes], [last - first], [replace(stream_slice, start=first)], 0, is_shuffled=True))

    pieces = [ids(first, min(first + 1_000, stop)) for first in range(start, stop, 1_000)]
    assert sorted(chain(*pieces)) == sorted(ids(start, stop))
    # Other samples than the first ones.
    assert len(set(ids(start, start + 1_000)) & set(ids(start + 1_000, stop))) == 0


@given(case=cuts(passes=40))
def test_runs_of_a_shuffle_hold_whole_units_of_one_stream(case: tuple[np.ndarray, list[int]]) -> None:
    sizes, places = case
    slices = [StreamSlice(stream=name, first_id=0, start=places[0]) for name in ("a", "b")]
    counts = [places[-1] - places[0]] * 2
    units = slice_units([sizes, sizes * 100], counts, slices, 0, is_shuffled=True)
    stops = np.cumsum(units.shuffled_runs())
    assert set(stops.tolist()) <= set(np.cumsum(units.sizes).tolist())
    assert counts[0] in stops
    assert stops[-1] == sum(counts)


def test_tiny_passes_are_shuffled_some_at_once_and_others_unit_by_unit() -> None:
    tiny, large = np.asarray([1, 2]), np.full(50, 20)
    slices = [StreamSlice(stream=name, first_id=0, start=0) for name in ("tiny", "large")]
    units = slice_units([tiny, large], [300_000, 5_000], slices, 0, is_shuffled=True)
    runs = units.shuffled_runs()
    of_tiny = np.cumsum(runs) <= 300_000
    assert of_tiny.sum() <= 300_000 // 1_024 + 1
    assert runs[~of_tiny].tolist() == [20] * 250


def test_each_pass_of_each_stream_under_each_seed_has_an_order_of_its_own() -> None:
    sizes = np.full(40, 5)
    half = 100

    def first_half(stream: str, number: int, seed: int) -> tuple[int, ...]:
        stream_slice = StreamSlice(stream=stream, first_id=0, start=number * 200)
        return tuple(ids_of(slice_units([sizes], [half], [stream_slice], seed, is_shuffled=True)))

    asked = [(stream, number, seed) for stream in ("web", "code", "") for number in (0, 1, 7) for seed in (0, 1)]
    found = [first_half(*one) for one in asked]
    assert len(set(found)) == len(asked)
    assert found == [first_half(*one) for one in asked]


def test_where_its_ids_begin_changes_nothing_else() -> None:
    sizes = np.asarray([4, 7, 0, 5])
    low, high = (
        ids_of(slice_units([sizes], [9], [StreamSlice(stream="web", first_id=first, start=5)], 0, is_shuffled=True))
        for first in (0, 10**12)
    )
    assert [one + 10**12 for one in low] == high


def test_several_streams_lie_one_after_another() -> None:
    several = [np.asarray([5, 5]), np.asarray([3]), np.asarray([2, 8])]
    slices = [StreamSlice(stream=name, first_id=first, start=2) for name, first in (("a", 0), ("b", 10), ("c", 13))]
    together = slice_units(several, [4, 7, 1], slices, 0, is_shuffled=True)
    apart = [
        ids_of(slice_units([sizes], [count], [one], 0, is_shuffled=True))
        for sizes, count, one in zip(several, [4, 7, 1], slices, strict=True)
    ]
    assert ids_of(together) == list(chain(*apart))


@pytest.mark.parametrize("start", [0, 3 * 10**9 + 7])
def test_a_slice_of_a_large_stream_takes_only_the_shards_it_reads(start: int) -> None:
    sizes = np.full(100_000, 10_000)
    units = taken(sizes, start, start + 25_000)
    assert units.sizes.sum() == 25_000
    assert len(units.sizes) <= 4


def test_a_pass_begins_next_where_the_last_one_ends() -> None:
    passes = StreamPasses(np.asarray([2, 3]), [TruncatedEpochs(shards=1, stop=4)])
    beginnings = [0, 2, 4, 9, 14, 19]  # two passes of the first shard, then of both
    for samples in range(20):
        assert passes.next_beginning(samples) == min(start for start in beginnings if start >= samples)
