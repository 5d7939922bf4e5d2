"""Parquet files, read as they lie: a shard is a row group, and of it only the wanted columns are fetched.

A row group is unpacked once per node, into a file of the cache that every process maps::

    train.parquet                       train.parquet.rows/000001.arrow
      row group 0 | a | b | c |
      row group 1 | a | b | c |   ──▶   a stream of Arrow IPC: the schema, the dictionaries, the rows; then padding
      footer

The index promises how many bytes that file has, which nobody can tell exactly before the row group is unpacked. So it
promises a bound that the footer gives: what columns of numbers take is known, text takes at most what it took in the
Parquet file before compression, with an offset for each value, if columns that are stored with a dictionary keep it.
The rest of the file is a hole. Where rows take more after all, as text that is stored as differences may, they are
compressed.

Where only some columns are wanted, the file is another one, with a name and a size of its own.
"""

from __future__ import annotations

import hashlib
import io
import os
from bisect import bisect_right
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from lightning_streaming.errors import (
    ConfigError,
    FormatError,
    IndexFormatError,
    ShardCorruptError,
    UnsupportedError,
)
from lightning_streaming.files import join_under
from lightning_streaming.formats.arrow_rows import ArrowRows, PlainArrow, plain_arrow, sound_arrow
from lightning_streaming.formats.arrow_types import arrow_columns
from lightning_streaming.formats.arrow_values import require_compute, require_parquet, require_pyarrow
from lightning_streaming.formats.in_order import known_or_found
from lightning_streaming.formats.mds import map_file
from lightning_streaming.formats.other_formats import RangedFile, ShardReader, StoredFiles, by_file, other_shard
from lightning_streaming.formats.shard_table import (
    FILE_SUFFIXES,
    PART,
    FileInfo,
    ShardInfo,
    check_columns,
    column_names,
)
from lightning_streaming.formats.values import shortened

_NAME = "parquet"
_SUFFIXES = FILE_SUFFIXES[_NAME]
_ROWS, _ARROW = ".rows/", ".arrow"
_NOT_READ = "not read: "
_MAGIC, _SEALED = b"PAR1", b"PARE"
_TAIL_BYTES = 64 << 10
"""Read of a file's end at once; most footers are shorter."""
_GAP_BYTES = 256 << 10
"""Ranges that lie closer are fetched as one, as a request costs more than what lies between."""
_OLD_CHUNK_BYTES = 100
"""By which early writers of Parquet tell the length of a column too short."""
_FRAME_BYTES, _FRAME_BYTES_OF_COLUMN = 4096, 512
"""More than a stream of Arrow takes for what is neither schema nor values, and than a column's share of that."""
_MOST_TEXT = 2**31 - 1
"""Bytes of text that one array can have whose offsets are of 32 bits."""
_BUFFER_BYTES = 64
"""To which each buffer of it is padded."""


