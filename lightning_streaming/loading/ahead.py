"""Shards that were fetched ahead of their reader, which fetching further ahead must not push out again."""

from __future__ import annotations

import threading
import time
from typing import Any

from lightning_streaming.cache.stamps import FINISHED_BEFORE


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
