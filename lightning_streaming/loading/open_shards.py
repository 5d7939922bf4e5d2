"""Shards that one process has mapped, as many as it may."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.util import register_after_fork
from typing import Any

from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard import ShardReader

_MOST_FILES = 256
"""Shard files mapped at a time; each holds a file descriptor, of which a process often may have 1024."""


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

    def make_room(self, info: ShardInfo) -> None:
        """Close what was used longest ago, so that one more shard may be opened."""
        most_bytes = self.most_bytes
        while self.readers and (
            self._num_files + len(info.files) > _MOST_FILES
            or (most_bytes is not None and self._num_bytes + raw_bytes(info) > most_bytes)
        ):
            self.close(next(iter(self.readers)))

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


def raw_bytes(info: ShardInfo) -> int:
    """Bytes of a shard's raw files."""
    return sum(raw.bytes for raw, _ in info.files)
