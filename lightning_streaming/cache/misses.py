"""What was not on this node when this process wanted it: noted by a cache, taken by whoever measures."""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

from lightning_streaming.formats.index import ShardInfo


class Miss(NamedTuple):
    """A raw file that was not on this node when this process asked for it."""

    fetched_bytes: int = 0
    """Bytes that this process then fetched; 0 where another process did."""
    unpack_began: int = 0
    """When this process began to decompress it, by ``perf_counter_ns``; 0 where it did not."""
    unpack_ended: int = 0
    """When it had."""


class Misses:
    """The misses of one stream in this process, of each file the latest, until they are taken.

    Threads that fetch ahead add to it while the reader takes from it: each call is one step of a dict.
    """

    def __init__(self) -> None:
        self._by_file: dict[str, Miss] = {}

    def fetched(self, basename: str, fetched_bytes: int) -> None:
        """Note that a raw file was fetched as it is."""
        self._by_file[basename] = Miss(fetched_bytes)

    def unpacked(self, basename: str, fetched_bytes: int, unpack_began: int) -> None:
        """Note that a raw file has just been decompressed, from one that was fetched or, of 0 bytes, was here."""
        self._by_file[basename] = Miss(fetched_bytes, unpack_began, perf_counter_ns())

    def fetched_elsewhere(self, basename: str) -> None:
        """Note that another process, or thread, is fetching a raw file; if it is a thread of ours, it tells more."""
        self._by_file.setdefault(basename, Miss())

    def take(self, shard: ShardInfo) -> list[Miss]:
        """What was noted of a shard's files."""
        taken = (self._by_file.pop(raw.basename, None) for raw, _ in shard.files)
        return [miss for miss in taken if miss is not None]

    def clear(self) -> None:
        """Forget what nobody has taken."""
        self._by_file.clear()
