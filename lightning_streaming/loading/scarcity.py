"""Whether room for shards is scarce, so that a reader who rests should keep none mapped."""

from __future__ import annotations

import time
from typing import Any

from lightning_streaming.cache.room import CacheRoom

_SECONDS_BETWEEN_LOOKS = 0.005
"""For each directory: small batches come faster than it pays to look."""
_SHARDS_LEFT = 2
"""A disk with room for fewer of the largest is as good as full. Whoever maps a shard looks before it rests, so all who
rest leave as much to a reader who goes on, however many they are."""


class Scarcity:
    """What one reader knows of the room there is.

    Args:
        room: The directories that shards are fetched into.
    """

    def __init__(self, room: CacheRoom) -> None:
        self._room = room
        self._looks_at = 0.0
        self._is_scarce = False
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
            self._looks_at = now + _SECONDS_BETWEEN_LOOKS * self._room.num_places
            self._is_scarce = self._room.is_scarce(_SHARDS_LEFT * self.largest_shard)
        return self._is_scarce
