"""Parquet files: their footers, and row groups unpacked from ranges of a file into a stream of Arrow of a given size.

The size of columns of numbers in memory is known; text takes at most its size in the Parquet file before compression,
with an offset for each value, if columns that are stored with a dictionary keep it.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from lightning_streaming.errors import ShardCorruptError, UnsupportedError
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.arrow.rows import sound_arrow
from lightning_streaming.formats.arrow.values import require_compute, require_parquet, require_pyarrow
from lightning_streaming.formats.shard_format import RangedFile

_MAGIC, _SEALED = b"PAR1", b"PARE"
_POINTER = b"version https://git-lfs"
DAMAGED = "the file is damaged: write or download it again"
_TAIL_BYTES = 64 << 10
"""Bytes at a file's end that are read first; most footers are shorter."""
_GAP_BYTES = 256 << 10
"""Ranges with smaller gaps are fetched as one, as a request costs more than the gap."""
_OLD_CHUNK_BYTES = 100
"""Bytes by which early writers of Parquet understate the length of a column."""
_FRAME_BYTES_OF_COLUMN = 512
"""More than the overhead of a column in a stream of Arrow."""
_BUFFER_BYTES = 64
"""Alignment of each buffer of such a stream."""

Range = tuple[int, int]
"""First byte, and the one after the last."""


@dataclass(frozen=True)
class Footer:
    """The footer of a Parquet file."""

    metadata: Any
    """A ``pyarrow.parquet.FileMetaData``."""
    schema: Any
    """The ``pyarrow.Schema`` of its rows."""
    start: int
    """Its first byte; all rows are before it."""

    def leaves(self, columns: Sequence[str]) -> list[int]:
        """Return the numbers of the Parquet columns that make up some columns of rows."""
        wanted, leaves, first = set(columns), list[int](), 0
        for field in self.schema:
            after = first + _num_leaves(field.type)
            if field.name in wanted:
                leaves += range(first, after)
            first = after
        return leaves


def read_footer(stored: RangedFile) -> Footer:
    """Read the footer of a Parquet file.

    Raises:
        ShardCorruptError: It is not a Parquet file, or truncated.
        UnsupportedError: It is encrypted; or two columns have one name.
        StorageError: It could not be read.
    """
    arrow, size = require_pyarrow(), stored.size
    start = max(0, size - _TAIL_BYTES)
    tail = stored.read([(start, size)])[0] if size else b""
    magic = bytes(tail[-4:])
    if magic == _SEALED:
        raise UnsupportedError(
            f"{stored.shown} is encrypted, which is not supported",
            hint="write it without encryption",
            path=stored.shown,
        )
    if magic != _MAGIC or size < 12:
        raise _not_parquet(stored, bytes(tail))
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if needed + len(_MAGIC) > size:
        raise ShardCorruptError(
            f"{stored.shown} has {size} bytes, fewer than its footer's {needed}; the file is truncated",
            path=stored.shown,
        )
    if needed > len(tail):
        tail = stored.read([(size - needed, size)])[0]
    with sound_arrow(f"the footer of {stored.shown}", "sound", DAMAGED, stored.shown):
        metadata = require_parquet().read_metadata(arrow.BufferReader(_MAGIC + bytes(tail[-needed:])))
        schema = metadata.schema.to_arrow_schema()
        if len(set(schema.names)) < len(schema.names):
            raise UnsupportedError(
                f"{stored.shown} has columns of one name, which is unsupported: {shortened(', '.join(schema.names))}",
                hint="write it with other names",
                path=stored.shown,
            )
        if sum(_num_leaves(field.type) for field in schema) != metadata.num_columns:
            raise UnsupportedError(
                f"{stored.shown} has columns that pyarrow {arrow.__version__} cannot distinguish", path=stored.shown
            )
        _check_columns(metadata, stored)
    return Footer(metadata, schema, size - needed)


def _not_parquet(stored: RangedFile, tail: bytes) -> ShardCorruptError:
    """Return the error of a file that does not end like a Parquet file."""
    if not tail:
        problem, hint = "is empty, unlike any Parquet file", "write or download it again"
    elif tail.startswith(_POINTER):
        problem, hint = "is a pointer of Git LFS, not the file itself", "download that with: git lfs pull"
    else:
        problem = f"does not end like a Parquet file, but with {tail[-4:]!r} after {stored.size} bytes"
        hint = "if it was truncated, write or download it again; if it is another file, name the others with remote="
    return ShardCorruptError(f"{stored.shown} {problem}", hint=hint, path=stored.shown)


class _UnreadFile(io.RawIOBase):
    """A file whose contents must not be read."""

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
    """An attempt to read the contents of a file."""


def _check_columns(metadata: Any, stored: RangedFile) -> None:
    """Raise if pyarrow would end the process on access to a column of a row group.

    Here pyarrow checks all columns before it reads the first, and raises an error.
    """
    file = require_parquet().ParquetFile(_UnreadFile(stored.size), metadata=metadata, pre_buffer=True)
    groups, columns = list(range(metadata.num_row_groups)), list(range(metadata.num_columns))
    with suppress(_ReachedError):
        file.reader.read_row_groups(groups, column_indices=columns, use_threads=False)


