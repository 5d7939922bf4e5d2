"""Which reads of an epoch are the first of their sample: the others only make canonical nodes, nodes and ranks even."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.batching import EpochSequence
from lightning_streaming.order.deal import Deal
from lightning_streaming.order.layout import IN_TURN
from lightning_streaming.order.sequence import CanonicalSequence


def are_first_reads(
    sequence: EpochSequence, deal: Deal, ts: NDArray[np.int64], node: int, rank_of_node: int
) -> NDArray[np.bool_]:
    """Which reads of some batches no rank, this one or another, makes earlier in the epoch.

    Over all ranks and batches of an epoch, each place of the order has exactly one first read. Of the composed
    sequences (every batching method but ``random``) what a stream repeats to fill its last batch is not told apart.

    Args:
        sequence: The epoch's.
        deal: How it is dealt.
        ts: Global batches, counted from where the deal starts.
        node: In ``[0, deal.num_nodes)``.
        rank_of_node: In ``[0, deal.ranks_per_node)``.

    Returns:
        Of shape (len(ts), batch_size), like ``deal.batches``; False where that is -1.
    """
    positions = deal.batches(ts, node, rank_of_node)
    are_first = positions >= 0
    at_end = ts >= deal.remaining // deal.global_batch_size
    if at_end.any():
        entries = ts[at_end, np.newaxis] * deal.global_batch_size + IN_TURN.entries(deal.geometry, node, rank_of_node)
        are_first[at_end] &= entries < deal.remaining
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
