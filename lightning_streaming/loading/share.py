"""One worker's share of a pass: which positions are its own, and where their samples are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.last_uses import BatchShards, NodePlan
from lightning_streaming.loading.prefetch import ShardNeed
from lightning_streaming.order.deal import Deal
from lightning_streaming.order.plan import EpochPlan

_WINDOW_SAMPLES = 8192
"""Samples whose ids are worked out together: enough for numpy to be fast, few enough to start at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One worker's share of a pass: every ``num_workers``-th global batch, beginning with number ``worker``."""

    plan: EpochPlan
    deal: Deal
    node: int
    rank_of_node: int
    worker: int = 0
    num_workers: int = 1

    def windows(self) -> Iterator[NDArray[np.int64]]:
        """Positions of this worker's samples in the epoch's sequence, some batches at a time."""
        batches = range(self.worker, self.deal.num_batches(), self.num_workers)
        for window in _some_at_a_time(batches, self.deal.batch_size):
            positions = self.deal.batches(window, self.node, self.rank_of_node).reshape(-1)
            # Only an epoch's last batch has gaps.
            yield positions if positions[-1] >= 0 else positions[positions >= 0]

    def batch(self, number: int) -> NDArray[np.int64]:
        """Positions of one of this worker's batches, counted from its first."""
        batches = np.array([self.worker + number * self.num_workers])
        positions = self.deal.batches(batches, self.node, self.rank_of_node).reshape(-1)
        return positions[positions >= 0]

    def windows_of_node(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Global batches, and positions of the samples that this node reads of each, of shape (batches, samples).

        Where the last batch has gaps, its positions are -1.
        """
        ranks = range(self.deal.ranks_per_node)
        for window in _some_at_a_time(range(self.deal.num_batches()), self.deal.batch_size * len(ranks)):
            yield window, np.hstack([self.deal.batches(window, self.node, rank) for rank in ranks])

    def num_samples(self) -> int:
        """About how many samples :meth:`windows` gives, exactly if the last batch is full."""
        return len(range(self.worker, self.deal.num_batches(), self.num_workers)) * self.deal.batch_size


def _some_at_a_time(batches: range, samples_per_batch: int) -> Iterator[NDArray[np.int64]]:
    step = max(1, _WINDOW_SAMPLES // samples_per_batch)
    return (np.asarray(batches[first : first + step], np.int64) for first in range(0, len(batches), step))


class Window(NamedTuple):
    """Some consecutive samples of a worker, by position and place. Arrays of equal length."""

    positions: NDArray[np.int64]
    shards: NDArray[np.int64]
    indexes: NDArray[np.int64]


def located(share: Share, catalog: Catalog) -> Iterator[Window]:
    """The worker's samples in order, some batches at a time."""
    for positions in share.windows():
        shards, indexes = catalog.places(share.plan.ids(positions))
        yield Window(positions, shards, indexes)


def shard_needs(share: Share, catalog: Catalog) -> Iterator[ShardNeed]:
    """Shards in the order in which this worker first needs them, once per window of samples."""
    samples_before = 0
    for window in located(share, catalog):
        shards, first_uses = np.unique(window.shards, return_index=True)
        for use in np.argsort(first_uses, kind="stable"):
            yield ShardNeed(samples_before + int(first_uses[use]), int(shards[use]))
        samples_before += len(window.positions)


def node_plan(share: Share, catalog: Catalog) -> NodePlan:
    """What the worker reads, and what all workers of its node read together."""

    def of_node() -> Iterator[BatchShards]:
        for batches, positions in share.windows_of_node():
            is_sample = positions >= 0
            ids = share.plan.ids(positions[is_sample])
            yield BatchShards(np.repeat(batches, is_sample.sum(axis=1)), catalog.shard_of(ids))

    return NodePlan(
        worker=share.worker,
        num_workers=share.num_workers,
        num_shards=len(catalog.shards),
        num_samples=share.deal.num_batches() * share.deal.batch_size * share.deal.ranks_per_node,
        own=lambda: (window.shards for window in located(share, catalog)),
        of_node=of_node,
    )