def ranges_of(chunks: Sequence[Any], footer: Footer, stored: RangedFile) -> list[Range]:
    """Return the ranges of a file that hold some columns of a row group, sorted; small gaps are included."""
    ranges = list[Range]()
    for chunk in chunks:
        starts = [chunk.data_page_offset]
        if chunk.dictionary_page_offset is not None and chunk.dictionary_page_offset > 0:
            starts.append(chunk.dictionary_page_offset)
        start = min(starts)
        stop = start + chunk.total_compressed_size
        if not len(_MAGIC) <= start <= stop <= footer.start:
            raise ShardCorruptError(
                f"the footer of {stored.shown} places column {shortened(chunk.path_in_schema)!r} in bytes {start} to "
                f"{stop}, but begins at byte {footer.start}; the file is damaged",
                path=stored.shown,
            )
        ranges.append((start, min(stop + _OLD_CHUNK_BYTES, stored.size)))
    merged = list[Range]()
    for start, stop in sorted(ranges):
        if merged and start - merged[-1][1] <= _GAP_BYTES:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _num_leaves(kind: Any) -> int:
    """Return the number of Parquet columns that make up a column of rows of this type."""
    children = _children(kind)
    return sum(map(_num_leaves, children)) if children else 1


def _children(kind: Any) -> list[Any]:
    """Return the types within a type; not those of a dictionary's values, which are in the column itself."""
    types = require_pyarrow().types
    if isinstance(kind, require_pyarrow().BaseExtensionType):
        return _children(kind.storage_type)
    if types.is_dictionary(kind):
        return []
    return [kind.field(place).type for place in range(kind.num_fields)]


# --- sizes of unpacked rows ---


def column_bytes_of(footer: Footer, group: Any) -> list[int]:
    """Return the most bytes of each column of a row group in a stream of Arrow, with its share of the schema."""
    chunks = iter([group.column(place) for place in range(group.num_columns)])
    share = len(footer.schema.serialize()) // max(len(footer.schema), 1)
    return [_FRAME_BYTES_OF_COLUMN + share + _max_bytes(field.type, group.num_rows, chunks) for field in footer.schema]


def _max_bytes(kind: Any, count: int, chunks: Iterator[Any]) -> int:
    """Return the most bytes that some values take.

    Args:
        kind: Their Arrow type.
        count: Their maximal number.
        chunks: The metadata of Parquet columns, the next of which hold the values.
    """
    arrow = require_pyarrow()
    if isinstance(kind, arrow.BaseExtensionType):
        return _max_bytes(kind.storage_type, count, chunks)
    children = _children(kind)
    validity = count // 8 + 2 * _BUFFER_BYTES
    if not children:
        return validity + _max_leaf_bytes(kind, next(chunks))
    if arrow.types.is_struct(kind):
        return validity + sum(_max_bytes(child, count, chunks) for child in children)
    offsets = 8 * (count + 1) if arrow.types.is_large_list(kind) else 4 * (count + 1)
    leaves = list(islice(chunks, _num_leaves(kind)))
    below = max(leaf.num_values for leaf in leaves)
    if arrow.types.is_fixed_size_list(kind):
        below = max(below, count * kind.list_size)
    return validity + offsets + sum(_max_bytes(child, below, iter(leaves)) for child in children)


