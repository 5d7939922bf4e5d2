"""The rows of Arrow record batches as samples: one by one, as tables of plain rows, and as flat columns.

A sample is cut out of its batch, column by column. Where all wanted columns are numbers, or arrays of one shape, a row
is plain; its columns then stand side by side, though in the batches each lies by itself::

    batch    label  int64         3 7 ...               plain row    label int64 | tokens 2048 x int32
             tokens list<int32>   5 1 8 ...
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    EncodingError,
    FormatError,
    SampleIndexError,
    ShardCorruptError,
    StreamingError,
    UnsupportedError,
)
from lightning_streaming.escaping import shortened
from lightning_streaming.formats.arrow.arrays import DenseKind, Numbers
from lightning_streaming.formats.arrow.tables import (
    DenseColumn,
    Taken,
    dense_column,
    flat_column,
    taking_arrays,
    taking_coded,
    taking_texts,
)
from lightning_streaming.formats.arrow.types import ArrowColumn
from lightning_streaming.formats.arrow.values import (
    Binary,
    Coded,
    Number,
    Read,
    Text,
    reader_of,
    require_pyarrow,
    stored,
)
from lightning_streaming.formats.readers import ColumnReader, FlatColumn, PlainRows, plain_rows

_UNSUPPORTED = re.compile(
    r"decrypt|compression codec|not supported by the C\+\+|column type: UNKNOWN|unknown encoding type", re.IGNORECASE
)
"""What pyarrow says of encrypted columns, and of types, encodings and compression that it does not have."""
_OF_VALUES = (FormatError, ValueError, ArithmeticError)
"""What comes of a value that is damaged."""


def _asks_for_too_much(error: MemoryError) -> bool:
    """Whether more was asked for than any process of this machine could have: a length that is damaged."""
    asked = re.search(r"malloc of size (\d+)", str(error))
    return asked is not None and int(asked[1]) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def sound_arrow(
    shown: str, must_be: str = "sound rows of Arrow", hint: str | None = None, path: str | None = None
) -> Iterator[None]:
    """Say of what Arrow refuses that the data is damaged; or that it is not read, where that is what Arrow says.

    Args:
        shown: What to call the data.
        must_be: What it ought to be.
        hint: How to fix it.
        path: The file. None: ``shown``.
    """
    arrow = require_pyarrow()
    try:
        yield
    except StreamingError:  # some of which are a ValueError or an OSError too
        raise
    except (arrow.ArrowException, MemoryError, OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        if isinstance(error, MemoryError) and not _asks_for_too_much(error):
            raise
        words = shortened(" ".join(str(error).split()))
        if isinstance(error, arrow.ArrowNotImplementedError) or _UNSUPPORTED.search(str(error)):
            raise UnsupportedError(
                f"{shown} is not read by pyarrow {arrow.__version__}: {words}",
                hint="write it again without encryption, and with types and compression that this version has",
                path=path or shown,
            ) from error
        raise ShardCorruptError(f"{shown} must be {must_be}, but: {words}", hint=hint, path=path or shown) from error


@dataclass(frozen=True, slots=True)
class PlainArrow:
    """What shards have in common whose batches may be made column by column."""

    columns: tuple[tuple[str, str], ...]
    """Of those wanted, name and encoding."""


_BY_COLUMN = re.compile(
    r"str|bytes|int|u?int(8|16|32|64)|float(16|32|64)|ndarray:.*|(large_|fixed_size_)?list<[^<]*: bool>(\[\d+\])?"
)


def plain_arrow(encodings: Mapping[str, str]) -> PlainArrow | None:
    """What a shard has in common with others of such columns; None where batches need a look at each sample.

    Args:
        encodings: Of the wanted columns; where there is no encoding, Arrow's type.
    """
    if not encodings or not all(map(_BY_COLUMN.fullmatch, encodings.values())):
        return None
    return PlainArrow(tuple(encodings.items()))


class ArrowRows(ColumnReader):
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
        self._shown, self._path, self._data = shown, shown, data
        self.columns = columns
        self._batches = list[dict[str, Any]]()
        self._firsts = [0]
        for batch in batches:
            self._add(batch, batches[0].schema)
        self._samples = self._firsts.pop()
        self._reads: list[tuple[tuple[str, Read], ...] | None] = [None] * len(self._firsts)
        self._dense_columns = dict[str, DenseColumn | None]()
        self._takes = dict[str, Taken | None]()
        self._plain: PlainRows | None = None
        self._is_looked_at = False

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
                f"{self._shown} must have columns of {batch.num_rows} rows, but one has not", path=self._path
            )
        self._batches.append({name: stored(array) for name, array in arrays.items()})
        self._firsts.append(self._firsts[-1] + batch.num_rows)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row; see :class:`ShardReader`."""
        if not 0 <= index < self._samples:
            raise SampleIndexError(
                f"{self._shown} has {self._samples} samples, but sample {index} was asked for",
                path=self._path,
                sample=index,
            )
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
        shown = f"{self._shown}, sample {index}, column {name!r}"
        if isinstance(error, FormatError):
            words, hint = shortened(str(error.args[0])), error.hint
            return type(error)(f"{shown}: {words}", hint=hint, path=self._path, sample=index)
        return ShardCorruptError(f"{shown}: {shortened(str(error))}", path=self._path, sample=index)

    # --- as tables ---

    def plain_rows(self) -> PlainRows | None:
        """How a row's columns stand side by side, if they are numbers, and arrays of one shape in all; else None."""
        if not self._is_looked_at:
            self._is_looked_at, fields, size = True, list[tuple[str, int, np.dtype[Any]]](), 0
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
        """Some rows, column by column; see :class:`ColumnReader`."""
        found = dict[str, NDArray[Any] | list[Any]]()
        for name in self.columns:
            if name not in self._takes:
                self._takes[name] = self._taking(name)
            take = self._takes[name]
            values = None if take is None else take(indexes)
            if values is None:
                return None
            found[name] = values
        return found

    def _taking(self, name: str) -> Taken | None:
        dense, kind = self._dense(name), self.columns[name].kind
        if dense is not None:
            return dense.take
        arrays = self._arrays(name)
        if any(array.null_count for array in arrays) or not isinstance(kind, (Text, Binary, Numbers, Coded)):
            return None
        if isinstance(kind, Coded):
            is_text = isinstance(kind.value, (Text, Binary))  # numbers are to become a tensor
            return taking_coded(kind, arrays[0]) if len(arrays) == 1 and is_text else None
        try:
            if isinstance(kind, (Text, Binary)):
                return taking_texts(
                    flat_column(kind, arrays, self._firsts, self._data), are_texts=isinstance(kind, Text)
                )
            return taking_arrays(self.flat_column(name))
        except EncodingError:  # a null, which is an error of its sample alone
            return None

    def _dense(self, name: str) -> DenseColumn | None:
        if name not in self._dense_columns:
            kind = self.columns[name].kind
            found = dense_column(kind, self._arrays(name), self._firsts) if isinstance(kind, DenseKind) else None
            self._dense_columns[name] = found
        return self._dense_columns[name]

    def _arrays(self, name: str) -> list[Any]:
        return [arrays[name] for arrays in self._batches]

    # --- as a column ---

    def column(self, name: str) -> NDArray[Any] | list[Any]:
        """All values of a column: numbers as an array of shape (rows,), if none is null; else a list, json as text."""
        kind = self.columns[name].kind
        if isinstance(kind, Number):
            parts = [kind.dense(array) for array in self._arrays(name)]
            if all(part is not None for part in parts):
                return np.concatenate([np.empty(0, kind.dtype), *(part for part in parts if part is not None)])
        values = list[Any]()
        for number, arrays in enumerate(self._batches):
            read = reader_of(kind, arrays[name])
            rows = range(self._num_rows(number))
            values += [read(row) for row in rows]
        return [json.dumps(value, default=_as_json) for value in values] if kind.encoding == "json" else values

    def _num_rows(self, number: int) -> int:
        after = [*self._firsts[1:], self._samples]
        return after[number] - self._firsts[number]

    # --- as a flat column ---

    def flat_column(self, name: str) -> FlatColumn:
        """Where the values of a column of one-dimensional arrays lie: in ``data``, if they do; else in a copy.

        Raises:
            EncodingError: The column is of other values, or a row is null or has a null.
        """
        if name not in self.columns:
            raise EncodingError(
                f"{self._shown}: column {name!r} is needed, but columns= leaves it out",
                hint="name it there too",
                option="columns",
                path=self._path,
            )
        kind, where = self.columns[name].kind, f"{self._shown}, column {name!r}"
        if not isinstance(kind, Numbers) or kind.inner or kind.final or kind.dtype.kind not in "iuf":
            raise EncodingError(
                f"{where} is of {self.columns[name].type}, not of one-dimensional arrays", path=self._path
            )
        try:
            return flat_column(kind, self._arrays(name), self._firsts, self._data)
        except EncodingError as error:
            raise error.with_context(where, path=self._path) from error

    def close(self) -> None:
        """Let go of the batches; nothing can be read afterwards, and what a flat column points at may be gone."""
        self._samples, self._firsts = 0, [0]
        self._batches, self._reads, self._dense_columns, self._takes = [], [], {}, {}
        self._plain = self._data = None


def _error_of(read: Read, row: int) -> Exception | None:
    try:
        read(row)
    except _OF_VALUES as error:
        return error
    return None


def _as_json(value: Any) -> Any:
    """A number, or an array of numbers, of numpy's as JSON has it."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise EncodingError(f"a {type(value).__name__} is no JSON")
