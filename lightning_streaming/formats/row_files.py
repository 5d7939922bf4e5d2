"""Files of rows, all of as many bytes: what an index says of them, and their reader.

Formats whose samples are such rows say so in ``described``; a row of 20 bytes with two columns::

    row_bytes   20
    columns     [["label", "<i4", [], 0], ["pixels", "<f4", [2, 2], 4]]       name, dtype, shape, first byte in the row
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    IndexFormatError,
    MissingDependencyError,
    SampleIndexError,
    ShardCorruptError,
)
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.other_formats import described
from lightning_streaming.formats.plain_rows import FlatColumn, PlainRows, plain_rows
from lightning_streaming.formats.shard_table import ShardInfo
from lightning_streaming.formats.values import NUMBERS, NdarrayEncoding

MOST_ROW_BYTES = 2**31 - 1
"""Bytes of one item of an array, to numpy."""
_MOST_DIMENSIONS = 32
_KINDS = "biufcSUMm"
_OF_TENSORS = tuple(
    map(np.dtype, ["?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16"])
)
"""Those of which torch has tensors."""


@dataclass(frozen=True, slots=True)
class RowColumn:
    """One column of a row."""

    name: str
    dtype: np.dtype[Any]
    """Of numbers, text, bytes, dates or durations."""
    shape: tuple[int, ...]
    """Empty where a value is a single number."""
    start: int
    """First byte in the row."""

    @property
    def bytes(self) -> int:
        """Bytes of a value."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize

    def encoding_name(self) -> str:
        """The encoding that would have such values; where there is none, what they are."""
        if self.dtype.kind in "SU" and not self.shape:
            return "bytes" if self.dtype.kind == "S" else "str"
        shape = ",".join(map(str, self.shape))
        name = f"ndarray:{self.dtype.name}:{shape}" if shape else self.dtype.name
        with suppress(ConfigError, MissingDependencyError):
            if self.dtype.kind in "iuf" and isinstance(encoding(name), (*NUMBERS, NdarrayEncoding)):
                return name
        return f"{self.dtype} of shape {self.shape}"


def is_value_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether a column can be of this dtype."""
    return dtype.kind in _KINDS and dtype.itemsize > 0


@dataclass(frozen=True)
class RowLayout:
    """Where the columns of each row lie."""

    row_bytes: int
    columns: tuple[RowColumn, ...]

    def described(self) -> dict[str, Any]:
        """What goes into ``described``."""
        return {
            "row_bytes": self.row_bytes,
            "columns": [[one.name, one.dtype.str, list(one.shape), one.start] for one in self.columns],
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The columns, in the order in which they lie."""
        return tuple(one.name for one in self.columns)

    @property
    def encodings(self) -> dict[str, str]:
        """The columns, and the MDS encodings that would hold their values."""
        return {one.name: one.encoding_name() for one in self.columns}

    @cached_property
    def table(self) -> np.dtype[np.void]:
        """A row, to numpy."""
        fields: Any = {
            "names": list(self.names),
            "formats": [(one.dtype, one.shape) for one in self.columns],
            "offsets": [one.start for one in self.columns],
            "itemsize": self.row_bytes,
        }
        table: np.dtype[np.void] = np.dtype(fields)
        return table

    def plain(self, columns: Sequence[str] | None) -> PlainRows | None:
        """How samples of some columns lie in their rows; None if torch has no tensors of one of them.

        Args:
            columns: Names of those wanted; None for all.
        """
        wanted = [one for one in self.columns if columns is None or one.name in columns]
        if not wanted or not all(one.dtype in _OF_TENSORS for one in wanted):
            return None
        return plain_rows(
            self.row_bytes, tuple((one.name, one.start, np.dtype((one.dtype, one.shape))) for one in wanted)
        )


def row_layout(info: ShardInfo) -> RowLayout | None:
    """What a shard's entry says of its rows; None where its samples are none.

    Raises:
        IndexFormatError: What it says cannot be.
    """
    said = described(info)
    if "row_bytes" not in said:
        return None
    try:
        row_bytes = _whole(said["row_bytes"], 1, MOST_ROW_BYTES)
        found = RowLayout(row_bytes, tuple(_column(one, row_bytes) for one in said["columns"]))
        _ = found.table
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise IndexFormatError(
            f"the index entry of {info.raw_data.basename} describes no rows of bytes: {error}"
        ) from error
    if not found.names or found.names != tuple(info.schema["column_names"]):
        raise IndexFormatError(
            f"the index entry of {info.raw_data.basename} describes columns {found.names}, but says that there are "
            f"{info.schema['column_names']}"
        )
    return found