def _max_leaf_bytes(kind: Any, chunk: Any) -> int:
    """Return the most bytes that the values of a Parquet column take."""
    types, count = require_pyarrow().types, int(chunk.num_values)
    if types.is_dictionary(kind):  # an index for each value, and the values
        width = max(int(kind.index_type.bit_width) // 8, 4)
        return width * count + _BUFFER_BYTES + _FRAME_BYTES_OF_COLUMN + _max_leaf_bytes(kind.value_type, chunk)
    if _is_text(kind):
        width = 16 if "view" in str(kind) else 8 if "large" in str(kind) else 4
        width += 4 if chunk.has_dictionary_page else 0
        return int(chunk.total_uncompressed_size) + width * (count + 1) + 4 * _BUFFER_BYTES
    if types.is_null(kind):
        return 0
    try:
        return count * int(kind.bit_width) // 8 + _BUFFER_BYTES
    except ValueError:  # no fixed width
        return int(chunk.total_uncompressed_size) + 16 * (count + 1)


def _is_text(kind: Any) -> bool:
    """Return whether values are text or bytes of any length."""
    types = require_pyarrow().types
    checks = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
    return any(check(kind) for check in checks) or str(kind) in ("string_view", "binary_view")


# --- row groups, unpacked into a stream of Arrow ---

_LONG_VALUE = 256
"""Mean bytes of text from which its dictionary is only kept if necessary."""
_MAX_TEXT_BYTES = 2**31 - 1
"""Most bytes of text of one array with offsets of 32 bits."""


class FileOfRanges(io.RawIOBase):
    """A file of which only some ranges are in memory."""

    def __init__(self, ranges: Sequence[Range], pieces: Sequence[memoryview | bytes], size: int) -> None:
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
        """Read bytes of the range at the current position."""
        return self._next(size).tobytes()

    def read_buffer(self, size: int | None = -1) -> Any:
        """Read the same as a ``pyarrow.Buffer``, without a copy; pyarrow prefers this method."""
        return require_pyarrow().py_buffer(self._next(size))

    def _next(self, size: int | None) -> memoryview:
        place = bisect_right(self._starts, self._at) - 1
        begin = self._at - self._starts[place] if place >= 0 else -1
        if begin < 0 or begin >= len(self._pieces[place]):
            raise ShardCorruptError(f"byte {self._at} is needed, which is not in a requested column")
        stop = len(self._pieces[place]) if size is None or size < 0 else begin + size
        data = self._pieces[place][begin:stop]
        self._at += len(data)
        return data


def unpacked_rows(footer: Footer, group: int, columns: Sequence[str], pieces: FileOfRanges, room: int) -> Any:
    """Return the rows of a row group, as one table whose columns are contiguous.

    Args:
        footer: The footer of the file.
        group: The number of the row group.
        columns: Names of the columns.
        pieces: The ranges that were read of the file.
        room: Bytes that the rows should take; they may take more.
    """
    dictionaries = _dictionaries(footer, group, set(columns))
    # Long values mostly differ, and comparing them takes longer than all the rest.
    short = [name for name, mean in dictionaries.items() if mean < _LONG_VALUE]
    rows = _with_plain_text(_decoded(footer, group, columns, pieces, short), room)
    if rows.nbytes > room and len(short) < len(dictionaries):
        rows = _with_plain_text(_decoded(footer, group, columns, pieces, list(dictionaries)), room)
    return rows


def _dictionaries(footer: Footer, group: int, columns: set[str]) -> dict[str, float]:
    """Return the columns of text that are stored with a dictionary, with the mean stored bytes of a value."""
    metadata, means, leaf = footer.metadata.row_group(group), dict[str, float](), 0
    for field in footer.schema:
        if field.name in columns and "." not in field.name and _is_text(field.type):
            chunk = metadata.column(leaf)
            if chunk.has_dictionary_page:
                means[field.name] = chunk.total_uncompressed_size / max(1, chunk.num_values)
        leaf += _num_leaves(field.type)
    return means


def _decoded(footer: Footer, group: int, columns: Sequence[str], pieces: FileOfRanges, kept: Sequence[str]) -> Any:
    # Without pyarrow's threads, which a forked worker would not have.
    file = require_parquet().ParquetFile(
        pieces,
        metadata=footer.metadata,
        read_dictionary=kept,
        pre_buffer=False,
        page_checksum_verification=True,  # of those pages that have one
    )
    rows = file.reader.read_row_group(group, column_indices=footer.leaves(columns), use_threads=False)
    return rows.combine_chunks()


def _with_plain_text(rows: Any, room: int) -> Any:
    """Return the rows with dictionaries of text replaced by text, which is read faster, as far as there is room.

    Args:
        rows: A table whose columns are contiguous.
        room: Bytes that they may take.
    """
    compute = require_compute()
    free = room - rows.nbytes - 4 * _BUFFER_BYTES * rows.num_columns
    for place, field in enumerate(rows.schema):
        if not require_pyarrow().types.is_dictionary(field.type) or not _is_text(field.type.value_type):
            continue
        array = rows.column(place).combine_chunks()
        lengths = compute.binary_length(array.dictionary).take(array.indices)
        text = compute.sum(lengths).as_py() or 0
        more = text + 8 * (len(array) + 1) - array.nbytes
        if more <= free and text <= _MAX_TEXT_BYTES:
            rows, free = rows.set_column(place, field.name, array.dictionary_decode()), free - max(more, 0)
    return rows


class _FullError(Exception):
    """The limit of a file was exceeded."""


class _LimitedFile(io.RawIOBase):
    """A file with a limit of written bytes."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file, self._free = file, most

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        self._free -= size
        if self._free < 0:
            raise _FullError
        while rest:  # the system writes less than 2 GiB at a time, and pyarrow ignores how much was written
            rest = rest[self._file.write(rest) :]
        return size


def write_stream(rows: Any, size: int, destination: Path, shown: str, path: str) -> None:
    """Write rows as a stream of Arrow into a file of a given size.

    Raises:
        ShardCorruptError: They do not fit, even compressed.
        OSError: The file cannot be written.
    """
    arrow = require_pyarrow()
    with os.fdopen(os.open(destination, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        for compression in (None, "zstd"):
            file.seek(0)
            options = arrow.ipc.IpcWriteOptions(compression=compression, use_threads=False, allow_64bit=True)
            sink = arrow.PythonFile(_LimitedFile(file, size), "w")
            try:
                with arrow.ipc.new_stream(sink, rows.schema, options=options) as stream:
                    stream.write_table(rows)
            except _FullError:
                continue
            file.flush()
            if os.fstat(file.fileno()).st_size != size:
                file.truncate(size)
            return
    raise ShardCorruptError(
        f"{shown} takes more than the {size} bytes derived from its footer, even compressed",
        hint="write it with another encoding of its text",
        path=path,
    )
