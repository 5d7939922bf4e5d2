"""The rows of Arrow record batches as samples: one by one, as tables of plain rows, and as flat columns.

A sample is cut out of its batch, column by column. Where all wanted columns are numbers, or arrays of one shape, a row
is plain; its columns then stand side by side, though in the batches each lies by itself::

    batch    label  int64         3 7 ...               plain row    label int64 | tokens 2048 x int32
             tokens list<int32>   5 1 8 ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import EncodingError, FormatError, SampleIndexError, ShardCorruptError
from lightning_streaming.formats.arrow_arrays import DenseKind, Numbers, is_dense
from lightning_streaming.formats.arrow_types import ArrowColumn
from lightning_streaming.formats.arrow_values import Read, reader_of, require_pyarrow, stored
from lightning_streaming.formats.plain_rows import FlatColumn, PlainRows, plain_rows
from lightning_streaming.formats.values import shortened

_SMALL = 1 << 20
"""Bytes of a batch of plain rows below which batches are copied into one: to go to each takes longer than to copy."""
_OF_VALUES = (FormatError, ValueError, ArithmeticError)
"""What comes of a value that is damaged."""


@contextmanager
def sound_arrow(shown: str) -> Iterator[None]:
    """Say of what Arrow refuses that the data is damaged."""
    arrow = require_pyarrow()
    try:
        yield
    except FormatError:
        raise
    except (arrow.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise ShardCorruptError(f"{shown} must be sound rows of Arrow, but: {shortened(str(error))}") from error


@dataclass(frozen=True, slots=True)
class PlainArrow:
    """What shards have in common whose rows may be plain."""

    columns: tuple[tuple[str, str], ...]
    """Of those wanted, name and encoding."""


def plain_arrow(columns: Mapping[str, ArrowColumn]) -> PlainArrow | None:
    """What a shard has in common with others of such columns; None where its rows are not plain whatever they hold."""
    if not columns or not all(is_dense(one.kind) for one in columns.values()):
        return None
    return PlainArrow(tuple((one.name, one.encoding) for one in columns.values()))


class ArrowRows:
    """The rows of some record batches, one batch after another. No sample shares memory with them.

    Args:
        batches: ``pyarrow.RecordBatch`` of one schema. What they lie in must not change, and can be closed once this is
            closed and nobody else holds a batch.
        columns: What to read, in this order: mostly what :func:`arrow_columns` finds in the schema of the batches.
        shown: What to call the batches in an error.
        data: What the batches lie in, where that is one piece of memory, for flat columns without a copy.

    Raises:
        ShardCorruptError: A batch is damaged. All that is wanted of it is looked at, so nothing that it says of
            places in its buffers leads out of them later.
    """

    def __init__(
        self, batches: Sequence[Any], columns: Mapping[str, ArrowColumn], shown: str, data: memoryview | None = None
    ) -> None:
        self._shown, self._data = shown, data
        self.columns = columns
        self._batches = list[dict[str, Any]]()
        self._firsts = [0]
        for batch in batches:
            self._add(batch, batches[0].schema)
        self._samples = self._firsts.pop()
        self._reads: list[tuple[tuple[str, Read], ...] | None] = [None] * len(self._firsts)
        self._tables: list[_Dense] | None = None
        self._plain: PlainRows | None = None

    def _add(self, batch: Any, schema: Any) -> None:
        if not batch.schema.equals(schema):
            raise ShardCorruptError(f"{self._shown} must have record batches of one schema, but they differ")
        if batch.num_rows < 0:
            raise ShardCorruptError(f"{self._shown} has a record batch of {batch.num_rows} rows")
        if not batch.num_rows:
            return
        with sound_arrow(self._shown):
            arrays = {name: batch.column(schema.get_field_index(name)) for name in self.columns}
            for array in arrays.values():
                array.validate(full=True)
        if any(len(array) != batch.num_rows for array in arrays.values()):
            raise ShardCorruptError(f"{self._shown} must have columns of {batch.num_rows} rows, but one has not")
        self._batches.append({name: stored(array) for name, array in arrays.items()})
        self._firsts.append(self._firsts[-1] + batch.num_rows)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row; see :class:`ShardReader`."""
        if not 0 <= index < self._samples:
            raise SampleIndexError(f"{self._shown} has {self._samples} samples, but sample {index} was asked for")
        number = bisect_right(self._firsts, index) - 1
        row = index - self._firsts[number]
        try:
            return {name: read(row) for name, read in self._reads[number] or self._prepare(number)}
        except _OF_VALUES as error:
            raise self._explained(index, number, row) from error

    def _prepare(self, number: int) -> tuple[tuple[str, Read], ...]:
        reads = tuple((name, reader_of(self.columns[name].kind, a)) for name, a in self._batches[number].items())
        self._reads[number] = reads
        return reads

    def _explained(self, index: int, number: int, row: int) -> FormatError:
        """The error of the first column that cannot be read, with its name."""
        errors = ((name, _error_of(read, row)) for name, read in self._reads[number] or self._prepare(number))
        name, error = next(found for found in errors if found[1] is not None)
        kind = type(error) if isinstance(error, FormatError) else ShardCorruptError
        return kind(f"{self._shown}, sample {index}, column {name!r}: {shortened(str(error))}")

    # --- as tables ---

    def plain_rows(self) -> PlainRows | None:
        """How a row's columns stand side by side, if they are numbers, and arrays of one shape in all; else None."""
        if self._tables is None:
            self._tables = self._plain_tables() or []
            self._plain = _side_by_side(self._tables[0]) if self._tables else None
        return self._plain

    def _plain_tables(self) -> list[_Dense] | None:
        if plain_arrow(self.columns) is None:
            return None
        tables = list[_Dense]()
        for arrays in self._batches:
            table = dict[str, NDArray[Any]]()
            for name, array in arrays.items():
                values = cast("DenseKind", self.columns[name].kind).dense(array)
                if values is None or (tables and tables[0].values[name].shape[1:] != values.shape[1:]):
                    return None
                table[name] = values
            tables.append(_Dense.of(table))
        size = sum(values.nbytes for table in tables for values in table.values.values())
        return [_Dense.joined(tables)] if size < _SMALL * len(tables) and len(tables) > 1 else tables

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Copy some rows; see :class:`PlainReader`."""
        assert self._tables, "rows are plain"
        assert self._plain, "rows are plain"
        if len(self._tables) == 1:
            self._tables[0].copy(indexes, rows, self._plain)
            return
        numbers = np.searchsorted(self._firsts, indexes, "right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            self._tables[number].copy_to(places, indexes[places] - self._firsts[number], rows, self._plain)

    # --- as a flat column ---

    def flat_column(self, name: str) -> FlatColumn:
        """Where the values of a column of one-dimensional arrays lie: in ``data``, if they do; else in a copy.

        Raises:
            EncodingError: The column is of other values, or a row is null or has a null.
        """
        kind = self.columns[name].kind
        if not isinstance(kind, Numbers) or kind.inner or kind.final or kind.dtype.kind not in "iuf":
            raise EncodingError(
                f"{self._shown}, column {name!r} is of {self.columns[name].type}, not of one-dimensional arrays"
            )
        pieces, starts, counts = list[NDArray[Any]](), list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        for first, arrays in zip(self._firsts, self._batches, strict=False):
            try:
                values, offsets = kind.flat(arrays[name])
            except EncodingError as error:
                where = f"{self._shown}, column {name!r}, in the rows from {first}"
                raise EncodingError(f"{where}: {error}") from error
            pieces.append(values[offsets[0] : offsets[-1]])
            starts.append((offsets[:-1] - offsets[0]).astype(np.int64) * kind.dtype.itemsize)
            counts.append(np.diff(offsets).astype(np.int64))
        if not pieces:
            return FlatColumn(memoryview(b""), kind.dtype, np.empty(0, np.int64), np.empty(0, np.int64))
        data, begins = self._together(pieces)
        starts = [one + begin for one, begin in zip(starts, begins, strict=True)]
        return FlatColumn(data, kind.dtype, np.concatenate(starts), np.concatenate(counts))

    def _together(self, pieces: list[NDArray[Any]]) -> tuple[memoryview, list[int]]:
        """One piece of memory that holds all these, and the byte at which each begins in it."""
        if self._data is not None:
            whole = np.frombuffer(self._data, np.uint8)
            begins = [one.ctypes.data - whole.ctypes.data if one.size else 0 for one in pieces]
            if all(0 <= begin <= len(whole) - one.nbytes for begin, one in zip(begins, pieces, strict=True)):
                return self._data, begins
        ends = np.cumsum([one.nbytes for one in pieces])
        copy = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        return memoryview(copy.view(np.uint8)), [int(end) - one.nbytes for end, one in zip(ends, pieces, strict=True)]  # type: ignore[arg-type]

    def close(self) -> None:
        """Let go of the batches; nothing can be read afterwards, and what a flat column points at may be gone."""
        self._samples, self._firsts = 0, [0]
        self._batches, self._reads, self._tables, self._plain, self._data = [], [], [], None, None


def _error_of(read: Read, row: int) -> Exception | None:
    try:
        read(row)
    except _OF_VALUES as error:
        return error
    return None


class _Dense(NamedTuple):
    """The columns of a batch whose rows are plain."""

    values: dict[str, NDArray[Any]]
    """By name, of shape (rows, ...)."""
    only: NDArray[np.void] | None
    """Where there is but one, its values as rows of bytes, of shape (rows,)."""

    @classmethod
    def of(cls, values: dict[str, NDArray[Any]]) -> _Dense:
        """That of some columns."""
        only, *others = values.values()
        if others or not only.flags.c_contiguous:
            return cls(values, None)
        return cls(values, only.reshape(len(only), -1).view(np.uint8).view(f"V{only.nbytes // len(only)}")[:, 0])

    @classmethod
    def joined(cls, tables: Sequence[_Dense]) -> _Dense:
        """One of the rows of all."""
        return cls.of({name: np.concatenate([one.values[name] for one in tables]) for name in tables[0].values})

    def copy(self, indexes: NDArray[np.int64], rows: NDArray[np.void], plain: PlainRows) -> None:
        """Copy some rows to rows of as many."""
        if self.only is not None:
            self.only.take(indexes, out=rows, mode="clip")  # which writes to its place at once, unlike the other modes
            return
        table = rows.view(plain.columns)
        for name, values in self.values.items():
            table[name] = values.take(indexes, axis=0)

    def copy_to(
        self, places: NDArray[np.intp], indexes: NDArray[np.int64], rows: NDArray[np.void], plain: PlainRows
    ) -> None:
        """Copy some rows to some places among others."""
        if self.only is not None:
            rows[places] = self.only.take(indexes)
            return
        table = rows.view(plain.columns)
        for name, values in self.values.items():
            table[name][places] = values.take(indexes, axis=0)


def _side_by_side(table: _Dense) -> PlainRows:
    fields, size = list[tuple[str, int, np.dtype[Any]]](), 0
    for name, values in table.values.items():
        fields.append((name, size, np.dtype((values.dtype, values.shape[1:]))))
        size += fields[-1][2].itemsize
    return plain_rows(size, tuple(fields))
