"""Parquet files, read as they lie: a shard is a row group, and of it only the wanted columns are fetched.

A row group is unpacked once per node, into a file of the cache that every process maps::

    train.parquet                       train.parquet.rows/000001.arrow
      row group 0 | a | b | c |
      row group 1 | a | b | c |   ──▶   a stream of Arrow IPC: the schema, the dictionaries, the rows; then padding
      footer

The index promises how many bytes that file has, which nobody can tell exactly before the row group is unpacked. So it
promises a bound that the footer gives, and the rest of the file is a hole. Where rows take more after all, as text that
is stored as differences may, they are compressed.

Where only some columns are wanted, the file is another one, with a name and a size of its own.
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

from lightning_streaming.errors import (
    ConfigError,
    FormatError,
    IndexFormatError,
    ShardCorruptError,
    UnsupportedError,
)
from lightning_streaming.escaping import shortened
from lightning_streaming.files import join_under
from lightning_streaming.formats.arrow.parquet_footers import (
    DAMAGED,
    Footer,
    Range,
    column_bytes_of,
    ranges_of,
    read_footer,
)
from lightning_streaming.formats.arrow.parquet_rows import FileOfRanges, unpacked_rows, write_stream
from lightning_streaming.formats.arrow.rows import ArrowRows, PlainArrow, plain_arrow, sound_arrow
from lightning_streaming.formats.arrow.types import arrow_columns
from lightning_streaming.formats.arrow.values import require_pyarrow
from lightning_streaming.formats.mds.shard import map_file
from lightning_streaming.formats.readers import ShardReader
from lightning_streaming.formats.shard_format import RangedFile, StoredFiles, by_file, map_unknown, other_shard
from lightning_streaming.formats.shard_table import (
    FILE_SUFFIXES,
    PART,
    FileInfo,
    ShardInfo,
    check_columns,
    column_names,
    shown_file,
)

_NAME = "parquet"
_SUFFIXES = FILE_SUFFIXES[_NAME]
_ROWS, _ARROW = ".rows/", ".arrow"
_NARROWED = re.compile(rf"({re.escape(_ROWS)}\d+)-[0-9a-f]+({re.escape(_ARROW)})\Z")
_NOT_READ = "not read: "
_FRAME_BYTES = 4096
"""More than a stream of Arrow takes beside its columns."""


@dataclass(frozen=True, slots=True)
class ParquetFormat:
    """Row groups of Parquet files."""

    is_read_in_place: ClassVar[bool] = False

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:
        """The row groups of every file, in the order of names; see :class:`ShardFormat`. Only footers are read."""
        require_pyarrow()
        names = [name for name in files.sizes() if name.endswith(_SUFFIXES) and not _is_of_a_writer(name)]
        if not names:
            raise _no_files(files)
        before, encodings = by_file(known, files.sizes()), dict[str, tuple[str, str]]()
        with closing(map_unknown(_row_groups, files, ((name, before.get(name)) for name in names))) as found:
            for name, shards in zip(names, found, strict=True):
                for shard in shards:
                    _check_alike(shard, name, encodings)
                yield from shards

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:
        """Refuse a shard that could not be read; see :class:`ShardFormat`."""
        require_pyarrow()
        check_columns(info, columns)
        _check_told(info)
        for name, kind in zip(info.schema["column_names"], info.schema["column_encodings"], strict=True):
            if kind.startswith(_NOT_READ) and (columns is None or name in columns):
                file = shown_file(info).basename
                raise UnsupportedError(
                    f"{file}: column {name!r} is of Arrow's type {kind.removeprefix(_NOT_READ)}, which is not read",
                    hint="name the columns that you want with columns=[...]",
                    option="columns",
                    path=file,
                )

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> ShardReader:
        """Open the unpacked rows of a row group; see :class:`ShardFormat`."""
        self.check(info, columns)
        return ParquetRows(self.narrowed(info, columns), directory)

    def narrowed(self, info: ShardInfo, columns: Sequence[str] | None) -> ShardInfo:
        """The shard of the same row group that has some columns alone; see :class:`RangeReadableFormat`."""
        names = column_names(info)
        if columns is None or set(columns) == set(names):
            return info
        told = dict(zip(names, _check_told(info), strict=True))
        schema, wanted = _narrowed_schema(tuple(info.schema.items()), frozenset(columns))
        sizes = [told[name] for name in wanted]
        whole = whole_row_group(info.raw_data.basename).removesuffix(_ARROW)
        basename = f"{whole}-{_columns_digest(wanted)}{_ARROW}"
        raw = FileInfo(basename=basename, bytes=_stream_bytes(sizes), hashes={})
        return replace(info, raw_data=raw, schema=schema, column_bytes=",".join(map(str, sizes)))

    def read_metadata(self, stored: RangedFile) -> Footer:
        """The footer of a file; see :class:`RangeReadableFormat`."""
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
    """The rows of a row group that was unpacked."""

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
            found = len(self)
            self.close()
            raise ShardCorruptError(f"{path} must have {info.samples} rows, but has {found}", path=str(path))

    def close(self) -> None:
        """Let go of the file; whoever still holds rows of it, as an error under way may, keeps the map until then."""
        super().close()
        with suppress(BufferError):
            self._map.release()


def whole_row_group(basename: str) -> str:
    """The raw name of a row group with all columns, by its name with some of them; other names as they are."""
    return _NARROWED.sub(r"\1\2", basename)


def parquet_plain_kind(info: ShardInfo, columns: Sequence[str] | None) -> PlainArrow | None:
    """What row groups have in common whose rows may be plain together; None where those of this one are not."""
    schema = info.schema
    told = zip(schema["column_names"], schema["column_encodings"], strict=True)
    return plain_arrow({name: one for name, one in told if columns is None or name in columns})


def may_be_flat_column(info: ShardInfo) -> bool:
    """Whether a row group has a column of one-dimensional arrays."""
    return any(one.startswith("ndarray:") for one in info.schema["column_encodings"])


def _is_of_a_writer(name: str) -> bool:
    """Whether a file lies in a directory that a writer keeps for itself: ``_temporary`` of Spark, ``_delta_log``.

    A directory like ``_day=7`` has rows.
    """
    return any(part.startswith("_") and "=" not in part for part in name.split("/")[:-1])


def _no_files(files: StoredFiles) -> ConfigError:
    """Return the error of a place with nothing to read."""
    there = list(files.sizes())
    others = [name for name in there if not name.endswith(_SUFFIXES)] or there
    found = f"what is there is like {others[0]}" if others else "nothing is there, so correct the path"
    left_out = ", and directories whose names begin with _ are left out" if any(map(_is_of_a_writer, there)) else ""
    return ConfigError(
        f"{files.shown} has no Parquet files, whose names end in {', '.join(_SUFFIXES)}; {found}{left_out}",
        hint="give the directory or the files, like data/train-*.parquet",
        path=files.shown,
    )


# --- entries of an index ---


def _row_groups(files: StoredFiles, name: str) -> list[ShardInfo]:
    """The shards of a file; none for row groups without rows."""
    size = files.sizes()[name]
    footer = read_footer(_FileAmong(files, name))
    columns = _encodings(footer.schema, name)
    stored = FileInfo(basename=name, bytes=size, hashes={})
    shards = []
    for group in range(footer.metadata.num_row_groups):
        told = footer.metadata.row_group(group)
        if not told.num_rows:
            continue
        sizes = column_bytes_of(footer, told)
        raw = FileInfo(basename=f"{name}{_ROWS}{group:06d}{_ARROW}", bytes=_stream_bytes(sizes), hashes={})
        shard = other_shard(_NAME, told.num_rows, raw, columns, {}, compression=PART, zip_data=stored)
        shards.append(replace(shard, column_bytes=",".join(map(str, sizes))))
    return shards


def _encodings(schema: Any, name: str) -> dict[str, str]:
    """The encoding of each column; of those whose type is not read, that it is not."""
    try:
        return {one: column.encoding for one, column in arrow_columns(schema, None, name).items()}
    except UnsupportedError:
        return {field.name: _encoding(schema, field, name) for field in schema}


def _encoding(schema: Any, field: Any, name: str) -> str:
    try:
        return arrow_columns(schema, [field.name], name)[field.name].encoding
    except UnsupportedError:
        return f"{_NOT_READ}{shortened(str(field.type), 100)}"


@dataclass(frozen=True, slots=True)
class _FileAmong:
    """A file whose place is listed."""

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


def _check_alike(shard: ShardInfo, name: str, encodings: dict[str, tuple[str, str]]) -> None:
    """Refuse files whose columns of one name are of different types."""
    schema = shard.schema
    for column, kind in zip(schema["column_names"], schema["column_encodings"], strict=True):
        first, there = encodings.setdefault(column, (name, kind))
        if there != kind and "null" not in (there, kind):
            raise FormatError(
                f"{name} has column {column!r} of type {kind}, but {first} has it of type {there}",
                hint="write one of them again, or read them as two streams",
                path=name,
            )
        if there == "null":
            encodings[column] = name, kind


def _check_told(info: ShardInfo) -> list[int]:
    """What columns take, as the index tells it."""
    try:
        sizes = [int(one) for one in (info.column_bytes or "").split(",") if one]
        _group_of(info)
    except ValueError:
        sizes = []
    names, raw = column_names(info), info.raw_data
    if info.zip_data is None or len(sizes) != len(names) or min(sizes, default=0) < 0:
        raise IndexFormatError(
            f"the entry of {raw.basename} must name a row group, its file, and the bytes of {len(names)} columns",
            hint="make the index again with: lightning-streaming index",
            path=raw.basename,
        )
    return sizes


def _group_of(info: ShardInfo) -> int:
    """Which row group of its file a shard is.

    Raises:
        ValueError: Its name does not say.
    """
    return int(info.raw_data.basename.rpartition(_ROWS)[2].removesuffix(_ARROW).partition("-")[0])


def _stream_bytes(sizes: Sequence[int]) -> int:
    return _FRAME_BYTES + sum(sizes)


@lru_cache(maxsize=64)
def _narrowed_schema(
    schema: tuple[tuple[str, Any], ...], columns: frozenset[str]
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """A shard's schema with only some columns, and their names."""
    told = dict(schema)
    kept = [place for place, name in enumerate(told["column_names"]) if name in columns]
    for key in ("column_names", "column_encodings"):
        told[key] = tuple(told[key][place] for place in kept)
    return told, told["column_names"]


