"""Samples of a shard that is not on this machine: which bytes of its raw files each one needs, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from lightning_streaming.errors import FormatError, SampleIndexError, ShardCorruptError
from lightning_streaming.formats.columns import check_columns
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.formats.mds_decoder import read_decoder
from lightning_streaming.formats.offsets import check_lengths, read_offsets, table_bytes
from lightning_streaming.formats.split import read_split_layout

_Decode = Callable[[memoryview], dict[str, Any]]


class FilePart(NamedTuple):
    """A stretch of a raw file; never empty, except of an empty sample."""

    file: FileInfo
    """The file."""
    start: int
    """Its first byte."""
    stop: int
    """The byte after its last."""


def table_part(info: ShardInfo) -> FilePart:
    """The bytes that say where all samples of a shard are.

    Raises:
        ShardCorruptError: By the index, the file is too small for them.
    """
    file = info.raw_meta or info.raw_data
    stop = table_bytes(info.samples)
    if stop > file.bytes:
        raise ShardCorruptError(f"{file.basename} must have {stop} bytes for its offsets alone, but has {file.bytes}")
    return FilePart(file, 0, stop)


class LoneSamples:
    """Single samples of one shard.

    Args:
        info: The shard, as its index describes it.
        table: The bytes of :func:`table_part`.
        allow_unsafe_types: Whether encodings may be read that can run code of whoever wrote the data.
        columns: Names of the columns to read; None for all.

    Raises:
        ShardCorruptError: The table contradicts the index.
        IndexFormatError: The index describes columns that cannot be.
        ConfigError: The shard lacks a wanted column, or one is unsafe and that was not allowed.
        MissingDependencyError: A wanted column needs a package that is not installed.
    """

    def __init__(
        self, info: ShardInfo, table: bytes, *, allow_unsafe_types: bool = False, columns: Sequence[str] | None = None
    ) -> None:
        check_columns(info, columns)
        self._info = info
        self._decode, smallest_bytes, earliest = _decoding(info, allow_unsafe_types, columns)
        name = info.raw_data.basename
        self._offsets = read_offsets(memoryview(table), info.samples, name)
        start, stop = self._offsets[0], self._offsets[-1]
        if start < earliest or stop != info.raw_data.bytes:
            raise ShardCorruptError(
                f"{name} must hold its samples between bytes {earliest} and {info.raw_data.bytes}, but they start at "
                f"{start} and end at {stop}"
            )
        check_lengths(self._offsets, smallest_bytes, name)

    def part(self, index: int) -> FilePart:
        """The bytes of one sample.

        Raises:
            SampleIndexError: The index is not in [0, samples).
        """
        if not 0 <= index < self._info.samples:
            raise SampleIndexError(
                f"{self._info.raw_data.basename} has {self._info.samples} samples, but sample {index} was asked for"
            )
        return FilePart(self._info.raw_data, int(self._offsets[index]), int(self._offsets[index + 1]))

    def decode(self, index: int, data: bytes) -> dict[str, Any]:
        """Turn the bytes of one sample into its columns.

        Raises:
            ShardCorruptError: They are not one sample.
            EncodingError: A column does not hold what its encoding says.
        """
        try:
            return self._decode(memoryview(data))
        except FormatError as error:
            raise type(error)(f"{self._info.raw_data.basename}, sample {index}: {error}") from error


def _decoding(info: ShardInfo, allow_unsafe_types: bool, columns: Sequence[str] | None) -> tuple[_Decode, int, int]:
    """What decodes a sample, the bytes it has at least, and where in its file the first one may start."""
    if info.format == "mds":
        decoder = read_decoder(info, allow_unsafe_types=allow_unsafe_types, columns=columns)
        return decoder.decode, decoder.smallest_bytes, table_bytes(info.samples)
    layout = read_split_layout(info)
    wanted = None if columns is None else frozenset(columns)
    return partial(layout.decode, columns=wanted), layout.rows.smallest_bytes, len(layout.header)
