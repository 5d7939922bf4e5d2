"""Chunk files of litData, in five layouts.

*Plain*: like an MDS shard without its config::

    4            uint32 n, the number of samples
    4 (n + 1)    uint32 offsets from the start of the file: where each sample starts, and where the last one ends
    any          the samples, back to back

*Zipped samples* are the same, with a zstd frame for each sample. *Tokens* are the same, but read as one row of values
that is cut into blocks.

*Frames* are groups of samples, each a zstd frame::

    24           "LDFZ01" and two zero bytes, uint16 version 1, uint16 0, uint32 n, uint32 samples of each frame, and
                 uint32 frames
    4 (n + 1)    uint32 offsets of the samples, from the start of all of them when unpacked
    24 a frame   uint32 first sample, uint32 samples, uint64 start in the file, uint32 bytes there, and uint32 bytes
                 when unpacked
    any          the frames

*Rows of Arrow* are dicts of JSON values and bytes. After the table there is a copy of the samples, or nothing, and::

    any          an Arrow IPC file of record batches of 256 rows; or an IPC stream, as earlier releases wrote it
    4            uint32 bytes of that
    8            "LDARW01" and a zero byte

All integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import FormatError, ShardCorruptError
from lightning_streaming.files import join_under
from lightning_streaming.formats.algorithms import declared_zstd_bytes, decompress
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
from lightning_streaming.formats.litdata.leaves import leaf_decoder
from lightning_streaming.formats.litdata.samples import ONLY_COLUMN, LitDataDecoder, PlainLeaves
from lightning_streaming.formats.mds import check_lengths, map_file, read_offsets, table_bytes
from lightning_streaming.formats.shard_format import ColumnReader, PlainRows, no_such_sample
from lightning_streaming.formats.shard_table import ShardInfo, column_names

_OFFSET_PAIR = struct.Struct("<II")
_KEPT_BYTES = 2**26
"""Bytes of unpacked parts that a chunk keeps; at least the part that is read."""


class LitDataChunk:
    """A chunk file, memory-mapped. No sample shares memory with the map."""

    def __init__(self, info: ShardInfo, directory: Path) -> None:
        """Map the file and check its size.

        Raises:
            ShardCorruptError: The file is not the one that the index describes.
            ObjectNotFoundError: The file is missing.
            StorageError: It cannot be opened.
        """
        self._path = join_under(directory, info.raw_data.basename)
        self._num_samples = info.samples
        self._data = map_file(self._path, info.raw_data.bytes)
        self._leaves: PlainLeaves | None = None  # of samples that may be plain, and have the same size
        self._plain: PlainRows | None = None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one sample.

        Raises:
            SampleIndexError: The index is not in [0, len).
            ShardCorruptError: Its bytes are not one sample.
            EncodingError: A leaf is not one of its serializer.
        """
        if not 0 <= index < self._num_samples:
            raise no_such_sample(self._path, self._num_samples, index)
        try:
            return self._sample(index)
        except FormatError as error:
            shown = str(self._path)
            raise error.with_context(f"{shown}, sample {index}", path=shown, sample=index) from error

    def _sample(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def plain_rows(self) -> PlainRows | None:
        """Return the layout of the first sample; see :class:`PlainReader`."""
        if self._plain is None and self._leaves is not None:
            self._plain = self._leaves.rows_like(self._bytes_of(0))
            self._leaves = None
        return self._plain

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Copy the bytes of some samples; see :class:`PlainReader`."""
        raise NotImplementedError

    def _bytes_of(self, index: int) -> memoryview:
        raise NotImplementedError

    def close(self) -> None:
        """Release the file; nothing can be read afterwards."""
        self._data.release()


class _RowsInPlace(LitDataChunk):
    """A chunk whose samples are consecutive in the file."""

    _rows: NDArray[np.void] | None = None

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        if self._rows is None:
            step = rows.itemsize
            self._rows = np.ndarray((self._num_samples,), f"V{step}", self._data, self._first_byte())
        self._rows.take(indexes, out=rows, mode="clip")  # writes directly, unlike the other modes

    def _first_byte(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        self._rows = None
        super().close()


# --- plain ---


class PlainChunk(_RowsInPlace):
    """Consecutive samples, each of which may be zipped."""

    def __init__(
        self,
        info: ShardInfo,
        directory: Path,
        decoder: LitDataDecoder,
        leaves: PlainLeaves | None = None,
        *,
        zipped: bool = False,
    ) -> None:
        super().__init__(info, directory)
        self._decoder, self._zipped = decoder, zipped
        offsets = read_offsets(self._data, info.samples, str(self._path))
        if offsets[0] != table_bytes(info.samples) or offsets[-1] != info.raw_data.bytes:
            raise ShardCorruptError(
                f"{self._path} must hold its samples between bytes {table_bytes(info.samples)} and "
                f"{info.raw_data.bytes}, but they start at {offsets[0]} and end at {offsets[-1]}",
                path=str(self._path),
            )
        same_size = check_lengths(offsets, 0 if zipped else decoder.sizes.size, str(self._path)) is not None
        self._leaves = leaves if same_size and not zipped else None

    def _sample(self, index: int) -> dict[str, Any]:
        start, stop = _OFFSET_PAIR.unpack_from(self._data, 4 + 4 * index)
        if not self._zipped:
            return self._decoder.decode(self._data, start, stop)
        frame = bytes(self._data[start:stop])
        return self._decoder.decode(memoryview(decompress("zstd", frame, declared_zstd_bytes(frame))))

    def _bytes_of(self, index: int) -> memoryview:
        start, stop = _OFFSET_PAIR.unpack_from(self._data, 4 + 4 * index)
        return self._data[start:stop]

    def _first_byte(self) -> int:
        return table_bytes(self._num_samples)


# --- tokens ---


class TokensChunk(_RowsInPlace):
    """Blocks of a row of values."""

    def __init__(self, info: ShardInfo, directory: Path, serializer: str, plain: PlainRows | None, size: int) -> None:
        super().__init__(info, directory)
        self._decode, self._plain, self._block_bytes = leaf_decoder(serializer), plain, size
        shown, end = str(self._path), info.raw_data.bytes
        if end < _OFFSET_PAIR.size:
            raise ShardCorruptError(f"{shown} must have 8 bytes for its offsets alone, but has {end}", path=shown)
        count, self._start = _OFFSET_PAIR.unpack_from(self._data)
        offsets = read_offsets(self._data, count, shown)
        if offsets[0] != table_bytes(count) or offsets[-1] != end:
            raise ShardCorruptError(
                f"{shown} must hold its values between bytes {table_bytes(count)} and {end}, but they start at "
                f"{offsets[0]} and end at {offsets[-1]}",
                path=shown,
            )
        check_lengths(offsets, 0, shown)
        if (end - self._start) // size != info.samples:
            raise ShardCorruptError(
                f"{shown} must have {info.samples} blocks by its index, but has {(end - self._start) // size}",
                path=shown,
            )

    def _sample(self, index: int) -> dict[str, Any]:
        start = self._start + index * self._block_bytes
        return {ONLY_COLUMN: self._decode(self._data[start : start + self._block_bytes])}

    def _first_byte(self) -> int:
        return int(self._start)


# --- frames ---

_Part = TypeVar("_Part")


class _UnpackedParts(Generic[_Part]):
    """The latest unpacked parts of a file."""

    def __init__(self) -> None:
        self._parts = dict[int, _Part]()
        self._sizes = dict[int, int]()
        self._bytes = 0
        self.get = self._parts.get
        """Return a part by its number, or None."""

    def keep(self, number: int, part: _Part, size: int) -> _Part:
        """Keep a part of a size in memory; drop the oldest parts if there is no room."""
        self._bytes += size
        while self._parts and self._bytes > _KEPT_BYTES:
            first = next(iter(self._parts))
            del self._parts[first]
            self._bytes -= self._sizes.pop(first)
        self._parts[number], self._sizes[number] = part, size
        return part


_MAGIC = b"LDFZ01\0\0"
_FRAMES_HEAD = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("samples", "<u4"), ("start", "<u8"), ("stored", "<u4"), ("raw", "<u4")])
_VERSION = 1


class FramedChunk(LitDataChunk):
    """Samples in groups, each group zipped."""

    def __init__(
        self, info: ShardInfo, directory: Path, decoder: LitDataDecoder, leaves: PlainLeaves | None = None
    ) -> None:
        super().__init__(info, directory)
        self._decoder, self._kept = decoder, _UnpackedParts[memoryview]()
        shown, end, samples = str(self._path), info.raw_data.bytes, info.samples
        if end < _FRAMES_HEAD.size:
            raise ShardCorruptError(
                f"{shown} must have {_FRAMES_HEAD.size} bytes for its head alone, but has {end}", path=shown
            )
        magic, version, _, count, self._per_frame, frames = _FRAMES_HEAD.unpack_from(self._data)
        if magic != _MAGIC or version != _VERSION:
            raise ShardCorruptError(
                f"{shown} must begin with {_MAGIC!r} and version 1, but has {magic!r}, {version}", path=shown
            )
        if count != samples:
            raise ShardCorruptError(f"{shown} must have {samples} samples by its index, but states {count}", path=shown)
        table = _FRAMES_HEAD.size + 4 * (samples + 1)
        stop = table + _FRAME.itemsize * frames
        if not self._per_frame or frames != -(-samples // self._per_frame) or stop > end:
            raise ShardCorruptError(
                f"{shown} states {frames} frames of {self._per_frame} samples in {end} bytes", path=shown
            )
        self._offsets = np.frombuffer(self._data, "<u4", samples + 1, _FRAMES_HEAD.size).astype(np.int64)
        same_size = check_lengths(self._offsets, decoder.sizes.size, shown) is not None
        self._leaves = leaves if same_size else None
        self._frames = np.frombuffer(self._data, _FRAME, frames, table).copy()
        self._check_frames(stop, end)

    def _check_frames(self, earliest: int, end: int) -> None:
        firsts = np.arange(len(self._frames), dtype=np.int64) * self._per_frame
        stops = np.minimum(firsts + self._per_frame, self._num_samples)
        raw = self._offsets[stops] - self._offsets[firsts]
        frames = self._frames
        # Starts after the end of the file first, so that sums do not overflow.
        wrong = (frames["start"] > end) | (frames["start"] < earliest) | (frames["first"] != firsts)
        wrong |= (frames["start"] + frames["stored"] > end) | (frames["samples"] != stops - firsts)
        wrong |= frames["raw"] != raw
        if wrong.any():
            worst = int(wrong.argmax())
            raise ShardCorruptError(
                f"{self._path}, sample {worst * self._per_frame}: its frame must be of samples {firsts[worst]} to "
                f"{stops[worst]}, {raw[worst]} bytes between {earliest} and {end}, but is {frames[worst]}",
                path=str(self._path),
                sample=int(worst * self._per_frame),
            )

    def _sample(self, index: int) -> dict[str, Any]:
        return self._decoder.decode(self._bytes_of(index))

    def _bytes_of(self, index: int) -> memoryview:
        number = index // self._per_frame
        start = int(self._offsets[number * self._per_frame])
        return self._frame(number)[int(self._offsets[index]) - start : int(self._offsets[index + 1]) - start]

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        numbers = indexes // self._per_frame
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            rows[places] = np.frombuffer(self._frame(number), rows.dtype)[indexes[places] - number * self._per_frame]

    def _frame(self, number: int) -> memoryview:
        part = self._kept.get(number)
        if part is not None:
            return part
        _, _, start, stored, raw = self._frames[number].tolist()
        data = decompress("zstd", bytes(self._data[start : start + stored]), raw)
        return self._kept.keep(number, memoryview(data), raw)

    def close(self) -> None:
        self._kept = _UnpackedParts()
        super().close()


# --- rows of Arrow ---

_FOOTER = struct.Struct("<I8s")
_FOOTER_MAGIC = b"LDARW01\0"
_FILE_MAGIC = b"ARROW1"


def has_arrow_rows(info: ShardInfo, directory: Path) -> bool:
    """Return whether the samples of a chunk are rows of Arrow.

    Raises:
        ShardCorruptError: The file is not the one that the index describes.
        ObjectNotFoundError: It is missing.
        StorageError: It cannot be opened.
    """
    path = join_under(directory, info.raw_data.basename)
    with map_file(path, info.raw_data.bytes) as data:
        return bool(read_offsets(data, info.samples, str(path))[-1] < info.raw_data.bytes)


class ArrowChunk(LitDataChunk, ColumnReader):
    """Samples as rows of Arrow, with Python's numbers, like those of litData."""

    def __init__(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> None:
        super().__init__(info, directory)
        shown, names = str(self._path), column_names(info) if columns is None else tuple(columns)
        with sound_arrow(shown):
            batches = list(_with_columns(self._batches(), names))
            for batch in batches:
                batch.validate(full=True)
            if batches:  # copied into one, as going through batches of 256 rows takes long
                batches = require_pyarrow().Table.from_batches(batches).combine_chunks().to_batches()
        fields = batches[0].schema if batches else ()
        columns_of_rows = {field.name: ArrowColumn(field.name, _kind(field.type), "") for field in fields}
        self._rows = ArrowRows(batches, columns_of_rows, shown, self._data)
        if len(self._rows) != info.samples:
            raise ShardCorruptError(f"{shown} must have {info.samples} rows, but has {len(self._rows)}", path=shown)

    def _batches(self) -> Iterator[Any]:
        end, start = len(self._data), table_bytes(self._num_samples)
        size, magic = _FOOTER.unpack_from(self._data, end - _FOOTER.size) if end >= _FOOTER.size else (0, b"")
        if magic != _FOOTER_MAGIC or not 0 < size <= end - _FOOTER.size - start:
            raise ShardCorruptError(
                f"{self._path} has more bytes than its samples, so it must end with rows of Arrow and "
                f"{_FOOTER_MAGIC!r}, but ends with {size} bytes and {magic!r}",
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
        """Return some samples, column by column; see :class:`ColumnReader`."""
        return self._rows.take(indexes)

    def close(self) -> None:
        self._rows.close()
        super().close()


def _with_columns(batches: Iterator[Any], names: Sequence[str]) -> Iterator[Any]:
    """Yield batches of some columns; a column that no row of the chunk has is null."""
    arrow = require_pyarrow()
    for batch in batches:
        places = {name: batch.schema.get_field_index(name) for name in names}
        arrays = [arrow.nulls(batch.num_rows) if at < 0 else batch.column(at) for at in places.values()]
        yield arrow.RecordBatch.from_arrays(arrays, list(places))


def _kind(kind: Any) -> ArrowKind:
    """Return the kind of values that litData returns for a type."""
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
        """Return values of which torch's collate creates tensors of this dtype; None for others."""
        return numbers_of(array, self.dtype) if self.dtype in _COLLATED_DTYPES and not array.null_count else None


_COLLATED_DTYPES = (np.dtype(np.int64), np.dtype(np.float64))


@dataclass(frozen=True, slots=True)
class _NumberList:
    """A list of ints or floats; not dense, as torch's collate does not create one tensor of it."""

    lists: Lists
    dtype: np.dtype[Any]
    encoding: None = None

    def read(self, array: Any) -> Read:
        below = stored(array.values)
        if below.null_count:
            return Listed(self.lists, _PythonNumber(self.dtype)).read(array)
        offsets, values = quick(offsets_of(array, large=self.lists.large)), numbers_of(below, self.dtype)
        return lambda row: values[offsets[row] : offsets[row + 1]].tolist()
