"""A run that goes on from machines to machines in the middle of an epoch, all that is promised of it checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.sequence.batching import Batched
from lightning_streaming.sequence.partition import BatchGeometry, Partition, epoch_geometry, rank_layout
from lightning_streaming.sequence.phased import Mixture, Phased
from lightning_streaming.sequence.settings import ResolvedOrder
from lightning_streaming.sequence.weights import DatasetShape
from tests.sequence.builders import epoch_of

ALONE = BatchGeometry(num_nodes=1, ranks_per_node=1, batch_size=1)
Data = DatasetShape | Mixture
"""Streams of one mixture, or of several."""


def sequence_of(asked: ResolvedOrder, shape: Data, geometry: BatchGeometry, epoch: int) -> Batched:
    """A whole epoch."""
    if isinstance(shape, Mixture):
        return Phased(shape, geometry, epoch)
    return epoch_of(asked, shape, geometry, epoch)


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


def stretches(asked: ResolvedOrder, shape: Data, epoch: int, legs: Sequence[Leg]) -> Iterator[Stretch]:
    """Go on as the loading room does: composed batches stay what the epoch began with, others follow the machines."""
    began_on = legs[0].machines.num_nodes
    kept: BatchGeometry | None = None
    position = 0
    for number, leg in enumerate(legs):
        current = leg.machines
        geometry = kept or epoch_geometry(asked, current, began_on if number else None)
        if asked.batching_method != "random" and (position or leg.steps or number == len(legs) - 1):
            kept = geometry
        plan = sequence_of(asked, shape, geometry, epoch)
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
        fewest = plan if asked.batching_method != "random" else sequence_of(asked, shape, ALONE, epoch)
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


def read_epoch(asked: ResolvedOrder, shape: Data, epoch: int, legs: Sequence[Leg]) -> list[int]:
    """Sample ids of an epoch in the order in which they were read for the first time, all that is promised checked."""
    ids: list[int] = []
    for stretch in stretches(asked, shape, epoch, legs):
        assert len(ids) == stretch.partition.start
        read = read_by_ranks(stretch)
        check_global_batches(stretch, read)
        check_ranks_are_even(stretch, read)
        ids += ids_in_order(stretch, read)
    return ids


def machines(nodes: st.SearchStrategy[int], largest_batch: int = 4) -> st.SearchStrategy[BatchGeometry]:
    return st.builds(
        BatchGeometry, num_nodes=nodes, ranks_per_node=st.integers(1, 3), batch_size=st.integers(1, largest_batch)
    )


def legs_on(first: st.SearchStrategy[int], later: st.SearchStrategy[int]) -> st.SearchStrategy[list[Leg]]:
    """Four legs: three cuts."""

    def leg(nodes: st.SearchStrategy[int]) -> st.SearchStrategy[Leg]:
        return st.builds(Leg, machines=machines(nodes), workers=st.integers(1, 3), steps=st.integers(0, 4))

    return st.tuples(leg(first), leg(later), leg(later), leg(later)).map(list)
