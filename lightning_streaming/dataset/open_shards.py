"""The shards that one reader has open and prefetched, and whether the cache has room for more.

OpenShards      readers of mapped shards; the least recently used is closed first
ShardsAhead     shards that were prefetched and are not opened yet
CachePressure   checks whether the cache has little room left
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.util import register_after_fork
from typing import Any

from lightning_streaming.cache.eviction import prefetch_spares_since
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard_format import ShardReader

_MOST_FILES = 256
"""Shard files mapped at a time; each holds a file descriptor, of which a process often may have 1024."""
_SECONDS_BETWEEN_CHECKS = 0.005
"""For each directory: small batches come faster than a check pays off."""
_SHARDS_LEFT = 2
"""A disk with room for fewer of the largest shard counts as full. A process that has mapped a shard checks it before it
rests, so any number of resting processes leave this much to a reader that continues."""


class OpenShards:
    """Readers of mapped shards. A copy in another process, or in a forked child, starts with none.

    Args:
        on_close: Called with each shard after it was closed.
        most_bytes: Raw bytes mapped at a time, though never less than one shard; None for no limit.
    """

    def __init__(self, on_close: Callable[[int], object], most_bytes: int | None = None) -> None:
        self.most_bytes = most_bytes
        self.readers: OrderedDict[int, ShardReader] = OrderedDict()
        """The reader of each open shard, the least recently used first. Look a reader up before each sample, as reading
        others may close it, and move it to the end."""
        self.opens: Callable[[int], ShardReader] | None = None
        """Opens the shards of a pass under way that samples need in addition to their own; None outside of one."""
        self.is_in_pass = False
        """Whether reads belong to a pass, which calls :meth:`SampleSource.rest` itself."""
        self._on_close = on_close
        self._sizes: dict[int, tuple[int, int]] = {}
        self._num_files = 0
        self._num_bytes = 0
        self._process = os.getpid()
        # Else a worker that never reads would hold its parent's shards and their locks until it ends.
        register_after_fork(self, OpenShards.forget_inherited)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._on_close, self.most_bytes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def make_room(self, info: ShardInfo) -> list[int]:
        """Close the least recently used readers so that one more shard may be opened; return these shards."""
        most_bytes, closed = self.most_bytes, list[int]()
        while self.readers and (
            self._num_files + len(info.files) > _MOST_FILES
            or (most_bytes is not None and self._num_bytes + raw_bytes(info) > most_bytes)
        ):
            closed.append(next(iter(self.readers)))
            self.close(closed[-1])
        return closed

    def add(self, shard: int, info: ShardInfo, reader: ShardReader) -> None:
        """Keep the reader of a shard that was opened."""
        self.readers[shard] = reader
        self._sizes[shard] = num_files, num_bytes = len(info.files), raw_bytes(info)
        self._num_files += num_files
        self._num_bytes += num_bytes

    def close(self, shard: int) -> None:
        """Unmap a shard, if it is open."""
        reader = self.readers.pop(shard, None)
        if reader is not None:
            num_files, num_bytes = self._sizes.pop(shard)
            self._num_files -= num_files
            self._num_bytes -= num_bytes
            reader.close()
            self._on_close(shard)

    def close_all(self) -> None:
        """Unmap every shard."""
        while self.readers:
            self.close(next(iter(self.readers)))

    def forget_inherited(self) -> None:
        """In a forked child: unmap what the parent had open, whose locks would last as long as the child.

        Processes of ``multiprocessing`` do so when they start; after a bare ``os.fork`` the first read does it.
        """
        if self._process == os.getpid():
            return
        while self.readers:
            self.readers.popitem()[1].close()
        self._sizes.clear()
        self._num_files = self._num_bytes = 0
        self._process = os.getpid()


class ShardsAhead:
    """Shards that one reader has prefetched and not opened yet. May be used by several threads.

    Args:
        most_bytes: Bytes that may be prefetched at the cost of other shards; None for no limit.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._fetched: dict[int, tuple[int, int]] = {}
        """Start of its download and bytes of each shard, the earliest first."""
        self._num_bytes = 0

    def __getstate__(self) -> tuple[int | None]:
        return (self.most_bytes,)

    def __setstate__(self, state: tuple[int | None]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def spare_since(self, size: int) -> int | None:
        """Return the access time from which files stay when one more shard of ``size`` bytes is prefetched.

        See :func:`~lightning_streaming.cache.eviction.prefetch_spares_since`.
        """
        with self._lock:
            oldest = next(iter(self._fetched.values()))[0] if self._fetched else None
            return prefetch_spares_since(self._num_bytes, oldest, size, self.most_bytes)

    def begin(self, shard: int, size: int, now: int | None = None) -> None:
        """Note that a shard of ``size`` bytes is being fetched, at ``now`` in nanoseconds."""
        with self._lock:
            self._drop(shard)
            self._fetched[shard] = (time.time_ns() if now is None else now, size)
            self._num_bytes += size

    def end(self, shard: int) -> None:
        """Note that a shard was opened, or could not be fetched."""
        with self._lock:
            self._drop(shard)

    def clear(self) -> None:
        """Note that the prefetched shards will not be read."""
        with self._lock:
            self._fetched.clear()
            self._num_bytes = 0

    def _drop(self, shard: int) -> None:
        _, size = self._fetched.pop(shard, (0, 0))
        self._num_bytes -= size


class CachePressure:
    """Whether the cache has little room left, as one reader knows it.

    Args:
        quota: The directories that shards are fetched into.
    """

    def __init__(self, quota: CacheQuota) -> None:
        self._quota = quota
        self._checks_at = 0.0
        self._is_scarce = False
        self.shards_limit = 0
        """Bytes that all shards may have together, if there is a limit."""
        self.largest_shard = 0
        """Bytes of the largest shard, raw and compressed; 0 where none is fetched, so there is nothing to check."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checks_at": 0.0}

    def check_next_time(self) -> None:
        """Note that one more shard is mapped, so that the last check is stale."""
        self._checks_at = 0.0

    def is_scarce(self) -> bool:
        """Return whether a process waits for room, or would if all resting processes kept their shards."""
        if not self.largest_shard:
            return False
        now = time.monotonic()
        if now >= self._checks_at:
            self._checks_at = now + _SECONDS_BETWEEN_CHECKS * self._quota.num_directories
            self._is_scarce = self._quota.is_scarce(_SHARDS_LEFT * self.largest_shard)
        return self._is_scarce


def raw_bytes(info: ShardInfo) -> int:
    """Return the bytes of a shard's raw files."""
    return sum(raw.bytes for raw, _ in info.files)
