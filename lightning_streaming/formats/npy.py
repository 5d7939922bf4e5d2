"""Files of rows of equal size, and NumPy's ``.npy`` files, in which each row along the first dimension is a sample.

Formats whose samples are such rows describe them in ``described``; a row of 20 bytes with two columns::

    row_bytes   20
    columns     [["label", "<i4", [], 0], ["pixels", "<f4", [2, 2], 4]]       name, dtype, shape, first byte in the row

A shard is a file, or a part of a large one, which is read in place, or fetched without the rest. A ``.npy`` file::

    bytes    content
    6        b"\\x93NUMPY"
    2        version: 1.0, 2.0 or 3.0
    2 or 4   little-endian length of the header: two bytes in version 1.0
    any      the header: the text of a Python dict with "descr" (the dtype), "fortran_order" and "shape"
    any      the values

A row of an array of records has a column for each field, any other row one column: "values", or "tokens" if an array of
one dimension is cut into blocks. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    MissingDependencyError,
    ShardCorruptError,
)
from lightning_streaming.escaping import shortened
from lightning_streaming.files import join_under
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.mds import map_file
from lightning_streaming.formats.shard_format import (
    FlatColumn,
    PlainRows,
    RangedFile,
    StoredFiles,
    by_file,
    described,
    map_unknown,
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


_MAGIC = b"\x93NUMPY"
_LENGTHS: Mapping[bytes, struct.Struct] = {
    b"\x01\x00": struct.Struct("<H"),
    b"\x02\x00": struct.Struct("<I"),
    b"\x03\x00": struct.Struct("<I"),
}
"""The length of the header as it is written, by version."""
_FIRST_READ = 4096
"""Bytes that hold nearly every header."""
_MAX_HEADER_BYTES = 1 << 20
# No header has operators or calls. On Python 3.10, a long chain of these would overflow the stack of Python's parser.
_LITERAL = re.compile(r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|True|False|[][(){}:,0-9L\s])*""")

# NumPy parses a header with Python's ast, whose nesting counters all threads share in several releases up to 3.12
# (gh-106905): a read that another thread interrupts fails with a SystemError. No process is forked while it is held.
_PARSING = Lock()
os.register_at_fork(before=_PARSING.acquire, after_in_parent=_PARSING.release, after_in_child=_PARSING.release)


class NpyHeader(NamedTuple):
    """The header of a file."""

    dtype: np.dtype[Any]
    is_fortran: bool
    shape: tuple[int, ...]
    stop: int
    """The byte where the values start."""


def read_header(read: Callable[[int, int], bytes], size: int, shown: str) -> NpyHeader:
    """Read the header of a file.

    Args:
        read: Returns the bytes from one position up to before another; fewer at the end of the file.
        size: Bytes of the file.
        shown: Name of the file in errors.

    Raises:
        ShardCorruptError: It is not a .npy file, or truncated.
        StorageError: As ``read`` does.
    """
    start = read(0, min(size, _FIRST_READ))
    version = start[6:8]
    if not start.startswith(_MAGIC):
        raise ShardCorruptError(f"{shown} does not begin like a .npy file, but with {start[:8]!r}", path=shown)
    if version not in _LENGTHS:
        raise ShardCorruptError(
            f"{shown} has version {tuple(version)} of .npy files; supported are 1.0, 2.0 and 3.0", path=shown
        )
    length = _LENGTHS[version]
    begin = 8 + length.size
    stop = begin + (length.unpack_from(start, 8)[0] if len(start) >= begin else size)
    if stop > min(size, _MAX_HEADER_BYTES):
        raise ShardCorruptError(
            f"{shown} has {size} bytes, but its header ends at byte {stop}; the file is truncated", path=shown
        )
    data = start[begin:stop] if stop <= len(start) else read(begin, stop)
    try:
        dtype, is_fortran, shape = _parsed(data, "utf-8" if version[0] == 3 else "latin-1")
    except Exception as error:  # numpy and Python's parser raise nearly anything for a damaged text
        raise ShardCorruptError(
            f"{shown} has an invalid header: {shortened(repr(data))} ({type(error).__name__}: {shortened(str(error))})",
            path=shown,
        ) from error
    return NpyHeader(dtype, is_fortran, shape, stop)


