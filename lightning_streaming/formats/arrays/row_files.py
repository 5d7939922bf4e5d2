"""Files of rows of equal size: their description in an index, and their reader.

Formats whose samples are such rows describe them in ``described``; a row of 20 bytes with two columns::

    row_bytes   20
    columns     [["label", "<i4", [], 0], ["pixels", "<f4", [2, 2], 4]]       name, dtype, shape, first byte in the row

A shard is a file, or a part of a large one, which is read in place, or fetched without the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    MissingDependencyError,
    ShardCorruptError,
)
from lightning_streaming.files import join_under
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.mds import map_file
from lightning_streaming.formats.shard_format import (
    FlatColumn,
    PlainRows,
    RangedFile,
    described,
    no_such_sample,
    other_shard,
    plain_rows,
)
from lightning_streaming.formats.shard_table import PART, FileInfo, ShardInfo, entry_error
from lightning_streaming.formats.values import NUMBERS, NdarrayEncoding

MAX_ROW_BYTES = 2**31 - 1
"""Most bytes of one item of an array in numpy."""
_MAX_DIMENSIONS = 32
_KINDS = "biufcSUMm"
_LAST_CHARACTER = 0x10FFFF
_TENSOR_DTYPES = tuple(
    map(np.dtype, ["?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16"])
)
"""Dtypes of torch tensors."""


@dataclass(frozen=True, slots=True)
class RowColumn:
    """One column of a row."""

    name: str
    dtype: np.dtype[Any]
    """Of numbers, text, bytes, dates or durations."""
    shape: tuple[int, ...]
    """Empty if a value is a single number."""
    start: int
    """First byte in the row."""

    @property
    def bytes(self) -> int:
        """Bytes of a value."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize

    @property
    def stored(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and shape to read; code points for text, as numpy raises no error for invalid ones."""
        if self.dtype.kind != "U":
            return self.dtype, self.shape
        return np.dtype("u4").newbyteorder(self.dtype.byteorder), (*self.shape, self.dtype.itemsize // 4)

    def value(self, stored: Any) -> Any:
        """Return the value in a sample: with separate memory, in this machine's byte order.

        Raises:
            EncodingError: It is text with invalid characters.
        """
        if not isinstance(stored, np.ndarray):
            return stored.item() if isinstance(stored, np.bytes_) else stored
        values = stored.astype(stored.dtype.newbyteorder("="))
        if self.dtype.kind != "U":
            return values
        if values.max(initial=0) > _LAST_CHARACTER:
            raise EncodingError(f"column {self.name!r}: {values.max()} is not a code point of Unicode")
        texts = values.view(f"U{values.shape[-1]}")[..., 0]
        return texts if self.shape else texts.item()

    def encoding_name(self) -> str:
        """Return the encoding that would have such values; if there is none, their dtype and shape."""
        if self.dtype.kind in "SU" and not self.shape:
            return "bytes" if self.dtype.kind == "S" else "str"
        shape = ",".join(map(str, self.shape))
        name = f"ndarray:{self.dtype.name}:{shape}" if shape else self.dtype.name
        with suppress(ConfigError, MissingDependencyError):
            if self.dtype.kind in "iuf" and isinstance(encoding(name), (*NUMBERS, NdarrayEncoding)):
                return name
        return f"{self.dtype} of shape {self.shape}"


def is_value_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether a column can be of this dtype."""
    return dtype.kind in _KINDS and dtype.itemsize > 0


@dataclass(frozen=True)
class RowLayout:
    """The positions of the columns in each row."""

    row_bytes: int
    columns: tuple[RowColumn, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The columns, in the order of their positions."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def table(self) -> np.dtype[np.void]:
        """The dtype of a row."""
        fields: Any = {
            "names": list(self.names),
            "formats": [column.stored for column in self.columns],
            "offsets": [column.start for column in self.columns],
            "itemsize": self.row_bytes,
        }
        table: np.dtype[np.void] = np.dtype(fields)
        return table

    def plain(self, columns: Sequence[str] | None) -> PlainRows | None:
        """Return the layout of samples of some columns; None if torch has no tensors of one of them.

        Args:
            columns: Names of the requested columns; None for all.
        """
        wanted = [column for column in self.columns if columns is None or column.name in columns]
        if not wanted or not all(column.dtype in _TENSOR_DTYPES for column in wanted):
            return None
        fields = ((column.name, column.start, np.dtype((column.dtype, column.shape))) for column in wanted)
        return plain_rows(self.row_bytes, tuple(fields))


def row_layout(info: ShardInfo) -> RowLayout | None:
    """Return the layout of rows that a shard's entry describes; None if its samples are not rows.

    Raises:
        IndexFormatError: The description is invalid.
    """
    facts = described(info)
    if "row_bytes" not in facts:
        return None
    try:
        row_bytes = _integer(facts["row_bytes"], 1, MAX_ROW_BYTES)
        layout = RowLayout(row_bytes, tuple(_column(entry, row_bytes) for entry in facts["columns"]))
        _ = layout.table
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise entry_error(info, f"does not describe rows of bytes: {error}") from error
    if not layout.names or layout.names != tuple(info.schema["column_names"]):
        raise entry_error(info, f"describes columns {layout.names}, but lists {info.schema['column_names']}")
    return layout


def _column(entry: Any, row_bytes: int) -> RowColumn:
    name, dtype_name, shape, start = entry
    if not isinstance(name, str) or not isinstance(dtype_name, str) or not isinstance(shape, list):
        raise TypeError(f"{name!r}, {dtype_name!r} and {shape!r} are not a name, a dtype and a shape")
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"an array of {len(shape)} dimensions")
    dtype = np.dtype(dtype_name)
    sizes = tuple(_integer(size, 1, row_bytes) for size in shape)
    column = RowColumn(name, dtype, sizes, _integer(start, 0, row_bytes))
    if not is_value_dtype(dtype) or column.start + column.bytes > row_bytes:
        raise ValueError(f"column {name!r} is {dtype} in {column.bytes} bytes from {start}, in a row of {row_bytes}")
    return column


def _integer(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"expected an integer from {least} to {most}, but got {value!r}")
    return value


# --- parts of files ---

PART_BYTES = 64 << 20
"""Largest part of a file: a larger file is split into shards, as no process should fetch 100 GB to read a row."""
_ROWS, _PART = ".rows/", re.compile(r"(\d{1,18})-(\d{1,18})")


def row_shards(
    shard_format: str, file: FileInfo, samples: int, layout: RowLayout, facts: Mapping[str, Any]
) -> list[ShardInfo]:
    """Return the shards of a file of rows: the file, or parts of one that is large.

    Args:
        shard_format: The format.
        file: The file.
        samples: Number of its rows.
        layout: Layout of each row.
        facts: What else the format has to know of all shards alike.
    """
    columns = {column.name: column.encoding_name() for column in layout.columns}
    described = {
        "row_bytes": layout.row_bytes,
        "columns": [[column.name, column.dtype.str, list(column.shape), column.start] for column in layout.columns],
        **facts,
    }
    if samples * layout.row_bytes <= PART_BYTES or samples < 2:
        return [other_shard(shard_format, samples, file, columns, described)]
    parts = -(-samples // max(1, PART_BYTES // layout.row_bytes))
    shards = []
    for start, stop in pairwise(samples * number // parts for number in range(parts + 1)):
        name = f"{file.basename}{_ROWS}{start}-{stop}"
        raw = FileInfo(basename=name, bytes=(stop - start) * layout.row_bytes, hashes={})
        shards.append(other_shard(shard_format, stop - start, raw, columns, described, compression=PART, zip_data=file))
    return shards


def same_kind(
    files: Iterable[Sequence[ShardInfo]], place: str, what: str, kind: Callable[[ShardInfo], object], kinds: str
) -> Iterator[ShardInfo]:
    """Yield the shards of some files, one after another.

    Args:
        files: The shards of each file.
        place: The location of the files, as errors show it.
        what: The contents: "samples", or "tokens".
        kind: Returns what kind of contents a shard has.
        kinds: What must be of one kind within a stream.

    Raises:
        FormatError: A shard is of another kind than the first.
    """
    first: ShardInfo | None = None
    for shard in chain.from_iterable(files):
        if first is not None and shard.schema != first.schema:
            raise FormatError(
                f"{shard.raw_data.basename} at {place} has {what} of {kind(shard)}, but {first.raw_data.basename} has "
                f"{what} of {kind(first)}; one stream takes {kinds} of one kind",
                hint="move other files to another location",
                path=shard.raw_data.basename,
            )
        first = first or shard
        yield shard


def part_rows(info: ShardInfo, layout: RowLayout) -> tuple[int, int]:
    """Return the first row of a part of a file, and the one after its last.

    Raises:
        IndexFormatError: The entry is not of such a part.
    """
    match = _PART.fullmatch(info.raw_data.basename.rpartition(_ROWS)[2])
    start, stop = (int(match[1]), int(match[2])) if match else (0, -1)
    if stop - start != info.samples or info.raw_data.bytes != info.samples * layout.row_bytes:
        raise entry_error(
            info,
            f"has {info.samples} samples in {info.raw_data.bytes} bytes, but its name must state a range of as many "
            f"rows of {layout.row_bytes} bytes",
            hint="create the index again: lightning-streaming index",
        )
    return start, stop


def file_of_rows(info: ShardInfo, layout: RowLayout, directory: Path) -> tuple[FileInfo, int | None]:
    """Return the file of a directory that has a shard's rows, and the number of rows before them.

    Args:
        info: The shard.
        layout: Layout of each row.
        directory: Directory of its raw file; or, for a part, of the stored file.

    Returns:
        The raw file, which has its rows alone, with None; or the stored file, with a number.
    """
    if info.compression != PART or info.zip_data is None or join_under(directory, info.raw_data.basename).is_file():
        return info.raw_data, None
    return info.zip_data, part_rows(info, layout)[0]


def map_part(path: Path, size: int, values_at: int, info: ShardInfo, layout: RowLayout) -> memoryview:
    """Map the rows of a part alone: mapping a whole file for each of its parts would exhaust the address space.

    Args:
        path: The stored file.
        size: Its bytes.
        values_at: The byte at which its rows start.
        info: The part.
        layout: Layout of each row.

    Raises:
        FormatError: The file has another size.
        ObjectNotFoundError: It is missing.
        StorageError: It cannot be opened.
    """
    first, stop = (values_at + row * layout.row_bytes for row in part_rows(info, layout))
    return map_file(path, size, first, stop)


def copy_part(info: ShardInfo, layout: RowLayout, values_at: int, stored: RangedFile, destination: Path) -> int:
    """Write the rows of a part to a separate file, and return the bytes read.

    Args:
        info: The part.
        layout: Layout of each row.
        values_at: The byte of the stored file at which its rows start.
        stored: The stored file.
        destination: The file to write.

    Raises:
        ShardCorruptError: The stored file is too short.
        StorageError: It could not be read.
        OSError: The other file cannot be written.
    """
    first, stop = (values_at + row * layout.row_bytes for row in part_rows(info, layout))
    if stop > stored.size:
        raise ShardCorruptError(
            f"{stored.shown} must have {stop} bytes for its rows, but has {stored.size}", path=stored.shown
        )
    with os.fdopen(os.open(destination, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.writelines(stored.read([(first, stop)]))
        file.flush()
        if os.fstat(file.fileno()).st_size != stop - first:
            file.truncate(stop - first)
    return stop - first


class RowsReader:
    """Consecutive rows of a mapped file.

    Args:
        path: The file, as errors show it.
        data: The mapped bytes, which are released with the reader.
        start: Position of the first row in them.
        samples: Number of rows.
        layout: Layout of each.
        columns: Names of the columns to read; None for all.

    Raises:
        ShardCorruptError: The file ends before its last row.
    """

    def __init__(
        self, path: Path, data: memoryview, start: int, samples: int, layout: RowLayout, columns: Sequence[str] | None
    ) -> None:
        stop = start + samples * layout.row_bytes
        if stop > len(data):
            raise ShardCorruptError(
                f"{path} must have {stop} bytes for {samples} samples, but has {len(data)}", path=str(path)
            )
        self._path, self._data, self._start, self._layout = path, data, start, layout
        self._wanted = [column for column in layout.columns if columns is None or column.name in columns]
        self._plain = layout.plain(columns)
        rows = np.ndarray((samples,), f"V{layout.row_bytes}", data, start)
        self._rows: NDArray[np.void] | None = rows
        self._table: NDArray[np.void] | None = rows.view(layout.table)

    def __len__(self) -> int:
        return 0 if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row, as a dict of numpy scalars, arrays, texts and bytes."""
        assert self._table is not None, "it is open"
        if not 0 <= index < len(self._table):
            raise no_such_sample(self._path, len(self._table), index)
        row = self._table[index]
        try:
            return {column.name: column.value(row[column.name]) for column in self._wanted}
        except EncodingError as error:
            shown = str(self._path)
            raise error.with_context(f"{shown}, sample {index}", path=shown, sample=index) from error

    def plain_rows(self) -> PlainRows | None:
        """Return the layout of each sample, if torch has tensors of its columns."""
        return self._plain

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Copy the bytes of some samples; see :class:`PlainReader`."""
        assert self._rows is not None, "it is open"
        self._rows.take(indexes, out=rows, mode="clip")  # writes directly, unlike the other modes

    def flat_column(self, name: str) -> FlatColumn:
        """Return the positions of the values of a column of one-dimensional arrays.

        Raises:
            EncodingError: The column has other values.
        """
        column = self._column(name)
        if len(column.shape) != 1:
            raise EncodingError(
                f"{self._path}, column {name!r} has values of shape {column.shape}, not of one dimension",
                path=str(self._path),
            )
        numbers = np.arange(len(self), dtype=np.int64)
        starts = self._start + column.start + numbers * self._layout.row_bytes
        return FlatColumn(self._data, column.dtype, starts, np.full(len(self), column.shape[0], np.int64))

    def column(self, name: str) -> NDArray[Any] | list[Any]:
        """Return a column of all rows: numbers as an array of shape (samples,), other values as a list."""
        assert self._table is not None, "it is open"
        values, column = self._table[name], self._column(name)
        if values.dtype.kind in "iuf" and values.ndim == 1:
            return values.astype(values.dtype.newbyteorder("="))
        try:
            return [column.value(value) for value in values]
        except EncodingError as error:
            raise error.with_context(str(self._path), path=str(self._path)) from error

    def _column(self, name: str) -> RowColumn:
        return next(column for column in self._layout.columns if column.name == name)

    def close(self) -> None:
        """Release the file; nothing can be read afterwards."""
        self._rows = self._table = None
        self._data.release()