@dataclass(frozen=True, slots=True)
class ParquetFormat:
    """Row groups of Parquet files."""

    is_read_in_place: ClassVar[bool] = False

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:
        """The row groups of every file, in the order of names; see :class:`OtherFormat`. Only footers are read."""
        require_pyarrow()
        names = [name for name in files.sizes() if name.endswith(_SUFFIXES)]
        if not names:
            raise ConfigError(
                f"{files.shown} has no Parquet files, whose names end in {', '.join(_SUFFIXES)}; give the directory or "
                "the files, like data/train-*.parquet"
            )
        before, encodings = by_file(known, files.sizes()), dict[str, tuple[str, str]]()
        with closing(known_or_found(_row_groups, files, ((name, before.get(name)) for name in names))) as found:
            for name, shards in zip(names, found, strict=True):
                for shard in shards:
                    _check_alike(shard, name, encodings)
                yield from shards

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:
        """Refuse a shard that could not be read; see :class:`OtherFormat`."""
        require_pyarrow()
        check_columns(info, columns)
        _check_told(info)
        for name, kind in zip(info.schema["column_names"], info.schema["column_encodings"], strict=True):
            if kind.startswith(_NOT_READ) and (columns is None or name in columns):
                raise UnsupportedError(
                    f"{info.raw_data.basename}: column {name!r} is of Arrow's type {kind.removeprefix(_NOT_READ)}, "
                    "which is not read; name the columns that you want with columns=[...]"
                )

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> ShardReader:
        """Open the unpacked rows of a row group; see :class:`OtherFormat`."""
        self.check(info, columns)
        return ParquetRows(_narrowed(info, columns), directory)

    def narrowed(self, info: ShardInfo, columns: Sequence[str] | None) -> ShardInfo:
        """The shard of the same row group that has some columns alone; see :class:`PartsFormat`."""
        return _narrowed(info, columns)

    def look(self, stored: RangedFile) -> Footer:
        """The footer of a file; see :class:`PartsFormat`."""
        return read_footer(stored)

    def unpack(self, info: ShardInfo, known: Footer, stored: RangedFile, destination: Path) -> int:
        """Unpack the columns of a row group; see :class:`PartsFormat`."""
        group, columns = _group_of(info), column_names(info)
        _check_unchanged(info, known, group, stored)
        leaves = known.leaves(columns)
        ranges = _ranges([known.metadata.row_group(group).column(one) for one in leaves], known, stored)
        pieces = _FileOfRanges(ranges, stored.read(ranges), stored.size)
        with sound_arrow(f"row group {group} of {stored.shown}"):
            rows = _decoded(known, group, columns, leaves, pieces)
            rows = _plain_where_it_fits(rows, info.raw_data.bytes - _FRAME_BYTES)
        if rows.num_rows != info.samples:
            raise ShardCorruptError(
                f"row group {group} of {stored.shown} must have {info.samples} rows, but has {rows.num_rows}"
            )
        _write_stream(rows, info.raw_data.bytes, destination, f"row group {group} of {stored.shown}")
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
        if len(self) != info.samples:
            found = len(self)
            self.close()
            raise ShardCorruptError(f"{path} must have {info.samples} rows, but has {found}")

    def close(self) -> None:
        """Let go of the file; whoever still holds rows of it, as an error under way may, keeps the map until then."""
        super().close()
        with suppress(BufferError):
            self._map.release()


def parquet_plain_kind(info: ShardInfo, columns: Sequence[str] | None) -> PlainArrow | None:
    """What row groups have in common whose rows may be plain together; None where those of this one are not."""
    schema = info.schema
    told = zip(schema["column_names"], schema["column_encodings"], strict=True)
    return plain_arrow({name: one for name, one in told if columns is None or name in columns})


def may_be_flat_column(info: ShardInfo) -> bool:
    """Whether a row group has a column of one-dimensional arrays."""
    return any(one.startswith("ndarray:") for one in info.schema["column_encodings"])


# --- the index ---


@dataclass(frozen=True)
class Footer:
    """What the end of a Parquet file says of all of it."""

    metadata: Any
    """A ``pyarrow.parquet.FileMetaData``."""
    schema: Any
    """The ``pyarrow.Schema`` of its rows."""
    start: int
    """Its first byte, before which all rows lie."""

    def leaves(self, columns: Sequence[str]) -> list[int]:
        """The numbers of the Parquet columns that make up some columns of rows."""
        wanted, found, first = set(columns), list[int](), 0
        for one in self.schema:
            after = first + _num_leaves(one.type)
            if one.name in wanted:
                found += range(first, after)
            first = after
        return found


def read_footer(stored: RangedFile) -> Footer:
    """Read the end of a Parquet file.

    Raises:
        ShardCorruptError: It is no such file, or is cut.
        UnsupportedError: It is encrypted; or two columns have one name.
        StorageError: It could not be read.
    """
    arrow, size = require_pyarrow(), stored.size
    start = max(0, size - _TAIL_BYTES)
    tail = stored.read([(start, size)])[0] if size else b""
    magic = bytes(tail[-4:])
    if magic == _SEALED:
        raise UnsupportedError(f"{stored.shown} is encrypted, which is not read; write it again without encryption")
    if magic != _MAGIC or size < 12:
        raise ShardCorruptError(f"{stored.shown} does not end as a Parquet file does, but with {magic!r}; is it cut?")
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if needed + len(_MAGIC) > size:
        raise ShardCorruptError(f"{stored.shown} has {size} bytes, fewer than its footer's {needed}; the file is cut")
    if needed > len(tail):
        tail = stored.read([(size - needed, size)])[0]
    with sound_arrow(stored.shown):
        metadata = require_parquet().read_metadata(arrow.BufferReader(_MAGIC + bytes(tail[-needed:])))
        schema = metadata.schema.to_arrow_schema()
        if len(set(schema.names)) < len(schema.names):
            raise UnsupportedError(f"{stored.shown} has two columns of one name: {shortened(', '.join(schema.names))}")
        if sum(_num_leaves(one.type) for one in schema) != metadata.num_columns:
            raise UnsupportedError(f"{stored.shown} has columns that pyarrow {arrow.__version__} cannot tell apart")
        _check_columns(metadata, stored)
    return Footer(metadata, schema, size - needed)


