"""How often a node downloads when its cache is smaller than what it uses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.quality.cost import Visits


def lru_downloads(visits: Visits, shard_bytes: NDArray[np.int64], limit: int) -> int:
    """Count downloads of a cache, empty at first, that gives up the shards used longest ago.

    All shards of a batch are needed together: they stay until the batch is done, even beyond the limit. Among shards
    last used in the same batch, lower numbers go first.

    Args:
        visits: Of one node and epoch.
        shard_bytes: Bytes of each shard, of shape (num_shards,).
        limit: Bytes that the cache may hold.

    Returns:
        Downloads; the number of shards that the node uses where none is fetched twice.

    Raises:
        ConfigError: The limit is negative.
    """
    if limit < 0:
        raise ConfigError(f"a cache limit must not be negative, but got {limit}")
    used = visits.used()
    if shard_bytes[used].sum() <= limit:
        return len(used)
    cache = _LruCache(visits, shard_bytes, limit)
    return sum(cache.read(batch) for batch in range(visits.num_batches))


class _LruCache:
    """A cache that is read batch by batch.

    Instead of a list of shards by last use, which each visit would have to change, batches are gone through a second
    time, far behind: whatever a batch was the last to use goes when its turn comes. So each visit is looked at twice,
    in numpy, however many shards there are.
    """

    def __init__(self, visits: Visits, shard_bytes: NDArray[np.int64], limit: int) -> None:
        self._shards = visits.shards
        self._starts = np.searchsorted(visits.batches, np.arange(visits.num_batches + 1)).tolist()
        self._bytes = shard_bytes
        self._limit = limit
        self._last_use = np.full(visits.num_shards, -1, np.int64)
        self._cached = np.zeros(visits.num_shards, np.bool_)
        self._size = 0
        self._oldest = 0
        """No cached shard was last used before this batch."""

    def read(self, batch: int) -> int:
        """Use a batch's shards, the batches before having been read; returns how many had to be downloaded."""
        shards = self._of(batch)
        self._last_use[shards] = batch
        missing = shards[~self._cached[shards]]
        if missing.size:
            self._cached[missing] = True
            self._size += int(self._bytes[missing].sum())
            while self._size > self._limit and self._oldest < batch:
                self._evict()
        return len(missing)

    def _of(self, batch: int) -> NDArray[np.int64]:
        return self._shards[self._starts[batch] : self._starts[batch + 1]]

    def _evict(self) -> None:
        """Give up as many of the shards used longest ago as are over the limit; all of them if that is not enough."""
        shards = self._of(self._oldest)
        shards = shards[self._cached[shards] & (self._last_use[shards] == self._oldest)]
        freed = np.cumsum(self._bytes[shards])
        count = int(np.searchsorted(freed, self._size - self._limit)) + 1
        if count >= len(shards):
            count = len(shards)
            self._oldest += 1
        if count:
            self._cached[shards[:count]] = False
            self._size -= int(freed[count - 1])
