"""Cost and mixing of an order: the shards of each batch of a node, from sample ids and shard sizes alone.

A shard is *open* from the first batch in which a node uses it to the last one: in between, it must be kept or fetched
again. All ranks and workers of a node count as one reader that goes through the node's part of each global batch, as
they share a cache and wait for each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import SampleIndexError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Visits:
    """The shards that a node uses in each batch: one entry for each pair of a batch and a shard."""

    batches: NDArray[np.int64]
    """The batch of each visit, in ascending order."""
    shards: NDArray[np.int64]
    """The shard of each visit, in ascending order within a batch."""
    num_batches: int
    """Batches of the node, also where they use no shard."""
    num_shards: int
    """Shards of the data, also those that the node never uses."""

    def used(self) -> NDArray[np.int64]:
        """Return the shards that the node uses, in ascending order."""
        return np.flatnonzero(self.last_batches() >= 0)

    def first_batches(self) -> NDArray[np.int64]:
        """Return the batch that first uses each shard, of shape (num_shards,); -1 where none does."""
        firsts = np.full(self.num_shards, -1, np.int64)
        firsts[self.shards[::-1]] = self.batches[::-1]  # of equal indexes the last one counts
        return firsts

    def last_batches(self) -> NDArray[np.int64]:
        """Return the batch that last uses each shard, of shape (num_shards,); -1 where none does."""
        lasts = np.full(self.num_shards, -1, np.int64)
        lasts[self.shards] = self.batches
        return lasts


def shard_visits(ids: NDArray[np.int64], shard_sizes: NDArray[np.int64]) -> Visits:
    """Find the shards that a node uses in each batch.

    Args:
        ids: Sample ids that the ranks of one node read together in each batch, of shape (batches, samples); a negative
            one stands for no sample.
        shard_sizes: Samples in each shard; ids count from 0 at the first.

    Raises:
        SampleIndexError: An id lies beyond the last shard.
    """
    ordered = np.sort(shards_of(ids, shard_sizes), axis=1)
    begins = ordered >= 0
    begins[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return Visits(
        batches=np.repeat(np.arange(len(ids)), np.count_nonzero(begins, axis=1)),
        shards=ordered[begins],
        num_batches=len(ids),
        num_shards=len(shard_sizes),
    )


def open_at_once(visits: Visits, weights: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum over open shards during each batch.

    Args:
        visits: Visits of one node and epoch.
        weights: Weight of each shard, of shape (num_shards,): its bytes, or ones to count shards.

    Returns:
        The sum over open shards, of shape (num_batches,).
    """
    used = visits.used()
    begun, finished = (
        np.bincount(batches[used], weights=weights[used], minlength=visits.num_batches + 1)
        for batches in (visits.first_batches(), visits.last_batches() + 1)
    )
    return np.cumsum(begun - finished)[: visits.num_batches].astype(np.int64)


def shards_of(ids: NDArray[np.int64], shard_sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the shard of each sample.

    Args:
        ids: Sample ids of any shape; a negative one stands for no sample.
        shard_sizes: Samples in each shard; ids count from 0 at the first.

    Returns:
        Shards of the same shape, counted from 0; -1 where there is no sample.

    Raises:
        SampleIndexError: An id lies beyond the last shard.
    """
    stops = np.cumsum(shard_sizes)
    num_samples = int(stops[-1]) if stops.size else 0
    if ids.size and ids.max() >= num_samples:
        raise SampleIndexError(f"sample ids must be below {num_samples}, but got {ids.max()}", sample=int(ids.max()))
    shards = np.searchsorted(stops, ids, side="right")
    return np.where(ids < 0, -1, shards)


def entropy_of_rows(labels: NDArray[np.int64]) -> float:
    """Return the entropy of the labels in a row, averaged over rows.

    For example rows ``0 0 1 1`` and ``5 5 5 5`` have ln 2 and 0, so (ln 2) / 2 on average.

    Args:
        labels: Labels, of shape (rows, labels in a row).

    Returns:
        Nats, in ``[0, ln(labels in a row)]``; 0 where there are no labels.
    """
    if labels.size == 0:
        return 0.0
    ordered = np.sort(labels, axis=1)
    begins = np.ones(ordered.shape, np.bool_)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=begins[:, 1:])
    counts = np.diff(np.flatnonzero(begins), append=labels.size)
    # A row of n labels, each seen count times, has ln n - sum(count ln count) / n; and all rows have the same n.
    k = np.arange(counts.max() + 1, dtype=np.float64)
    together = np.bincount(counts) @ (k * np.log(np.maximum(k, 1)))
    return max(0.0, math.log(labels.shape[1]) - float(together) / labels.size)
