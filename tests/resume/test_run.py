"""A run as a value: what a cursor means to it, and the run that goes on from a saved position. Nothing is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, StateError, StateMismatchError
from lightning_streaming.formats.index import INDEX_BASENAME, parse_index
from lightning_streaming.reading.workers import SharedEpochStart
from lightning_streaming.resume.mismatch import Difference
from lightning_streaming.resume.run import Epoch, Machines, Run, new_run, order_of_pass, resume
from lightning_streaming.resume.run_order import RunRequest
from lightning_streaming.resume.run_state import drawn_sequence
from lightning_streaming.resume.state import Cursor, SavedPosition, read_state
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.settings import BATCHING_METHODS, OrderSettings
from lightning_streaming.sequence.skips import TrainProgress, parse_batch_ranges
from lightning_streaming.sequence.weights import StreamWeight
from lightning_streaming.world import World
from tests.helpers import json_copy, write_dataset
from tests.tiers import examples

SIZES = {"a": 37, "b": 53}


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    base = tmp_path_factory.mktemp("data")
    return catalog_of({name: write_dataset(base / name, size) for name, size in SIZES.items()})


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    base = tmp_path_factory.mktemp("smaller")
    return catalog_of({name: write_dataset(base / name, size // 2) for name, size in SIZES.items()})


def catalog_of(roots: dict[str, Path]) -> Catalog:
    return Catalog({name: parse_index((root / INDEX_BASENAME).read_bytes(), name) for name, root in roots.items()})


def request(*, skip: tuple[str, ...] = (), epoch_size: int | None = None, **order: Any) -> RunRequest:
    given = OrderSettings(**{"shuffle": True, "shuffle_block_size": 16, **order})
    return RunRequest(
        settings=given,
        weights=(StreamWeight(), StreamWeight()),
        epoch_size=epoch_size,
        skip=parse_batch_ranges(skip, "skip"),
    )


def machines(nodes: int = 1, ranks: int = 1, batch_size: int | None = 4, drop_last: bool = False) -> Machines:
    return Machines(num_nodes=nodes, ranks_per_node=ranks, batch_size=batch_size, drop_last=drop_last)


def read_from(run: Run, cursor: Cursor) -> list[int]:
    """Sample ids of the rest of an epoch, as all ranks read them step by step; what one reads again is left out."""
    epoch = run.epoch(run.normalise(cursor))
    partition, plan = epoch.partition, drawn_sequence(epoch)
    steps = np.arange(partition.num_batches(run.machines.drop_last))
    ranks = np.ndindex(run.machines.num_nodes, run.machines.ranks_per_node)
    positions = np.concatenate([partition.batches(steps, node, rank) for node, rank in ranks], axis=1)
    read = sorted({int(position) for position in positions.ravel() if position >= 0})
    return [int(sample) for sample in plan.ids(np.asarray(read, np.int64))]


def fields_of(run: Run) -> dict[str, Any]:
    """What a run says, to be compared before and after questions."""
    return {name: value for name, value in vars(run).items() if name != "skipped_ranges"}


worlds = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 5, 8]))
methods = st.sampled_from(BATCHING_METHODS)


@given(method=methods, world=worlds, position=st.integers(0, 90), drop_last=st.booleans(), skips=st.booleans())
@settings(max_examples=examples(60))
def test_no_question_changes_a_run(
    catalog: Catalog, method: Any, world: tuple[int, int, int], position: int, drop_last: bool, skips: bool
) -> None:
    options = request(batching_method=method, num_canonical_nodes=12, skip=("1-2",) if skips else ())
    run = new_run(options, catalog, machines(*world, drop_last=drop_last))
    try:
        start = run.normalise(Cursor(0, min(position, len(run.epoch(Cursor(0, 0)).sequence))))
    except ConfigError:  # a stream that does not fill a batch of so many ranks
        return
    before = fields_of(run)
    answers = [
        (
            run.normalise(start),
            run.advance(start, 3),
            run.batches_left(start),
            run.batches_in_epoch(start),
            run.samples_before(start),
            run.saved(start).as_state(),
            run.at(start).saved(start).as_state(),
            run.skipped_ranges,
        )
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert fields_of(run) == before


@given(method=methods, first=worlds, second=worlds, steps=st.integers(0, 6), data=st.data())
@settings(max_examples=examples(80))
def test_a_resumed_run_reads_the_rest_of_the_epoch(
    catalog: Catalog,
    method: Any,
    first: tuple[int, int, int],
    second: tuple[int, int, int],
    steps: int,
    data: st.DataObject,
) -> None:
    options = request(batching_method=method, num_canonical_nodes=12)
    try:
        run = new_run(options, catalog, machines(*first)).at(Cursor(0, 0))
        begins = run.epoch(Cursor(0, 0)).partition.position_after(steps)
    except ConfigError:
        return
    cursor = run.normalise(Cursor(0, min(begins, len(run.epoch(Cursor(0, 0)).sequence))))
    state = json_copy(run.saved(cursor).as_state())
    onward = data.draw(st.sampled_from([request(batching_method=method), options]), label="requested on resume")
    resumed = resume(read_state(state), onward, catalog, machines(*second))
    assert (list(resumed.differences), list(resumed.notes())) == ([], [])
    if cursor.epoch == 0 and cursor.sample_in_epoch:
        epoch = run.epoch(cursor)
        rest = drawn_sequence(epoch).ids(np.arange(cursor.sample_in_epoch, len(epoch.sequence)))
        assert read_from(resumed.run, cursor)[-len(rest) :] == rest.tolist()


@given(method=methods, world=worlds, first=st.integers(0, 20), then=st.integers(0, 20))
@settings(max_examples=examples(60))
def test_advancing_twice_is_advancing_by_the_sum(
    catalog: Catalog, method: Any, world: tuple[int, int, int], first: int, then: int
) -> None:
    try:
        run = new_run(
            request(batching_method=method, num_canonical_nodes=12, skip=("1", "4-5")), catalog, machines(*world)
        )
        length = len(run.epoch(Cursor(0, 0)).sequence)
    except ConfigError:
        return
    kept = run.skipped(0).kept_before(length)
    if first + then < kept:
        there = run.advance(Cursor(0, 0), first + then)
        assert run.advance(run.advance(Cursor(0, 0), first), then) == there
        assert run.samples_before(there) == first + then
    assert run.advance(Cursor(3, 7), 0) == Cursor(3, 7)


@pytest.mark.parametrize(("read", "there"), [(88, 89), (89, 90), (96, 90), (97, 98)])
def test_only_what_keeps_ranks_even_counts_for_nothing(catalog: Catalog, read: int, there: int) -> None:
    run = new_run(request(), catalog, machines(1, 8, 1))
    # Of 90 samples, 89 are left for 8 ranks, which read 96. One more round is more than there is, and stays so.
    assert run.advance(Cursor(0, 1), read) == Cursor(0, there)


def test_an_epoch_ends_where_the_next_begins(catalog: Catalog) -> None:
    run = new_run(request(), catalog, machines(batch_size=None))
    length = len(run.epoch(Cursor(0, 0)).sequence)
    assert length == sum(SIZES.values())
    assert [run.normalise(Cursor(2, at)) for at in (0, length - 1, length)] == [(2, 0), (2, length - 1), (3, 0)]
    with pytest.raises(StateError, match="92 samples were consumed of an epoch that has 90"):
        replace(run, machines=machines(1, 1)).normalise(Cursor(2, length + 2))


def test_epochs_that_are_skipped_whole_are_passed_over(catalog: Catalog) -> None:
    run = new_run(request(skip=("2-60",)), catalog, machines(batch_size=5))
    ((_, end),) = run.skipped_ranges.values()
    assert end == (3, 35)
    begins = run.normalise(Cursor(0, 10))
    assert begins == Cursor(3, 0)  # what is skipped of it is passed over when it is read
    assert run.epoch(begins).partition.batch(0, 0, 0).tolist() == [35, 36, 37, 38, 39]


def test_an_epoch_of_which_a_dropped_batch_is_left_is_passed_over(catalog: Catalog) -> None:
    run = new_run(request(skip=("0-21",)), catalog, machines(batch_size=4, drop_last=True))
    assert list(run.skipped_ranges.values()) == [((0, 0), (0, 88))]
    assert run.normalise(Cursor(0, 0)) == Cursor(1, 0)
    assert run.on(machines(batch_size=4)).normalise(Cursor(0, 0)) == Cursor(0, 0)
    run = new_run(request(skip=("0-21", "22-43", "44-65")), catalog, machines(batch_size=4, drop_last=True))
    assert run.normalise(Cursor(0, 0)) == Cursor(3, 0)


def test_seed_canonical_nodes_and_block_are_those_of_the_saved_position(catalog: Catalog) -> None:
    run = new_run(request(shuffle_seed=5, shuffle_block_size=None), catalog, machines(4, 2))
    state = run.saved(Cursor(1, 8))
    other = resume(state, request(shuffle_seed=77, shuffle_block_size=None), catalog, machines(2, 1)).run
    assert other.settings == run.settings
    assert (other.initial_nodes, other.resumed_from_nodes) == (4, 4)
    assert other.saved(Cursor(1, 8)) == state


def test_weights_follow_the_saved_seed(catalog: Catalog) -> None:
    drawn = set()
    for seed in range(9):
        run = new_run(request(epoch_size=31, shuffle_seed=seed), catalog, machines())
        back = resume(run.saved(Cursor(0, 3)), request(epoch_size=31, shuffle_seed=1), catalog, machines()).run
        assert back.order.weights == run.order.weights
        drawn.add(back.order.weights.choose)
    assert len(drawn) == 2  # the seed says which stream gets the sample left over


CHANGES: dict[str, Callable[[RunRequest], RunRequest]] = {
    "order.shuffle": lambda base: replace(base, settings=replace(base.settings, shuffle=False)),
    "order.shuffle_algo": lambda base: replace(base, settings=replace(base.settings, shuffle_algo="naive")),
    "order.shuffle_block_size": lambda base: replace(base, settings=replace(base.settings, shuffle_block_size=17)),
    "order.sampling_method": lambda base: replace(base, settings=replace(base.settings, sampling_method="fixed")),
    "order.epoch_size": lambda base: replace(base, epoch_size=50),
    "streams.a.samples_drawn": lambda base: replace(base, weights=(StreamWeight(choose=9), StreamWeight())),
}


@pytest.mark.parametrize("setting", CHANGES)
def test_changes_are_listed_and_refused(catalog: Catalog, setting: str) -> None:
    state = new_run(request(), catalog, machines()).saved(Cursor(0, 8))
    changed = CHANGES[setting](request())
    with pytest.raises(StateMismatchError, match=rf"(?s)text: the saved position belongs to other data.*{setting}"):
        resume(state, changed, catalog, machines(), reader="text")
    resumed = resume(state, changed, catalog, machines(), "warn", reader="text")
    assert setting in {change.setting for change in resumed.differences}
    (note,) = resumed.notes()
    assert note.startswith("text: resuming although data or order have changed:")
    assert resumed.run.may_end_early


@pytest.mark.parametrize(
    "alike",
    [{"shuffle_seed": 3}, {"num_canonical_nodes": 7}, {"partition_algo": "orig"}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_the_state_brings_or_does_not_matter_is_no_difference(catalog: Catalog, alike: dict[str, Any]) -> None:
    state = new_run(request(num_canonical_nodes=2), catalog, machines()).saved(Cursor(0, 8))
    assert resume(state, request(**alike), catalog, machines()).differences == []


def test_other_data_is_reported_stream_by_stream(catalog: Catalog, smaller: Catalog) -> None:
    state = new_run(request(), catalog, machines()).saved(Cursor(0, 80))
    resumed = resume(state, request(), smaller, machines(), "warn")
    assert Difference("streams.a.samples", "37", "18") in resumed.differences
    run = resumed.run
    assert list(run.why_moved(Cursor(0, 80))) == ["epoch 0 has ended: 80 of its samples were read, and it has 44 now"]
    assert run.normalise(Cursor(0, 80)) == Cursor(1, 0)
    assert list(run.why_moved(Cursor(1, 0))) == []


def test_a_state_without_a_fingerprint_is_taken_as_it_is(catalog: Catalog, smaller: Catalog) -> None:
    bare = replace(new_run(request(), catalog, machines()).saved(Cursor(0, 8)), fingerprint=None, streams=None)
    resumed = resume(bare, request(), smaller, machines())
    assert (list(resumed.differences), resumed.run.normalise(Cursor(0, 8))) == ([], Cursor(0, 8))
    with pytest.raises(StateError, match="80 samples were consumed of an epoch that has 44"):
        resumed.run.normalise(Cursor(0, 80))


def test_a_state_without_its_first_nodes_has_no_nodes_to_continue_with(catalog: Catalog) -> None:
    options = request(batching_method="device_per_stream", num_canonical_nodes=4)
    state = new_run(options, catalog, machines(4, 1, 2)).saved(Cursor(1, 0))
    known = resume(state, options, catalog, machines(3, 1, 2)).run
    assert known.epoch(Cursor(1, 0)).composed.num_nodes == 1
    unknown = resume(replace(state, initial_physical_nodes=None), options, catalog, machines(3, 1, 2)).run
    with pytest.raises(ConfigError, match="num_canonical_nodes=4 must be a multiple of the 3 nodes"):
        unknown.epoch(Cursor(1, 0))


def test_too_many_canonical_nodes_are_refused_as_an_option_or_a_state(catalog: Catalog) -> None:
    many = request(num_canonical_nodes=2**17)
    with pytest.raises(ConfigError, match="is 131072, and an epoch of 90 samples has 65536 at most"):
        new_run(many, catalog, machines())
    saved = SavedPosition(
        cursor=Cursor(0, 0),
        shuffle_seed=1,
        num_canonical_nodes=2**17,
        initial_physical_nodes=1,
        geometry=None,
        fingerprint=None,
    )
    with pytest.raises(ConfigError, match="set it lower"):
        resume(saved, many, catalog, machines())
    with pytest.raises(StateError, match="'num_canonical_nodes' of the saved position is 131072"):
        resume(saved, request(), catalog, machines())


@pytest.mark.parametrize("method", [name for name in BATCHING_METHODS if name != "random"])
def test_an_epoch_under_way_keeps_its_batches_on_other_machines(catalog: Catalog, method: Any) -> None:
    begun = new_run(request(batching_method=method), catalog, machines(1, 2, 4)).at(Cursor(1, 0))
    composed = begun.epoch(Cursor(1, 0)).composed
    moved = begun.on(machines(1, 1, 3))
    assert moved.epoch(Cursor(1, 16)).composed == composed
    assert moved.epoch(Cursor(1, 0)).composed.batch_size == 3  # of which nothing has been read
    assert moved.epoch(Cursor(2, 0)).composed.batch_size == 3
    assert moved.saved(Cursor(1, 16)).geometry == composed
    assert moved.saved(Cursor(2, 0)).geometry is None
    (why,) = moved.why_uneven(Cursor(1, 16))
    assert "global batches of 8 samples, composed for 1 nodes of 2 ranks; read in steps of 3" in why
    later = moved.at(Cursor(2, 0))
    assert later.epoch(Cursor(1, 16)).composed == composed  # for whoever consumes batches late
    assert 1 not in later.at(Cursor(3, 0)).composed


def test_composed_batches_need_a_batch_size(catalog: Catalog) -> None:
    run = new_run(request(batching_method="stratified"), catalog, machines(batch_size=None))
    with pytest.raises(ConfigError, match="pass batch_size= to the dataset"):
        run.normalise(Cursor(0, 0))
    assert run.on(machines(batch_size=4)).normalise(Cursor(0, 0)) == Cursor(0, 0)


def test_ranges_to_skip_stay_where_they_were_placed(catalog: Catalog) -> None:
    run = new_run(request(skip=("3-4",)), catalog, machines(batch_size=4)).at(Cursor(0, 0))
    assert list(run.skipped_ranges.values()) == [((0, 12), (0, 20))]
    state = run.saved(Cursor(0, 8))
    resumed = resume(state, request(skip=("3-4", "8")), catalog, machines(batch_size=2)).run
    counted = resumed.counted_from(TrainProgress(steps=2, place=(0, 8), steps_in_epoch=2))
    # From there on a batch has two samples: 2 is the next, 3 and 4 are those that were placed, 5 comes after it.
    assert list(counted.skipped_ranges.values()) == [((0, 12), (0, 20)), ((0, 24), (0, 26))]
    assert counted.skipped_too_late(Cursor(0, 8)) == []
    assert counted.skipped_too_late(Cursor(0, 25)) == []
    assert [str(batches) for batches in counted.skipped_too_late(Cursor(0, 26))] == ["8"]
    assert [str(batches) for batches in counted.skipped_too_late(Cursor(1, 0))] == ["8"]


def test_what_is_new_to_skip_is_placed_also_where_the_data_has_become_smaller(
    catalog: Catalog, smaller: Catalog
) -> None:
    state = new_run(request(), catalog, machines()).saved(Cursor(0, 80))
    run = resume(state, request(skip=("3-4", "21")), smaller, machines(), "warn").run
    run = run.counted_from(TrainProgress(steps=20, place=(0, 80), steps_in_epoch=20))
    assert run.normalise(Cursor(0, 80)) == Cursor(1, 0)
    assert [str(batches) for batches in run.skipped_too_late(Cursor(0, 80))] == ["3-4"]
    assert list(run.skipped_ranges.values()) == [((0, 80), (0, 80)), ((1, 4), (1, 8))]


def test_what_was_placed_for_a_trainer_that_has_begun_stays_there(catalog: Catalog) -> None:
    run = new_run(request(skip=("5",)), catalog, machines(batch_size=4)).counted_from(TrainProgress())
    assert list(run.skipped_ranges.values()) == [((0, 20), (0, 24))]
    later = run.counted_from(TrainProgress(steps=2, place=(0, 8), steps_in_epoch=2))
    assert later.on(machines(batch_size=9)).skipped_ranges == run.skipped_ranges
    untouched = run.counted_from(TrainProgress())
    assert untouched.on(machines(batch_size=9)).skipped_ranges != run.skipped_ranges


def test_ranges_located_by_a_pass_are_located_again_for_a_trainer_and_for_other_machines(catalog: Catalog) -> None:
    run = new_run(request(skip=("5",)), catalog, machines(batch_size=4)).at(Cursor(0, 0))
    assert list(run.skipped_ranges.values()) == [((0, 20), (0, 24))]
    # Two steps of other machines have come as far as 16, so that three more lie between there and batch 5.
    counted = run.counted_from(TrainProgress(steps=2, place=(0, 16), steps_in_epoch=2))
    assert list(counted.skipped_ranges.values()) == [((0, 28), (0, 32))]
    assert list(run.on(machines(batch_size=9)).skipped_ranges.values()) == [((0, 45), (0, 54))]


def test_ranges_of_later_epochs_stay_when_the_epoch_that_they_were_counted_from_is_over(catalog: Catalog) -> None:
    options = request(batching_method="per_stream", num_canonical_nodes=4)
    state = new_run(options, catalog, machines(1, 2, 4)).at(Cursor(0, 0)).saved(Cursor(0, 16))
    skipping = replace(options, skip=parse_batch_ranges(["40", "80"], "skip"))
    run = resume(state, skipping, catalog, machines(1, 1, 3)).run
    run = run.counted_from(TrainProgress(steps=2, place=(0, 16), steps_in_epoch=2))
    lengths = [len(run.epoch(Cursor(*place)).sequence) for place in ((0, 16), (1, 0))]
    assert lengths == [96, 93]
    # Of the epoch under way 80 samples are left, 27 batches; the next ones have 31.
    placed = [((1, 33), (1, 36)), ((2, 60), (2, 63))]
    for begins in (Cursor(0, 16), Cursor(1, 0), Cursor(2, 0), Cursor(3, 0)):
        run = run.at(begins)
        assert list(run.skipped_ranges.values()) == placed, begins


@pytest.mark.parametrize("method", BATCHING_METHODS)
def test_a_process_that_gets_a_pass_reads_the_same(catalog: Catalog, method: Any) -> None:
    options = request(batching_method=method, skip=("2",))
    run = new_run(options, catalog, machines(2, 2, 3)).at(Cursor(1, 0))
    begins = Cursor(0, 12)
    world = World(num_nodes=2, ranks_per_node=2, rank=3)
    shared = SharedEpochStart(most_skipped_runs=1)
    shared.assign(run.epoch(begins).pass_start(world))
    start = shared.assigned()
    mine, theirs = run.epoch(begins), Epoch.of_pass(order_of_pass(options, catalog, start), start)
    assert theirs.partition.sequence.digest == mine.partition.sequence.digest
    assert replace(theirs.partition, sequence=mine.partition.sequence) == mine.partition
    positions = np.arange(len(mine.sequence))
    assert np.array_equal(drawn_sequence(theirs).ids(positions), drawn_sequence(mine).ids(positions))


def test_every_batch_ends_where_the_next_begins(catalog: Catalog) -> None:
    run = new_run(request(skip=("2", "6-7")), catalog, machines(1, 2, 3))
    left = [run.batches_left(run.advance(Cursor(0, 0), 6 * step)) for step in range(run.batches_left(Cursor(0, 0)))]
    assert all(before - after == 1 for before, after in pairwise(left))
    assert left[0] == run.batches_in_epoch(Cursor(0, 0)) == 15 - 3
