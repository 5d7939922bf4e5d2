"""What an order costs a node: which shards it uses in each batch, and what follows from that.

A shard is *open* from the first batch in which a node uses it to the last one: in between, it must be kept or fetched
again. All ranks and workers of a node count as one reader that goes through the node's part of each global batch, as
they share a cache and wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.quality.shards import shards_of


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
        """Shards that the node uses at all, in ascending order."""
        return np.flatnonzero(self.last_batches() >= 0)

    def first_batches(self) -> NDArray[np.int64]:
        """The batch that first uses each shard, of shape (num_shards,); -1 where none does."""
        firsts = np.full(self.num_shards, -1, np.int64)
        firsts[self.shards[::-1]] = self.batches[::-1]  # of equal indexes the last one counts
        return firsts

    def last_batches(self) -> NDArray[np.int64]:
        """The batch that last uses each shard, of shape (num_shards,); -1 where none does."""
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
    """How much is open during each batch.

    Args:
        visits: Of one node and epoch.
        weights: What each shard counts, of shape (num_shards,): its bytes, or ones to count shards.

    Returns:
        The sum over open shards, of shape (num_batches,).
    """
    used = visits.used()
    begun, finished = (
        np.bincount(batches[used], weights=weights[used], minlength=visits.num_batches + 1)
        for batches in (visits.first_batches(), visits.last_batches() + 1)
    )
    return np.cumsum(begun - finished)[: visits.num_batches].astype(np.int64)


def needed_within(visits: Visits, weights: NDArray[np.int64], num_batches: int) -> int:
    """How much the first ``num_batches`` batches use; with 1, what must arrive before the first batch is complete.

    Args:
        visits: Of one node and epoch.
        weights: What each shard counts, of shape (num_shards,): its bytes, or ones to count shards.
        num_batches: From the start of the epoch.
    """
    used = visits.used()
    return int(weights[used[visits.first_batches()[used] < num_batches]].sum())


def largest_burst(visits: Visits, run: int) -> float:
    """How unevenly new shards come: the most in any ``run`` consecutive batches, relative to the mean of such runs.

    The first ``run`` batches are left out, as every order that mixes must open many shards there; :func:`needed_within`
    tells about them. 1 is perfectly even; 0 where all shards are first used at the start.

    Args:
        visits: Of one node and epoch.
        run: Batches looked at together, at least 1: about as many as are prefetched.

    Raises:
        ConfigError: ``run`` is less than 1.
    """
    if run < 1:
        raise ConfigError(f"bursts are looked for in runs of at least one batch, but got {run}")
    used = visits.used()
    new_shards = np.bincount(visits.first_batches()[used], minlength=visits.num_batches)
    new_before = np.concatenate([[0], np.cumsum(new_shards)])[run:]  # [t]: before batch run + t
    in_run = new_before[run:] - new_before[:-run]
    if in_run.size == 0 or used.size == 0:
        return 0.0
    return float(in_run.max()) / (len(used) * run / visits.num_batches)
