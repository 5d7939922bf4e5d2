"""Parquet files, read in place: a shard is a row group, of which only the requested columns are fetched.

A row group is unpacked once per node, into a file of the cache that every process maps::

    train.parquet                       train.parquet.rows/000001.arrow
      row group 0 | a | b | c |
      row group 1 | a | b | c |   ──▶   a stream of Arrow IPC: the schema, the dictionaries, the rows; then padding
      footer

The index states the size of that file, which is not known exactly before the row group is unpacked: it is an upper
bound from the footer, and the rest of the file is a hole. Rows that take more, as text that is stored as differences
may, are compressed. If only some columns are requested, that is another file, with its own name and size.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from lightning_streaming.errors import ConfigError, FormatError, ShardCorruptError, UnsupportedError
from lightning_streaming.escaping import shortened
from lightning_streaming.files import join_under
from lightning_streaming.formats.arrow.parquet_files import (
    DAMAGED,
    FileOfRanges,
    Footer,
    Range,
    column_bytes_of,
    ranges_of,
    read_footer,
    unpacked_rows,
    write_stream,
)
from lightning_streaming.formats.arrow.rows import ArrowRows, PlainArrow, plain_arrow, sound_arrow
from lightning_streaming.formats.arrow.types import arrow_columns
from lightning_streaming.formats.arrow.values import require_pyarrow
from lightning_streaming.formats.mds import map_file
from lightning_streaming.formats.shard_format import (
    RangedFile,
    ShardReader,
    StoredFiles,
    by_file,
    map_unknown,
    other_shard,
)
from lightning_streaming.formats.shard_table import (
    FILE_SUFFIXES,
    PART,
    FileInfo,
    ShardInfo,
    check_columns,
    column_names,
    entry_error,
    shown_file,
)

_NAME = "parquet"
_SUFFIXES = FILE_SUFFIXES[_NAME]
_ROWS, _ARROW = ".rows/", ".arrow"
_NARROWED = re.compile(rf"({re.escape(_ROWS)}\d+)-[0-9a-f]+({re.escape(_ARROW)})\Z")
_UNSUPPORTED = "not read: "
_FRAME_BYTES = 4096
"""More than the overhead of a stream of Arrow."""


@dataclass(frozen=True, slots=True)
class ParquetFormat:
    """Row groups of Parquet files."""

    is_read_in_place: ClassVar[bool] = False

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:
        """Yield the row groups of every file, by name; see :class:`ShardFormat`. Only footers are read."""
        require_pyarrow()
        names = [name for name in files.sizes() if name.endswith(_SUFFIXES) and not _is_internal(name)]
        if not names:
            raise _no_files(files)
        before, encodings = by_file(known, files.sizes()), dict[str, tuple[str, str]]()
        with closing(map_unknown(_row_groups, files, ((name, before.get(name)) for name in names))) as groups:
            for name, shards in zip(names, groups, strict=True):
                for shard in shards:
                    _check_types(shard, name, encodings)
                yield from shards

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:
        """Raise if a shard could not be read; see :class:`ShardFormat`."""
        require_pyarrow()
        check_columns(info, columns)
        _column_sizes(info)
        for name, kind in zip(info.schema["column_names"], info.schema["column_encodings"], strict=True):
            if kind.startswith(_UNSUPPORTED) and (columns is None or name in columns):
                file = shown_file(info).basename
                raise UnsupportedError(
                    f"{file}: column {name!r} has the unsupported type {kind.removeprefix(_UNSUPPORTED)} of Arrow",
                    hint="name the columns to read with columns=[...]",
                    option="columns",
                    path=file,
                )

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> ShardReader:
        """Open the unpacked rows of a row group; see :class:`ShardFormat`."""
        self.check(info, columns)
        return ParquetRows(self.narrowed(info, columns), directory)

    def narrowed(self, info: ShardInfo, columns: Sequence[str] | None) -> ShardInfo:
        """Return the shard of the same row group with only some columns; see :class:`RangeReadableFormat`."""
        names = column_names(info)
        if columns is None or set(columns) == set(names):
            return info
        sizes_of = dict(zip(names, _column_sizes(info), strict=True))
        schema, wanted, digest = _narrowed_schema(tuple(info.schema.items()), frozenset(columns))
        sizes = [sizes_of[name] for name in wanted]
        whole = whole_row_group(info.raw_data.basename).removesuffix(_ARROW)
        basename = f"{whole}-{digest}{_ARROW}"
        raw = FileInfo(basename=basename, bytes=_stream_bytes(sizes), hashes={})
        return replace(info, raw_data=raw, schema=schema, column_bytes=",".join(map(str, sizes)))

    def read_metadata(self, stored: RangedFile) -> Footer:
        """Read the footer of a file; see :class:`RangeReadableFormat`."""
        return read_footer(stored)

    def unpack(self, info: ShardInfo, metadata: Footer, stored: RangedFile, destination: Path) -> int:
        """Unpack the columns of a row group; see :class:`RangeReadableFormat`."""
        group, columns = _group_of(info), column_names(info)
        _check_unchanged(info, metadata, group, stored)
        chunks = [metadata.metadata.row_group(group).column(place) for place in metadata.leaves(columns)]
        ranges = ranges_of(chunks, metadata, stored)
        pieces = FileOfRanges(ranges, stored.read(ranges), stored.size)
        with sound_arrow(f"row group {group} of {stored.shown}", "sound", DAMAGED, stored.shown):
            rows = unpacked_rows(metadata, group, columns, pieces, info.raw_data.bytes - _FRAME_BYTES)
        if rows.num_rows != info.samples:
            raise ShardCorruptError(
                f"row group {group} of {stored.shown} must have {info.samples} rows, but has {rows.num_rows}",
                path=stored.shown,
            )
        write_stream(rows, info.raw_data.bytes, destination, f"row group {group} of {stored.shown}", stored.shown)
        return sum(stop - start for start, stop in ranges)


class ParquetRows(ArrowRows):
    """The rows of an unpacked row group."""

    def __init__(self, info: ShardInfo, directory: Path) -> None:
        path = join_under(directory, info.raw_data.basename)
        arrow = require_pyarrow()
        self._map = map_file(path, info.raw_data.bytes)
        try:
            with sound_arrow(str(path)):
                batches = list(arrow.ipc.open_stream(arrow.py_buffer(self._map)))
            schema = batches[0].schema if batches else arrow.schema([])
            columns = arrow_columns(schema, column_names(info), str(path))
            super().__init__(batches, columns, str(path), self._map)
        except BaseException:
            self.close()
            raise
        assert info.zip_data is not None, "a row group is a part of a file"
        self._shown = f"row group {_group_of(info)} of {info.zip_data.basename}"
        self._path = info.zip_data.basename
        if len(self) != info.samples:
            count = len(self)
            self.close()
            raise ShardCorruptError(f"{path} must have {info.samples} rows, but has {count}", path=str(path))

    def close(self) -> None:
        """Release the file; an object that still holds rows, like a raised error, keeps the map alive."""
        super().close()
        with suppress(BufferError):
            self._map.release()


def whole_row_group(basename: str) -> str:
    """Return the raw name of a row group with all columns, from its name with some of them; other names unchanged."""
    return _NARROWED.sub(r"\1\2", basename)


def parquet_plain_kind(info: ShardInfo, columns: Sequence[str] | None) -> PlainArrow | None:
    """Return what row groups share whose rows may be plain together; None if the rows of this one are not."""
    pairs = zip(info.schema["column_names"], info.schema["column_encodings"], strict=True)
    return plain_arrow({name: encoding for name, encoding in pairs if columns is None or name in columns})


def may_be_flat_column(info: ShardInfo) -> bool:
    """Return whether a row group has a column of one-dimensional arrays."""
    return any(encoding.startswith("ndarray:") for encoding in info.schema["column_encodings"])


def _is_internal(name: str) -> bool:
    """Return whether a file is in a writer's internal directory: ``_temporary`` of Spark, ``_delta_log``.

    A directory like ``_day=7`` has rows.
    """
    return any(part.startswith("_") and "=" not in part for part in name.split("/")[:-1])


def _no_files(files: StoredFiles) -> ConfigError:
    """Return the error of a location without Parquet files."""
    names = list(files.sizes())
    others = [name for name in names if not name.endswith(_SUFFIXES)] or names
    contents = f"it has files like {others[0]}" if others else "it is empty, so check the path"
    left_out = ", and directories whose names begin with _ are left out" if any(map(_is_internal, names)) else ""
    return ConfigError(
        f"{files.shown} has no Parquet files, whose names end in {', '.join(_SUFFIXES)}; {contents}{left_out}",
        hint="pass the directory or the files, like data/train-*.parquet",
        path=files.shown,
    )


# --- entries of an index ---


def _row_groups(files: StoredFiles, name: str) -> list[ShardInfo]:
    """Return the shards of a file; none for row groups without rows."""
    size = files.sizes()[name]
    footer = read_footer(_ListedFile(files, name))
    try:
        columns = {column.name: column.encoding for column in arrow_columns(footer.schema, None, name).values()}
    except UnsupportedError:
        columns = {field.name: _encoding(footer.schema, field, name) for field in footer.schema}
    stored = FileInfo(basename=name, bytes=size, hashes={})
    shards = []
    for group in range(footer.metadata.num_row_groups):
        metadata = footer.metadata.row_group(group)
        if not metadata.num_rows:
            continue
        sizes = column_bytes_of(footer, metadata)
        raw = FileInfo(basename=f"{name}{_ROWS}{group:06d}{_ARROW}", bytes=_stream_bytes(sizes), hashes={})
        shard = other_shard(_NAME, metadata.num_rows, raw, columns, {}, compression=PART, zip_data=stored)
        shards.append(replace(shard, column_bytes=",".join(map(str, sizes))))
    return shards


def _encoding(schema: Any, field: Any, name: str) -> str:
    """Return the encoding of a column, or a note that its type is not supported."""
    try:
        return arrow_columns(schema, [field.name], name)[field.name].encoding
    except UnsupportedError:
        return f"{_UNSUPPORTED}{shortened(str(field.type), 100)}"


@dataclass(frozen=True, slots=True)
class _ListedFile:
    """A file of a listed location; see :class:`RangedFile`."""

    files: StoredFiles
    name: str

    @property
    def shown(self) -> str:
        return self.files.shown_file(self.name)

    @property
    def size(self) -> int:
        return self.files.sizes()[self.name]

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        return [self.files.read_range(self.name, start, stop) for start, stop in ranges]


def _check_types(shard: ShardInfo, name: str, encodings: dict[str, tuple[str, str]]) -> None:
    """Raise FormatError if columns of one name have different types in two files."""
    schema = shard.schema
    for column, kind in zip(schema["column_names"], schema["column_encodings"], strict=True):
        first, known = encodings.setdefault(column, (name, kind))
        if known != kind and "null" not in (known, kind):
            raise FormatError(
                f"{name} has column {column!r} of type {kind}, but {first} has it with type {known}",
                hint="rewrite one of them, or read them as two streams",
                path=name,
            )
        if known == "null":
            encodings[column] = name, kind


def _column_sizes(info: ShardInfo) -> list[int]:
    """Return the size of each column according to the index."""
    try:
        sizes = [int(size) for size in (info.column_bytes or "").split(",") if size]
        _group_of(info)
    except ValueError:
        sizes = []
    names = column_names(info)
    if info.zip_data is None or len(sizes) != len(names) or min(sizes, default=0) < 0:
        raise entry_error(
            info,
            f"must name a row group, its file, and the bytes of {len(names)} columns",
            hint="create the index again: lightning-streaming index",
        )
    return sizes


def _group_of(info: ShardInfo) -> int:
    """Return the number of a shard's row group in its file.

    Raises:
        ValueError: Its name does not state it.
    """
    return int(info.raw_data.basename.rpartition(_ROWS)[2].removesuffix(_ARROW).partition("-")[0])


def _stream_bytes(sizes: Sequence[int]) -> int:
    return _FRAME_BYTES + sum(sizes)


@lru_cache(maxsize=64)
def _narrowed_schema(
    schema: tuple[tuple[str, Any], ...], columns: frozenset[str]
) -> tuple[Mapping[str, Any], tuple[str, ...], str]:
    """Return a shard's schema with only some columns, their names, and a digest of these."""
    narrowed = dict(schema)
    kept = [place for place, name in enumerate(narrowed["column_names"]) if name in columns]
    for key in ("column_names", "column_encodings"):
        narrowed[key] = tuple(narrowed[key][place] for place in kept)
    names = narrowed["column_names"]
    return narrowed, names, hashlib.blake2b(json.dumps(names).encode(), digest_size=5).hexdigest()


def _check_unchanged(info: ShardInfo, footer: Footer, group: int, stored: RangedFile) -> None:
    """Raise ShardCorruptError if a file has changed since its index was created."""
    metadata = footer.metadata
    is_same = group < metadata.num_row_groups and metadata.row_group(group).num_rows == info.samples
    if is_same:
        names = column_names(info)
        actual = dict(zip(footer.schema.names, column_bytes_of(footer, metadata.row_group(group)), strict=True))
        is_same = dict(zip(names, _column_sizes(info), strict=True)).items() <= actual.items()
    if is_same:
        columns = arrow_columns(footer.schema, names, stored.shown)
        is_same = tuple(columns[name].encoding for name in names) == info.schema["column_encodings"]
    if not is_same:
        raise ShardCorruptError(
            f"{stored.shown} has changed since its index was created: its row group {group} differs",
            hint="start the run again; if the index was created ahead, create it again: lightning-streaming index",
            path=stored.shown,
        )
