"""Data of other formats in a directory, as a format is shown it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_streaming.cache.generated_index import FilesAt
from lightning_streaming.formats.arrow.rows import ArrowRows
from lightning_streaming.formats.arrow.types import arrow_columns
from lightning_streaming.formats.index import dump_index, parse_index
from lightning_streaming.formats.shard import check_shard, open_shard, other_format
from lightning_streaming.formats.shard_format import FlatColumn, ShardReader
from lightning_streaming.formats.shard_table import ShardInfo
from lightning_streaming.storage import Location


class Folder(FilesAt):
    """The files below a directory; counts the bytes that are asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(Location(str(root)))
        self.bytes_read = 0

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        data = super().read_range(name, start, stop)
        self.bytes_read += len(data)
        return data


def describe(
    root: Path, name: str, block_length: int | None = None, known: Sequence[ShardInfo] = ()
) -> list[ShardInfo]:
    """The shards of a directory, as they come out of an index that was written and read."""
    before = {shard.raw_data.basename: shard for shard in known}
    shards = list(other_format(name, block_length).describe(Folder(root), before))
    return list(parse_index(dump_index(shards), "index.json").shards)


def opened(info: ShardInfo, root: Path, columns: Sequence[str] | None = None) -> ShardReader:
    check_shard(info, columns=columns)
    return open_shard(info, root, columns=columns)


def read_all(infos: Sequence[ShardInfo], root: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    samples = list[dict[str, Any]]()
    for info in infos:
        reader = opened(info, root, columns)
        samples += [reader[index] for index in range(len(reader))]
        reader.close()
    return samples


def rows_of(
    batches: Sequence[Any], columns: Sequence[str] | None = None, shown: str = "file", data: memoryview | None = None
) -> ArrowRows:
    """The rows of record batches, of which the schema of the first says what they are."""
    return ArrowRows(batches, arrow_columns(batches[0].schema, columns, shown) if batches else {}, shown, data)


def arrays_in(column: FlatColumn) -> list[list[Any]]:
    """The arrays of a column, by where they are said to lie."""
    places = zip(column.starts.tolist(), column.counts.tolist(), strict=True)
    return [np.frombuffer(column.data, column.dtype, count, start).tolist() for start, count in places]
