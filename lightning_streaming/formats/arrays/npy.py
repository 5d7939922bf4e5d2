"""NumPy's ``.npy`` files: each, or a part of a large one, is a shard; each row along the first dimension is a sample.

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
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np

from lightning_streaming.errors import ConfigError, FormatError, ShardCorruptError
from lightning_streaming.escaping import shortened
from lightning_streaming.files import join_under
from lightning_streaming.formats.arrays.row_files import (
    MAX_ROW_BYTES,
    RowColumn,
    RowLayout,
    RowsReader,
    copy_part,
    file_of_rows,
    is_value_dtype,
    map_part,
    part_rows,
    row_layout,
    row_shards,
    same_kind,
)
from lightning_streaming.formats.mds import map_file
from lightning_streaming.formats.shard_format import RangedFile, StoredFiles, by_file, described, map_unknown
from lightning_streaming.formats.shard_table import FileInfo, ShardInfo, entry_error

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
