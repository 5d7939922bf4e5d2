"""Megatron-LM's tokens: of two files ``x.bin`` and ``x.idx``, which are a shard.

``x.bin`` is the tokens of all documents, and nothing else. ``x.idx`` says where they are::

    bytes    content
    9        b"MMIDIDX\\x00\\x00"
    8        uint64 version, which is 1
    1        uint8 code of the tokens' dtype
    8        uint64 n, the number of sequences
    8        uint64 d, the number of document borders: documents + 1
    4 n      int32 tokens of each sequence
    8 n      int64 first byte of each sequence in x.bin
    8 d      int64 document borders: the first sequence of each document, and in the end n
    n        int8 mode of each sequence; only some files have these, and they are not read

All integers are little-endian. A sample is a document: ``{"tokens": array}``. Or it is a block of so many tokens,
whatever documents they are of, and then ``x.idx`` is only needed to describe the data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    ConfigError,
    FormatError,
    IndexFormatError,
    SampleIndexError,
    ShardCorruptError,
)
from lightning_streaming.files import join_under
from lightning_streaming.formats.arrays.row_files import (
    MOST_ROW_BYTES,
    RowColumn,
    RowLayout,
    RowsReader,
    all_alike,
    copy_part,
    file_of_rows,
    map_part,
    row_layout,
    row_shards,
)
from lightning_streaming.formats.in_order import known_or_found
from lightning_streaming.formats.mds.shard import map_file
from lightning_streaming.formats.other_formats import (
    RangedFile,
    ShardReader,
    StoredFiles,
    by_file,
    described,
    other_shard,
)
from lightning_streaming.formats.plain_rows import FlatColumn
from lightning_streaming.formats.shard_table import MAX_RAW_BYTES, FileInfo, ShardInfo

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_LENGTH, _POINTER = np.dtype("<i4"), np.dtype("<i8")
_DTYPES: Mapping[int, str] = dict(enumerate(("|u1", "|i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1))
"""Dtypes of tokens, by code."""
_AT_ONCE = 1 << 16
"""Sequences that are checked together, so that what that takes stays in the processor's cache."""


class _IndexHead(NamedTuple):
    """The head of an ``.idx`` file of the right size."""

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
        """Of the file, without modes."""
        return self.borders_at + self.borders * _POINTER.itemsize


