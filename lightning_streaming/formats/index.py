"""``index.json``: the list of shards that a dataset consists of.

A value of this module has been checked when it exists: sizes are sound, file names stay inside the dataset, and each
shard has the files that its compression calls for.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.formats.index_builder import table_of
from lightning_streaming.formats.index_entries import INDEX_VERSION, MAX_RAW_BYTES, FileInfo, ShardInfo
from lightning_streaming.formats.index_json import shard_to_json
from lightning_streaming.formats.index_stream import Read, read_table
from lightning_streaming.formats.index_table import ShardTable

__all__ = [
    "INDEX_BASENAME",
    "INDEX_VERSION",
    "MAX_RAW_BYTES",
    "DatasetIndex",
    "FileInfo",
    "ShardInfo",
    "dump_index",
    "dump_merged_index",
    "parse_index",
    "read_index",
]

INDEX_BASENAME = "index.json"


class DatasetIndex:
    """A dataset: its shards in sample order.

    Args:
        shards: May be none.
        data_digest: What :attr:`data_digest` is, where that is known already.
    """

    def __init__(self, shards: Iterable[ShardInfo], data_digest: str | None = None) -> None:
        self.shards: ShardTable = table_of(shards)
        if data_digest is not None:
            self.data_digest = data_digest

    @cached_property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return int(self.shards.samples.sum())

    @cached_property
    def data_digest(self) -> str:
        """What identifies the data, wherever and however it is stored: names, samples, sizes and hashes."""
        return self.shards.digest()

    def samples_per_shard(self) -> NDArray[np.int64]:
        """Samples of each shard, of shape (shards,); not to be changed."""
        return self.shards.samples

    def __eq__(self, other: object) -> bool:
        return self.shards == other.shards if isinstance(other, DatasetIndex) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"DatasetIndex({self.shards!r})"


def dump_index(shards: Iterable[ShardInfo]) -> bytes:
    """The text of ``index.json``, byte for byte as the original writer makes it."""
    return _dumped(b'{"shards": [', shards, f'], "version": {INDEX_VERSION}}}'.encode())


def dump_merged_index(shards: Iterable[ShardInfo]) -> bytes:
    """The text of a merged index, byte for byte as the original makes it: the version stands first."""
    return _dumped(f'{{"version": {INDEX_VERSION}, "shards": ['.encode(), shards, b"]}")


def _dumped(start: bytes, shards: Iterable[ShardInfo], end: bytes) -> bytes:
    text, separator = io.BytesIO(), start
    for shard in shards:
        text.write(separator)
        text.write(json.dumps(shard_to_json(shard), sort_keys=True).encode())
        separator = b", "
    text.write(end if separator == b", " else start + end)
    return text.getvalue()


def parse_index(data: bytes, source: str) -> DatasetIndex:
    """Read the text of ``index.json``. Keys that this version does not know are ignored.

    All formats that the specification knows are understood here; whether a shard can also be read,
    :func:`~lightning_streaming.formats.shard.check_shard` tells.

    Args:
        data: The whole file.
        source: Its path or URL, for errors.

    Raises:
        IndexFormatError: It is not an index of version 2, or one of its shards contradicts itself or would leave the
            dataset's directory; the message names the shard by its number.
    """
    return read_index(io.BytesIO(data).read, source)


def read_index(read: Read, source: str) -> DatasetIndex:
    """Read ``index.json`` without holding its text, which may be hundreds of megabytes.

    Args:
        read: Gives up to so many bytes of the file, from its beginning, and none at its end.
        source: Its path or URL, for errors.

    Raises:
        IndexFormatError: As for :func:`parse_index`.
    """
    return DatasetIndex(read_table(read, source))
