"""Shards that one process has mapped, as many as it may."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard import ShardReader

_MOST_FILES = 256
"""Shard files mapped at a time; each holds a file descriptor, of which a process often may have 1024."""


@dataclass(slots=True)
class _Open:
    reader: ShardReader
    num_files: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class OpenShards:
    """Readers of mapped shards. A copy in another process, or in a forked child, starts with none."""

    on_close: Callable[[int], object]
    """Called with each shard after it was closed."""
    most_bytes: int | None = None
    """Raw bytes mapped at a time, though never less than one shard; None for no limit."""
    _shards: OrderedDict[int, _Open] = field(default_factory=OrderedDict)
    _num_files: int = 0
    _num_bytes: int = 0
    _process: int = field(default_factory=os.getpid)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.on_close, self.most_bytes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __contains__(self, shard: int) -> bool:
        return shard in self._shards and self._process == os.getpid()

    def get(self, shard: int) -> ShardReader | None:
        """The reader of a shard, if it is open; it is then the most recently used."""
        found = self._shards.get(shard)
        if found is None:
            return None
        if self._process != os.getpid():
            self._forget_inherited()
            return None
        self._shards.move_to_end(shard)
        return found.reader

    def make_room(self, info: ShardInfo) -> None:
        """Close what was used longest ago, so that one more shard may be opened."""
        if self._process != os.getpid():
            self._forget_inherited()
        most_bytes = self.most_bytes
        while self._shards and (
            self._num_files + len(info.files) > _MOST_FILES
            or (most_bytes is not None and self._num_bytes + raw_bytes(info) > most_bytes)
        ):
            self.close(next(iter(self._shards)))

    def add(self, shard: int, info: ShardInfo, reader: ShardReader) -> None:
        """Keep the reader of a shard that was opened."""
        self._shards[shard] = opened = _Open(reader, len(info.files), raw_bytes(info))
        self._num_files += opened.num_files
        self._num_bytes += opened.num_bytes

    def close(self, shard: int) -> None:
        """Unmap a shard, if it is open."""
        found = self._shards.pop(shard, None)
        if found is not None:
            self._num_files -= found.num_files
            self._num_bytes -= found.num_bytes
            found.reader.close()
            self.on_close(shard)

    def close_all(self) -> None:
        """Unmap every shard."""
        if self._process != os.getpid():
            self._forget_inherited()
        while self._shards:
            self.close(next(iter(self._shards)))

    def _forget_inherited(self) -> None:
        """In a forked child: unmap what the parent had open, whose locks would last as long as the child."""
        while self._shards:
            self._shards.popitem()[1].reader.close()
        self._num_files = self._num_bytes = 0
        self._process = os.getpid()


def raw_bytes(info: ShardInfo) -> int:
    """Bytes of a shard's raw files."""
    return sum(raw.bytes for raw, _ in info.files)
