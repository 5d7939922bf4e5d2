"""What one reader has open, has fetched ahead, and knows of the room for it.

OpenShards      readers of mapped shards, the one used longest ago goes first
ShardsAhead     what was fetched ahead and is not opened yet
RoomWatch       whether room is scarce
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.util import register_after_fork
from typing import Any

from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.cache.usage import FINISHED_BEFORE
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.readers import ShardReader

_MOST_FILES = 256
"""Shard files mapped at a time; each holds a file descriptor, of which a process often may have 1024."""
_SECONDS_BETWEEN_LOOKS = 0.005
"""For each directory: small batches come faster than it pays to look."""
_SHARDS_LEFT = 2
"""A disk with room for fewer of the largest is as good as full. Whoever maps a shard looks before it rests, so all who
rest leave as much to a reader who goes on, however many they are."""


class OpenShards:
    """Readers of mapped shards. A copy in another process, or in a forked child, starts with none.

    Args:
        on_close: Called with each shard after it was closed.
        most_bytes: Raw bytes mapped at a time, though never less than one shard; None for no limit.
    """

    def __init__(self, on_close: Callable[[int], object], most_bytes: int | None = None) -> None:
        self.most_bytes = most_bytes
        self.readers: OrderedDict[int, ShardReader] = OrderedDict()
        """The reader of each open shard, the one used longest ago first. To be looked into before each sample: whoever
        reads other samples meanwhile may close any. Whoever uses one moves it to the end."""
        self.opens: Callable[[int], ShardReader] | None = None
        """How the pass under way opens what samples need beside their own shard; None outside of one."""
        self.is_in_pass = False
        """Whether what is read is read for a pass, which says itself when it rests."""
        self._on_close = on_close
        self._sizes: dict[int, tuple[int, int]] = {}
        self._num_files = 0
        self._num_bytes = 0
        self._process = os.getpid()
        # Else a worker that never reads would hold what its parent had open, and its locks, for as long as it lives.
        register_after_fork(self, OpenShards.forget_inherited)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._on_close, self.most_bytes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def make_room(self, info: ShardInfo) -> list[int]:
        """Close what was used longest ago, so that one more shard may be opened; return which shards that were."""
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

        Processes of ``multiprocessing`` do so when they start; after a bare ``os.fork`` it is for who begins to read.
        """
        if self._process == os.getpid():
            return
        while self.readers:
            self.readers.popitem()[1].close()
        self._sizes.clear()
        self._num_files = self._num_bytes = 0
        self._process = os.getpid()


class ShardsAhead:
    """What one reader's threads have fetched and it has not begun to read. May be used by several threads."""

    def __init__(self) -> None:
        self.most_bytes: int | None = None
        """Bytes that may be fetched ahead at the cost of other shards; None for no limit."""
        self._lock = threading.Lock()
        self._fetched: dict[int, tuple[int, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"most_bytes": self.most_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.most_bytes = state["most_bytes"]

    def spare_since(self, size: int) -> int | None:
        """What one more shard of so many bytes must not push out: what was used since then; None if anything may go.

        Beyond this reader's part of the room, only what nobody needs any more this epoch may go.
        """
        with self._lock:
            since = min((time for time, _ in self._fetched.values()), default=None)
            ahead = sum(size for _, size in self._fetched.values())
        if self.most_bytes is not None and ahead + size > self.most_bytes:
            return FINISHED_BEFORE
        return since

    def begin(self, shard: int, size: int) -> None:
        """Say that a shard is being fetched."""
        with self._lock:
            self._fetched[shard] = (time.time_ns(), size)

    def end(self, shard: int) -> None:
        """Say that a shard has found its reader, or could not be fetched."""
        with self._lock:
            self._fetched.pop(shard, None)

    def clear(self) -> None:
        """Say that nobody will read what was fetched."""
        with self._lock:
            self._fetched.clear()


class RoomWatch:
    """What one reader knows of the room there is.

    Args:
        room: The directories that shards are fetched into.
    """

    def __init__(self, room: CacheQuota) -> None:
        self._room = room
        self._looks_at = 0.0
        self._is_scarce = False
        self.shards_limit = 0
        """Bytes that all shards may have together; without a limit, of no meaning."""
        self.largest_shard = 0
        """Bytes of the largest shard, raw and compressed; 0 where none is fetched, and there is nothing to look at."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_looks_at": 0.0}

    def look_next_time(self) -> None:
        """Say that one more shard is mapped, so that what was seen before counts no more."""
        self._looks_at = 0.0

    def is_felt(self) -> bool:
        """Whether somebody waits for room, or would have to if all who rest kept what they have."""
        if not self.largest_shard:
            return False
        now = time.monotonic()
        if now >= self._looks_at:
            self._looks_at = now + _SECONDS_BETWEEN_LOOKS * self._room.num_directories
            self._is_scarce = self._room.is_scarce(_SHARDS_LEFT * self.largest_shard)
        return self._is_scarce


def raw_bytes(info: ShardInfo) -> int:
    """Bytes of a shard's raw files."""
    return sum(raw.bytes for raw, _ in info.files)
