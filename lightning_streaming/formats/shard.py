"""Shards of every format: checks, readers of whole files, and readers of single samples of remote files."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from lightning_streaming.errors import ConfigError, FormatError, ShardCorruptError
from lightning_streaming.escaping import short_repr
from lightning_streaming.files import join_under
from lightning_streaming.formats.algorithms import check_algorithm
from lightning_streaming.formats.arrow.parquet import (
    ParquetFormat,
    may_be_flat_column,
    parquet_plain_kind,
    whole_row_group,
)
from lightning_streaming.formats.arrow.rows import PlainArrow
from lightning_streaming.formats.encodings import is_unsafe
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.formats.litdata.directory import LitDataFormat, litdata_plain_kind, litdata_unsafe_columns
from lightning_streaming.formats.litdata.samples import PlainLeaves
from lightning_streaming.formats.mds import (
    Decoder,
    MDSReader,
    PlainSchema,
    check_safe,
    plain_schema,
    read_decoder,
    read_places,
    table_bytes,
)
from lightning_streaming.formats.megatron import MegatronFormat
from lightning_streaming.formats.npy import NpyFormat, row_layout
from lightning_streaming.formats.shard_format import (
    PlainRows,
    RangeReadableFormat,
    ShardFormat,
    ShardReader,
    no_such_sample,
)
from lightning_streaming.formats.shard_table import OTHER_FORMATS, PART, check_columns, entry_error
from lightning_streaming.formats.split import RowDecoder, SplitReader, read_split_layout
from lightning_streaming.formats.webdataset import WebDatasetFormat, unsafe_members

_RANGE_READABLE = ("parquet", "npy", "megatron")
"""Formats whose shards may be parts of files."""


def check_wanted(info: ShardInfo, *, allow_unsafe_types: bool = False, columns: Sequence[str] | None = None) -> None:
    """Raise ConfigError for the names and kinds of columns, independent of installed and registered packages.

    Args:
        info: The shard, as its index describes it.
        allow_unsafe_types: Whether encodings may be read that can run code of the data's author.
        columns: Names of the columns to read; None for all.

    Raises:
        ConfigError: The shard lacks a requested column, or one is unsafe and that was not allowed.
    """
    check_columns(info, columns)
    if allow_unsafe_types:
        return
    check_safe(info, columns)
    unsafe = unsafe_columns(info) if info.format in OTHER_FORMATS else []
    wanted = [name for name in unsafe if columns is None or name in columns]
    if wanted:
        raise ConfigError(
            f"{info.raw_data.basename} has a column {wanted[0]!r}, which can run any code when it is read",
            hint="pass allow_unsafe_types=True if you trust its author, or list the other columns in columns=",
            option="allow_unsafe_types",
            path=info.raw_data.basename,
        )


def check_shard(info: ShardInfo, *, allow_unsafe_types: bool = False, columns: Sequence[str] | None = None) -> None:
    """Raise if a shard could not be read, before anything of it is downloaded.

    Args:
        info: The shard, as its index describes it.
        allow_unsafe_types: Whether encodings may be read that can run code of the data's author.
        columns: Names of the columns to read; None for all.

    Raises:
        MissingDependencyError: Its compression, or a requested column, needs a package that is not installed.
        IndexFormatError: The index describes invalid columns.
        ConfigError: The shard lacks a requested column, or one is unsafe and that was not allowed.
    """
    check_columns(info, columns)
    if info.format == "mds":
        read_decoder(info, allow_unsafe_types=allow_unsafe_types, columns=columns)
    elif info.format in OTHER_FORMATS:
        other_format(info.format, allow_unsafe_types=allow_unsafe_types).check(info, columns)
    else:
        read_split_layout(info)
    if info.compression not in (None, PART):
        check_algorithm(info.compression)


def open_shard(
    info: ShardInfo,
    directory: Path,
    *,
    allow_unsafe_types: bool = False,
    columns: Sequence[str] | None = None,
    as_files: Collection[str] = (),
) -> ShardReader:
    """Open the raw files of a shard.

    Args:
        info: The shard, as its index describes it.
        directory: Directory of the dataset's files.
        allow_unsafe_types: Whether encodings may be read that can run code of the data's author.
        columns: Names of the columns to read; None for all. Others are not decoded.
        as_files: Names of columns whose image files may be returned as bytes; formats with a faster way return PIL
            images that are open to their files.

    Raises:
        ShardCorruptError: A file is not the one that the index describes.
        ObjectNotFoundError: A file is missing.
        StorageError: A file cannot be opened.
        IndexFormatError: The index describes invalid columns.
        ConfigError: The shard lacks a requested column, or one is unsafe and that was not allowed.
        MissingDependencyError: A requested column needs a package that is not installed.
    """
    if info.format in OTHER_FORMATS:
        shard_format = other_format(info.format, allow_unsafe_types=allow_unsafe_types, as_files=as_files)
        return shard_format.open(info, directory, columns)
    if info.format != "mds":
        return SplitReader(info, directory, columns=columns)
    return MDSReader(info, directory, allow_unsafe_types=allow_unsafe_types, columns=columns, as_files=as_files)


def plain_kind(
    info: ShardInfo, columns: Sequence[str] | None
) -> PlainSchema | PlainArrow | PlainLeaves | PlainRows | None:
    """Return what shards share whose samples may be plain together; None if the samples of this one are not.

    Args:
        info: The shard, as its index describes it.
        columns: The requested columns, which the shard has; None for all.

    Raises:
        IndexFormatError: The index describes invalid rows.
    """
    if info.format == "litdata":
        return litdata_plain_kind(info, columns)
    if info.format == "parquet":
        return parquet_plain_kind(info, columns)
    if info.format in OTHER_FORMATS:
        layout = row_layout(info)
        return None if layout is None else layout.plain(columns)
    return plain_schema(info, columns)


def may_be_flat(info: ShardInfo) -> bool:
    """Return whether a shard's reader has the positions of one-dimensional arrays; see ``flat_column``."""
    if info.format == "parquet":
        return may_be_flat_column(info)
    if info.format in OTHER_FORMATS:
        layout = row_layout(info)
        return info.format == "megatron" if layout is None else layout.plain(None) is not None
    return info.format == "mds"


