"""Megatron-LM's tokens: two files ``x.bin`` and ``x.idx`` are a shard.

``x.bin`` has the tokens of all documents, and nothing else. ``x.idx`` has their positions::

    bytes    content
    9        b"MMIDIDX\\x00\\x00"
    8        uint64 version, which is 1
    1        uint8 code of the tokens' dtype
    8        uint64 n, the number of sequences
    8        uint64 d, the number of document borders: documents + 1
    4 n      int32 tokens of each sequence
    8 n      int64 first byte of each sequence in x.bin
    8 d      int64 document borders: the first sequence of each document, and in the end n
    n        int8 mode of each sequence; only some files have these; not read

All integers are little-endian. A sample is a document: ``{"tokens": array}``. With ``block_length`` a
sample is a block of that many tokens, across documents, and ``x.idx`` is only needed to describe the data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, FormatError, ShardCorruptError
from lightning_streaming.files import join_under
from lightning_streaming.formats.mds import map_file
from lightning_streaming.formats.npy import (
    MAX_ROW_BYTES,
    RowColumn,
    RowLayout,
    RowsReader,
    copy_part,
    file_of_rows,
    map_part,
    row_layout,
    row_shards,
    same_kind,
)
from lightning_streaming.formats.shard_format import (
    FlatColumn,
    RangedFile,
    ShardReader,
    StoredFiles,
    by_file,
    described,
    map_unknown,
    no_such_sample,
    other_shard,
)
from lightning_streaming.formats.shard_table import MAX_RAW_BYTES, FileInfo, ShardInfo, entry_error

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_LENGTH, _POINTER = np.dtype("<i4"), np.dtype("<i8")
_DTYPES: Mapping[int, str] = dict(enumerate(("|u1", "|i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1))
"""Dtypes of tokens, by code."""
_AT_ONCE = 1 << 16
"""Sequences that are checked together, so that they stay in the processor's cache."""


