"""A run goes on with other machines in the middle of an epoch: nothing is read twice, nothing left out.

Only where an epoch's samples do not divide evenly a few are read twice, and only at its very end: fewer than there are
canonical nodes to make slices even, and fewer than there are ranks to make these even.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.batchings import Batched
from lightning_streaming.order.canonical import fits
from lightning_streaming.order.draw import Shuffled
from lightning_streaming.order.partition import BatchGeometry, Partition, epoch_geometry, rank_layout
from lightning_streaming.order.settings import BATCHING_METHODS, SHUFFLE_ALGOS, OrderSettings, SettledOrder
from lightning_streaming.order.weights import DatasetShape, StreamWeight, resolve_weights
from lightning_streaming.world import World
from tests.order.builders import epoch_of, make_shape

UNHURRIED = settings(deadline=None)
COMPOSED = ("device_per_stream", "per_stream", "stratified")


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One stretch of a run on the same machines."""

    machines: BatchGeometry
    workers: int
    steps: int
    """Global batches to read before the next leg; the last leg reads all that is left."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """How one leg goes on with an epoch."""

    leg: Leg
    plan: Batched
    partition: Partition
    batches: int


def stretches(asked: SettledOrder, shape: DatasetShape, epoch: int, legs: Sequence[Leg]) -> Iterator[Stretch]:
    """Go on as the loading room does: composed batches stay what the epoch began with, others follow the machines."""
    began_on = legs[0].machines.num_nodes
    kept: BatchGeometry | None = None
    position = 0
    for number, leg in enumerate(legs):
        current = leg.machines
        geometry = kept or epoch_geometry(asked, current, began_on if number else None)
        if asked.batching_method != "random" and (position or leg.steps or number == len(legs) - 1):
            kept = geometry
        plan = epoch_of(asked, shape, geometry, epoch)
        partition = Partition(
            sequence=plan,
            start=plan.resume_position(position, current.num_ranks),
            geometry=current,
            layout=rank_layout(asked, current, geometry),
        )
        left = partition.num_batches()
        batches = left if number == len(legs) - 1 else min(leg.steps, left)
        yield Stretch(leg=leg, plan=plan, partition=partition, batches=batches)
        position = partition.position_after(batches)
        fewest = plan if asked.batching_method != "random" else epoch_of(asked, shape, ALONE, epoch)
        if position >= min(len(plan), len(fewest)):
            return  # all has been read; what may be left are repeats that make many nodes even


def read_by_workers(stretch: Stretch, node: int, rank: int) -> NDArray[np.int64]:
    """Positions of shape (batches, batch size) that the workers of one rank read between them; -1 for none."""
    positions = np.full((stretch.batches, stretch.partition.geometry.batch_size), -1, np.int64)
    for worker in range(stretch.leg.workers):
        mine = np.arange(worker, stretch.batches, stretch.leg.workers)
        positions[mine] = stretch.partition.batches(mine, node, rank)
    return positions


def read_by_ranks(stretch: Stretch) -> NDArray[np.int64]:
    """Positions of shape (ranks, batches, batch size)."""
    partition = stretch.partition
    ranks = [
        (node, rank)
        for node in range(partition.geometry.num_nodes)
        for rank in range(partition.geometry.ranks_per_node)
    ]
    return np.stack([read_by_workers(stretch, node, rank) for node, rank in ranks])


def check_global_batches(stretch: Stretch, read: NDArray[np.int64]) -> None:
    """Each global batch is the next run of positions; only the last one of an epoch may hold some a second time."""
    partition = stretch.partition
    full = min(stretch.batches, partition.full_batches)
    in_order = np.sort(read[:, :full].swapaxes(0, 1).reshape(full, partition.geometry.global_batch_size))
    assert in_order.ravel().tolist() == list(range(partition.start, partition.position_after(full)))
    if stretch.batches > full:
        assert stretch.batches == full + 1
        ending = read[:, full][read[:, full] >= 0].tolist()
        new = range(partition.position_after(full), len(stretch.plan))
        assert set(new) <= set(ending)
        assert 0 <= len(ending) - len(new) < partition.geometry.num_ranks


def check_ranks_are_even(stretch: Stretch, read: NDArray[np.int64]) -> None:
    """All ranks read equally many batches and samples, also when a last batch that is not full is left out."""
    sizes = (read >= 0).sum(axis=2)  # (ranks, batches)
    assert (sizes == sizes[:1]).all()
    assert (sizes > 0).all()
    if stretch.batches == stretch.partition.num_batches():
        assert (
            (sizes == stretch.partition.geometry.batch_size).sum(axis=1)
            == stretch.partition.num_batches(drop_last=True)
        ).all()


def ids_in_order(stretch: Stretch, read: NDArray[np.int64]) -> list[int]:
    """What was read for the first time, in the order of its positions."""
    start, end = stretch.partition.start, stretch.partition.position_after(stretch.batches)
    ids = np.full(end - start, -1)
    new = read >= start
    ids[read[new] - start] = stretch.plan.ids(read[new])
    return list(ids.tolist())


def read_epoch(asked: SettledOrder, shape: DatasetShape, epoch: int, legs: Sequence[Leg]) -> list[int]:
    """Sample ids of an epoch in the order in which they were read for the first time, all that is promised checked."""
    ids: list[int] = []
    for stretch in stretches(asked, shape, epoch, legs):
        assert len(ids) == stretch.partition.start
        read = read_by_ranks(stretch)
        check_global_batches(stretch, read)
        check_ranks_are_even(stretch, read)
        ids += ids_in_order(stretch, read)
    return ids


def drawn_ids(asked: SettledOrder, shape: DatasetShape, epoch: int) -> list[int]:
    """What the epoch draws."""
    return list(Shuffled(asked, shape, epoch).ids(np.arange(shape.epoch_size)).tolist())


@st.composite
def mixtures(draw: st.DrawFn, shards: int = 4, largest: int = 30) -> DatasetShape:
    """One to three streams, some repeated, some drawn in part, all of some weight."""
    sizes = draw(st.lists(st.lists(st.integers(1, largest), min_size=1, max_size=shards), min_size=1, max_size=3))
    relative = draw(st.booleans())
    shares = [draw(st.floats(0.3, 2.5)) for _ in sizes]
    weights = [StreamWeight(proportion=share) if relative else StreamWeight(repeat=share) for share in shares]
    totals = [sum(stream) for stream in sizes]
    assume(relative or any(int(share * total) for share, total in zip(shares, totals, strict=True)))
    return DatasetShape(
        shard_sizes=tuple(np.asarray(stream) for stream in sizes),
        weights=resolve_weights(weights, totals, draw(st.integers(1, 150)) if relative else None, seed=0),
    )


def machines(nodes: st.SearchStrategy[int], largest_batch: int = 4) -> st.SearchStrategy[BatchGeometry]:
    return st.builds(
        BatchGeometry, num_nodes=nodes, ranks_per_node=st.integers(1, 3), batch_size=st.integers(1, largest_batch)
    )


def legs_on(first: st.SearchStrategy[int], later: st.SearchStrategy[int]) -> st.SearchStrategy[list[Leg]]:
    """Four legs: three cuts."""

    def leg(nodes: st.SearchStrategy[int]) -> st.SearchStrategy[Leg]:
        return st.builds(Leg, machines=machines(nodes), workers=st.integers(1, 3), steps=st.integers(0, 4))

    return st.tuples(leg(first), leg(later), leg(later), leg(later)).map(list)


ALONE = BatchGeometry(num_nodes=1, ranks_per_node=1, batch_size=1)
CANONICAL = 6
FITTING = st.sampled_from([1, 2, 3, 6, 12])
WHOLE = st.sampled_from([1, 2, 3, 6])
ANY = st.integers(1, 7)
epochs = st.integers(0, 2)


def asked_for(algo: str, **said: object) -> SettledOrder:
    """A shuffle in small blocks; None of it where there is no name."""
    return OrderSettings(
        shuffle=bool(algo),
        shuffle_algo=algo or "py1s",  # type: ignore[arg-type]  # checked at birth, too
        shuffle_block_size=20,
        **{"num_canonical_nodes": CANONICAL, **said},  # type: ignore[arg-type]  # each is checked at birth
    ).settled(1)


@pytest.mark.parametrize("algo", ["", *SHUFFLE_ALGOS])
@settings(UNHURRIED, max_examples=40)
@given(shape=mixtures(), legs=legs_on(FITTING, FITTING), epoch=epochs, partition=st.sampled_from(["orig", "relaxed"]))
def test_an_epoch_cut_three_times_reads_what_one_that_was_not_does(
    algo: str, shape: DatasetShape, legs: list[Leg], epoch: int, partition: str
) -> None:
    asked = asked_for(algo, partition_algo=partition)
    assume(shape.epoch_size > CANONICAL)
    ids = read_epoch(asked, shape, epoch, legs)
    drawn = drawn_ids(asked, shape, epoch)
    whole = epoch_of(asked, shape, ALONE, epoch)
    expected = whole.ids_between(0, len(whole)).tolist()
    assert ids[: len(expected)] == expected
    assert not Counter(drawn) - Counter(expected)
    again = Counter(expected) - Counter(drawn)
    assert again.total() < CANONICAL
    assert again.keys() <= set(expected[-CANONICAL:])
    # More nodes than canonical nodes read some twice at the end.
    assert len(ids) - len(expected) < max(leg.machines.num_nodes for leg in legs)


@UNHURRIED
@given(shape=mixtures(), legs=legs_on(WHOLE, ANY), algo=st.sampled_from(["", "py1e", "py1s"]), epoch=epochs)
def test_relaxed_goes_on_with_nodes_that_canonical_nodes_do_not_fit(
    shape: DatasetShape, legs: list[Leg], algo: str, epoch: int
) -> None:
    asked = asked_for(algo)
    assume(shape.epoch_size >= CANONICAL)
    ids = read_epoch(asked, shape, epoch, legs)
    assert ids == read_epoch(asked, shape, epoch, legs[:1])


@UNHURRIED
@given(legs=legs_on(WHOLE, ANY))
def test_orig_goes_on_with_nodes_that_canonical_nodes_fit_only(legs: list[Leg]) -> None:
    asked, shape = asked_for("py1s", partition_algo="orig"), make_shape([400], [300])
    if all(fits(CANONICAL, leg.machines.num_nodes) for leg in legs):
        assert len(read_epoch(asked, shape, 0, legs)) >= shape.epoch_size
    else:
        with pytest.raises(ConfigError, match="multiple or a divisor"):
            read_epoch(asked, shape, 0, legs)


@UNHURRIED
@given(shape=mixtures(largest=2, shards=2), legs=legs_on(FITTING, FITTING))
def test_of_fewer_samples_than_canonical_nodes_none_is_left_out(shape: DatasetShape, legs: list[Leg]) -> None:
    asked = asked_for("py1s", num_canonical_nodes=12)
    assert set(read_epoch(asked, shape, 0, legs)) == set(drawn_ids(asked, shape, 0))


@st.composite
def composed_epochs(draw: st.DrawFn) -> tuple[DatasetShape, list[Leg]]:
    """Streams that fill a few batches of the machines that begin; the machines of later legs may be any."""
    legs = draw(legs_on(st.sampled_from([1, 2, 4]), ANY))
    begins = replace(legs[0].machines, ranks_per_node=min(legs[0].machines.ranks_per_node, 2), batch_size=4)
    streams = draw(st.lists(st.lists(st.integers(20, 40), min_size=3, max_size=4), min_size=1, max_size=3))
    weights = [StreamWeight(repeat=draw(st.floats(0.8, 1.5))) for _ in streams]
    shape = DatasetShape(
        shard_sizes=tuple(np.asarray(stream) for stream in streams),
        weights=resolve_weights(weights, [sum(stream) for stream in streams], None, seed=0),
    )
    assume(begins.batch_size * min(shape.weights.proportion) >= 1)  # or no sample of it would be in a batch
    return shape, [replace(legs[0], machines=begins), *legs[1:]]


@pytest.mark.parametrize("method", COMPOSED)
@pytest.mark.parametrize("partition", ["orig", "relaxed"])
@UNHURRIED
@given(case=composed_epochs(), algo=st.sampled_from(["", *SHUFFLE_ALGOS]), epoch=epochs)
def test_composed_batches_stay_those_of_the_machines_that_the_epoch_began_with(
    method: str, partition: str, case: tuple[DatasetShape, list[Leg]], algo: str, epoch: int
) -> None:
    shape, legs = case
    asked = asked_for(algo, num_canonical_nodes=4, batching_method=method, partition_algo=partition)
    began = next(leg for leg in legs if leg.steps or leg is legs[-1])
    assume(fits(4, began.machines.num_nodes) and began is legs[0])
    ids = read_epoch(asked, shape, epoch, legs)
    whole = epoch_of(asked, shape, legs[0].machines, epoch)
    assert ids == whole.ids_between(0, len(whole)).tolist()


@UNHURRIED
@given(case=composed_epochs(), method=st.sampled_from(COMPOSED))
def test_batches_cut_and_taken_up_by_the_same_machines_are_composed_as_ever(
    case: tuple[DatasetShape, list[Leg]], method: str
) -> None:
    shape, legs = case
    asked = asked_for("py1s", num_canonical_nodes=4, batching_method=method)
    cut = [replace(leg, machines=legs[0].machines) for leg in legs]
    parts = [read_by_ranks(stretch) for stretch in stretches(asked, shape, 0, cut)]
    whole = [read_by_ranks(stretch) for stretch in stretches(asked, shape, 0, cut[-1:])]
    assert np.concatenate(parts, axis=1).tolist() == whole[0].tolist()


@UNHURRIED
@given(
    nodes=st.sampled_from([1, 2, 4]),
    ranks=st.sampled_from([1, 2, 4]),
    replication=st.sampled_from([1, 2, 4, 8]),
    method=st.sampled_from(BATCHING_METHODS),
    steps=st.integers(0, 3),
)
def test_replicated_ranks_read_the_same_and_their_groups_everything(
    nodes: int, ranks: int, replication: int, method: str, steps: int
) -> None:
    assume(nodes * ranks % replication == 0)
    asked, shape = asked_for("py1s", num_canonical_nodes=4, batching_method=method), make_shape([150], [250])
    worlds = [
        World(num_nodes=nodes, ranks_per_node=ranks, rank=rank).replicated(replication) for rank in range(nodes * ranks)
    ]
    groups = BatchGeometry(num_nodes=worlds[0].num_nodes, ranks_per_node=worlds[0].ranks_per_node, batch_size=4)
    before = Leg(machines=replace(ALONE, batch_size=4), workers=1, steps=steps)
    *_, stretch = stretches(asked, shape, 0, [before, Leg(machines=groups, workers=2, steps=0)])
    read = [read_by_workers(stretch, world.node, world.rank_of_node) for world in worlds]
    for rank, positions in enumerate(read):
        assert positions.tolist() == read[rank // replication * replication].tolist()
    distinct = np.stack(read[::replication])
    assert len(distinct) == groups.num_ranks
    check_global_batches(stretch, distinct)
    check_ranks_are_even(stretch, distinct)
