"""Measures what making batches takes, in the process that makes them: once a batch and once a shard, never a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from itertools import chain
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.misses import Misses
from lightning_streaming.loading.catalog import Catalog


class BatchMeasures(NamedTuple):
    """What it took to make one batch."""

    samples: int = 0
    sample_bytes: int = 0
    """Bytes of its samples as they are stored uncompressed."""
    download_ns: int = 0
    """Time for which their reader waited for files to be on this node, but for decompression."""
    decompress_ns: int = 0
    """Time for which it waited for files to be decompressed."""
    work_ns: int = 0
    """Time from the first sample to the collated batch, the two above included."""
    shards_opened: int = 0
    cache_hits: int = 0
    """Of those, how many were on this node when this process first wanted them."""
    fetched_bytes: int = 0
    """Bytes that this process fetched of the others, or had fetched ahead."""
    shards_open: int = 0
    """Shards that are mapped now."""


NUM_MEASURES = len(BatchMeasures._fields)


_Counts = tuple[int, ...]
"""Of a batch: its samples, their bytes, and its samples of each stream."""


class Meter:
    """What this process has measured since it began its batch; whoever makes the batch says where that ends.

    Args:
        misses: Where each stream's cache notes what was not there, by stream name.
        is_read: Whether anybody asks for what is measured.
    """

    def __init__(self, misses: Mapping[str, Misses], is_read: bool) -> None:
        self._misses = dict(misses)
        self._is_read = is_read
        self._began = 0
        self._download_ns = self._decompress_ns = 0
        self._opened = self._hits = self._fetched_bytes = 0
        self._counts: Iterator[_Counts] = iter(())
        self._no_counts: _Counts = (0,) * (2 + len(self._misses))  # of batches that are none of the plan's
        self._open: Sized = ()

    def begin_pass(self, open_shards: Sized) -> None:
        """Forget what was measured before; the first batch begins now."""
        for misses in self._misses.values():
            misses.clear()
        self._open, self._counts = open_shards, iter(())
        self._begin_batches()

    def begin_window(self, catalog: Catalog, shards: NDArray[np.int64], batch_size: int) -> None:
        """Say which shards the samples of the next batches are in."""
        if self._is_read:
            # Whoever iterates over the samples for the loader may look further ahead than the batch under way.
            self._counts = chain(self._counts, _count_batches(catalog, shards, batch_size))

    def begin_batch(self) -> None:
        """Say that the first sample of the next batch is wanted."""
        self._began = perf_counter_ns()

    def opened(self, began: int, catalog: Catalog, shard: int) -> None:
        """Note that a shard was opened, for which the reader has waited since ``began``, by ``perf_counter_ns``."""
        ended = perf_counter_ns()
        stream = catalog.stream_names[int(catalog.stream_of_shard[shard])]
        missed = self._misses[stream].take(catalog.shards[shard])
        if missed:  # else it was only mapped, as a part of decoding
            unpacking = sum(max(0, min(ended, miss.unpack_ended) - max(began, miss.unpack_began)) for miss in missed)
            self._decompress_ns += unpacking
            self._download_ns += ended - began - unpacking
        self._opened += 1
        self._hits += not missed
        self._fetched_bytes += sum(miss.fetched_bytes for miss in missed)

    def end_batches(self, batches: int) -> NDArray[np.int64]:
        """Note that some batches are made, which were made as one.

        Returns:
            Array of shape (batches, numbers): of each batch its :class:`BatchMeasures`, then its samples per stream.
            What the batches took together is said of the first, for which their consumer waits.
        """
        counts = np.array([next(self._counts, self._no_counts) for _ in range(batches)], np.int64)
        measures = np.zeros((batches, NUM_MEASURES + len(self._misses)), np.int64)
        took = BatchMeasures(
            download_ns=self._download_ns,
            decompress_ns=self._decompress_ns,
            work_ns=perf_counter_ns() - self._began,
            shards_opened=self._opened,
            cache_hits=self._hits,
            fetched_bytes=self._fetched_bytes,
        )
        measures[0, :NUM_MEASURES] = took
        measures[:, :2] = counts[:, :2]
        measures[:, NUM_MEASURES - 1] = len(self._open)
        measures[:, NUM_MEASURES:] = counts[:, 2:]
        self._begin_batches()
        return measures

    def _begin_batches(self) -> None:
        self._download_ns = self._decompress_ns = 0
        self._opened = self._hits = self._fetched_bytes = 0
        self.begin_batch()


def _count_batches(catalog: Catalog, shards: NDArray[np.int64], batch_size: int) -> Iterator[_Counts]:
    """The counts of consecutive batches, the last one maybe of fewer samples."""
    num_streams = len(catalog.stream_names)
    num_batches = -(-len(shards) // batch_size)
    firsts = np.arange(num_batches) * batch_size
    samples = np.minimum(batch_size, len(shards) - firsts)
    sample_bytes = np.add.reduceat(catalog.mean_sample_bytes[shards], firsts, dtype=np.float64)
    if num_streams == 1:
        per_stream = samples[:, None]
    else:
        cells = np.repeat(np.arange(num_batches) * num_streams, samples) + catalog.stream_of_shard[shards]
        per_stream = np.bincount(cells, minlength=num_batches * num_streams).reshape(num_batches, num_streams)
    counts = np.column_stack([samples, np.rint(sample_bytes).astype(np.int64), per_stream])
    return map(tuple, counts.tolist())
