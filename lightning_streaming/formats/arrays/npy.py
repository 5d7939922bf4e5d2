"""NumPy's ``.npy`` files: each, or a part of a large one, is a shard; each row along the first dimension is a sample.

A row of an array of records has a column for each field, any other row one column: "values", or "tokens" where an array
of one dimension is cut into blocks. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lightning_streaming.errors import ConfigError, FormatError, IndexFormatError, ShardCorruptError
from lightning_streaming.files import join_under
from lightning_streaming.formats.arrays.npy_header import MOST_HEADER_BYTES, NpyHeader, read_header
from lightning_streaming.formats.arrays.row_files import (
    MOST_ROW_BYTES,
    RowColumn,
    RowLayout,
    RowsReader,
    all_alike,
    copy_part,
    file_of_rows,
    is_value_dtype,
    map_part,
    part_rows,
    row_layout,
    row_shards,
)
from lightning_streaming.formats.in_order import known_or_found
from lightning_streaming.formats.mds.shard import map_file
from lightning_streaming.formats.other_formats import RangedFile, StoredFiles, by_file, described
from lightning_streaming.formats.shard_table import FileInfo, ShardInfo


class NpyFormat:
    """``.npy`` files, in the order of their names.

    Args:
        block_length: Elements of a sample, where arrays of one dimension are to be cut into blocks; what is left at the
            end of a file is left out. None for a sample from each element.
    """

    is_read_in_place: ClassVar[bool] = True

    def __init__(self, block_length: int | None = None) -> None:
        self._block_length = block_length

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:
        """The shards under a place; see :class:`OtherFormat`."""
        sizes = {name: size for name, size in files.sizes().items() if name.endswith(".npy")}
        if not sizes:
            raise ConfigError(f"there is no .npy file at {files.shown}", path=files.shown)
        before = {name: found for name, found in by_file(known, sizes).items() if self._is_same(found[0])}
        asked = ((name, before.get(name)) for name in sizes)
        with closing(known_or_found(self._described, files, asked)) as found:
            yield from all_alike(found, files.shown, "samples", _in_words, "files")

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:  # noqa: ARG002
        """Refuse an entry that describes no rows."""
        _layout(info)

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> RowsReader:
        """The rows of a file, or part; raises ShardCorruptError where it is not the one that was described."""
        layout = _layout(info)
        file, first = file_of_rows(info, layout, directory)
        path = join_under(directory, file.basename)
        data = map_file(path, file.bytes, 0, None if first is None else MOST_HEADER_BYTES)
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
        """The same shard: its columns lie together."""
        return info

    def look(self, stored: RangedFile) -> NpyHeader:
        """The header of a file; see :class:`PartsFormat`."""
        return read_header(lambda start, stop: bytes(stored.read([(start, stop)])[0]), stored.size, stored.shown)

    def unpack(self, info: ShardInfo, known: NpyHeader, stored: RangedFile, destination: Path) -> int:
        """Copy the rows of a part; see :class:`PartsFormat`."""
        values_at = _checked_values_at(info, known, stored.size, stored.shown)
        return copy_part(info, _layout(info), values_at, stored, destination)

    def _is_same(self, shard: ShardInfo) -> bool:
        return shard.format == "npy" and described(shard).get("block_length") == self._block_length

    def _described(self, files: StoredFiles, name: str) -> list[ShardInfo]:
        shown, size = files.shown_file(name), files.sizes()[name]
        header = read_header(lambda start, stop: files.read_range(name, start, stop), size, shown)
        layout, samples = rows_of(header, size, shown, self._block_length)
        facts = {} if self._block_length is None else {"block_length": self._block_length}
        return row_shards("npy", FileInfo(basename=name, bytes=size, hashes={}), samples, layout, facts)


def _checked_values_at(info: ShardInfo, header: NpyHeader, size: int, shown: str) -> int:
    """The byte at which the rows of a stored file start; ShardCorruptError where it is not what the index describes."""
    layout = _layout(info)
    found, samples = rows_of(header, size, shown, described(info).get("block_length"))
    needed = info.samples if info.compression is None else part_rows(info, layout)[1]
    if found != layout or (samples < needed if info.compression else samples != needed):
        raise ShardCorruptError(
            f"{shown} has {samples} samples of {found.names} in {found.row_bytes} bytes, but {needed} of "
            f"{layout.names} in {layout.row_bytes} bytes by its index; the file was changed since",
            path=shown,
        )
    return header.stop


def rows_of(header: NpyHeader, size: int, shown: str, block_length: int | None) -> tuple[RowLayout, int]:
    """How the samples of a file lie, and how many there are.

    Args:
        header: What the file says.
        size: Its bytes.
        shown: What to call it in an error.
        block_length: Elements of a sample; None for rows of the first dimension.

    Raises:
        ShardCorruptError: The file has not the bytes that its header says.
        FormatError: Its values cannot be samples; says why.
    """
    dtype, shape = header.dtype, header.shape
    _check_readable(header, shown)
    expected = header.stop + math.prod(shape) * dtype.itemsize
    if size != expected:
        raise ShardCorruptError(
            f"{shown} must have {expected} bytes for {dtype} of shape {shape}, but has {size}; the file is cut, or is "
            "more than one array",
            path=shown,
        )
    if block_length is None:
        columns, row_bytes = _columns(dtype, shape[1:], shown), dtype.itemsize * math.prod(shape[1:])
        samples = shape[0]
    elif len(shape) == 1 and dtype.names is None:
        columns, row_bytes = (RowColumn("tokens", dtype, (block_length,), 0),), dtype.itemsize * block_length
        samples = shape[0] // block_length
    else:
        raise FormatError(
            f"{shown} has {dtype} of shape {shape}, but block_length cuts arrays of one dimension",
            hint="leave block_length out",
            option="block_length",
            path=shown,
        )
    if not 0 < row_bytes <= MOST_ROW_BYTES:
        raise FormatError(
            f"{shown} has samples of {row_bytes} bytes; a sample can have 1 to {MOST_ROW_BYTES}", path=shown
        )
    return RowLayout(row_bytes, columns), samples


def _check_readable(header: NpyHeader, shown: str) -> None:
    if header.dtype.hasobject:
        raise FormatError(
            f"{shown} has Python objects, which are never unpickled here",
            hint="save it with a dtype of numbers",
            path=shown,
        )
    if not header.shape:
        raise FormatError(
            f"{shown} is a single value, of no dimension", hint="a file must be an array of samples", path=shown
        )
    if header.is_fortran and len(header.shape) > 1:
        raise FormatError(
            f"{shown} is in Fortran order, in which no sample lies together",
            hint="save numpy.ascontiguousarray(array)",
            path=shown,
        )


def _columns(dtype: np.dtype[Any], shape: tuple[int, ...], shown: str) -> tuple[RowColumn, ...]:
    """The columns of a row of this dtype and shape."""
    if dtype.names is None:
        columns: tuple[RowColumn, ...] = (RowColumn("values", dtype, shape, 0),)
    elif shape:
        raise FormatError(
            f"{shown} has rows of shape {shape} of records; an array of records can have one dimension", path=shown
        )
    else:
        assert dtype.fields is not None, "it has names"
        fields = ((name, *dtype.fields[name][:2]) for name in dtype.names)
        columns = tuple(RowColumn(name, found.base, found.shape, start) for name, found, start in fields)
    for one in columns:
        if not is_value_dtype(one.dtype):
            raise FormatError(f"{shown} has {one.dtype} in column {one.name!r}, which cannot be read", path=shown)
    return columns


def _layout(info: ShardInfo) -> RowLayout:
    found = row_layout(info)
    if found is None:
        raise IndexFormatError(
            f"the index entry of {info.raw_data.basename} does not say how its rows lie", path=info.raw_data.basename
        )
    return found


def _in_words(info: ShardInfo) -> str:
    return ", ".join(f"{one.name} {one.dtype} of shape {one.shape}" for one in _layout(info).columns)
