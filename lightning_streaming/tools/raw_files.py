"""The raw files of a shard on this machine, wherever and however they are stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_streaming.cache.verify import unpack
from lightning_streaming.files import join_under
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.storage import read_range
from lightning_streaming.tools.stored_dataset import RETRY, TIMEOUT, StoredDataset


def raw_directory(place: StoredDataset, shard: ShardInfo, scratch: Path) -> Path:
    """Make the raw files of a shard present.

    Files of a directory are used where they are, raw or compressed; what is on a store is fetched. A raw file is not
    used where there is a compressed one: it may be of another dataset that was there.

    Args:
        place: Where the dataset is.
        shard: An entry of its index.
        scratch: An empty directory for what is fetched or decompressed.

    Returns:
        The directory that holds the raw files under their basenames.

    Raises:
        IntegrityError: A file is not what the index promises.
        StorageError: A file could not be fetched.
    """
    if place.directory is not None and _is_raw_there(place, shard):
        return place.directory
    for raw, compressed in shard.files:
        stored = compressed or raw
        path = join_under(scratch, stored.basename)
        if place.directory is not None and compressed is not None and place.path(stored.basename).exists():
            path = place.path(stored.basename)
        else:
            place.fetch(stored, path)
        if compressed is not None and shard.compression is not None:
            destination = join_under(scratch, raw.basename)
            destination.parent.mkdir(parents=True, exist_ok=True)
            unpack(path, compressed.basename, raw, shard.compression, destination)
    return scratch


def _is_raw_there(place: StoredDataset, shard: ShardInfo) -> bool:
    if any(compressed is not None and place.path(compressed.basename).exists() for _, compressed in shard.files):
        return False
    return all(place.path(raw.basename).exists() for raw, _ in shard.files)


def peek_directory(place: StoredDataset, shard: ShardInfo, samples: int, scratch: Path) -> Path:
    """Make the first samples of a shard readable, fetching of an uncompressed shard on a store no more than they need.

    Args:
        place: Where the dataset is.
        shard: An entry of its index.
        samples: How many, from the first one on.
        scratch: An empty directory for what is fetched or decompressed.

    Returns:
        A directory from which the shard can be opened. Beyond these samples its files may be empty.

    Raises:
        IntegrityError: A file is not what the index promises.
        StorageError: A file could not be fetched.
    """
    if place.directory is None and shard.compression is None:
        _fetch_start(place, shard, samples, scratch)
        return scratch
    return raw_directory(place, shard, scratch)


def _fetch_start(place: StoredDataset, shard: ShardInfo, samples: int, scratch: Path) -> None:
    table_file = shard.raw_meta or shard.raw_data
    table_bytes = min(4 + 4 * (shard.samples + 1), table_file.bytes)
    table = _fetch_range(place, table_file, 0, table_bytes)
    offsets = np.frombuffer(table[4 : len(table) // 4 * 4], "<u4")
    # Offsets that contradict the sizes are for the reader to find, so they need only be no harm here.
    stop = min(int(offsets[min(samples, len(offsets) - 1)]), shard.raw_data.bytes) if len(offsets) else 0
    start = min(table_bytes, stop) if shard.raw_meta is None else 0
    data = _fetch_range(place, shard.raw_data, start, stop)
    if shard.raw_meta is None:
        _write_sparse(join_under(scratch, shard.raw_data.basename), table + data, shard.raw_data.bytes)
    else:
        place.fetch(shard.raw_meta, join_under(scratch, shard.raw_meta.basename))
        _write_sparse(join_under(scratch, shard.raw_data.basename), data, shard.raw_data.bytes)


def _fetch_range(place: StoredDataset, file: FileInfo, start: int, stop: int) -> bytes:
    return read_range(place.url(file.basename), place.options, start, stop, retry=RETRY, timeout=TIMEOUT)


def _write_sparse(path: Path, start: bytes, size: int) -> None:
    """Write a file that has its full size, takes the room of its start, and holds zeros after it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
