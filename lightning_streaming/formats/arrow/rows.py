"""Rows of Arrow record batches as samples: one by one, as tables of plain rows, and as flat columns.

A sample is read from its batch column by column. If all requested columns are numbers, or arrays of one shape, a row is
plain: its columns are contiguous, though each is stored separately in the batches::

    batch    label  int64         3 7 ...               plain row    label int64 | tokens 2048 x int32
             tokens list<int32>   5 1 8 ...
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import EncodingError, FormatError, ShardCorruptError, StreamingError, UnsupportedError
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.arrow.types import ArrowColumn
from lightning_streaming.formats.arrow.values import (
    Binary,
    Coded,
    DenseKind,
    Number,
    Numbers,
    Read,
    Text,
    numbers_of,
    reader_of,
    require_pyarrow,
    stored,
)
from lightning_streaming.formats.shard_format import ColumnReader, FlatColumn, PlainRows, no_such_sample, plain_rows

_UNSUPPORTED = re.compile(
    r"decrypt|compression codec|not supported by the C\+\+|column type: UNKNOWN|unknown encoding type", re.IGNORECASE
)
"""pyarrow's messages about encrypted columns, and about unsupported types, encodings and compression."""
_VALUE_ERRORS = (FormatError, ValueError, ArithmeticError)
"""Errors of damaged values."""