def _parsed(data: bytes, charset: str) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    text = data.decode(charset)
    if _LITERAL.fullmatch(text) is None:
        raise ValueError("it is not a literal")
    # As a header of version 2.0, in which escapes stand for the other characters of version 3.0.
    data = text.encode("latin-1", "backslashreplace")
    file = io.BytesIO(struct.pack("<I", len(data)) + data)
    with _PARSING:
        shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file, max_header_size=len(data))
    if not all(type(dim) is int for dim in shape):
        raise ValueError(f"its shape is {shape}")
    return dtype, is_fortran, shape


def header_of(file: BinaryIO) -> NpyHeader:
    """Read the header of an open local file; raises ShardCorruptError if it is not a .npy file."""
    descriptor = file.fileno()

    def read(start: int, stop: int) -> bytes:
        return os.pread(descriptor, stop - start, start)

    return read_header(read, os.fstat(descriptor).st_size, file.name)


class NpyFormat:
    """``.npy`` files, in the order of their names.

    Args:
        block_length: Elements of a sample, to cut arrays of one dimension into blocks; the remainder at the end of a
            file is left out. None for a sample from each element.
    """

    is_read_in_place: ClassVar[bool] = True

    def __init__(self, block_length: int | None = None) -> None:
        self._block_length = block_length

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:
        """Yield the shards at a location; see :class:`ShardFormat`."""
        sizes = {name: size for name, size in files.sizes().items() if name.endswith(".npy")}
        if not sizes:
            raise ConfigError(f"{files.shown} has no .npy file", path=files.shown)
        before = {
            name: shards
            for name, shards in by_file(known, sizes).items()
            if shards[0].format == "npy" and described(shards[0]).get("block_length") == self._block_length
        }
        items = ((name, before.get(name)) for name in sizes)
        with closing(map_unknown(self._described, files, items)) as shards:
            yield from same_kind(shards, files.shown, "samples", _columns_text, "files")

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:  # noqa: ARG002
        """Raise IndexFormatError if an entry does not describe rows."""
        _layout(info)

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> RowsReader:
        """Open a file, or part; raises ShardCorruptError if it is not the one that was described."""
        layout = _layout(info)
        file, first = file_of_rows(info, layout, directory)
        path = join_under(directory, file.basename)
        data = map_file(path, file.bytes, 0, None if first is None else _MAX_HEADER_BYTES)
        try:
            start = 0
            if first is not None or info.compression is None:
                header = read_header(lambda begin, stop: bytes(data[begin:stop]), file.bytes, str(path))
                start = _checked_values_at(info, header, file.bytes, str(path))
            if first is not None:
                data.release()
                data, start = map_part(path, file.bytes, start, info, layout), 0
            return RowsReader(path, data, start, info.samples, layout, columns)
        except FormatError:
            data.release()
            raise

    def narrowed(self, info: ShardInfo, columns: Sequence[str] | None) -> ShardInfo:  # noqa: ARG002
        """Return the same shard: its columns are stored together."""
        return info

    def read_metadata(self, stored: RangedFile) -> NpyHeader:
        """Read the header of a file; see :class:`RangeReadableFormat`."""
        return read_header(lambda start, stop: bytes(stored.read([(start, stop)])[0]), stored.size, stored.shown)

    def unpack(self, info: ShardInfo, metadata: NpyHeader, stored: RangedFile, destination: Path) -> int:
        """Copy the rows of a part; see :class:`RangeReadableFormat`."""
        values_at = _checked_values_at(info, metadata, stored.size, stored.shown)
        return copy_part(info, _layout(info), values_at, stored, destination)

    def _described(self, files: StoredFiles, name: str) -> list[ShardInfo]:
        shown, size = files.shown_file(name), files.sizes()[name]
        header = read_header(lambda start, stop: files.read_range(name, start, stop), size, shown)
        layout, samples = _rows_of(header, size, shown, self._block_length)
        facts = {} if self._block_length is None else {"block_length": self._block_length}
        return row_shards("npy", FileInfo(basename=name, bytes=size, hashes={}), samples, layout, facts)


