"""The MDS shard file: its bytes, its reader, and the table of offsets that split shards share.

    bytes        content
    4            uint32 n, the number of samples
    4 (n + 1)    uint32 offsets from the start of the file: where each sample starts, and where the last one ends
    any          config, JSON text that ends where the first sample starts
    any          the samples, back to back

All integers are little-endian. The config repeats the columns of the index, which is authoritative. The meta
file of a split shard begins with the same table of offsets.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    ConfigError,
    FormatError,
    ObjectNotFoundError,
    ShardCorruptError,
    StorageError,
)
from lightning_streaming.files import join_under, open_regular
from lightning_streaming.formats.mds.samples import plain_schema, read_decoder
from lightning_streaming.formats.readers import PlainRows, no_such_sample
from lightning_streaming.formats.shard_table import MAX_RAW_BYTES, ShardInfo, check_columns, shared_entry

_COUNT = struct.Struct("<I")
_OFFSET_PAIR = struct.Struct("<II")
_MORE_FILES = "each shard that is read keeps a file open: allow more files (ulimit -n), or write larger shards"

# --- files of all formats ---


def table_bytes(num_samples: int) -> int:
    """Return the bytes of the table of that many samples."""
    return 4 + 4 * (num_samples + 1)


def read_offsets(start: memoryview, num_samples: int, shown: str) -> NDArray[np.int64]:
    """Read the table.

    Args:
        start: The file that begins with it; bytes after it are not read.
        num_samples: Number of samples according to the index.
        shown: Name of the file in errors.

    Returns:
        Array of shape (num_samples + 1,).

    Raises:
        ShardCorruptError: The file is too short, or states another number of samples.
    """
    stop = table_bytes(num_samples)
    if stop > len(start):
        raise ShardCorruptError(
            f"{shown} must have {stop} bytes for its offsets alone, but has {len(start)}", path=shown
        )
    (count,) = _COUNT.unpack_from(start)
    if count != num_samples:
        raise ShardCorruptError(f"{shown} must have {num_samples} samples by its index, but states {count}", path=shown)
    return np.frombuffer(start, "<u4", num_samples + 1, 4).astype(np.int64)


def write_offsets(offsets: NDArray[np.int64]) -> bytes:
    """Return the table of offsets of shape (samples + 1,)."""
    return _COUNT.pack(len(offsets) - 1) + offsets.astype("<u4").tobytes()


def check_lengths(
    offsets: NDArray[np.int64], smallest_bytes: int, shown: str, largest_bytes: int | None = None
) -> int | None:
    """Raise ShardCorruptError if offsets decrease, or a sample is smaller or larger than possible.

    Args:
        offsets: The result of :func:`read_offsets`.
        smallest_bytes: Smallest size of a sample.
        shown: Name of the file in errors.
        largest_bytes: Largest size of a sample; None if it varies.

    Returns:
        The bytes of each sample if all have the same size; else None, also without samples.

    Raises:
        ShardCorruptError: Names the worst sample.
    """
    lengths = np.diff(offsets)
    if not len(lengths):
        return None
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < smallest_bytes:
        worst, expected = int(lengths.argmin()), f"at least {smallest_bytes}"
    elif largest_bytes is not None and longest > largest_bytes:
        worst, expected = int(lengths.argmax()), f"no more than {largest_bytes}"
    else:
        return shortest if shortest == longest else None
    raise ShardCorruptError(
        f"{shown}, sample {worst}: expected {expected} bytes, but the offsets state {lengths[worst]}",
        path=shown,
        sample=worst,
    )


def read_places(
    table: memoryview, info: ShardInfo, shown: str, earliest: int, smallest_bytes: int, largest_bytes: int | None = None
) -> tuple[NDArray[np.int64], int | None]:
    """Read the offsets of consecutive samples up to the end of their file.

    Args:
        table: The file that begins with them.
        info: The shard, as its index describes it.
        shown: Name of the file in errors.
        earliest: Smallest offset of the first sample.
        smallest_bytes: Smallest size of a sample.
        largest_bytes: Largest size of a sample; None if it varies.

    Returns:
        The results of :func:`read_offsets` and :func:`check_lengths`.

    Raises:
        ShardCorruptError: The offsets contradict the index.
    """
    offsets, end = read_offsets(table, info.samples, shown), info.raw_data.bytes
    is_late = offsets[0] > earliest and info.raw_meta is not None  # before the samples of an MDS file is its config
    if offsets[0] < earliest or is_late or offsets[-1] != end:
        where = f"bytes {earliest} and {end}" + (f" of {info.raw_data.basename}" if info.raw_meta else "")
        raise ShardCorruptError(
            f"{shown} must hold its samples between {where}, but they start at {offsets[0]} and end at {offsets[-1]}",
            path=shown,
        )
    return offsets, check_lengths(offsets, smallest_bytes, shown, largest_bytes)


def map_file(path: Path, expected_bytes: int, start: int = 0, stop: int | None = None) -> memoryview:
    """Map a file of a known size, or some of its bytes; an empty range is an empty view.

    While the map is alive it holds a shared lock on the file, so that a cache knows that it is in use.

    Args:
        path: The file.
        expected_bytes: Its size.
        start: The first byte to map.
        stop: The byte after the last, if the file has it; None for its end.

    Raises:
        ShardCorruptError: It has another size.
        ObjectNotFoundError: It is missing.
        StorageError: It cannot be opened.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            with suppress(OSError):  # a filesystem without locks, or a file that is being removed
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(file.fileno())
            if status.st_nlink and status.st_size != expected_bytes:
                raise ShardCorruptError(
                    f"{path} must have {expected_bytes} bytes by its index, but has {status.st_size}", path=str(path)
                )
            if status.st_nlink:
                # The map keeps the file open, and so the lock. Files are replaced by renaming and never truncated.
                return _mapped(file.fileno(), start, expected_bytes if stop is None else min(stop, expected_bytes))
    except FileNotFoundError:
        pass
    except OSError as error:
        hint = _MORE_FILES if error.errno == errno.EMFILE else None
        raise StorageError(f"{path} cannot be opened: {error}", hint=hint, path=str(path)) from error
    # It may also have been removed from a cache between opening and locking it.
    raise ObjectNotFoundError(f"{path} is missing, but an index lists it", path=str(path))