def _column(entry: Any, row_bytes: int) -> RowColumn:
    name, dtype_name, shape, start = entry
    if not isinstance(name, str) or not isinstance(dtype_name, str) or not isinstance(shape, list):
        raise TypeError(f"{name!r}, {dtype_name!r} and {shape!r} are not a name, a dtype and a shape")
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"an array of {len(shape)} dimensions")
    dtype = np.dtype(dtype_name)
    found = RowColumn(name, dtype, tuple(_whole(size, 1, row_bytes) for size in shape), _whole(start, 0, row_bytes))
    if not is_value_dtype(dtype) or found.start + found.bytes > row_bytes:
        raise ValueError(f"column {name!r} is {dtype} in {found.bytes} bytes from {start}, in a row of {row_bytes}")
    return found


def _whole(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"expected a whole number from {least} to {most}, but found {value!r}")
    return value


class RowsReader:
    """Rows that lie one after another in a mapped file.

    Args:
        path: The file, as an error calls it.
        data: What is mapped; it is released with the reader.
        start: Where in it the first row starts.
        samples: How many rows there are.
        layout: Of each.
        columns: Names of the columns to read; None for all.

    Raises:
        ShardCorruptError: The file ends before its last row.
    """

    def __init__(
        self, path: Path, data: memoryview, start: int, samples: int, layout: RowLayout, columns: Sequence[str] | None
    ) -> None:
        stop = start + samples * layout.row_bytes
        if stop > len(data):
            raise ShardCorruptError(f"{path} must have {stop} bytes for {samples} samples, but has {len(data)}")
        self._path, self._data, self._start, self._layout = path, data, start, layout
        self._wanted = [one for one in layout.columns if columns is None or one.name in columns]
        self._plain = layout.plain(columns)
        rows = np.ndarray((samples,), f"V{layout.row_bytes}", data, start)
        self._rows: NDArray[np.void] | None = rows
        self._table: NDArray[np.void] | None = rows.view(layout.table)

    def __len__(self) -> int:
        return 0 if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row, as a dict of numpy scalars, arrays, texts and bytes."""
        assert self._table is not None, "it is open"
        if not 0 <= index < len(self._table):
            raise SampleIndexError(f"{self._path} has {len(self._table)} samples, but sample {index} was asked for")
        row = self._table[index]
        return {one.name: _value(row[one.name]) for one in self._wanted}

    def plain_rows(self) -> PlainRows | None:
        """How each sample lies in its bytes, if torch has tensors of its columns."""
        return self._plain

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Copy the bytes of some samples; see :class:`PlainReader`."""
        assert self._rows is not None, "it is open"
        self._rows.take(indexes, out=rows, mode="clip")  # which writes to its place at once, unlike the other modes

    def flat_column(self, name: str) -> FlatColumn:
        """Where the values of a column of one-dimensional arrays lie.

        Raises:
            EncodingError: It is of other values.
        """
        column = next(one for one in self._layout.columns if one.name == name)
        if len(column.shape) != 1:
            raise EncodingError(
                f"{self._path}, column {name!r} is of values of shape {column.shape}, not of one dimension"
            )
        numbers = np.arange(len(self), dtype=np.int64)
        starts = self._start + column.start + numbers * self._layout.row_bytes
        return FlatColumn(self._data, column.dtype, starts, np.full(len(self), column.shape[0], np.int64))

    def column(self, name: str) -> NDArray[Any] | list[Any]:
        """A column of all rows: numbers as an array of shape (samples,), others as a list."""
        assert self._table is not None, "it is open"
        values = self._table[name]
        if values.dtype.kind in "iuf" and values.ndim == 1:
            return values.astype(values.dtype.newbyteorder("="))
        return [_value(one) for one in values]

    def close(self) -> None:
        """Let go of the file; nothing can be read afterwards."""
        self._rows = self._table = None
        self._data.release()


def _value(found: Any) -> Any:
    """What a sample has of a column: of its own memory, in this machine's byte order."""
    if isinstance(found, np.ndarray):
        return found.astype(found.dtype.newbyteorder("="))
    return found.item() if isinstance(found, (np.str_, np.bytes_)) else found