class MegatronFormat:
    """Pairs of ``.bin`` and ``.idx`` files, in the order of their names.

    Args:
        block_length: Tokens of a sample, which is then a block of tokens that follow each other; what is left at the
            end of a file is left out. None for a sample from each document.
    """

    is_read_in_place: ClassVar[bool] = True

    def __init__(self, block_length: int | None = None) -> None:
        self._block_length = block_length

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:
        """The shards under a place; see :class:`OtherFormat`."""
        sizes = files.sizes()
        stems = [name[:-4] for name in sizes if name.endswith((".bin", ".idx"))]
        if not stems:
            raise ConfigError(f"there are no .bin and .idx files at {files.shown}", path=files.shown)
        with closing(known_or_found(self._described, files, self._asked(files, stems, known))) as found:
            yield from all_alike(found, files.shown, "tokens", _dtype, "tokens")

    def _asked(
        self, files: StoredFiles, stems: Sequence[str], known: Mapping[str, ShardInfo]
    ) -> Iterator[tuple[str, list[ShardInfo] | None]]:
        """Each pair of files by its stem, with what is known of it."""
        sizes = files.sizes()
        before = by_file(known, sizes)
        for stem in dict.fromkeys(stems):
            data, index = f"{stem}.bin", f"{stem}.idx"
            if data not in sizes or index not in sizes:
                there, missing = (data, index) if data in sizes else (index, data)
                raise FormatError(
                    f"{files.shown_file(there)} has no {missing} next to it",
                    hint="put other files elsewhere",
                    path=files.shown_file(there),
                )
            shards = before.get(data)
            yield stem, shards if shards and self._is_same(shards[0], sizes[index]) else None

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:  # noqa: ARG002
        """Refuse an entry that describes no tokens."""
        if row_layout(info) is None:
            _dtype(info)
            if info.raw_meta is None:
                raise IndexFormatError(
                    f"the index entry of {info.raw_data.basename} names no .idx file", path=info.raw_data.basename
                )

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> ShardReader:
        """The documents, or blocks, of a shard; ShardCorruptError where a file is not the one that was described."""
        layout = row_layout(info)
        if layout is None:
            return DocumentsReader(info, directory)
        file, first = file_of_rows(info, layout, directory)
        path = join_under(directory, file.basename)
        data = map_file(path, file.bytes) if first is None else map_part(path, file.bytes, 0, info, layout)
        return RowsReader(path, data, 0, info.samples, layout, columns)

    def narrowed(self, info: ShardInfo, columns: Sequence[str] | None) -> ShardInfo:  # noqa: ARG002
        """The same shard: there is but one column."""
        return info

    def look(self, stored: RangedFile) -> None:
        """Nothing: a ``.bin`` file has tokens alone; see :class:`PartsFormat`."""

    def unpack(self, info: ShardInfo, known: None, stored: RangedFile, destination: Path) -> int:  # noqa: ARG002
        """Copy the blocks of a part; see :class:`PartsFormat`."""
        layout = row_layout(info)
        if layout is None:
            raise IndexFormatError(
                f"the index entry of {info.raw_data.basename} is of a part of a file, but of no blocks",
                path=info.raw_data.basename,
            )
        return copy_part(info, layout, 0, stored, destination)

    def _is_same(self, shard: ShardInfo, index_bytes: int) -> bool:
        if shard.format != "megatron":
            return False
        # The index file of blocks tells but the dtype.
        same_index = shard.raw_meta is None or shard.raw_meta.bytes == index_bytes
        return same_index and described(shard).get("block_length") == self._block_length

    def _described(self, files: StoredFiles, stem: str) -> list[ShardInfo]:
        sizes, data, index = files.sizes(), f"{stem}.bin", f"{stem}.idx"
        raw_data = FileInfo(basename=data, bytes=sizes[data], hashes={})
        head, shown = _look_afar(files, raw_data, index), files.shown_file(raw_data.basename)
        if self._block_length is not None:
            row_bytes = self._block_length * head.dtype.itemsize
            if row_bytes > MOST_ROW_BYTES:
                raise ConfigError(
                    f"block_length={self._block_length} is more than {MOST_ROW_BYTES} bytes of {shown}",
                    option="block_length",
                    path=shown,
                )
            layout = RowLayout(row_bytes, (RowColumn("tokens", head.dtype, (self._block_length,), 0),))
            facts = {"block_length": self._block_length}
            return row_shards("megatron", raw_data, raw_data.bytes // row_bytes, layout, facts)
        if head.borders - 1 > MAX_RAW_BYTES:
            raise FormatError(f"{shown} has {head.borders - 1} documents, over {MAX_RAW_BYTES}", path=shown)
        raw_meta = FileInfo(basename=index, bytes=sizes[index], hashes={})
        columns = {"tokens": f"ndarray:{head.dtype.name}"}
        return [
            other_shard("megatron", head.borders - 1, raw_data, columns, {"dtype": head.dtype.str}, raw_meta=raw_meta)
        ]


def _look_afar(files: StoredFiles, raw_data: FileInfo, index: str) -> _IndexHead:
    """The head of an index file, where a few of its numbers go with its data file; whoever opens it checks all."""
    shown, size = files.shown_file(index), files.sizes()[index]
    head = _read_head(files.read_range(index, 0, min(size, _HEAD.size)), size, shown)

    def number(place: int, dtype: np.dtype[Any]) -> int:
        found = files.read_range(index, place, place + dtype.itemsize)
        return int(np.frombuffer(found.ljust(dtype.itemsize, b"\0"), dtype)[0])

    tokens_end = 0
    if head.sequences:
        length = number(head.pointers_at - _LENGTH.itemsize, _LENGTH)
        tokens_end = number(head.borders_at - _POINTER.itemsize, _POINTER) + length * head.dtype.itemsize
    _check_ends(head, number(head.bytes - _POINTER.itemsize, _POINTER), tokens_end, raw_data, shown)
    return head


def _read_head(data: bytes | memoryview, size: int, shown: str) -> _IndexHead:
    """Read the head of an index file.

    Raises:
        ShardCorruptError: It is no such file, or has other bytes than that says.
    """
    if len(data) < _HEAD.size or bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise ShardCorruptError(
            f"{shown} does not begin as an .idx file does, but with {bytes(data[:9])!r}", path=shown
        )
    _, version, code, sequences, borders = _HEAD.unpack_from(data)
    if version != 1 or code not in _DTYPES or not borders:
        raise ShardCorruptError(
            f"{shown} is of version {version} and dtype code {code}, with {borders} document borders; version 1, codes "
            f"1 to {len(_DTYPES)}, and at least one border can be read",
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
    """An ``.idx`` file that was checked as a whole; the arrays are views of it."""

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    """Tokens, of shape (sequences,)."""
    pointers: NDArray[np.int64]
    """First bytes, of shape (sequences,)."""
    borders: NDArray[np.int64]
    """First sequence of each document, and the end; of shape (documents + 1,)."""

    def starts(self, data_bytes: int) -> NDArray[np.int64]:
        """First byte of each document, and the end of the last; of shape (documents + 1,).

        Args:
            data_bytes: Of the data file.
        """
        return np.append(self.pointers, data_bytes)[self.borders]


def read_sequences(data: bytes | memoryview, info: ShardInfo, shown: str) -> Sequences:
    """Read an index file, and check every number of it.

    Args:
        data: The whole file.
        info: The shard, as its index describes it.
        shown: What to call the file in an error.

    Raises:
        ShardCorruptError: It contradicts itself, the size of the data file, or the index.
    """
    head = _read_head(data, len(data), shown)
    if (head.dtype, head.borders - 1) != (_dtype(info), info.samples):
        raise ShardCorruptError(
            f"{shown} has {head.borders - 1} documents of {head.dtype}, but {info.samples} of {_dtype(info)} by its "
            "index; the file was changed since",
            path=shown,
        )
    found = Sequences(
        head.dtype,
        np.frombuffer(data, _LENGTH, head.sequences, _HEAD.size),
        np.frombuffer(data, _POINTER, head.sequences, head.pointers_at),
        np.frombuffer(data, _POINTER, head.borders, head.borders_at),
    )
    tokens_end = _checked_end(found, shown)
    _check_ends(head, int(found.borders[-1]), tokens_end, info.raw_data, shown)
    before = found.borders[0]
    for first in range(0, head.borders, _AT_ONCE):
        some = found.borders[first : first + _AT_ONCE]
        if some[0] < before or (np.diff(some) < 0).any() or found.borders[0]:
            raise ShardCorruptError(f"{shown} has document borders that go back, or do not begin with 0", path=shown)
        before = some[-1]
    return found


def _checked_end(sequences: Sequences, shown: str) -> int:
    """Where the last sequence ends, if each begins where the one before it ends."""
    end, size = 0, sequences.dtype.itemsize
    for first in range(0, len(sequences.lengths), _AT_ONCE):
        lengths = sequences.lengths[first : first + _AT_ONCE].astype(np.int64)
        stops = end + np.cumsum(lengths * size)
        is_wrong = (sequences.pointers[first : first + _AT_ONCE] != stops - lengths * size) | (lengths < 0)
        if is_wrong.any():
            worst = int(is_wrong.argmax())
            raise ShardCorruptError(
                f"{shown}, sequence {first + worst}: expected to begin at byte {stops[worst] - lengths[worst] * size}, "
                f"but it is said to be {lengths[worst]} tokens from {sequences.pointers[first + worst]} on",
                path=shown,
            )
        end = int(stops[-1])
    return end


class DocumentsReader:
    """The documents of a shard. No sample shares memory with the maps, so samples outlive the reader."""

    def __init__(self, info: ShardInfo, directory: Path) -> None:
        """Map both files and check them; errors are those of :class:`OtherFormat`."""
        if info.raw_meta is None:
            raise IndexFormatError(
                f"the index entry of {info.raw_data.basename} names no .idx file", path=info.raw_data.basename
            )
        index_path = join_under(directory, info.raw_meta.basename)
        self._path = join_under(directory, info.raw_data.basename)
        self._index = map_file(index_path, info.raw_meta.bytes)
        self._sequences: Sequences | None = read_sequences(self._index, info, str(index_path))
        self._data = map_file(self._path, info.raw_data.bytes)
        self._num_samples = info.samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The tokens of a document, of shape (tokens,)."""
        assert self._sequences is not None, "it is open"
        if not 0 <= index < self._num_samples:
            raise SampleIndexError(
                f"{self._path} has {self._num_samples} samples, but sample {index} was asked for",
                path=str(self._path),
                sample=index,
            )
        dtype, _, pointers, borders = self._sequences
        whole, ends = len(self._data), borders[index : index + 2]
        start, stop = (int(pointers[border]) if border < len(pointers) else whole for border in ends)
        return {"tokens": np.frombuffer(self._data, dtype, (stop - start) // dtype.itemsize, start).copy()}

    def flat_column(self, name: str) -> FlatColumn:  # noqa: ARG002  # there is but one
        """Where the tokens of each document lie."""
        assert self._sequences is not None, "it is open"
        starts, dtype = self._sequences.starts(len(self._data)), self._sequences.dtype
        return FlatColumn(self._data, dtype, starts[:-1], np.diff(starts) // dtype.itemsize)

    def close(self) -> None:
        """Let go of the files; nothing can be read afterwards."""
        self._sequences = None
        self._index.release()
        self._data.release()


class DocumentLengths(NamedTuple):
    """How the tokens of documents are counted: by the ``.idx`` file alone."""

    info: ShardInfo
    constant: int | None = None
    told_by_offsets: bool = True

    def read_afar(self, read: Callable[[FileInfo, int, int], bytes]) -> NDArray[np.int64]:
        """The lengths by the ``.idx`` file, which is elsewhere; see :class:`ArrayLengths`."""
        file = self._file()
        return self._counted(read(file, 0, file.bytes), file.basename)

    def read_here(self, directory: Path) -> NDArray[np.int64]:
        """The lengths by the ``.idx`` file; see :class:`ArrayLengths`."""
        path = join_under(directory, self._file().basename)
        data = map_file(path, self._file().bytes)
        found = self._counted(data, str(path))
        data.release()
        return found

    def _file(self) -> FileInfo:
        if self.info.raw_meta is None:
            raise IndexFormatError(
                f"the index entry of {self.info.raw_data.basename} names no .idx file", path=self.info.raw_data.basename
            )
        return self.info.raw_meta

    def _counted(self, data: bytes | memoryview, shown: str) -> NDArray[np.int64]:
        sequences = read_sequences(data, self.info, shown)
        lengths: NDArray[np.int64] = np.diff(sequences.starts(self.info.raw_data.bytes)) // sequences.dtype.itemsize
        return lengths


def _dtype(info: ShardInfo) -> np.dtype[Any]:
    """Of the tokens of a shard, by its entry in the index.

    Raises:
        IndexFormatError: That does not say it.
    """
    layout = row_layout(info)
    if layout is not None:
        return layout.columns[0].dtype
    said = described(info).get("dtype")
    if said not in _DTYPES.values():
        raise IndexFormatError(
            f"the index entry of {info.raw_data.basename} has tokens of dtype {said!r}", path=info.raw_data.basename
        )
    return np.dtype(said)
