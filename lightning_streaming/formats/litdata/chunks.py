"""The chunk files of litData, in four of the ways that samples lie in them.

*Plain*: like an MDS shard without its config::

    4            uint32 n, the number of samples
    4 (n + 1)    uint32 offsets from the start of the file: where each sample starts, and where the last one ends
    any          the samples, back to back

*Zipped samples* are the same, each sample being a zstd frame. *Tokens* are the same, but read as one row of values, cut
into blocks. See ``litdata_rows`` for *rows of Arrow*.

*Frames* are groups of samples, each a zstd frame::

    24           "LDFZ01" and two zero bytes, uint16 version 1, uint16 0, uint32 n, uint32 samples of each frame, and
                 uint32 frames
    4 (n + 1)    uint32 offsets of the samples, from the start of all of them when unpacked
    24 a frame   uint32 first sample, uint32 samples, uint64 start in the file, uint32 bytes there, and uint32 bytes
                 when unpacked
    any          the frames

All integers are little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    FormatError,
    SampleIndexError,
    ShardCorruptError,
)
from lightning_streaming.files import join_under
from lightning_streaming.formats.compression import declared_zstd_bytes, decompress
from lightning_streaming.formats.litdata.leaves import leaf_decoder
from lightning_streaming.formats.litdata.samples import ONLY_COLUMN, LitDataDecoder, PlainLeaves
from lightning_streaming.formats.mds.shard import check_lengths, map_file, read_offsets, table_bytes
from lightning_streaming.formats.readers import PlainRows
from lightning_streaming.formats.shard_table import ShardInfo

_OFFSET_PAIR = struct.Struct("<II")
_KEPT_BYTES = 2**26
"""What a chunk keeps of its unpacked parts, and at least the one that is read."""


class LitDataChunk:
    """A chunk file, memory-mapped. No sample shares memory with the map."""

    def __init__(self, info: ShardInfo, directory: Path) -> None:
        """Map the file and check its size.

        Raises:
            ShardCorruptError: The file is not the one that the index describes.
            ObjectNotFoundError: It is not there.
            StorageError: It cannot be opened.
        """
        self._path = join_under(directory, info.raw_data.basename)
        self._num_samples = info.samples
        self._data = map_file(self._path, info.raw_data.bytes)
        self._leaves: PlainLeaves | None = None  # of samples that may be plain, and have as many bytes
        self._plain: PlainRows | None = None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one sample.

        Raises:
            SampleIndexError: The index is not in [0, len).
            ShardCorruptError: Its bytes are not one sample.
            EncodingError: A leaf is not what its serializer writes.
        """
        if not 0 <= index < self._num_samples:
            raise SampleIndexError(
                f"{self._path} has {self._num_samples} samples, but sample {index} was asked for",
                path=str(self._path),
                sample=index,
            )
        try:
            return self._sample(index)
        except FormatError as error:
            shown = str(self._path)
            raise error.with_context(f"{shown}, sample {index}", path=shown, sample=index) from error

    def _sample(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def plain_rows(self) -> PlainRows | None:
        """How the first sample lies in its bytes; see :class:`PlainReader`."""
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
        """Let go of the file; nothing can be read afterwards."""
        self._data.release()


class _RowsInPlace(LitDataChunk):
    """A chunk whose samples follow each other in the file."""

    _rows: NDArray[np.void] | None = None

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        if self._rows is None:
            step = rows.itemsize
            self._rows = np.ndarray((self._num_samples,), f"V{step}", self._data, self._first_byte())
        self._rows.take(indexes, out=rows, mode="clip")  # which writes to its place at once, unlike the other modes

    def _first_byte(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        self._rows = None
        super().close()


# --- plain ---


class PlainChunk(_RowsInPlace):
    """Samples one after another; each may be zipped."""

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
        are_alike = check_lengths(offsets, 0 if zipped else decoder.sizes.size, str(self._path)) is not None
        self._leaves = leaves if are_alike and not zipped else None

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


class _Kept(Generic[_Part]):
    """The parts of a file that were unpacked last."""

    def __init__(self) -> None:
        self._parts = dict[int, _Part]()
        self._sizes = dict[int, int]()
        self._bytes = 0
        self.get = self._parts.get
        """A part by its number; None if it is not there."""

    def keep(self, number: int, part: _Part, size: int) -> _Part:
        """Keep a part of so many bytes of memory, instead of the first ones if there is no room."""
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
        self._decoder, self._kept = decoder, _Kept[memoryview]()
        shown, end, samples = str(self._path), info.raw_data.bytes, info.samples
        if end < _FRAMES_HEAD.size:
            raise ShardCorruptError(
                f"{shown} must have {_FRAMES_HEAD.size} bytes for its head alone, but has {end}", path=shown
            )
        magic, version, _, found, self._per_frame, frames = _FRAMES_HEAD.unpack_from(self._data)
        if magic != _MAGIC or version != _VERSION:
            raise ShardCorruptError(
                f"{shown} must begin with {_MAGIC!r} and version 1, but has {magic!r}, {version}", path=shown
            )
        if found != samples:
            raise ShardCorruptError(
                f"{shown} must have {samples} samples by its index, but says it has {found}", path=shown
            )
        table = _FRAMES_HEAD.size + 4 * (samples + 1)
        stop = table + _FRAME.itemsize * frames
        if not self._per_frame or frames != -(-samples // self._per_frame) or stop > end:
            raise ShardCorruptError(
                f"{shown} says it has {frames} frames of {self._per_frame} samples in {end} bytes", path=shown
            )
        self._offsets = np.frombuffer(self._data, "<u4", samples + 1, _FRAMES_HEAD.size).astype(np.int64)
        are_alike = check_lengths(self._offsets, decoder.sizes.size, shown) is not None
        self._leaves = leaves if are_alike else None
        self._frames = np.frombuffer(self._data, _FRAME, frames, table).copy()
        self._check_frames(stop, end)

    def _check_frames(self, earliest: int, end: int) -> None:
        firsts = np.arange(len(self._frames), dtype=np.int64) * self._per_frame
        stops = np.minimum(firsts + self._per_frame, self._num_samples)
        raw = self._offsets[stops] - self._offsets[firsts]
        frames = self._frames
        # Of starts beyond the file first, so that sums do not wrap around.
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
        found = self._kept.get(number)
        if found is not None:
            return found
        _, _, start, stored, raw = self._frames[number].tolist()
        data = decompress("zstd", bytes(self._data[start : start + stored]), raw)
        return self._kept.keep(number, memoryview(data), raw)

    def close(self) -> None:
        self._kept = _Kept()
        super().close()