@contextmanager
def sound_arrow(
    shown: str, must_be: str = "sound rows of Arrow", hint: str | None = None, path: str | None = None
) -> Iterator[None]:
    """Raise ShardCorruptError if Arrow refuses data, or UnsupportedError if Arrow does not support it.

    Args:
        shown: Name of the data in errors.
        must_be: What the data must be.
        hint: How to fix it.
        path: The file; None if it is ``shown``.
    """
    arrow = require_pyarrow()
    try:
        yield
    except StreamingError:  # some of which are a ValueError or an OSError too
        raise
    except (arrow.ArrowException, MemoryError, OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        if isinstance(error, MemoryError):  # more than this machine has: a length that is damaged
            size = re.search(r"malloc of size (\d+)", str(error))
            if size is None or int(size[1]) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
                raise
        text = shortened(" ".join(str(error).split()))
        if isinstance(error, arrow.ArrowNotImplementedError) or _UNSUPPORTED.search(str(error)):
            raise UnsupportedError(
                f"{shown} is not read by pyarrow {arrow.__version__}: {text}",
                hint="write it again without encryption, and with types and compression that this version supports",
                path=path or shown,
            ) from error
        raise ShardCorruptError(f"{shown} must be {must_be}, but: {text}", hint=hint, path=path or shown) from error


@dataclass(frozen=True, slots=True)
class PlainArrow:
    """The columns that shards share whose batches may be built column by column."""

    columns: tuple[tuple[str, str], ...]
    """Name and encoding of each requested column."""


_BY_COLUMN = re.compile(
    r"str|bytes|int|u?int(8|16|32|64)|float(16|32|64)|ndarray:.*|(large_|fixed_size_)?list<[^<]*: bool>(\[\d+\])?"
)


def plain_arrow(encodings: Mapping[str, str]) -> PlainArrow | None:
    """Return what a shard shares with others of such columns; None if samples have to be decoded one by one.

    Args:
        encodings: Encoding of each requested column; Arrow's type if there is none.
    """
    if not encodings or not all(map(_BY_COLUMN.fullmatch, encodings.values())):
        return None
    return PlainArrow(tuple(encodings.items()))


class ArrowRows(ColumnReader):
    """The rows of some record batches, one batch after another. No sample shares memory with them.

    Args:
        batches: ``pyarrow.RecordBatch`` of one schema. Their memory must not change, and can be closed once this is
            closed and no other object holds a batch.
        columns: The columns to read, in this order: usually the result of :func:`arrow_columns`.
        shown: Name of the batches in errors.
        data: The memory of all batches, if it is contiguous, for flat columns without a copy.

    Raises:
        ShardCorruptError: A batch is damaged. All requested columns are validated, so no position in a buffer is out
            of range later.
    """

    def __init__(
        self, batches: Sequence[Any], columns: Mapping[str, ArrowColumn], shown: str, data: memoryview | None = None
    ) -> None:
        self._shown, self._path, self._data = shown, shown, data
        self.columns = columns
        self._batches = list[dict[str, Any]]()
        self._firsts = [0]
        for batch in batches:
            self._add(batch, batches[0].schema)
        self._samples = self._firsts.pop()
        self._reads: list[tuple[tuple[str, Read], ...] | None] = [None] * len(self._firsts)
        self._dense_columns = dict[str, DenseColumn | None]()
        self._takes = dict[str, _Take | None]()
        self._plain: PlainRows | None = None
        self._is_plain_known = False

    def _add(self, batch: Any, schema: Any) -> None:
        if not batch.schema.equals(schema):
            raise ShardCorruptError(
                f"{self._shown} must have record batches of one schema, but they differ", path=self._path
            )
        if batch.num_rows < 0:
            raise ShardCorruptError(f"{self._shown} has a record batch of {batch.num_rows} rows", path=self._path)
        if not batch.num_rows:
            return
        with sound_arrow(self._shown):
            arrays = {name: batch.column(schema.get_field_index(name)) for name in self.columns}
            for array in arrays.values():
                array.validate(full=True)
        if any(len(array) != batch.num_rows for array in arrays.values()):
            raise ShardCorruptError(
                f"{self._shown} must have columns of {batch.num_rows} rows, but one differs", path=self._path
            )
        self._batches.append({name: stored(array) for name, array in arrays.items()})
        self._firsts.append(self._firsts[-1] + batch.num_rows)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row; see :class:`ShardReader`."""
        if not 0 <= index < self._samples:
            raise no_such_sample(self._shown, self._samples, index, self._path)
        number = bisect_right(self._firsts, index) - 1
        row = index - self._firsts[number]
        try:
            return {name: read(row) for name, read in self._reads[number] or self._prepare(number)}
        except _VALUE_ERRORS as error:
            raise self._explained(index, number, row) from error

    def _prepare(self, number: int) -> tuple[tuple[str, Read], ...]:
        reads = tuple((name, reader_of(self.columns[name].kind, a)) for name, a in self._batches[number].items())
        self._reads[number] = reads
        return reads

    def _explained(self, index: int, number: int, row: int) -> FormatError:
        """Return the error of the first column that cannot be read, with its name."""
        errors = ((name, _error_of(read, row)) for name, read in self._reads[number] or self._prepare(number))
        name, error = next(pair for pair in errors if pair[1] is not None)
        shown = f"{self._shown}, sample {index}, column {name!r}"
        if isinstance(error, FormatError):
            text = shortened(str(error.args[0]))
            return type(error)(f"{shown}: {text}", hint=error.hint, path=self._path, sample=index)
        return ShardCorruptError(f"{shown}: {shortened(str(error))}", path=self._path, sample=index)

    # --- as tables ---

    def plain_rows(self) -> PlainRows | None:
        """Return the layout of rows whose columns are numbers, or arrays of one shape; else None."""
        if not self._is_plain_known:
            self._is_plain_known, fields, size = True, list[tuple[str, int, np.dtype[Any]]](), 0
            for name in self.columns:
                column = self._dense(name)
                if column is None:
                    return None
                fields.append((name, size, column.value))
                size += column.value.itemsize
            self._plain = plain_rows(size, tuple(fields)) if fields else None
        return self._plain

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Copy some rows; see :class:`PlainReader`."""
        assert self._plain is not None, "rows are plain"
        dense = [column for column in map(self._dense, self.columns) if column is not None]
        if len(dense) == 1:
            dense[0].take_into(indexes, rows)
            return
        table = rows.view(self._plain.columns)
        for name, column in zip(self.columns, dense, strict=True):
            table[name] = column.take(indexes)

    def take(self, indexes: NDArray[np.int64]) -> dict[str, NDArray[Any] | list[Any]] | None:
        """Return some rows, column by column; see :class:`ColumnReader`."""
        columns = dict[str, NDArray[Any] | list[Any]]()
        for name in self.columns:
            if name not in self._takes:
                self._takes[name] = self._taking(name)
            take = self._takes[name]
            values = None if take is None else take(indexes)
            if values is None:
                return None
            columns[name] = values
        return columns

    def _taking(self, name: str) -> _Take | None:
        dense, kind = self._dense(name), self.columns[name].kind
        if dense is not None:
            return dense.take
        arrays = self._arrays(name)
        if any(array.null_count for array in arrays) or not isinstance(kind, (Text, Binary, Numbers, Coded)):
            return None
        if isinstance(kind, Coded):
            if len(arrays) != 1 or not isinstance(kind.value, (Text, Binary)):  # numbers become a tensor
                return None
            codes, read = numbers_of(arrays[0].indices, kind.index), reader_of(kind.value, arrays[0].dictionary)
            return lambda indexes: list(map(read, codes[indexes].tolist()))
        try:
            if isinstance(kind, (Text, Binary)):
                return _texts_taker(_flat_column(kind, arrays, self._firsts, self._data), isinstance(kind, Text))
            return _arrays_taker(self.flat_column(name))
        except EncodingError:  # a null is an error of its sample only
            return None

    def _dense(self, name: str) -> DenseColumn | None:
        if name not in self._dense_columns:
            kind = self.columns[name].kind
            column = _dense_column(kind, self._arrays(name), self._firsts) if isinstance(kind, DenseKind) else None
            self._dense_columns[name] = column
        return self._dense_columns[name]

    def _arrays(self, name: str) -> list[Any]:
        return [arrays[name] for arrays in self._batches]

    # --- as a column ---

    def column(self, name: str) -> NDArray[Any] | list[Any]:
        """Return all values of a column: numbers without nulls as an array of shape (rows,); else a list."""
        kind = self.columns[name].kind
        if isinstance(kind, Number):
            parts = [kind.dense(array) for array in self._arrays(name)]
            if all(part is not None for part in parts):
                return np.concatenate([np.empty(0, kind.dtype), *(part for part in parts if part is not None)])
        values = list[Any]()
        for arrays in self._batches:
            read = reader_of(kind, arrays[name])
            values += [read(row) for row in range(len(arrays[name]))]
        return [json.dumps(value, default=_as_json) for value in values] if kind.encoding == "json" else values

    # --- as a flat column ---

    def flat_column(self, name: str) -> FlatColumn:
        """Return the positions of the values of a column of one-dimensional arrays, in ``data`` or in a copy.

        Raises:
            EncodingError: The column has other values, or a row is null or has a null.
        """
        if name not in self.columns:
            raise EncodingError(
                f"{self._shown}: column {name!r} is needed, but columns= leaves it out",
                hint="add it to columns=",
                option="columns",
                path=self._path,
            )
        kind, where = self.columns[name].kind, f"{self._shown}, column {name!r}"
        if not isinstance(kind, Numbers) or kind.inner or kind.final or kind.dtype.kind not in "iuf":
            raise EncodingError(
                f"{where} has type {self.columns[name].type}, not one-dimensional arrays", path=self._path
            )
        try:
            return _flat_column(kind, self._arrays(name), self._firsts, self._data)
        except EncodingError as error:
            raise error.with_context(where, path=self._path) from error

    def close(self) -> None:
        """Release the batches; nothing can be read afterwards, and the memory of a flat column may be gone."""
        self._samples, self._firsts = 0, [0]
        self._batches, self._reads, self._dense_columns, self._takes = [], [], {}, {}
        self._plain = self._data = None


def _error_of(read: Read, row: int) -> Exception | None:
    try:
        read(row)
    except _VALUE_ERRORS as error:
        return error
    return None


def _as_json(value: Any) -> Any:
    """Return a numpy number or array as JSON represents it."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise EncodingError(f"a {type(value).__name__} is not JSON")


# --- columns of several batches ---
#
# A dense column has numbers, or arrays of one shape: the same number of bytes in each row. A flat one has texts, bytes
# or arrays of any length, with their positions in one piece of memory.

_SMALL = 1 << 20
"""Bytes of a batch's column below which all are copied into one, which is faster than reading each batch."""


@dataclass(frozen=True, slots=True)
class DenseColumn:
    """A column of numbers, or of arrays of one shape."""

    tables: tuple[NDArray[np.void], ...]
    """Bytes of the values of each batch, of shape (rows,)."""
    firsts: NDArray[np.int64]
    """First row of each batch."""
    value: np.dtype[Any]
    """Dtype of a value, with its shape."""

    def take(self, indexes: NDArray[np.int64]) -> NDArray[Any]:
        """Return the values of some rows, of shape (rows, ...)."""
        rows = np.empty(len(indexes), self.tables[0].dtype)
        self.take_into(indexes, rows)
        return rows.view(self.value.base).reshape(len(indexes), *self.value.shape)

    def take_into(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Write the bytes of some rows to an array of the same length."""
        if len(self.tables) == 1:
            # "clip" writes directly, unlike the other modes.
            self.tables[0].take(indexes, out=rows, mode="clip")
            return
        numbers = np.searchsorted(self.firsts, indexes, "right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            rows[places] = self.tables[number].take(indexes[places] - self.firsts[number])


def _dense_column(kind: DenseKind, arrays: Sequence[Any], firsts: Sequence[int]) -> DenseColumn | None:
    """Return the column of some batches; None if a value is null or empty, or shapes differ.

    Args:
        kind: Kind of the values.
        arrays: The array of each batch, none without rows.
        firsts: First row of each.
    """
    parts = list[NDArray[Any]]()
    for array in arrays:
        values = kind.dense(array)
        if values is None or (parts and parts[0].shape[1:] != values.shape[1:]):
            return None
        parts.append(np.ascontiguousarray(values))
    if not parts:
        return None
    if len(parts) > 1 and sum(part.nbytes for part in parts) < _SMALL * len(parts):
        parts, firsts = [np.concatenate(parts)], [0]
    value = np.dtype((parts[0].dtype, parts[0].shape[1:]))
    tables = (part.reshape(len(part), -1).view(np.uint8).view(f"V{value.itemsize}")[:, 0] for part in parts)
    return DenseColumn(tuple(tables), np.array(firsts, np.int64), value)


def _flat_column(
    kind: Numbers | Text | Binary, arrays: Sequence[Any], firsts: Sequence[int], data: memoryview | None
) -> FlatColumn:
    """Return the positions of texts, bytes or one-dimensional arrays; texts and bytes count as arrays of bytes.

    Args:
        kind: Kind of the values.
        arrays: The array of each batch, none without rows.
        firsts: First row of each.
        data: The memory of all arrays; if it is not contiguous, or unknown, the values are copied.

    Raises:
        EncodingError: A row is null or has a null.
    """
    dtype = kind.dtype if isinstance(kind, Numbers) else np.dtype(np.uint8)
    pieces, starts, counts = list[NDArray[Any]](), list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    for first, array in zip(firsts, arrays, strict=False):
        try:
            values, offsets = kind.flat(array)
        except EncodingError as error:
            raise EncodingError(f"in the rows from {first}: {error}") from error
        pieces.append(values[offsets[0] : offsets[-1]])
        starts.append((offsets[:-1] - offsets[0]).astype(np.int64) * dtype.itemsize)
        counts.append(np.diff(offsets).astype(np.int64))
    if not pieces:
        return FlatColumn(memoryview(b""), dtype, np.empty(0, np.int64), np.empty(0, np.int64))
    whole, begins = _contiguous(pieces, data)
    starts = [offsets + begin for offsets, begin in zip(starts, begins, strict=True)]
    return FlatColumn(whole, dtype, np.concatenate(starts), np.concatenate(counts))


def _contiguous(pieces: list[NDArray[Any]], data: memoryview | None) -> tuple[memoryview, list[int]]:
    """Return contiguous memory that holds all pieces, and the byte at which each begins in it."""
    if data is not None:
        whole = np.frombuffer(data, np.uint8)
        begins = [piece.ctypes.data - whole.ctypes.data if piece.size else 0 for piece in pieces]
        if all(0 <= begin <= len(whole) - piece.nbytes for begin, piece in zip(begins, pieces, strict=True)):
            return data, begins
    ends = np.cumsum([piece.nbytes for piece in pieces]).tolist()
    copy: Any = (np.concatenate(pieces) if len(pieces) > 1 else pieces[0]).view(np.uint8)
    return memoryview(copy), [end - piece.nbytes for end, piece in zip(ends, pieces, strict=True)]


_Take = Callable[[NDArray[np.int64]], "NDArray[Any] | list[Any] | None"]
"""Returns the values of some rows: an array of shape (rows, ...), or a list of texts or bytes."""


def _texts_taker(column: FlatColumn, are_texts: bool) -> _Take:
    """Return a function that takes texts, or bytes, from a flat column of them."""
    data, _, starts, counts = column
    stops = starts + counts

    def take(indexes: NDArray[np.int64]) -> list[Any]:
        places = zip(starts[indexes].tolist(), stops[indexes].tolist(), strict=True)
        if are_texts:
            return [str(data[start:stop], "utf-8") for start, stop in places]
        return [bytes(data[start:stop]) for start, stop in places]

    return take


def _arrays_taker(column: FlatColumn) -> _Take:
    """Return a function that takes arrays of one length from a flat column; it returns None if lengths differ."""
    data, dtype, starts, counts = column

    def take(indexes: NDArray[np.int64]) -> NDArray[Any] | None:
        sizes = counts[indexes]
        if not sizes[0] or (sizes != sizes[0]).any():
            return None
        size = int(sizes[0])
        return np.stack([np.frombuffer(data, dtype, size, start) for start in starts[indexes].tolist()])

    return take
