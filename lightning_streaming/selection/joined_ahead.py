"""Which shards of datasets joined by id a worker will need: told by the ids of its next samples, as soon as those are
on this node."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.formats.columns import read_columns
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.selection.joins import JoinedDataset

_MOST_SHARDS = 64
"""Shards of a stream of which it is remembered what their ids need: four bytes for each sample and join."""
_MOST_TOLD = 64
"""Where shards may be evicted: those told longest ago may be gone, and are told again."""


class JoinedAhead:
    """Reads ids ahead, for one worker in a pass. May be used by several threads.

    Args:
        room: Where what is fetched is counted.
    """

    def __init__(self, room: CacheQuota) -> None:
        self._room = room
        self._lock = Lock()
        self._needed: OrderedDict[int, list[NDArray[np.int32]]] = OrderedDict()
        self._told: OrderedDict[int, None] = OrderedDict()

    def shards(
        self,
        shard: int,
        indexes: NDArray[np.int64],
        stored: tuple[ShardCache, ShardInfo],
        joined: Sequence[JoinedDataset],
    ) -> list[int]:
        """The shards that some samples need, those left out that were told before.

        Args:
            shard: Of a stream, that has the samples.
            indexes: Theirs.
            stored: Where it is, and what its index says of it.
            joined: What is joined by id.

        Raises:
            StreamingError: The shard could not be fetched, or is damaged.
        """
        cache, info = stored
        limited = self._room.limit is not None
        if limited and not cache.has(info):  # to wait for room would be in the reader's way
            return []
        with cache.hold(info, self._room) as directory:
            with self._lock:
                of_shard = self._needed.get(shard)
            if of_shard is None:  # without the lock: other threads look into other shards meanwhile
                names = list(dict.fromkeys(str(one.asked.key) for one in joined))
                values: dict[str, Any] = dict(read_columns(info, directory, names))
                of_shard = [one.shards_of_ids(values[str(one.asked.key)]) for one in joined]
        with self._lock:
            self._needed[shard] = of_shard
            self._needed.move_to_end(shard)
            if len(self._needed) > _MOST_SHARDS:
                self._needed.popitem(last=False)
            needed = np.concatenate([of[indexes] for of in of_shard])
            found = [one for one in dict.fromkeys(needed.tolist()) if one >= 0 and one not in self._told]
            self._told.update(dict.fromkeys(found))
            while limited and len(self._told) > _MOST_TOLD:
                self._told.popitem(last=False)
        return found
