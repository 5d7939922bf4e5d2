"""Row groups of Parquet files, unpacked: out of ranges of the file, into a stream of Arrow of a promised size."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.formats.arrow.parquet_footers import BUFFER_BYTES, Footer, Range, first_leaves, is_text
from lightning_streaming.formats.arrow.values import require_compute, require_parquet, require_pyarrow

_LONG_VALUE = 256
"""Mean bytes of text from which a dictionary of it is only kept if it must be."""
_MOST_TEXT = 2**31 - 1
"""Bytes of text that one array can have whose offsets are of 32 bits."""


class FileOfRanges(io.RawIOBase):
    """A file of which only some ranges are here."""

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
        """Bytes of the range that the place is in."""
        return self._next(size).tobytes()

    def read_buffer(self, size: int | None = -1) -> Any:
        """The same as a ``pyarrow.Buffer``, without a copy; pyarrow asks for it where there is this."""
        return require_pyarrow().py_buffer(self._next(size))

    def _next(self, size: int | None) -> memoryview:
        place = bisect_right(self._starts, self._at) - 1
        begin = self._at - self._starts[place] if place >= 0 else -1
        if begin < 0 or begin >= len(self._pieces[place]):
            raise ShardCorruptError(f"byte {self._at} is asked for, which no wanted column has")
        stop = len(self._pieces[place]) if size is None or size < 0 else begin + size
        found = self._pieces[place][begin:stop]
        self._at += len(found)
        return found


def unpacked_rows(footer: Footer, group: int, columns: Sequence[str], pieces: FileOfRanges, room: int) -> Any:
    """The rows of a row group, as one table whose columns are each in one piece.

    Args:
        footer: Of the file.
        group: The number of the row group.
        columns: Names of the columns.
        pieces: What was read of the file.
        room: Bytes that the rows should take; they may take more.
    """
    dictionaries = _dictionaries(footer, group, columns)
    # Long values mostly differ, and to tell them apart takes longer than all the rest.
    short = [name for name, mean in dictionaries.items() if mean < _LONG_VALUE]
    rows = _plain_where_it_fits(_decoded(footer, group, columns, pieces, short), room)
    if rows.nbytes > room and len(short) < len(dictionaries):
        rows = _plain_where_it_fits(_decoded(footer, group, columns, pieces, list(dictionaries)), room)
    return rows


def _dictionaries(footer: Footer, group: int, columns: Sequence[str]) -> dict[str, float]:
    """The columns of text that are stored with a dictionary, with the mean bytes of a value as they are stored."""
    told, found = footer.metadata.row_group(group), dict[str, float]()
    first = dict(zip(footer.schema.names, first_leaves(footer.schema), strict=True))
    for name in columns:
        chunk = told.column(first[name])
        if is_text(footer.schema.field(name).type) and "." not in name and chunk.has_dictionary_page:
            found[name] = chunk.total_uncompressed_size / max(1, chunk.num_values)
    return found


def _decoded(footer: Footer, group: int, columns: Sequence[str], pieces: FileOfRanges, kept: Sequence[str]) -> Any:
    # Nothing of pyarrow's own threads, which a forked worker would not have.
    file = require_parquet().ParquetFile(
        pieces,
        metadata=footer.metadata,
        read_dictionary=kept,
        pre_buffer=False,
        page_checksum_verification=True,  # of those pages that have one
    )
    rows = file.reader.read_row_group(group, column_indices=footer.leaves(columns), use_threads=False)
    return rows.combine_chunks()


def _plain_where_it_fits(rows: Any, room: int) -> Any:
    """The rows with text in place of dictionaries of it, which is read faster, as far as there is room for it.

    Args:
        rows: A table whose columns are each in one piece.
        room: Bytes that they may take.
    """
    compute = require_compute()
    left = room - rows.nbytes - 4 * BUFFER_BYTES * rows.num_columns
    for place, field in enumerate(rows.schema):
        if not require_pyarrow().types.is_dictionary(field.type) or not is_text(field.type.value_type):
            continue
        array = rows.column(place).combine_chunks()
        lengths = compute.binary_length(array.dictionary).take(array.indices)
        text = compute.sum(lengths).as_py() or 0
        more = text + 8 * (len(array) + 1) - array.nbytes
        if more <= left and text <= _MOST_TEXT:
            rows, left = rows.set_column(place, field.name, array.dictionary_decode()), left - max(more, 0)
    return rows


class _FullError(Exception):
    """What is written takes more room than there is."""


class _Bounded(io.RawIOBase):
    """A file of which no more than so many bytes are written."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file, self._left = file, most

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        self._left -= size
        if self._left < 0:
            raise _FullError
        while left:  # the system takes less than 2 GiB at a time, and pyarrow does not look at how much it took
            left = left[self._file.write(left) :]
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
            sink = arrow.PythonFile(_Bounded(file, size), "w")
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
        f"{shown} takes more than the {size} bytes that its footer tells of, even compressed",
        hint="write it again with another encoding of its text",
        path=path,
    )