class _SizeAlone(io.RawIOBase):
    """A file of which nothing can be read."""

    def __init__(self, size: int) -> None:
        self._size = size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:  # noqa: ARG002
        return self._size

    def read(self, size: int | None = -1) -> bytes:  # noqa: ARG002
        raise _ReachedError


class _ReachedError(Exception):
    """What is in a file would be read now."""


def _check_columns(metadata: Any, stored: RangedFile) -> None:
    """Refuse a footer over which pyarrow would end the process when it is asked about a column of a row group.

    Here it looks at all of them, before it reads the first, and raises what is wrong.
    """
    file = require_parquet().ParquetFile(_SizeAlone(stored.size), metadata=metadata, pre_buffer=True)
    groups, columns = list(range(metadata.num_row_groups)), list(range(metadata.num_columns))
    with suppress(_ReachedError):
        file.reader.read_row_groups(groups, column_indices=columns, use_threads=False)


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
        sizes = _column_bytes(footer, told)
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


def _check_alike(shard: ShardInfo, name: str, encodings: dict[str, tuple[str, str]]) -> None:
    """Refuse files whose columns of one name are of different types."""
    schema = shard.schema
    for column, kind in zip(schema["column_names"], schema["column_encodings"], strict=True):
        first, there = encodings.setdefault(column, (name, kind))
        if there != kind and "null" not in (there, kind):
            raise FormatError(
                f"{name} has column {column!r} of type {kind}, but {first} has it of type {there}; write one of "
                "them again, or read them as two streams"
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
            f"the entry of {raw.basename} must name a row group, its file, and the bytes of {len(names)} columns; make "
            "the index again with: lightning-streaming index"
        )
    return sizes


def _group_of(info: ShardInfo) -> int:
    """Which row group of its file a shard is.

    Raises:
        ValueError: Its name does not say.
    """
    return int(info.raw_data.basename.rpartition(_ROWS)[2].removesuffix(_ARROW).partition("-")[0])