def unsafe_columns(info: ShardInfo) -> list[str]:
    """Return the columns of a shard whose values can run code of their author when they are read.

    Raises:
        IndexFormatError: The index describes invalid columns.
        ConfigError: It describes samples of unsupported types.
    """
    if info.format == "webdataset":
        return unsafe_members(info)
    if info.format == "litdata":
        return litdata_unsafe_columns(info)
    if info.format != "mds":
        return []
    pairs = zip(info.schema["column_names"], info.schema["column_encodings"], strict=False)
    return [name for name, encoding in pairs if is_unsafe(encoding)]


def other_format(
    name: str, block_length: int | None = None, *, allow_unsafe_types: bool = False, as_files: Collection[str] = ()
) -> ShardFormat:
    """Return the format of this name.

    Args:
        name: One of ``OTHER_FORMATS``.
        block_length: Tokens of a sample, for formats without sample borders; only used to describe data.
        allow_unsafe_types: Whether values may be read that can run code of the data's author.
        as_files: As for :func:`open_shard`.

    Raises:
        ConfigError: The name is unknown; or the format has no tokens for blocks.
    """
    if name == "npy":
        return NpyFormat(block_length)
    if name == "megatron":
        return MegatronFormat(block_length)
    if name == "litdata":
        return LitDataFormat(block_length, allow_unsafe_types, frozenset(as_files))
    if name not in ("webdataset", "parquet"):
        raise ConfigError(
            f"format must be one of {', '.join(OTHER_FORMATS)}, but is {short_repr(name)}", option="format"
        )
    if block_length is not None:
        raise ConfigError(
            f"block_length splits tokens into samples, but format={name!r} already has samples", option="block_length"
        )
    return WebDatasetFormat(allow_unsafe_types, frozenset(as_files)) if name == "webdataset" else ParquetFormat()


def range_readable_format(info: ShardInfo) -> RangeReadableFormat | None:
    """Return the format of a shard that is a part of a file; None for other shards.

    Raises:
        IndexFormatError: Files of its format have no parts.
    """
    if info.compression != PART:
        return None
    if info.format not in _RANGE_READABLE:
        raise entry_error(info, f"is of a part of a {info.format} file")
    return cast("RangeReadableFormat", other_format(info.format))


def narrowed(info: ShardInfo, columns: Sequence[str] | None) -> ShardInfo:
    """Return the shard to cache if only some columns are requested: the same one, unless less suffices.

    Args:
        info: The shard, as its index describes it.
        columns: Names of the columns to read, which it has; None for all.

    Raises:
        IndexFormatError: The index lacks the sizes of columns.
    """
    shard_format = range_readable_format(info)
    return info if shard_format is None else shard_format.narrowed(info, columns)


