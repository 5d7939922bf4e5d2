"""Ranges of batches as users write them, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice, pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.skips import (
    NOTHING_SKIPPED,
    BatchRange,
    EpochPartitions,
    EpochPosition,
    Skipped,
    SkippedPositions,
    SkippedRange,
    TrainProgress,
    first_epoch_not_skipped,
    joined_ranges,
    locate_batch_ranges,
    parse_batch_ranges,
    skipped_in_epoch,
)
from tests.sequence.builders import partition_of
from tests.sequence.test_partition import all_read

LENGTH, EPOCHS = 12, 6
places = st.tuples(st.integers(0, EPOCHS), st.integers(0, LENGTH))
stretches = st.lists(st.tuples(places, places), max_size=5)


def left_out(stretches: list[SkippedRange], epoch: int) -> set[int]:
    return {at for at in range(LENGTH) if any(start <= (epoch, at) < stop for start, stop in stretches)}


@given(stretches, st.integers(0, EPOCHS))
def test_what_is_kept_is_what_no_stretch_leaves_out(stretches: list[SkippedRange], epoch: int) -> None:
    skipped = skipped_in_epoch(stretches, epoch)
    kept = [at for at in range(LENGTH) if at not in left_out(stretches, epoch)]
    assert [skipped.kept_before(at) for at in range(LENGTH + 1)] == [
        sum(k < at for k in kept) for at in range(LENGTH + 1)
    ]
    assert skipped.positions(np.arange(len(kept))).tolist() == kept
    assert [skipped.position_after(read) for read in range(len(kept) + 1)] == [0, *(at + 1 for at in kept)]


@given(stretches)
def test_merged_stretches_are_apart_and_cover_the_same(stretches: list[SkippedRange]) -> None:
    whole = joined_ranges(stretches)
    flat = [place for stretch in whole for place in stretch]
    assert flat == sorted(set(flat))
    for epoch in range(EPOCHS + 1):
        assert left_out(whole, epoch) == left_out(stretches, epoch)


@given(stretches, st.integers(0, EPOCHS))
@example([((1, 0), (2, 0))], 1)
def test_epochs_that_stretches_pass_over_whole_are_passed_over(stretches: list[SkippedRange], epoch: int) -> None:
    found = first_epoch_not_skipped(stretches, epoch)
    assert all(len(left_out(stretches, passed)) == LENGTH for passed in range(epoch, found))
    assert not any(start <= (found, 0) and (found + 1, 0) <= stop for start, stop in joined_ranges(stretches))


def test_without_gaps_positions_are_themselves() -> None:
    entries = np.arange(5)
    assert skipped_in_epoch([], 0) == NOTHING_SKIPPED == SkippedPositions(())
    assert NOTHING_SKIPPED.positions(entries) is entries
    assert (NOTHING_SKIPPED.kept_before(7), NOTHING_SKIPPED.position_after(7)) == (7, 7)


def test_ranges_are_read_in_any_order() -> None:
    assert parse_batch_ranges(["30-40", "7", 9, " 10 - 12 "], "skip") == ((7, 7), (9, 9), (10, 12), (30, 40))
    assert [str(one) for one in parse_batch_ranges(["7-7", "8-9"], "skip")] == ["7", "8-9"]


@pytest.mark.parametrize(
    "asked", [["a-b"], ["9-3"], ["-3"], ["3-"], ["1-2-3"], [""], [1.5], [True], [None], [-1], "3-4", 3]
)
def test_anything_else_is_refused_by_the_name_of_the_field(asked: object) -> None:
    with pytest.raises(ConfigError, match="skip"):
        parse_batch_ranges(asked, "skip")  # type: ignore[arg-type]  # that is the point


def test_ranges_that_overlap_are_named() -> None:
    with pytest.raises(ConfigError, match="skip has ranges that overlap, 3-9 and 9-12"):
        parse_batch_ranges(["9-12", "3-9"], "skip")


@st.composite
def ranges(draw: st.DrawFn, first: int = 0) -> list[BatchRange]:
    edges = sorted(draw(st.sets(st.integers(first, 40), max_size=8)))
    return [BatchRange(low, high - 1) for low, high in list(pairwise(edges))[::2]]


@st.composite
def dealings(draw: st.DrawFn) -> EpochPartitions:
    nodes, ranks, size = (draw(st.integers(1, 3)) for _ in range(3))
    lengths = [draw(st.integers(nodes * ranks * size, 60)) for _ in range(2)]
    now, later = (partition_of(length, 0, nodes, ranks, size) for length in lengths)
    return EpochPartitions(now=now, later=later, drop_last=draw(st.booleans()))


def run_of(dealing: EpochPartitions) -> Iterator[list[EpochPosition]]:
    """The places of each batch of a whole run."""
    for epoch in count():
        partition = dealing.later if epoch else dealing.now
        for t in range(partition.num_batches(dealing.drop_last)):
            yield [(epoch, at) for at in range(partition.position_after(t), partition.position_after(t + 1))]


def within(place: EpochPosition, stretch: SkippedRange) -> bool:
    return stretch[0] <= place < stretch[1]


@given(dealings(), ranges())
def test_a_range_has_the_places_of_its_batches(dealing: EpochPartitions, asked: list[BatchRange]) -> None:
    found = locate_batch_ranges(asked, {}, TrainProgress(), dealing)
    for number, batch in enumerate(islice(run_of(dealing), 45)):
        for place in batch:
            length = len((dealing.now if place[0] == 0 else dealing.later).sequence)
            dropped = dealing.drop_last and place[1] >= length - length % dealing.now.geometry.global_batch_size
            in_range = any(one.first <= number <= one.last for one in asked)
            assert dropped or in_range == any(within(place, stretch) for stretch in found.values())


@given(dealings(), ranges(), ranges())
def test_batches_keep_their_numbers_when_others_are_skipped(
    dealing: EpochPartitions, first: list[BatchRange], second: list[BatchRange]
) -> None:
    second = [one for one in second if all(one.last < other.first or other.last < one.first for other in first)]
    at_once = locate_batch_ranges(sorted([*first, *second]), {}, TrainProgress(), dealing)
    known = {one: at_once[one] for one in first}
    one_by_one = {**known, **locate_batch_ranges(second, known, TrainProgress(), dealing)}
    for epoch in range(EPOCHS):
        length = len((dealing.later if epoch else dealing.now).sequence)
        skipped, gaps_one_by_one = (skipped_in_epoch(found.values(), epoch) for found in (at_once, one_by_one))
        kept = skipped.kept_before(length)
        assert gaps_one_by_one.kept_before(length) == kept
        assert gaps_one_by_one.positions(np.arange(kept)).tolist() == skipped.positions(np.arange(kept)).tolist()


def test_a_range_after_a_known_one_is_where_it_was_without() -> None:
    partition = partition_of(100, 0, 1, 2, 5)
    dealing = EpochPartitions(now=partition, later=partition, drop_last=False)
    known = locate_batch_ranges([BatchRange(2, 3)], {}, TrainProgress(), dealing)
    assert known == {(2, 3): ((0, 20), (0, 40))}
    assert locate_batch_ranges([BatchRange(6, 6)], known, TrainProgress(), dealing) == {(6, 6): ((0, 60), (0, 70))}
    assert locate_batch_ranges([BatchRange(12, 12)], known, TrainProgress(), dealing) == {(12, 12): ((1, 20), (1, 30))}
    # After six steps, with two batches skipped before, the next one is number 8.
    counted = TrainProgress(steps=6, place=(0, 80), steps_in_epoch=6)
    assert locate_batch_ranges([BatchRange(8, 9)], known, counted, dealing) == {(8, 9): ((0, 80), (1, 0))}
    assert locate_batch_ranges([BatchRange(4, 5)], known, counted, dealing) == {(4, 5): ((0, 80), (0, 80))}
    assert locate_batch_ranges([BatchRange(5, 8)], known, counted, dealing) == {(5, 8): ((0, 80), (0, 90))}


@pytest.mark.parametrize(
    ("limit", "place"), [(4, (1, 10)), (0.4, (1, 10)), (1.0, (0, 50)), (20, (0, 50)), (0.01, (5, 0))]
)
def test_an_epoch_that_a_trainer_limits_has_as_many_batches(limit: int | float, place: EpochPosition) -> None:
    partition = partition_of(100, 0, 1, 2, 5)
    found = locate_batch_ranges(
        [BatchRange(5, 5)],
        {},
        TrainProgress(limit=limit),
        EpochPartitions(now=partition, later=partition, drop_last=False),
    )
    assert found[BatchRange(5, 5)][0] == place


def test_a_limit_counts_what_was_trained_of_the_epoch_under_way() -> None:
    partition = partition_of(100, 0, 1, 2, 5)
    dealing = EpochPartitions(now=partition, later=partition, drop_last=False)
    counted = TrainProgress(steps=3, place=(0, 30), steps_in_epoch=3, limit=5)  # two more, then the next epoch
    assert locate_batch_ranges([BatchRange(4, 5)], {}, counted, dealing) == {(4, 5): ((0, 40), (1, 10))}


def test_a_known_range_up_to_the_end_of_an_epoch_is_passed_where_the_next_begins() -> None:
    partition = partition_of(100, 0, 1, 2, 5)
    dealing = EpochPartitions(now=partition, later=partition, drop_last=False)
    known = locate_batch_ranges([BatchRange(9, 9)], {}, TrainProgress(), dealing)
    assert known == {(9, 9): ((0, 90), (1, 0))}
    # Nine steps and the batch that was skipped: the next one is number 10.
    counted = TrainProgress(steps=9, place=(1, 0))
    assert locate_batch_ranges([BatchRange(12, 12)], known, counted, dealing) == {(12, 12): ((1, 20), (1, 30))}


@pytest.mark.parametrize(("at", "left"), [(20, 3), (25, 3), (30, 2), (45, 1), (50, 0), (55, 0)])
def test_a_part_of_an_epoch_that_is_left_counts_its_last_batch_although_other_machines_began_it(
    at: int, left: int
) -> None:
    partition = partition_of(100, 0, 1, 2, 5)
    dealing = EpochPartitions(now=partition, later=partition, drop_last=False)
    counted = TrainProgress(steps=7, place=(0, at), steps_in_epoch=7, limit=0.5)
    asked = BatchRange(7 + left, 7 + left)
    assert locate_batch_ranges([asked], {}, counted, dealing) == {asked: ((1, 0), (1, 10))}


@given(dealings(), ranges())
def test_all_that_is_dealt_is_the_rest(dealing: EpochPartitions, asked: list[BatchRange]) -> None:
    found = locate_batch_ranges(asked, {}, TrainProgress(), dealing)
    skipped = skipped_in_epoch(found.values(), 0)
    partition = replace(dealing.now, sequence=Skipped(dealing.now.sequence, skipped))
    kept = skipped.positions(np.arange(len(partition.sequence))).tolist()
    assert all_read(partition, partition.num_batches())[: len(kept)] == kept
