"""Where the files of a stage's streams are and go."""

from __future__ import annotations

from lightning_streaming.cache import CacheConfig
from lightning_streaming.reading.dataset import StreamingDataset


def cache_configs(dataset: StreamingDataset) -> dict[str, CacheConfig]:
    """Where each stream's files are and go, by stream name."""
    return {name: stream.cache_config() for name, stream in dataset.streams.items()}


def is_in_place(cache: CacheConfig) -> bool:
    """Whether a stream's own directory is read, so that nothing has to be fetched."""
    return cache.source_directory() is not None
