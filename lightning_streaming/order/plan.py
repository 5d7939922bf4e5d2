"""The plan of one epoch: which sample is read at which position, without reading the positions before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.order.batchings import BATCHINGS, EpochSequence, EpochSpec
from lightning_streaming.order.draw import Order
from lightning_streaming.order.partition import INTERLEAVED, BatchGeometry, Partition
from lightning_streaming.order.sequence import CanonicalSequence
from lightning_streaming.order.settings import SettledOrder
from lightning_streaming.order.weights import DatasetShape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochPlan:
    """The sample at each position of one epoch, at random access."""

    sequence: EpochSequence
    """Which place of ``order`` each position reads."""
    order: Order | None
    """What :func:`~lightning_streaming.order.draw.draw_order` made, maybe memory-mapped; None for the identity."""

    def __post_init__(self) -> None:
        if self.order is not None and len(self.order) != self.sequence.num_samples:
            raise ConfigError(
                f"an epoch of {self.sequence.num_samples} samples needs an order of that length, but got "
                f"{len(self.order)}"
            )

    def __len__(self) -> int:
        """Positions of the epoch.

        With batching method ``random`` a little more than its samples where they do not divide evenly; with the others
        a little less, since what fills no batch is left out.
        """
        return len(self.sequence)

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at these positions.

        Args:
            positions: Of any shape, each in ``[0, len(self))``.

        Returns:
            Sample ids of the same shape.

        Raises:
            SampleIndexError: A position lies outside the epoch.
        """
        places = self.sequence.places(positions)
        return places if self.order is None else self.order[places].astype(np.int64, copy=False)

    def ids_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Sample ids at positions ``[start, stop)``."""
        return self.ids(np.arange(start, stop))


def epoch_sequence(settings: SettledOrder, shape: DatasetShape, geometry: BatchGeometry, epoch: int) -> EpochSequence:
    """In which order the places of an epoch's order are read; quick, whatever the epoch's size.

    Args:
        settings: How it is ordered.
        shape: The data.
        geometry: What batches are made for; see :func:`~lightning_streaming.order.partition.epoch_geometry`.
        epoch: Counts from 0.

    Raises:
        ConfigError: Batches cannot be made so from this data.
    """
    facts = EpochSpec(settings=settings, shape=shape, geometry=geometry, epoch=epoch)
    return BATCHINGS[settings.batching_method](facts)


def plan_epoch(
    settings: SettledOrder, shape: DatasetShape, geometry: BatchGeometry, epoch: int, order: Order | None
) -> EpochPlan:
    """Plan an epoch whose order has been drawn.

    Args:
        settings: How it is ordered.
        shape: The data.
        geometry: What batches are made for; see :func:`~lightning_streaming.order.partition.epoch_geometry`.
        epoch: Counts from 0.
        order: What :func:`~lightning_streaming.order.draw.draw_order` gave for the same settings, data and epoch.

    Raises:
        ConfigError: Batches cannot be made so from this data, or ``order`` is not of this epoch.
    """
    return EpochPlan(sequence=epoch_sequence(settings, shape, geometry, epoch), order=order)


def resume_position(sequence: EpochSequence, consumed: int, num_ranks: int, told: str = "") -> int:
    """Where to go on after ``consumed`` samples, counted over all ranks with what they read twice to stay even.

    Args:
        sequence: The epoch's.
        consumed: Samples as a saved state counts them, replication divided out.
        num_ranks: Ranks that read.
        told: What an error begins with.

    Returns:
        A position in ``[0, len(sequence)]``: the end where all has been read, and where only repeats are left their
        beginning, which is a position on any number of nodes.

    Raises:
        StateError: More was consumed than any epoch of this size has.
    """
    most = sequence.most_counted(num_ranks)
    if not 0 <= consumed <= most:
        raise StateError(
            f"{told}{consumed} samples were consumed of an epoch that has {sequence.num_samples}, or {most} with "
            "repeats; the state belongs to other data or another epoch size. Put these back, or resume with "
            'on_change="warn" to begin the next epoch, or move the place with `lightning-streaming state set`'
        )
    return len(sequence) if consumed >= len(sequence) else min(consumed, sequence.read_once)


def are_first_reads(
    sequence: EpochSequence, partition: Partition, ts: NDArray[np.int64], node: int, rank_of_node: int
) -> NDArray[np.bool_]:
    """Which reads of some batches no rank, this one or another, makes earlier in the epoch.

    Over all ranks and batches of an epoch, each place of the order has exactly one first read. Of the composed
    sequences (every batching method but ``random``) what a stream repeats to fill its last batch is not told apart.

    Args:
        sequence: The epoch's.
        partition: How it is divided.
        ts: Global batches, counted from where the partition starts.
        node: In ``[0, partition.num_nodes)``.
        rank_of_node: In ``[0, partition.ranks_per_node)``.

    Returns:
        Of shape (len(ts), batch_size), like ``partition.batches``; False where that is -1.
    """
    positions = partition.batches(ts, node, rank_of_node)
    are_first = positions >= 0
    at_end = ts >= partition.remaining // partition.global_batch_size
    if at_end.any():
        entries = ts[at_end, np.newaxis] * partition.global_batch_size + INTERLEAVED.entries(
            partition.geometry, node, rank_of_node
        )
        are_first[at_end] &= entries < partition.remaining
    if isinstance(sequence, CanonicalSequence):
        are_first &= ~_are_repeats(sequence, positions)
    return are_first


def _are_repeats(sequence: CanonicalSequence, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the sequence reads a place again; False for a position of -1."""
    slices = sequence.num_canonical_nodes
    if sequence.num_samples <= slices:  # each slice has one sample, or none of its own
        _, first_positions = np.unique(sequence.places(np.arange(len(sequence))), return_index=True)
        return ~np.isin(positions, first_positions) & (positions >= 0)
    are_repeats = positions >= sequence.read_once
    # In the last round before, a slice with one sample less reads the one of the round before again.
    last_round = ~are_repeats & (positions >= sequence.read_once - slices)
    ours = positions[last_round]
    are_repeats[last_round] = sequence.places(ours) == sequence.places(ours - slices)
    return are_repeats
