"""Samples of data that another library wrote, in the order of its shards, as the library reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from lightning_streaming.cache import ShardCache
from lightning_streaming.formats.images import stored_file
from lightning_streaming.formats.index import ShardInfo, shard_to_json
from lightning_streaming.formats.shard import unsafe_columns
from lightning_streaming.tools.console import is_image
from lightning_streaming.tools.converting.sources.row_encoding import can_be_written
from lightning_streaming.tools.converting.sources.row_source import Piece, RowSource, Schema, SourceColumn, digest_of
from lightning_streaming.tools.stored.stored_dataset import StoredDataset, open_cached

_IMAGE_FILES = ("jpeg", "png", "bytes")
"""Encodings that take the file of an image."""


@dataclass(frozen=True, slots=True)
class StoredShards(RowSource):
    """The samples of all shards. A piece is a shard; its ``start`` is the shard's number."""

    unit: ClassVar[str] = "sample"
    format: str = ""
    block_length: int | None = None
    cache: ShardCache | None = field(default=None, compare=False)
    """Cache that makes shards present."""

    @classmethod
    def open(cls, dataset: StoredDataset) -> StoredShards:
        """Read the index of the data.

        Raises:
            StreamingError: As for :meth:`ShardCache.read_index`.
        """
        assert dataset.format is not None, "else it has rows of another kind, or is a dataset"
        cache = dataset.cache()
        names = tuple(shard.raw_data.basename for shard in cache.read_index().shards)
        return cls(names, dataset.format, dataset.block_length, cache)

    def schema(self) -> Schema:
        """Return the columns of all shards, and their encodings in the index."""
        columns = dict[str, SourceColumn]()
        for _, shard in self._opened_cache.read_index().shards.examples():
            unsafe = unsafe_columns(shard)
            for name, encoding in zip(shard.schema["column_names"], shard.schema["column_encodings"], strict=True):
                is_known = name not in unsafe and can_be_written(encoding)
                what = "pickles" if name in unsafe else "what only pickle can hold" if encoding == "pkl" else encoding
                columns.setdefault(name, SourceColumn(encoding if is_known else None, what))
        return Schema(columns, f"the {self.format} files")

    def pieces(self, max_bytes: int) -> Sequence[Piece]:  # noqa: ARG002
        """Return whole shards."""
        shards = self._opened_cache.read_index().shards
        return [
            Piece(shard.raw_data.basename, shard.raw_data.bytes, number, number + 1)
            for number, shard in enumerate(shards)
        ]

    def rows(self, piece: Piece, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the samples of a shard, numbered from 1; images that are files as files.

        Raises:
            FormatError: The shard is damaged, or a sample lacks a column.
            ConfigError: The shard lacks a column.
            StorageError: It could not be downloaded.
        """
        with open_cached(self._opened_cache, self._shard(piece), list(names) or None) as reader:
            for number in range(len(reader)):
                yield number + 1, reader[number]

    def parser(self, encoding: str) -> Callable[[Any], Any] | None:
        """Convert images to the files that they were opened from, if the encoding takes files."""
        return partial(_plain, as_file=encoding in _IMAGE_FILES)

    def content(self, piece: Piece) -> str:
        """Return a digest of the shard's entry in the index; bytes are not compared."""
        return digest_of(shard_to_json(self._shard(piece)))

    @property
    def _opened_cache(self) -> ShardCache:
        assert self.cache is not None, "open sets it"
        return self.cache

    def _shard(self, piece: Piece) -> ShardInfo:
        return self._opened_cache.read_index().shards[piece.start]


def _plain(value: Any, *, as_file: bool) -> Any:
    """Return a value as encoders take it."""
    if as_file and is_image(value):
        data = stored_file(value)
        if data is not None:
            return data
    return bool(value) if isinstance(value, np.bool_) else value
