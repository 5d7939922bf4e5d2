"""Bytes of a dataset's shards: those that travel, and those that a node keeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import CacheConfig
from lightning_streaming.formats.index_table import ShardTable
from lightning_streaming.loading.dataset import StreamingDataset
from lightning_streaming.loading.passes import passes_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sizes:
    """Bytes of each shard over all streams; arrays of shape (shards,)."""

    fetched: NDArray[np.int64]
    """Over the link; 0 where a shard is read in place."""
    kept: NDArray[np.int64]
    """In a cache directory of this node; 0 where nothing is written."""
    making: NDArray[np.int64]
    """The same while a shard is decompressed, which takes room for both of its forms."""
    index: int
    """Of the indexes that are kept too."""


def cache_configs(dataset: StreamingDataset) -> dict[str, CacheConfig]:
    """Where each stream's files are and go, by stream name."""
    return {name: stream.cache_config() for name, stream in dataset.streams.items()}


def is_in_place(cache: CacheConfig) -> bool:
    """Whether a stream's own directory is read, so that nothing has to be fetched."""
    return cache.source_directory() is not None


def sizes_of(dataset: StreamingDataset) -> Sizes:
    """Add up what the indexes say; these are read, and fetched where they are not here.

    Raises:
        StorageError: An index could not be fetched.
    """
    fetched, kept, making, index_bytes = [], [], [], 0
    for cache, index in zip(cache_configs(dataset).values(), passes_of(dataset).catalog.indexes, strict=True):
        raw, packed = _raw_and_packed(index.shards)
        if is_in_place(cache):
            fetched.append(np.zeros_like(raw))
            kept.append(np.where(packed, raw, 0))
            making.append(kept[-1])
        else:
            fetched.append(np.where(packed, packed, raw))
            kept.append(raw + packed if cache.keep_zip else raw)
            making.append(raw + packed)
            index_bytes += _size(cache.cache_directory() / "index.json")
    arrays = {"fetched": fetched, "kept": kept, "making": making}
    return Sizes(**{name: np.concatenate(parts) for name, parts in arrays.items()}, index=index_bytes)


def _raw_and_packed(shards: ShardTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bytes of each shard's raw files, and of its compressed ones: 0 where it has none."""
    packed = np.zeros(len(shards), np.int64)
    firsts = shards.first_file[:-1]
    for number, kind in enumerate(shards.kinds):
        if kind.example.compression is not None:  # raw data, compressed data, and maybe raw and compressed meta
            these = np.flatnonzero(shards.kind_of_shard == number)
            for place in range(1, len(kind.files), 2):
                packed[these] += shards.sizes[firsts[these] + place]
    whole = np.add.reduceat(shards.sizes, firsts) if len(shards) else packed
    return whole - packed, packed


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