class _IndexHead(NamedTuple):
    """The head of an ``.idx`` file of a valid size."""

    dtype: np.dtype[Any]
    sequences: int
    borders: int

    @property
    def pointers_at(self) -> int:
        return _HEAD.size + self.sequences * _LENGTH.itemsize

    @property
    def borders_at(self) -> int:
        return self.pointers_at + self.sequences * _POINTER.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the file, without modes."""
        return self.borders_at + self.borders * _POINTER.itemsize


class MegatronFormat:
    """Pairs of ``.bin`` and ``.idx`` files, in the order of their names.

    Args:
        block_length: Tokens of a sample, which is then a block of consecutive tokens; the remainder at the end of a
            file is left out. None for a sample from each document.
    """

    is_read_in_place: ClassVar[bool] = True

    def __init__(self, block_length: int | None = None) -> None:
        self._block_length = block_length

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:
        """Yield the shards at a location; see :class:`ShardFormat`."""
        sizes = files.sizes()
        stems = dict.fromkeys(name[:-4] for name in sizes if name.endswith((".bin", ".idx")))
        if not stems:
            raise ConfigError(f"{files.shown} has no .bin and .idx files", path=files.shown)
        before = by_file(known, sizes)

        def pairs() -> Iterator[tuple[str, list[ShardInfo] | None]]:
            for stem in stems:
                data, index = f"{stem}.bin", f"{stem}.idx"
                if data not in sizes or index not in sizes:
                    path, missing = (data, index) if data in sizes else (index, data)
                    raise FormatError(
                        f"{files.shown_file(path)} has no {missing} next to it",
                        hint="move other files to another location",
                        path=files.shown_file(path),
                    )
                shards = before.get(data)
                yield stem, shards if shards and self._is_same(shards[0], sizes[index]) else None

        with closing(map_unknown(self._described, files, pairs())) as shards:
            yield from same_kind(shards, files.shown, "tokens", _dtype, "tokens")

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:  # noqa: ARG002
        """Raise IndexFormatError if an entry does not describe tokens."""
        if row_layout(info) is None:
            _dtype(info)
            _index_file(info)

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> ShardReader:
        """Open the documents, or blocks, of a shard; raises ShardCorruptError if a file is not the one described."""
        layout = row_layout(info)
        if layout is None:
            return DocumentsReader(info, directory)
        file, first = file_of_rows(info, layout, directory)
        path = join_under(directory, file.basename)
        data = map_file(path, file.bytes) if first is None else map_part(path, file.bytes, 0, info, layout)
        return RowsReader(path, data, 0, info.samples, layout, columns)

    def narrowed(self, info: ShardInfo, columns: Sequence[str] | None) -> ShardInfo:  # noqa: ARG002
        """Return the same shard: there is only one column."""
        return info

    def read_metadata(self, stored: RangedFile) -> None:
        """Read nothing: a ``.bin`` file has only tokens; see :class:`RangeReadableFormat`."""

    def unpack(self, info: ShardInfo, metadata: None, stored: RangedFile, destination: Path) -> int:  # noqa: ARG002
        """Copy the blocks of a part; see :class:`RangeReadableFormat`."""
        layout = row_layout(info)
        if layout is None:
            raise entry_error(info, "is of a part of a file, but not of blocks")
        return copy_part(info, layout, 0, stored, destination)

    def _is_same(self, shard: ShardInfo, index_bytes: int) -> bool:
        if shard.format != "megatron":
            return False
        # Of the index file of blocks only the dtype matters.
        same_index = shard.raw_meta is None or shard.raw_meta.bytes == index_bytes
        return same_index and described(shard).get("block_length") == self._block_length

    def _described(self, files: StoredFiles, stem: str) -> list[ShardInfo]:
        sizes, data, index = files.sizes(), f"{stem}.bin", f"{stem}.idx"
        raw_data = FileInfo(basename=data, bytes=sizes[data], hashes={})
        head, shown = _stored_head(files, raw_data, index), files.shown_file(raw_data.basename)
        if self._block_length is not None:
            row_bytes = self._block_length * head.dtype.itemsize
            if row_bytes > MAX_ROW_BYTES:
                raise ConfigError(
                    f"block_length={self._block_length} is more than {MAX_ROW_BYTES} bytes of {shown}",
                    option="block_length",
                    path=shown,
                )
            layout = RowLayout(row_bytes, (RowColumn("tokens", head.dtype, (self._block_length,), 0),))
            facts = {"block_length": self._block_length}
            return row_shards("megatron", raw_data, raw_data.bytes // row_bytes, layout, facts)
        if head.borders - 1 > MAX_RAW_BYTES:
            raise FormatError(f"{shown} has {head.borders - 1} documents, more than {MAX_RAW_BYTES}", path=shown)
        raw_meta = FileInfo(basename=index, bytes=sizes[index], hashes={})
        columns = {"tokens": f"ndarray:{head.dtype.name}"}
        return [
            other_shard("megatron", head.borders - 1, raw_data, columns, {"dtype": head.dtype.str}, raw_meta=raw_meta)
        ]


def _stored_head(files: StoredFiles, raw_data: FileInfo, index: str) -> _IndexHead:
    """Read the head of an index file, and check a few of its numbers; opening the shard checks all."""
    shown, size = files.shown_file(index), files.sizes()[index]
    head = _read_head(files.read_range(index, 0, min(size, _HEAD.size)), size, shown)

    def number(place: int, dtype: np.dtype[Any]) -> int:
        data = files.read_range(index, place, place + dtype.itemsize)
        return int(np.frombuffer(data.ljust(dtype.itemsize, b"\0"), dtype)[0])

    tokens_end = 0
    if head.sequences:
        length = number(head.pointers_at - _LENGTH.itemsize, _LENGTH)
        tokens_end = number(head.borders_at - _POINTER.itemsize, _POINTER) + length * head.dtype.itemsize
    _check_ends(head, number(head.bytes - _POINTER.itemsize, _POINTER), tokens_end, raw_data, shown)
    return head


def _read_head(data: bytes | memoryview, size: int, shown: str) -> _IndexHead:
    """Read the head of an index file.

    Raises:
        ShardCorruptError: It is not an index file, or its size contradicts its head.
    """
    if len(data) < _HEAD.size or bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise ShardCorruptError(f"{shown} does not begin like an .idx file, but with {bytes(data[:9])!r}", path=shown)
    _, version, code, sequences, borders = _HEAD.unpack_from(data)
    if version != 1 or code not in _DTYPES or not borders:
        raise ShardCorruptError(
            f"{shown} has version {version}, dtype code {code} and {borders} document borders; supported are version "
            f"1, codes 1 to {len(_DTYPES)}, and at least one border",
            path=shown,
        )
    head = _IndexHead(np.dtype(_DTYPES[code]), sequences, borders)
    if size not in (head.bytes, head.bytes + sequences):
        raise ShardCorruptError(
            f"{shown} must have {head.bytes} bytes for {sequences} sequences and {borders} document borders, or one "
            f"more for each sequence, but has {size}",
            path=shown,
        )
    return head


def _check_ends(head: _IndexHead, last_border: int, tokens_end: int, raw_data: FileInfo, shown: str) -> None:
    if last_border != head.sequences:
        raise ShardCorruptError(
            f"{shown} has {head.sequences} sequences, but its last document ends with number {last_border}", path=shown
        )
    if tokens_end != raw_data.bytes:
        raise ShardCorruptError(
            f"{shown} says that {raw_data.basename} has {tokens_end} bytes of tokens, but it has {raw_data.bytes}",
            path=shown,
        )


class Sequences(NamedTuple):
    """A whole ``.idx`` file that was checked; the arrays are views of it."""

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    """Tokens of each, of shape (sequences,)."""
    pointers: NDArray[np.int64]
    """First byte of each, of shape (sequences,)."""
    borders: NDArray[np.int64]
    """First sequence of each document, and the end; of shape (documents + 1,)."""

    def starts(self, data_bytes: int) -> NDArray[np.int64]:
        """Return the first byte of each document, and the end of the last; of shape (documents + 1,).

        Args:
            data_bytes: Bytes of the data file.
        """
        return np.append(self.pointers, data_bytes)[self.borders]


def read_sequences(data: bytes | memoryview, info: ShardInfo, shown: str) -> Sequences:
    """Read an index file, and check all its numbers.

    Args:
        data: The whole file.
        info: The shard, as its index describes it.
        shown: Name of the file in errors.

    Raises:
        ShardCorruptError: It contradicts itself, the size of the data file, or the index.
    """
    head = _read_head(data, len(data), shown)
    if (head.dtype, head.borders - 1) != (_dtype(info), info.samples):
        raise ShardCorruptError(
            f"{shown} has {head.borders - 1} documents of {head.dtype}, but its index says {info.samples} of "
            f"{_dtype(info)}; the file has changed since",
            path=shown,
        )
    sequences = Sequences(
        head.dtype,
        np.frombuffer(data, _LENGTH, head.sequences, _HEAD.size),
        np.frombuffer(data, _POINTER, head.sequences, head.pointers_at),
        np.frombuffer(data, _POINTER, head.borders, head.borders_at),
    )
    end, size = 0, head.dtype.itemsize
    for first in range(0, head.sequences, _AT_ONCE):  # each sequence begins where the one before it ends
        lengths = sequences.lengths[first : first + _AT_ONCE].astype(np.int64)
        stops = end + np.cumsum(lengths * size)
        is_wrong = (sequences.pointers[first : first + _AT_ONCE] != stops - lengths * size) | (lengths < 0)
        if is_wrong.any():
            worst = int(is_wrong.argmax())
            raise ShardCorruptError(
                f"{shown}, sequence {first + worst}: must begin at byte {stops[worst] - lengths[worst] * size}, but "
                f"has {lengths[worst]} tokens from byte {sequences.pointers[first + worst]}",
                path=shown,
            )
        end = int(stops[-1])
    borders = sequences.borders
    _check_ends(head, int(borders[-1]), end, info.raw_data, shown)
    before = borders[0]
    for first in range(0, head.borders, _AT_ONCE):
        some = borders[first : first + _AT_ONCE]
        if some[0] < before or (np.diff(some) < 0).any() or borders[0]:
            raise ShardCorruptError(f"{shown} has document borders that decrease, or do not begin with 0", path=shown)
        before = some[-1]
    return sequences


class DocumentsReader:
    """The documents of a shard. No sample shares memory with the maps, so samples outlive the reader."""

    def __init__(self, info: ShardInfo, directory: Path) -> None:
        """Map both files and check them; errors are those of :class:`ShardFormat`."""
        index = _index_file(info)
        index_path = join_under(directory, index.basename)
        self._path = join_under(directory, info.raw_data.basename)
        self._index = map_file(index_path, index.bytes)
        self._sequences: Sequences | None = read_sequences(self._index, info, str(index_path))
        self._data = map_file(self._path, info.raw_data.bytes)
        self._num_samples = info.samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the tokens of a document, of shape (tokens,)."""
        assert self._sequences is not None, "it is open"
        if not 0 <= index < self._num_samples:
            raise no_such_sample(self._path, self._num_samples, index)
        dtype, _, pointers, borders = self._sequences
        whole, ends = len(self._data), borders[index : index + 2]
        start, stop = (int(pointers[border]) if border < len(pointers) else whole for border in ends)
        return {"tokens": np.frombuffer(self._data, dtype, (stop - start) // dtype.itemsize, start).copy()}

    def flat_column(self, name: str) -> FlatColumn:  # noqa: ARG002  # there is only one
        """Return the positions of the tokens of each document."""
        assert self._sequences is not None, "it is open"
        starts, dtype = self._sequences.starts(len(self._data)), self._sequences.dtype
        return FlatColumn(self._data, dtype, starts[:-1], np.diff(starts) // dtype.itemsize)

    def close(self) -> None:
        """Release the files; nothing can be read afterwards."""
        self._sequences = None
        self._index.release()
        self._data.release()


class DocumentLengths(NamedTuple):
    """The numbers of tokens of documents, from the ``.idx`` file alone."""

    info: ShardInfo
    constant: int | None = None
    is_in_offsets: bool = True

    def read_remote(self, read: Callable[[FileInfo, int, int], bytes]) -> NDArray[np.int64]:
        """Read the lengths from a remote ``.idx`` file; see :class:`ArrayLengths`."""
        file = _index_file(self.info)
        return self._counts(read(file, 0, file.bytes), file.basename)

    def read_local(self, directory: Path) -> NDArray[np.int64]:
        """Read the lengths from the local ``.idx`` file; see :class:`ArrayLengths`."""
        file = _index_file(self.info)
        path = join_under(directory, file.basename)
        data = map_file(path, file.bytes)
        counts = self._counts(data, str(path))
        data.release()
        return counts

    def _counts(self, data: bytes | memoryview, shown: str) -> NDArray[np.int64]:
        sequences = read_sequences(data, self.info, shown)
        lengths: NDArray[np.int64] = np.diff(sequences.starts(self.info.raw_data.bytes)) // sequences.dtype.itemsize
        return lengths


def _index_file(info: ShardInfo) -> FileInfo:
    if info.raw_meta is None:
        raise entry_error(info, "names no .idx file")
    return info.raw_meta


def _dtype(info: ShardInfo) -> np.dtype[Any]:
    """Return the dtype of a shard's tokens according to its index entry.

    Raises:
        IndexFormatError: The entry does not state it.
    """
    layout = row_layout(info)
    if layout is not None:
        return layout.columns[0].dtype
    dtype = described(info).get("dtype")
    if dtype not in _DTYPES.values():
        raise entry_error(info, f"has tokens of dtype {dtype!r}")
    return np.dtype(dtype)