def _narrowed(info: ShardInfo, columns: Sequence[str] | None) -> ShardInfo:
    names = column_names(info)
    if columns is None or set(columns) == set(names):
        return info
    told = dict(zip(names, _check_told(info), strict=True))
    schema, wanted = _narrowed_schema(tuple(info.schema.items()), frozenset(columns))
    sizes = [told[name] for name in wanted]
    start, _, group = info.raw_data.basename.rpartition(_ROWS)
    basename = f"{start}{_ROWS}{group.removesuffix(_ARROW).partition('-')[0]}-{_columns_digest(wanted)}{_ARROW}"
    raw = FileInfo(basename=basename, bytes=_stream_bytes(sizes), hashes={})
    return replace(info, raw_data=raw, schema=schema, column_bytes=",".join(map(str, sizes)))


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
    return hashlib.blake2b("\n".join(columns).encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()


# --- how much room unpacked rows take ---


def _stream_bytes(sizes: Sequence[int]) -> int:
    return _FRAME_BYTES + sum(sizes)


def _column_bytes(footer: Footer, group: Any) -> list[int]:
    """Most bytes that each column of a row group takes in a stream of Arrow, with its share of the schema."""
    chunks = iter([group.column(place) for place in range(group.num_columns)])
    share = len(footer.schema.serialize()) // max(len(footer.schema), 1)
    return [_FRAME_BYTES_OF_COLUMN + share + _most_bytes(one.type, group.num_rows, chunks) for one in footer.schema]


def _num_leaves(kind: Any) -> int:
    """How many Parquet columns make up a column of rows of this type."""
    children = _children(kind)
    return sum(map(_num_leaves, children)) if children else 1


def _children(kind: Any) -> list[Any]:
    """The types within a type; those of a dictionary's values lie in the column itself."""
    types = require_pyarrow().types
    if isinstance(kind, require_pyarrow().BaseExtensionType):
        return _children(kind.storage_type)
    if types.is_dictionary(kind):
        return []
    return [kind.field(place).type for place in range(kind.num_fields)]


def _most_bytes(kind: Any, count: int, chunks: Iterator[Any]) -> int:
    """Most bytes that some values take.

    Args:
        kind: Their Arrow type.
        count: How many there are at most.
        chunks: The metadata of Parquet columns, the next of which are theirs.
    """
    arrow = require_pyarrow()
    if isinstance(kind, arrow.BaseExtensionType):
        return _most_bytes(kind.storage_type, count, chunks)
    children = _children(kind)
    validity = count // 8 + 2 * _BUFFER_BYTES
    if not children:
        return validity + _most_leaf_bytes(kind, next(chunks))
    if arrow.types.is_struct(kind):
        return validity + sum(_most_bytes(one, count, chunks) for one in children)
    offsets = 8 * (count + 1) if arrow.types.is_large_list(kind) else 4 * (count + 1)
    mine = list[Any]()
    for _ in range(sum(map(_num_leaves, children))):
        mine.append(next(chunks))
    below = max(one.num_values for one in mine)
    if arrow.types.is_fixed_size_list(kind):
        below = max(below, count * kind.list_size)
    return validity + offsets + sum(_most_bytes(one, below, iter(mine)) for one in children)


def _most_leaf_bytes(kind: Any, chunk: Any) -> int:
    """Most bytes that the values of a Parquet column take."""
    count = int(chunk.num_values)
    if _is_text(kind):
        width = 16 if "view" in str(kind) else 8 if "large" in str(kind) else 4
        width += 4 if chunk.has_dictionary_page else 0
        return int(chunk.total_uncompressed_size) + width * (count + 1) + 4 * _BUFFER_BYTES
    if require_pyarrow().types.is_null(kind):
        return 0
    try:
        return count * int(kind.bit_width) // 8 + _BUFFER_BYTES
    except ValueError:  # of no fixed width: a dictionary's values, or nulls
        return int(chunk.total_uncompressed_size) + 16 * (count + 1)


def _is_text(kind: Any) -> bool:
    """Whether values are text or bytes of any length."""
    types = require_pyarrow().types
    asked = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
    return any(one(kind) for one in asked) or "_view" in str(kind)


# --- unpacking ---

_Range = tuple[int, int]


def _check_unchanged(info: ShardInfo, footer: Footer, group: int, stored: RangedFile) -> None:
    """Refuse a file that is another one than when its index was made."""
    metadata = footer.metadata
    is_same = group < metadata.num_row_groups and metadata.row_group(group).num_rows == info.samples
    if is_same:
        found = _column_bytes(footer, metadata.row_group(group))
        sizes = dict(zip(footer.schema.names, found, strict=True))
        told = dict(zip(column_names(info), _check_told(info), strict=True))
        is_same = told.items() <= sizes.items() and _types(footer, info, stored) == info.schema["column_encodings"]
    if not is_same:
        raise ShardCorruptError(
            f"{stored.shown} has changed since its index was made: its row group {group} is another one; start the run "
            "again, or where an index was made ahead make that again with: lightning-streaming index"
        )


def _types(footer: Footer, info: ShardInfo, stored: RangedFile) -> tuple[str, ...]:
    """What a footer says of the columns of a shard, in the order of its index entry."""
    found = arrow_columns(footer.schema, column_names(info), stored.shown)
    return tuple(found[name].encoding for name in column_names(info))


def _ranges(chunks: Sequence[Any], footer: Footer, stored: RangedFile) -> list[_Range]:
    """The bytes of a file that hold some columns of a row group, in order, those that lie close together as one."""
    found = list[_Range]()
    for chunk in chunks:
        starts = [chunk.data_page_offset]
        if chunk.dictionary_page_offset is not None and chunk.dictionary_page_offset > 0:
            starts.append(chunk.dictionary_page_offset)
        start = min(starts)
        stop = start + chunk.total_compressed_size
        if not len(_MAGIC) <= start <= stop <= footer.start:
            raise ShardCorruptError(
                f"the footer of {stored.shown} has column {shortened(chunk.path_in_schema)!r} in bytes {start} to "
                f"{stop}, but begins itself at byte {footer.start}; the file is damaged"
            )
        found.append((start, min(stop + _OLD_CHUNK_BYTES, stored.size)))
    joined = list[_Range]()
    for start, stop in sorted(found):
        if joined and start - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


class _FileOfRanges(io.RawIOBase):
    """A file of which only some ranges are here."""

    def __init__(self, ranges: Sequence[_Range], pieces: Sequence[memoryview | bytes], size: int) -> None:
        self._starts = [start for start, _ in ranges]
        self._pieces = [memoryview(piece) for piece in pieces]
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Bytes of the range that the place is in."""
        place = bisect_right(self._starts, self._at) - 1
        begin = self._at - self._starts[place] if place >= 0 else -1
        if begin < 0 or begin >= len(self._pieces[place]):
            raise ShardCorruptError(f"byte {self._at} is asked for, which no wanted column has")
        stop = len(self._pieces[place]) if size is None or size < 0 else begin + size
        found = self._pieces[place][begin:stop].tobytes()
        self._at += len(found)
        return found


def _decoded(footer: Footer, group: int, columns: Sequence[str], leaves: Sequence[int], pieces: _FileOfRanges) -> Any:
    """The rows of a row group, as one table whose columns are each in one piece."""
    parquet = require_parquet()
    told = footer.metadata.row_group(group)
    first = dict(zip(footer.schema.names, _first_leaves(footer.schema), strict=True))
    keeps_dictionary = [
        name
        for name in columns
        if _is_text(footer.schema.field(name).type) and "." not in name and told.column(first[name]).has_dictionary_page
    ]
    # Nothing of pyarrow's own threads, which a forked worker would not have.
    file = parquet.ParquetFile(
        pieces,
        metadata=footer.metadata,
        read_dictionary=keeps_dictionary,
        pre_buffer=False,
        page_checksum_verification=True,  # of those pages that have one
    )
    rows = file.reader.read_row_group(group, column_indices=list(leaves), use_threads=False)
    return rows.combine_chunks()


def _plain_where_it_fits(rows: Any, room: int) -> Any:
    """The rows with text in place of dictionaries of it, which is read faster, as far as there is room for it.

    Args:
        rows: A table whose columns are each in one piece.
        room: Bytes that they may take.
    """
    compute = require_compute()
    left = room - rows.nbytes - sum(_BUFFER_BYTES * 4 for _ in rows.columns)
    for place, field in enumerate(rows.schema):
        if not require_pyarrow().types.is_dictionary(field.type) or not _is_text(field.type.value_type):
            continue
        array = rows.column(place).combine_chunks()
        lengths = compute.binary_length(array.dictionary).take(array.indices)
        text = compute.sum(lengths).as_py() or 0
        more = text + 8 * (len(array) + 1) - array.nbytes
        if more <= left and text <= _MOST_TEXT:
            rows, left = rows.set_column(place, field.name, array.dictionary_decode()), left - max(more, 0)
    return rows


def _first_leaves(schema: Any) -> Iterator[int]:
    first = 0
    for one in schema:
        yield first
        first += _num_leaves(one.type)


class _FullError(Exception):
    """What is written takes more room than there is."""


class _Bounded(io.RawIOBase):
    """A file of which no more than so many bytes are written."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file, self._left = file, most

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._left -= len(memoryview(data).cast("B"))
        if self._left < 0:
            raise _FullError
        return self._file.write(data)


def _write_stream(rows: Any, size: int, destination: Path, shown: str) -> None:
    """Write rows as a stream of Arrow into a file of a given size.

    Raises:
        ShardCorruptError: They do not fit, even compressed.
        OSError: The file cannot be written.
    """
    arrow = require_pyarrow()
    with os.fdopen(os.open(destination, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        for compression in (None, "zstd"):
            file.seek(0)
            options = arrow.ipc.IpcWriteOptions(compression=compression, use_threads=False)
            sink = arrow.PythonFile(_Bounded(file, size), "w")
            try:
                with arrow.ipc.new_stream(sink, rows.schema, options=options) as stream:
                    stream.write_table(rows)
            except _FullError:
                continue
            if os.fstat(file.fileno()).st_size != size:
                file.truncate(size)
            return
    raise ShardCorruptError(
        f"{shown} takes more than the {size} bytes that its footer tells of, even compressed; write it again with "
        "another encoding of its text"
    )


# --- one file among those of a place ---


@dataclass(frozen=True, slots=True)
class _FileAmong:
    """A file whose place is listed."""

    files: StoredFiles
    name: str

    @property
    def shown(self) -> str:
        return f"{self.files.shown}/{self.name}"

    @property
    def size(self) -> int:
        return self.files.sizes()[self.name]

    def read(self, ranges: Sequence[_Range]) -> list[bytes]:
        return [self.files.read_range(self.name, start, stop) for start, stop in ranges]
