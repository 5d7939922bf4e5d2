"""Which shards one node needs at a time in an epoch: what its cache must hold, or else fetch again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.loading.dataloader import StreamingDataLoader
from lightning_streaming.loading.passes import passes_of
from lightning_streaming.order.quality.cache import lru_downloads
from lightning_streaming.order.quality.cost import Visits, open_at_once, shard_visits
from lightning_streaming.tools.tuning.run import batch_size_of

MOST_SAMPLES = 200_000_000
"""Of longer epochs nothing is worked out: it would take minutes."""
_MOST_REMEMBERED = 10_000_000
"""Samples whose shards are remembered one by one: up to 160 bytes for each ten of them."""
_AT_ONCE = 1 << 18
"""Samples that are looked up together."""


def most_open_bytes(loader: StreamingDataLoader, shard_bytes: NDArray[np.int64]) -> int:
    """The most bytes of shards that the first node has begun and not finished, at any time of the first epoch.

    Args:
        loader: Of a rank of that node.
        shard_bytes: Bytes of each shard, of shape (shards,).
    """
    firsts = np.full(len(shard_bytes), -1, np.int64)
    lasts = firsts.copy()
    before = 0
    for visits in _windows(loader):
        used = visits.used()
        lasts[used] = before + visits.last_batches()[used]
        new = used[firsts[used] < 0]
        firsts[new] = before + visits.first_batches()[new]
        before += visits.num_batches
    used = np.flatnonzero(firsts >= 0)
    ends = np.unique(np.stack([np.concatenate([firsts[used], lasts[used]]), np.tile(used, 2)]), axis=1)
    whole = Visits(batches=ends[0], shards=ends[1], num_batches=before, num_shards=len(shard_bytes))
    return int(open_at_once(whole, shard_bytes).max(initial=0))


def times_fetched(loader: StreamingDataLoader, shard_bytes: NDArray[np.int64], limit: int) -> float | None:
    """How often a shard is fetched in an epoch, on average, by a node whose cache holds so many bytes.

    Args:
        loader: Of a rank of that node.
        shard_bytes: Bytes of each shard, of shape (shards,).
        limit: Bytes of shards that the cache may hold.

    Returns:
        1 where none is fetched twice; where a batch alone needs more than the limit, as often as batches use a shard.
        None where the epoch is too long to be gone through like that.
    """
    if len(loader.dataset) * loader.dataset.current_world().ranks_per_node > _MOST_REMEMBERED:
        return None
    parts = list(_windows(loader))
    starts = np.cumsum([0, *(part.num_batches for part in parts)])
    visits = Visits(
        batches=np.concatenate([part.batches + start for part, start in zip(parts, starts[:-1], strict=True)]),
        shards=np.concatenate([part.shards for part in parts]),
        num_batches=int(starts[-1]),
        num_shards=len(shard_bytes),
    )
    of_batches = np.bincount(visits.batches, weights=shard_bytes[visits.shards])
    fetched = len(visits.batches) if of_batches.max() > limit else lru_downloads(visits, shard_bytes, limit)
    return fetched / len(visits.used())


def _windows(loader: StreamingDataLoader) -> Iterator[Visits]:
    """Visits of the first node in the first epoch, some batches at a time, each window counted from its own start."""
    dataset, batch_size = loader.dataset, batch_size_of(loader)
    dataset.next_epoch = 0
    start = passes_of(dataset).begin(dataset.current_world(), batch_size, loader.drop_last)
    plan, deal = passes_of(dataset).epochs.plan(start), passes_of(dataset).epochs.deal(start)
    ranks = range(start.world.ranks_per_node)
    step = max(1, _AT_ONCE // (batch_size * len(ranks)))
    for first in range(0, deal.num_batches(), step):
        batches = np.arange(first, min(first + step, deal.num_batches()))
        positions = np.hstack([deal.batches(batches, start.world.node, rank) for rank in ranks])
        ids = np.where(positions < 0, -1, plan.ids(np.maximum(positions, 0)))
        yield shard_visits(ids, passes_of(dataset).catalog.samples_per_shard)
