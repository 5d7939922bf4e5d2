"""Gathers shards into a table, one by one or many at a time."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from lightning_streaming.formats.index_entries import ShardInfo
from lightning_streaming.formats.index_table import Kind, ShardTable, key_of


class TableBuilder:
    """A table that grows."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._examples: list[Kind] = []
        self._kind_of_shard = array("i")
        self._samples, self._sizes, self._text_stops = array("q"), array("q"), array("q")
        self._text = bytearray()

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, shard: ShardInfo) -> int:
        """Add one shard, and say of which kind it is."""
        key = key_of(shard)
        number = self._kinds.get(key)
        if number is None:
            number = self._kinds[key] = len(self._examples)
            self._examples.append(Kind(example=shard))
        self._kind_of_shard.append(number)
        self._samples.append(shard.samples)
        for file in (shard.raw_data, shard.zip_data, shard.raw_meta, shard.zip_meta):
            if file is not None:
                self._sizes.append(file.bytes)
                for text in (file.basename, *file.hashes.values()):
                    self._text += text.encode("utf-8", "surrogatepass")
                    self._text_stops.append(len(self._text))
        return number

    def kind(self, number: int) -> Kind:
        """A kind by its number."""
        return self._examples[number]

    def schema_before(self) -> Any:
        """The schema of the latest kind, for shards to share."""
        return self._examples[-1].example.schema if self._examples else {}

    def add_many(
        self, kind: int, samples: Sequence[int], sizes: Sequence[Sequence[int]], texts: Sequence[Sequence[str]]
    ) -> None:
        """Add shards of one kind.

        Args:
            kind: Its number.
            samples: Of each shard.
            sizes: For each file of the kind, its size in each shard.
            texts: For each text of the kind, what it is in each shard; ASCII only.
        """
        self._kind_of_shard.extend([kind] * len(samples))
        self._samples.extend(samples)
        self._sizes.extend(chain.from_iterable(zip(*sizes, strict=True)))
        flat = list(chain.from_iterable(zip(*texts, strict=True)))
        stops = np.fromiter(map(len, flat), np.int64, len(flat)).cumsum() + len(self._text)
        self._text += "".join(flat).encode("ascii")
        self._text_stops.frombytes(stops.tobytes())

    def table(self) -> ShardTable:
        """All shards so far. To be called once, at the end: the table takes the builder's memory over."""
        return ShardTable(
            kinds=tuple(self._examples),
            kind_of_shard=np.frombuffer(self._kind_of_shard, np.int32),
            samples=np.frombuffer(self._samples, np.int64),
            sizes=np.frombuffer(self._sizes, np.int64),
            text_stops=np.frombuffer(self._text_stops, np.int64),
            text=np.frombuffer(self._text, np.uint8),
        )


def table_of(shards: Iterable[ShardInfo]) -> ShardTable:
    """The table of these shards; a table as it is."""
    if isinstance(shards, ShardTable):
        return shards
    builder = TableBuilder()
    for shard in shards:
        builder.add(shard)
    return builder.table()