def name_in_index(basename: str) -> str:
    """Return the name of a raw file in an index: that of all columns, if it has only some; see :func:`narrowed`."""
    return whole_row_group(basename)


class FilePart(NamedTuple):
    """A range of a raw file; never empty, except of an empty sample."""

    file: FileInfo
    """The file."""
    start: int
    """Its first byte."""
    stop: int
    """The byte after its last."""


def table_part(info: ShardInfo) -> FilePart:
    """Return the bytes that hold the offsets of all samples of a shard.

    Raises:
        ShardCorruptError: According to the index, the file is too small for them.
    """
    file = info.raw_meta or info.raw_data
    stop = table_bytes(info.samples)
    if stop > file.bytes:
        raise ShardCorruptError(
            f"{file.basename} must have {stop} bytes for its offsets alone, but has {file.bytes}", path=file.basename
        )
    return FilePart(file, 0, stop)


def has_single_samples(info: ShardInfo) -> bool:
    """Return whether single samples of a shard can be read without its other bytes."""
    return info.compression is None and info.format not in OTHER_FORMATS


class SingleSampleReader:
    """Reader of single samples of a shard.

    Args:
        info: The shard, as its index describes it.
        table: The bytes of :func:`table_part`.
        allow_unsafe_types: Whether encodings may be read that can run code of the data's author.
        columns: Names of the columns to read; None for all.
        as_files: As for :func:`open_shard`.

    Raises:
        ShardCorruptError: The table contradicts the index.
        IndexFormatError: The index describes invalid columns.
        ConfigError: The shard lacks a requested column, or one is unsafe and that was not allowed.
        MissingDependencyError: A requested column needs a package that is not installed.
    """

    def __init__(
        self,
        info: ShardInfo,
        table: bytes,
        *,
        allow_unsafe_types: bool = False,
        columns: Sequence[str] | None = None,
        as_files: Collection[str] = (),
    ) -> None:
        check_columns(info, columns)
        self._info = info
        self._decoder: Decoder
        if info.format == "mds":
            self._decoder = read_decoder(
                info, allow_unsafe_types=allow_unsafe_types, columns=columns, as_files=as_files
            )
            earliest = table_bytes(info.samples)
        else:
            layout = read_split_layout(info)
            self._decoder = RowDecoder(layout, None if columns is None else frozenset(columns))
            earliest = len(layout.header)
        shown, smallest = info.raw_data.basename, self._decoder.smallest_bytes
        self._offsets, _ = read_places(memoryview(table), info, shown, earliest, smallest)

    def part(self, index: int) -> FilePart:
        """Return the bytes of one sample.

        Raises:
            SampleIndexError: The index is not in [0, samples).
        """
        if not 0 <= index < self._info.samples:
            raise no_such_sample(self._info.raw_data.basename, self._info.samples, index)
        return FilePart(self._info.raw_data, int(self._offsets[index]), int(self._offsets[index + 1]))

    def decode(self, index: int, data: bytes) -> dict[str, Any]:
        """Decode the bytes of one sample.

        Raises:
            ShardCorruptError: They are not one sample.
            EncodingError: A payload is not one of its column's encoding.
        """
        try:
            return self._decoder.decode(memoryview(data))
        except FormatError as error:
            file = self._info.raw_data.basename
            raise error.with_context(f"{file}, sample {index}", path=file, sample=index) from error


_HEAD = struct.Struct("<II")
_MAX_CONFIG_BYTES = 2**24


def raw_forms(shards: Iterable[ShardInfo]) -> Iterator[FileInfo]:
    """Yield the raw files of compressed shards: the dataset has their names, though it does not store them."""
    return (raw for shard in shards for raw, compressed in shard.files if compressed is not None)


def was_written_for(shard: ShardInfo, directory: Path) -> bool:
    """Return whether the raw files of a shard state its number of samples and compression.

    Args:
        shard: An entry of an index.
        directory: Directory of the raw files.
    """
    table = shard.raw_meta or shard.raw_data
    try:
        with join_under(directory, table.basename).open("rb") as file:
            count, first = _HEAD.unpack(file.read(_HEAD.size))
            # The config is between the offsets and the samples, or at the end of a meta file.
            start = table_bytes(count)
            stop = first if shard.raw_meta is None else table.bytes
            if count != shard.samples or not 0 <= stop - start <= _MAX_CONFIG_BYTES:
                return False
            file.seek(start)
            config = json.loads(file.read(stop - start))
    except (OSError, ValueError, struct.error, RecursionError):
        return False
    return isinstance(config, dict) and config.get("compression") == shard.compression
