"""Reads a split shard from its two raw files."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_streaming.errors import (
    FormatError,
    SampleIndexError,
    ShardCorruptError,
)
from lightning_streaming.files import join_under
from lightning_streaming.formats.checks import brief
from lightning_streaming.formats.columns import check_columns
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.mapping import map_file
from lightning_streaming.formats.offsets import check_lengths, read_offsets
from lightning_streaming.formats.split import SplitLayout, read_split_layout

_OFFSET_PAIR = struct.Struct("<II")


class SplitReader:
    """A data file and its meta file, memory-mapped. Samples share no memory with the maps, so they may outlive them."""

    def __init__(self, info: ShardInfo, directory: Path, *, columns: Sequence[str] | None = None) -> None:
        """Map the raw files and check their sizes, the offsets and the header.

        Args:
            info: The shard, as its index describes it.
            directory: Where the dataset's files are.
            columns: Names of the columns to read; None for all.

        Raises:
            ShardCorruptError: A file is not the one that the index describes.
            ObjectNotFoundError: A file is not there.
            StorageError: A file cannot be opened.
            IndexFormatError: The index describes columns that cannot be.
            ConfigError: The shard lacks a column that was asked for.
        """
        assert info.raw_meta is not None  # the index of a split format was refused without it
        self._layout = read_split_layout(info)
        check_columns(info, columns)
        self._columns = None if columns is None else frozenset(columns)
        self._path = join_under(directory, info.raw_data.basename)
        self._num_samples = info.samples
        meta_path = join_under(directory, info.raw_meta.basename)
        self._meta = map_file(meta_path, info.raw_meta.bytes)
        self._data = map_file(self._path, info.raw_data.bytes)
        _check_offsets(self._meta, info, self._layout, meta_path)
        _check_header(self._data, self._layout.header, self._path)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one sample.

        Raises:
            SampleIndexError: The index is not in [0, len).
            ShardCorruptError: Its bytes are not one row.
            EncodingError: A column does not hold what its encoding says.
        """
        if not 0 <= index < self._num_samples:
            raise SampleIndexError(f"{self._path} has {self._num_samples} samples, but sample {index} was asked for")
        start, stop = _OFFSET_PAIR.unpack_from(self._meta, 4 + 4 * index)
        try:
            if index:
                self._check_row_before(start)
            return self._layout.decode(self._data[start:stop], self._columns)
        except FormatError as error:
            raise type(error)(f"{self._path}, sample {index}: {error}") from error

    def close(self) -> None:
        """Let go of the files; nothing can be read afterwards.

        Only the traceback of a failed decode can hold a map for longer.
        """
        self._meta.release()
        self._data.release()

    def _check_row_before(self, start: int) -> None:
        """Refuse an offset into the middle of a row, where what is left of it can look like a row."""
        newline = self._layout.newline.encode()
        found = bytes(self._data[start - len(newline) : start])
        if found != newline:
            raise ShardCorruptError(f"expected {newline!r} before byte {start}, where it starts, but found {found!r}")


def _check_offsets(meta: memoryview, info: ShardInfo, layout: SplitLayout, path: Path) -> None:
    """Refuse a meta file whose rows would not follow each other from the data file's header to its end."""
    offsets = read_offsets(meta, info.samples, str(path))
    expected = len(layout.header), info.raw_data.bytes
    if (offsets[0], offsets[-1]) != expected:
        raise ShardCorruptError(
            f"{path} must place its rows from byte {expected[0]} to {expected[1]} of {info.raw_data.basename}, but "
            f"they start at {offsets[0]} and end at {offsets[-1]}"
        )
    check_lengths(offsets, layout.rows.smallest_bytes, str(path))


def _check_header(data: memoryview, header: bytes, path: Path) -> None:
    found = bytes(data[: len(header)])
    if found != header:
        raise ShardCorruptError(f"{path} must start with {brief(header)}, its columns, but starts with {brief(found)}")