def _checked_values_at(info: ShardInfo, header: NpyHeader, size: int, shown: str) -> int:
    """Return the byte at which the rows of a stored file start; raise ShardCorruptError if the index differs."""
    layout = _layout(info)
    actual, samples = _rows_of(header, size, shown, described(info).get("block_length"))
    needed = info.samples if info.compression is None else part_rows(info, layout)[1]
    if actual != layout or (samples < needed if info.compression else samples != needed):
        raise ShardCorruptError(
            f"{shown} has {samples} samples of {actual.names} in {actual.row_bytes} bytes, but its index says {needed} "
            f"of {layout.names} in {layout.row_bytes} bytes; the file has changed since",
            path=shown,
        )
    return header.stop


def _rows_of(header: NpyHeader, size: int, shown: str, block_length: int | None) -> tuple[RowLayout, int]:
    """Return the layout of a file's samples, and their number.

    Args:
        header: The file's header.
        size: Its bytes.
        shown: Name of the file in errors.
        block_length: Elements of a sample; None for rows of the first dimension.

    Raises:
        ShardCorruptError: The size of the file contradicts its header.
        FormatError: Its values cannot be samples; says why.
    """
    dtype, shape = header.dtype, header.shape
    hint, option = "", None
    if dtype.hasobject:
        problem, hint = "has Python objects, which are never unpickled", "save it with a dtype of numbers"
    elif not shape:
        problem, hint = "is a single value, of no dimension", "save an array of samples"
    elif header.is_fortran and len(shape) > 1:
        problem = "is in Fortran order, in which samples are not contiguous"
        hint = "save numpy.ascontiguousarray(array)"
    elif block_length is not None and (len(shape) > 1 or dtype.names is not None):
        problem = f"has {dtype} of shape {shape}, but block_length requires arrays of one dimension"
        hint, option = "leave block_length out", "block_length"
    else:
        problem = ""
    if problem:
        raise FormatError(f"{shown} {problem}", hint=hint, option=option, path=shown)
    expected = header.stop + math.prod(shape) * dtype.itemsize
    if size != expected:
        raise ShardCorruptError(
            f"{shown} must have {expected} bytes for {dtype} of shape {shape}, but has {size}; the file is truncated, "
            "or has more than one array",
            path=shown,
        )
    if block_length is None:
        columns, row_bytes = _columns(dtype, shape[1:], shown), dtype.itemsize * math.prod(shape[1:])
        samples = shape[0]
    else:
        columns, row_bytes = (RowColumn("tokens", dtype, (block_length,), 0),), dtype.itemsize * block_length
        samples = shape[0] // block_length
    if not 0 < row_bytes <= MAX_ROW_BYTES:
        raise FormatError(f"{shown} has samples of {row_bytes} bytes; the range is 1 to {MAX_ROW_BYTES}", path=shown)
    return RowLayout(row_bytes, columns), samples


def _columns(dtype: np.dtype[Any], shape: tuple[int, ...], shown: str) -> tuple[RowColumn, ...]:
    """Return the columns of a row of this dtype and shape."""
    if dtype.names is None:
        columns: tuple[RowColumn, ...] = (RowColumn("values", dtype, shape, 0),)
    elif shape:
        raise FormatError(
            f"{shown} has rows of shape {shape} of records; an array of records can have one dimension", path=shown
        )
    else:
        assert dtype.fields is not None, "it has names"
        fields = ((name, *dtype.fields[name][:2]) for name in dtype.names)
        columns = tuple(RowColumn(name, kind.base, kind.shape, start) for name, kind, start in fields)
    for column in columns:
        if not is_value_dtype(column.dtype):
            raise FormatError(f"{shown} has {column.dtype} in column {column.name!r}, which cannot be read", path=shown)
    return columns


def _layout(info: ShardInfo) -> RowLayout:
    layout = row_layout(info)
    if layout is None:
        raise entry_error(info, "does not describe its rows")
    return layout


def _columns_text(info: ShardInfo) -> str:
    return ", ".join(f"{column.name} {column.dtype} of shape {column.shape}" for column in _layout(info).columns)
