"""Chunks of litData whose samples lie as rows of Arrow: dicts of JSON values and bytes.

Behind a table of offsets like that of other chunks, and nothing, or a copy, for the samples::

    any          an Arrow IPC file of record batches of 256 rows; or an IPC stream, as earlier releases wrote it
    4            uint32 bytes of that
    8            "LDARW01" and a zero byte

Values are Python's own, as litData gives them: an int, not one of numpy's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.files import join_under
from lightning_streaming.formats.arrow.rows import ArrowRows, sound_arrow
from lightning_streaming.formats.arrow.types import ArrowColumn
from lightning_streaming.formats.arrow.values import (
    ArrowKind,
    Binary,
    Bool,
    Listed,
    Lists,
    Null,
    Rare,
    Read,
    Record,
    Text,
    numbers_of,
    offsets_of,
    quick,
    require_pyarrow,
    stored,
)
from lightning_streaming.formats.litdata.chunks import LitDataChunk
from lightning_streaming.formats.mds.shard import map_file, read_offsets, table_bytes
from lightning_streaming.formats.readers import ColumnReader, PlainRows
from lightning_streaming.formats.shard_table import ShardInfo, column_names

_FOOTER = struct.Struct("<I8s")
_FOOTER_MAGIC = b"LDARW01\0"
_FILE_MAGIC = b"ARROW1"


def has_arrow_rows(info: ShardInfo, directory: Path) -> bool:
    """Whether samples lie behind a chunk's table as rows of Arrow.

    Raises:
        ShardCorruptError: The file is not the one that the index describes.
        ObjectNotFoundError: It is not there.
        StorageError: It cannot be opened.
    """
    path = join_under(directory, info.raw_data.basename)
    with map_file(path, info.raw_data.bytes) as data:
        return bool(read_offsets(data, info.samples, str(path))[-1] < info.raw_data.bytes)


class ArrowChunk(LitDataChunk, ColumnReader):
    """Samples as rows of Arrow."""

    def __init__(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> None:
        super().__init__(info, directory)
        shown, names = str(self._path), column_names(info) if columns is None else tuple(columns)
        with sound_arrow(shown):
            batches = _as_one(list(_with_columns(self._batches(), names)))
        fields = batches[0].schema if batches else ()
        self._rows = ArrowRows(
            batches, {one.name: ArrowColumn(one.name, _kind(one.type), "") for one in fields}, shown, self._data
        )
        if len(self._rows) != info.samples:
            raise ShardCorruptError(f"{shown} must have {info.samples} rows, but has {len(self._rows)}", path=shown)

    def _batches(self) -> Iterator[Any]:
        end, start = len(self._data), table_bytes(self._num_samples)
        size, magic = _FOOTER.unpack_from(self._data, end - _FOOTER.size) if end >= _FOOTER.size else (0, b"")
        if magic != _FOOTER_MAGIC or not 0 < size <= end - _FOOTER.size - start:
            raise ShardCorruptError(
                f"{self._path} has more bytes than its samples, so it must end in {_FOOTER_MAGIC!r} and rows of Arrow "
                f"before it, but ends in {magic!r} and {size} bytes",
                path=str(self._path),
            )
        arrow, rows = require_pyarrow(), self._data[end - _FOOTER.size - size : end - _FOOTER.size]
        if rows[: len(_FILE_MAGIC)] != _FILE_MAGIC:
            yield from arrow.ipc.open_stream(arrow.py_buffer(rows))
            return
        reader = arrow.ipc.open_file(arrow.py_buffer(rows))
        yield from map(reader.get_batch, range(reader.num_record_batches))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def plain_rows(self) -> PlainRows | None:
        return self._rows.plain_rows()

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        self._rows.copy_rows(indexes, rows)

    def take(self, indexes: NDArray[np.int64]) -> dict[str, NDArray[Any] | list[Any]] | None:
        """Some samples, column by column; see :class:`ColumnReader`."""
        return self._rows.take(indexes)

    def close(self) -> None:
        self._rows.close()
        super().close()


def _with_columns(batches: Iterator[Any], names: Sequence[str]) -> Iterator[Any]:
    """Batches of some columns; a column that no row of the chunk has is of nulls."""
    arrow = require_pyarrow()
    for batch in batches:
        places = {name: batch.schema.get_field_index(name) for name in names}
        arrays = [arrow.nulls(batch.num_rows) if at < 0 else batch.column(at) for at in places.values()]
        yield arrow.RecordBatch.from_arrays(arrays, list(places))


def _as_one(batches: list[Any]) -> list[Any]:
    """The same rows in as few batches as can be: a copy, as it takes long to go from batch to batch of 256 rows."""
    for batch in batches:
        batch.validate(full=True)
    found: list[Any] = require_pyarrow().Table.from_batches(batches).combine_chunks().to_batches() if batches else []
    return found


# --- values ---


def _kind(kind: Any) -> ArrowKind:
    """What litData gives of values of a type."""
    types = require_pyarrow().types
    if types.is_string(kind) or types.is_large_string(kind):
        return Text(large=types.is_large_string(kind))
    if types.is_binary(kind) or types.is_large_binary(kind):
        return Binary(large=types.is_large_binary(kind))
    if types.is_list(kind) or types.is_large_list(kind):
        lists, number = Lists(None, large=types.is_large_list(kind)), _number(kind.value_type)
        return Listed(lists, _kind(kind.value_type)) if number is None else _NumberList(lists, number)
    if types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return Record(tuple((field.name, _kind(field.type)) for field in fields))
    if types.is_boolean(kind):
        return Bool()
    number = _number(kind)
    return Null() if types.is_null(kind) else Rare(None) if number is None else _PythonNumber(number)


def _number(kind: Any) -> np.dtype[Any] | None:
    types = require_pyarrow().types
    is_number = types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)
    return np.dtype(kind.to_pandas_dtype()) if is_number else None


@dataclass(frozen=True, slots=True)
class _PythonNumber:
    """An int or a float."""

    dtype: np.dtype[Any]
    encoding: None = None

    def read(self, array: Any) -> Read:
        return quick(numbers_of(array, self.dtype)).__getitem__

    def dense(self, array: Any) -> NDArray[Any] | None:
        """Only of those that torch's collate makes tensors of this dtype of."""
        return numbers_of(array, self.dtype) if self.dtype in _COLLATED and not array.null_count else None


_COLLATED = (np.dtype(np.int64), np.dtype(np.float64))


@dataclass(frozen=True, slots=True)
class _NumberList:
    """A list of ints or floats. It is not dense: torch's collate makes no one tensor of it."""

    lists: Lists
    dtype: np.dtype[Any]
    encoding: None = None

    def read(self, array: Any) -> Read:
        below = stored(array.values)
        if below.null_count:
            return Listed(self.lists, _PythonNumber(self.dtype)).read(array)
        offsets, values = quick(offsets_of(array, large=self.lists.large)), numbers_of(below, self.dtype)
        return lambda row: values[offsets[row] : offsets[row + 1]].tolist()
