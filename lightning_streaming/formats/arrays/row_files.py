"""Files of rows, all of as many bytes: what an index says of them, and their reader.

Formats whose samples are such rows say so in ``described``; a row of 20 bytes with two columns::

    row_bytes   20
    columns     [["label", "<i4", [], 0], ["pixels", "<f4", [2, 2], 4]]       name, dtype, shape, first byte in the row

A shard is a file, or of a large one a part, which is read where the file lies, or fetched alone.
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
    IndexFormatError,
    MissingDependencyError,
    SampleIndexError,
    ShardCorruptError,
)
from lightning_streaming.files import join_under
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.mds.shard import map_file
from lightning_streaming.formats.other_formats import RangedFile, described, other_shard
from lightning_streaming.formats.plain_rows import FlatColumn, PlainRows, plain_rows
from lightning_streaming.formats.shard_table import PART, FileInfo, ShardInfo
from lightning_streaming.formats.values import NUMBERS, NdarrayEncoding

MOST_ROW_BYTES = 2**31 - 1
"""Bytes of one item of an array, to numpy."""
_MOST_DIMENSIONS = 32
_KINDS = "biufcSUMm"
_LAST_CHARACTER = 0x10FFFF
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

    @property
    def stored(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """What is looked at of it: of text its characters' numbers, as numpy has no error for those that are none."""
        if self.dtype.kind != "U":
            return self.dtype, self.shape
        return np.dtype("u4").newbyteorder(self.dtype.byteorder), (*self.shape, self.dtype.itemsize // 4)

    def value(self, found: Any) -> Any:
        """What a sample has of the column: of its own memory, in this machine's byte order.

        Raises:
            EncodingError: It is text with characters that are none.
        """
        if not isinstance(found, np.ndarray):
            return found.item() if isinstance(found, np.bytes_) else found
        values = found.astype(found.dtype.newbyteorder("="))
        if self.dtype.kind != "U":
            return values
        if values.max(initial=0) > _LAST_CHARACTER:
            raise EncodingError(f"column {self.name!r}: {values.max()} is not the number of a character")
        texts = values.view(f"U{values.shape[-1]}")[..., 0]
        return texts if self.shape else texts.item()

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
            "formats": [one.stored for one in self.columns],
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
            f"the index entry of {info.raw_data.basename} describes no rows of bytes: {error}",
            path=info.raw_data.basename,
        ) from error
    if not found.names or found.names != tuple(info.schema["column_names"]):
        raise IndexFormatError(
            f"the index entry of {info.raw_data.basename} describes columns {found.names}, but says that there are "
            f"{info.schema['column_names']}",
            path=info.raw_data.basename,
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


# --- parts of files ---

PART_BYTES = 64 << 20
"""Of a file that has more bytes of rows, parts of at most so many are shards: nobody fetches 100 GB to read a row."""
_ROWS, _PART = ".rows/", re.compile(r"(\d{1,18})-(\d{1,18})")


def row_shards(
    shard_format: str, file: FileInfo, samples: int, layout: RowLayout, facts: Mapping[str, Any]
) -> list[ShardInfo]:
    """The shards of a file of rows: the file, or parts of one that is large.

    Args:
        shard_format: The format.
        file: The file.
        samples: Its rows.
        layout: Of each row.
        facts: What else the format has to know of all shards alike.
    """
    described = {**layout.described(), **facts}
    if samples * layout.row_bytes <= PART_BYTES or samples < 2:
        return [other_shard(shard_format, samples, file, layout.encodings, described)]
    parts = -(-samples // max(1, PART_BYTES // layout.row_bytes))
    borders = [samples * number // parts for number in range(parts + 1)]
    return [
        other_shard(
            shard_format,
            stop - start,
            FileInfo(
                basename=f"{file.basename}{_ROWS}{start}-{stop}", bytes=(stop - start) * layout.row_bytes, hashes={}
            ),
            layout.encodings,
            described,
            compression=PART,
            zip_data=file,
        )
        for start, stop in pairwise(borders)
    ]


def all_alike(
    found: Iterable[Sequence[ShardInfo]], place: str, what: str, of: Callable[[ShardInfo], object], kinds: str
) -> Iterator[ShardInfo]:
    """The shards of some files, one after another.

    Args:
        found: Those of each file.
        place: Where the files are, as an error calls it.
        what: Is in them: "samples", or "tokens".
        of: Tells of a shard what they are of.
        kinds: Of what a stream takes but one kind.

    Raises:
        FormatError: One is of another kind than the first.
    """
    first: ShardInfo | None = None
    for shard in chain.from_iterable(found):
        if first is not None and shard.schema != first.schema:
            raise FormatError(
                f"{shard.raw_data.basename} at {place} has {what} of {of(shard)}, but {first.raw_data.basename} of "
                f"{of(first)}; one stream takes {kinds} of one kind",
                hint="put others elsewhere",
                path=shard.raw_data.basename,
            )
        first = first or shard
        yield shard


def part_rows(info: ShardInfo, layout: RowLayout) -> tuple[int, int]:
    """The first row of a part of a file, and the one after its last.

    Raises:
        IndexFormatError: The entry is of no such part.
    """
    found = _PART.fullmatch(info.raw_data.basename.rpartition(_ROWS)[2])
    start, stop = (int(found[1]), int(found[2])) if found else (0, -1)
    if stop - start != info.samples or info.raw_data.bytes != info.samples * layout.row_bytes:
        raise IndexFormatError(
            f"the index entry of {info.raw_data.basename} has {info.samples} samples in {info.raw_data.bytes} bytes, "
            f"but its name must say from which row of {layout.row_bytes} bytes to which",
            hint="make the index again with: lightning-streaming index",
            path=info.raw_data.basename,
        )
    return start, stop


def file_of_rows(info: ShardInfo, layout: RowLayout, directory: Path) -> tuple[FileInfo, int | None]:
    """The file of a directory that has a shard's rows, and how many rows there are before them.

    Args:
        info: The shard.
        layout: Of each row.
        directory: Where its raw file is; or, of a part, the stored file.

    Returns:
        The raw file, which has its rows alone, with None; or the stored file, with a number.
    """
    if info.compression != PART or info.zip_data is None or join_under(directory, info.raw_data.basename).is_file():
        return info.raw_data, None
    return info.zip_data, part_rows(info, layout)[0]


def map_part(path: Path, size: int, values_at: int, info: ShardInfo, layout: RowLayout) -> memoryview:
    """Map the rows of a part alone: all of a file for each of its parts would not fit into the address space.

    Args:
        path: The stored file.
        size: Its bytes.
        values_at: The byte at which its rows start.
        info: The part.
        layout: Of each row.

    Raises:
        FormatError: The file has another size.
        ObjectNotFoundError: It is not there.
        StorageError: It cannot be opened.
    """
    first, stop = (values_at + row * layout.row_bytes for row in part_rows(info, layout))
    return map_file(path, size, first, stop)


def copy_part(info: ShardInfo, layout: RowLayout, values_at: int, stored: RangedFile, destination: Path) -> int:
    """Write the rows of a part to a file of their own; gives the bytes read.

    Args:
        info: The part.
        layout: Of each row.
        values_at: The byte of the stored file at which its rows start.
        stored: That file.
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
            raise ShardCorruptError(
                f"{path} must have {stop} bytes for {samples} samples, but has {len(data)}", path=str(path)
            )
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
            raise SampleIndexError(
                f"{self._path} has {len(self._table)} samples, but sample {index} was asked for",
                path=str(self._path),
                sample=index,
            )
        row = self._table[index]
        try:
            return {one.name: one.value(row[one.name]) for one in self._wanted}
        except EncodingError as error:
            shown = str(self._path)
            raise error.with_context(f"{shown}, sample {index}", path=shown, sample=index) from error

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
        column = self._column(name)
        if len(column.shape) != 1:
            raise EncodingError(
                f"{self._path}, column {name!r} is of values of shape {column.shape}, not of one dimension",
                path=str(self._path),
            )
        numbers = np.arange(len(self), dtype=np.int64)
        starts = self._start + column.start + numbers * self._layout.row_bytes
        return FlatColumn(self._data, column.dtype, starts, np.full(len(self), column.shape[0], np.int64))

    def column(self, name: str) -> NDArray[Any] | list[Any]:
        """A column of all rows: numbers as an array of shape (samples,), others as a list."""
        assert self._table is not None, "it is open"
        values, column = self._table[name], self._column(name)
        if values.dtype.kind in "iuf" and values.ndim == 1:
            return values.astype(values.dtype.newbyteorder("="))
        try:
            return [column.value(one) for one in values]
        except EncodingError as error:
            raise error.with_context(str(self._path), path=str(self._path)) from error

    def _column(self, name: str) -> RowColumn:
        return next(one for one in self._layout.columns if one.name == name)

    def close(self) -> None:
        """Let go of the file; nothing can be read afterwards."""
        self._rows = self._table = None
        self._data.release()
