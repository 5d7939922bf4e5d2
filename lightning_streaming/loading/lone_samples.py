"""Single samples of shards that are not on this node, read by their bytes alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.lone_sample import FilePart, LoneSamples, table_part

_MOST_TABLES = 64
"""Shards whose offsets are remembered; four bytes for each of their samples."""


@dataclass(slots=True, eq=False)
class LoneReader:
    """Reads samples of shards of one dataset without their shards. A copy in another process starts with nothing."""

    open_table: Callable[[ShardInfo, bytes], LoneSamples]
    """Makes sense of a shard's offsets."""
    _tables: OrderedDict[int, LoneSamples] = field(default_factory=OrderedDict)

    def __reduce__(self) -> tuple[type[LoneReader], tuple[Any, ...]]:
        return LoneReader, (self.open_table,)

    def read(self, shard: int, info: ShardInfo, index: int, fetch: Callable[[FilePart], bytes]) -> dict[str, Any]:
        """Read one sample.

        Args:
            shard: Number of the shard.
            info: The shard, which is stored uncompressed.
            index: Counted within the shard.
            fetch: Gives bytes of its files.

        Raises:
            FormatError: The sample, or what says where it is, is damaged.
            StorageError: The bytes could not be fetched.
        """
        table = self._tables.get(shard)
        if table is None:
            table = self._tables[shard] = self.open_table(info, fetch(table_part(info)))
            if len(self._tables) > _MOST_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(shard)
        return table.decode(index, fetch(table.part(index)))
