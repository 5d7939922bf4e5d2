"""The MDS shard file.

    bytes        content
    4            uint32 n, the number of samples
    4 (n + 1)    uint32 offsets from the start of the file: where each sample starts, and where the last one ends
    any          config, JSON text that ends where the first sample starts
    any          the samples, back to back

All integers are little-endian. The config repeats what the index says of the columns; the index is what we believe.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import (
    ConfigError,
    FormatError,
    SampleIndexError,
    ShardCorruptError,
)
from lightning_streaming.files import join_under
from lightning_streaming.formats.columns import check_columns
from lightning_streaming.formats.index import INDEX_VERSION, MAX_RAW_BYTES, ShardInfo
from lightning_streaming.formats.mapping import map_file
from lightning_streaming.formats.mds_decoder import SampleDecoder, read_decoder
from lightning_streaming.formats.offsets import check_lengths, read_offsets, table_bytes
from lightning_streaming.formats.plain_rows import PlainRows, plain_schema

_COUNT = struct.Struct("<I")
_OFFSET_PAIR = struct.Struct("<II")


class MDSReader:
    """A shard file, memory-mapped. No sample shares memory with the map, so samples outlive the reader."""

    def __init__(
        self,
        info: ShardInfo,
        directory: Path,
        *,
        allow_unsafe_types: bool = False,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Map the raw file and check its size and its offsets.

        Args:
            info: The shard, as its index describes it.
            directory: Where the dataset's files are.
            allow_unsafe_types: Whether encodings may be read that can run code of whoever wrote the data.
            columns: Names of the columns to read; None for all.

        Raises:
            ShardCorruptError: The file is not the one that the index describes.
            ObjectNotFoundError: The file is not there.
            StorageError: The file cannot be opened.
            IndexFormatError: The index describes columns that cannot be.
            ConfigError: The shard lacks a wanted column, or one is unsafe and that was not allowed.
            MissingDependencyError: A wanted column needs a package that is not installed.
        """
        check_columns(info, columns)
        self._decoder = read_decoder(info, allow_unsafe_types=allow_unsafe_types, columns=columns)
        self._path = join_under(directory, info.raw_data.basename)
        self._num_samples = info.samples
        self._view = map_file(self._path, info.raw_data.bytes)
        self._schema = plain_schema(info, columns)
        self._plain: PlainRows | None = None
        self._rows: NDArray[np.void] | None = None
        self._sample_bytes = _check_offsets(self._view, info.samples, self._decoder, self._path)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one sample.

        Raises:
            SampleIndexError: The index is not in [0, len).
            ShardCorruptError: The sample's sizes do not add up.
            EncodingError: A column does not hold what its encoding says.
        """
        if not 0 <= index < self._num_samples:
            raise SampleIndexError(f"{self._path} has {self._num_samples} samples, but sample {index} was asked for")
        start, stop = _OFFSET_PAIR.unpack_from(self._view, 4 + 4 * index)
        try:
            return self._decoder.decode(self._view, start, stop)
        except FormatError as error:
            raise type(error)(f"{self._path}, sample {index}: {error}") from error

    def plain_rows(self) -> PlainRows | None:
        """How the first sample lies in its bytes, if it may be plain and all samples have as many; else None."""
        if self._plain is None and self._schema is not None and self._sample_bytes is not None:
            start = len(self._view) - self._num_samples * self._sample_bytes
            self._plain = self._schema.rows_like(self._view[start : start + self._sample_bytes])
            if self._plain is None:
                self._schema = None
            else:
                self._rows = np.ndarray((self._num_samples,), self._plain.row, self._view, start)
        return self._plain

    def copy_rows(self, indexes: NDArray[np.int64], rows: NDArray[np.void]) -> None:
        """Copy the bytes of some samples of a shard that has :meth:`plain_rows`.

        Args:
            indexes: Which samples, each in [0, len); of shape (samples,).
            rows: Where to; of shape (samples,), and the dtype of the plain rows.
        """
        assert self._rows is not None, "it has plain rows"
        self._rows.take(indexes, out=rows, mode="clip")  # which writes to its place at once, unlike the other modes

    def close(self) -> None:
        """Let go of the file; nothing can be read afterwards. The map goes with the last slice of it.

        Only the traceback of a failed decode can hold such a slice for longer.
        """
        self._schema = self._plain = self._rows = None
        self._view.release()


def encode_config(
    schema: Mapping[str, Any], *, compression: str | None, hashes: Sequence[str], size_limit: int | None
) -> bytes:
    """The config text of a shard, byte for byte as the original writer makes it."""
    config = {
        **schema,
        "compression": compression,
        "format": "mds",
        "hashes": hashes,
        "size_limit": size_limit,
        "version": INDEX_VERSION,
    }
    return json.dumps(config, sort_keys=True).encode()


def shard_bytes(num_samples: int, samples_bytes: int, config_bytes: int) -> int:
    """Size of the shard file that holds so many samples, of so many bytes together."""
    return 4 + 4 * (num_samples + 1) + config_bytes + samples_bytes


def check_shard_bytes(size: int) -> None:
    """Refuse a shard file that would have 4 GiB or more, which its 32-bit offsets cannot reach.

    Raises:
        ConfigError: It would.
    """
    if size > MAX_RAW_BYTES:
        raise ConfigError(f"a shard can have {MAX_RAW_BYTES} bytes, but this one would have {size}; set size_limit")


def head_bytes(ends: Sequence[int] | NDArray[np.int64], config: bytes) -> bytes:
    """What a shard file has before its samples.

    Args:
        ends: Where each sample ends, counted from the start of the first; of shape (samples,).
        config: What :func:`encode_config` gives.

    Raises:
        ConfigError: The file would have 4 GiB or more.
    """
    offsets = np.zeros(len(ends) + 1, np.int64)
    offsets[1:] = ends
    offsets += shard_bytes(len(ends), 0, len(config))
    check_shard_bytes(int(offsets[-1]))
    return b"".join([_COUNT.pack(len(ends)), offsets.astype("<u4").tobytes(), config])


def _check_offsets(view: memoryview, num_samples: int, decoder: SampleDecoder, path: Path) -> int | None:
    """Refuse a shard whose samples would not follow each other through the rest of the file.

    Returns:
        As :func:`check_lengths`.
    """
    offsets = read_offsets(view, num_samples, str(path))
    if offsets[0] < table_bytes(num_samples) or offsets[-1] != len(view):
        raise ShardCorruptError(
            f"{path} must hold its samples between bytes {table_bytes(num_samples)} and {len(view)}, but they start at "
            f"{offsets[0]} and end at {offsets[-1]}"
        )
    largest_bytes = None if decoder.header.size else decoder.smallest_bytes
    return check_lengths(offsets, decoder.smallest_bytes, str(path), largest_bytes)