def _mapped(descriptor: int, start: int, stop: int) -> memoryview:
    if stop <= start:
        return memoryview(b"")
    ahead = start % mmap.ALLOCATIONGRANULARITY
    length, offset = stop - start + ahead, start - ahead
    view = memoryview(mmap.mmap(descriptor, length, access=mmap.ACCESS_READ, offset=offset))
    return view[ahead:] if ahead else view


class Decoder(Protocol):
    """Decodes the bytes of samples to their requested columns."""

    @property
    def smallest_bytes(self) -> int:
        """Smallest size of a sample."""
        ...

    def decode(self, data: memoryview, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """Decode the sample at these positions of its data file, or all of the data.

        Raises:
            FormatError: The bytes are not a sample.
        """
        ...


class MappedShard:
    """The raw files of a shard, memory-mapped. No sample shares memory with the maps, so samples outlive the reader."""

    def __init__(self, info: ShardInfo, directory: Path, decoder: Decoder) -> None:
        """Map the raw files and check their sizes.

        Raises:
            ShardCorruptError: A file is not the one that the index describes.
            ObjectNotFoundError: A file is missing.
            StorageError: A file cannot be opened.
        """
        table = info.raw_meta or info.raw_data
        self._path, self._table_path = (join_under(directory, file.basename) for file in (info.raw_data, table))
        self._num_samples, self._decoder = info.samples, decoder
        self._values: tuple[tuple[str, Callable[[int], Any]], ...] = ()
        """A function from number to value for each column, if samples are alike and any bytes are valid."""
        self._table = map_file(self._table_path, table.bytes)
        self._data = self._table if info.raw_meta is None else map_file(self._path, info.raw_data.bytes)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one sample.

        Raises:
            SampleIndexError: The index is not in [0, len).
            ShardCorruptError: Its bytes are not one sample.
            EncodingError: A column does not hold what its encoding says.
        """
        if not 0 <= index < self._num_samples:
            raise no_such_sample(self._path, self._num_samples, index)
        if self._values:
            return {name: value(index) for name, value in self._values}
        start, stop = _OFFSET_PAIR.unpack_from(self._table, 4 + 4 * index)
        try:
            return self._decoder.decode(self._data, start, stop)
        except FormatError as error:
            shown = str(self._path)
            raise error.with_context(f"{shown}, sample {index}", path=shown, sample=index) from error

    def close(self) -> None:
        """Release the files; nothing can be read afterwards. A map is closed with its last slice.

        Only the traceback of a failed decode can hold such a slice longer.
        """
        self._table.release()
        self._data.release()


# --- MDS files ---


class MDSReader(MappedShard):
    """A shard file."""

    def __init__(
        self,
        info: ShardInfo,
        directory: Path,
        *,
        allow_unsafe_types: bool = False,
        columns: Sequence[str] | None = None,
        as_files: Collection[str] = (),
    ) -> None:
        """Map the raw file and check its size and its offsets; arguments and errors are those of ``open_shard``."""
        check_columns(info, columns)
        decoder = read_decoder(info, allow_unsafe_types=allow_unsafe_types, columns=columns, as_files=as_files)
        super().__init__(info, directory, decoder)
        self._schema = plain_schema(info, columns)
        self._plain: PlainRows | None = None
        self._rows: NDArray[np.void] | None = None
        smallest = decoder.smallest_bytes
        largest = None if decoder.header.size else smallest
        earliest = table_bytes(info.samples)
        _, self._sample_bytes = read_places(self._table, info, str(self._path), earliest, smallest, largest)
        plain = None if decoder.header.size else self.plain_rows()
        if plain is not None and self._schema is not None and self._rows is not None:
            self._values = self._schema.values_of(self._rows, plain)

    def plain_rows(self) -> PlainRows | None:
        """Return the layout of the first sample, if it may be plain and all samples have the same size; else None."""
        if self._plain is None and self._schema is not None and self._sample_bytes is not None:
            start = len(self._data) - self._num_samples * self._sample_bytes
            self._plain = self._schema.rows_like(self._data[start : start + self._sample_bytes])
            if self._plain is None:
                self._schema = None
            else:
                self._rows = np.ndarray((self._num_samples,), self._plain.row, self._data, start)
        return self._plain

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Copy the bytes of some samples; see :class:`PlainReader`."""
        assert self._rows is not None, "it has plain rows"
        self._rows.take(indexes, out=rows, mode="clip")  # writes directly, unlike the other modes

    def bytes_and_offsets(self) -> tuple[memoryview, NDArray[np.int64]]:
        """Return the file, and the offset of each sample; the last offset is the end of the last sample."""
        return self._data, read_offsets(self._table, self._num_samples, str(self._path))

    def close(self) -> None:
        """Release the file; nothing can be read afterwards."""
        self._schema = self._plain = self._rows = None
        self._values = ()
        super().close()


def encode_config(
    schema: Mapping[str, Any],
    shard_format: str = "mds",
    *,
    compression: str | None,
    hashes: Sequence[str],
    size_limit: int | None,
) -> bytes:
    """Return the config text of a shard, byte for byte as the original writer creates it."""
    return json.dumps(shared_entry(schema, shard_format, compression, hashes, size_limit), sort_keys=True).encode()


def shard_bytes(num_samples: int, samples_bytes: int, config_bytes: int) -> int:
    """Return the size of a shard file with that many samples and bytes of samples."""
    return table_bytes(num_samples) + config_bytes + samples_bytes


def check_shard_bytes(size: int) -> None:
    """Raise ConfigError if a shard file would have 4 GiB or more, which its 32-bit offsets cannot address.

    Raises:
        ConfigError: See above.
    """
    if size > MAX_RAW_BYTES:
        raise ConfigError(
            f"a shard can have {MAX_RAW_BYTES} bytes, but this one would have {size}",
            hint="set size_limit",
            option="size_limit",
        )


def head_bytes(ends: Sequence[int] | NDArray[np.int64], config: bytes) -> bytes:
    """Return the part of a shard file before its samples.

    Args:
        ends: End of each sample, counted from the start of the first; of shape (samples,).
        config: The result of :func:`encode_config`.

    Raises:
        ConfigError: The file would have 4 GiB or more.
    """
    offsets = np.zeros(len(ends) + 1, np.int64)
    offsets[1:] = ends
    offsets += shard_bytes(len(ends), 0, len(config))
    check_shard_bytes(int(offsets[-1]))
    return write_offsets(offsets) + config