@lru_cache(maxsize=64)
def _columns_digest(columns: tuple[str, ...]) -> str:
    return hashlib.blake2b(json.dumps(columns).encode(), digest_size=5).hexdigest()


def _check_unchanged(info: ShardInfo, footer: Footer, group: int, stored: RangedFile) -> None:
    """Refuse a file that is another one than when its index was made."""
    metadata = footer.metadata
    is_same = group < metadata.num_row_groups and metadata.row_group(group).num_rows == info.samples
    if is_same:
        found = column_bytes_of(footer, metadata.row_group(group))
        sizes = dict(zip(footer.schema.names, found, strict=True))
        told = dict(zip(column_names(info), _check_told(info), strict=True))
        is_same = told.items() <= sizes.items() and _types(footer, info, stored) == info.schema["column_encodings"]
    if not is_same:
        raise ShardCorruptError(
            f"{stored.shown} has changed since its index was made: its row group {group} is another one",
            hint="start the run "
            "again, or where an index was made ahead make that again with: lightning-streaming index",
            path=stored.shown,
        )


def _types(footer: Footer, info: ShardInfo, stored: RangedFile) -> tuple[str, ...]:
    """What a footer says of the columns of a shard, in the order of its index entry."""
    found = arrow_columns(footer.schema, column_names(info), stored.shown)
    return tuple(found[name].encoding for name in column_names(info))
