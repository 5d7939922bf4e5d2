"""Measures what making batches takes, in the process that makes them: once a batch and once a shard, never a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from itertools import chain
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.misses import Misses
from lightning_streaming.loading.board import BatchMeasures, Board
from lightning_streaming.loading.catalog import Catalog

_Counts = tuple[int, ...]
"""Of a batch: its samples, their bytes, and its samples of each stream."""


class Meter:
    """What this process has measured since it began its batch; whoever makes the batch says where that ends.

    Measures of a dataset that no :class:`~lightning_streaming.StreamingDataLoader` reads go nowhere.

    Args:
        misses: Where each stream's cache notes what was not there, by stream name.
    """

    def __init__(self, misses: Mapping[str, Misses]) -> None:
        self._misses = dict(misses)
        self._board: Board | None = None
        self._worker = 0
        self._batches = 0
        self._began = 0
        self._download_ns = self._decompress_ns = 0
        self._opened = self._hits = self._fetched_bytes = 0
        self._counts: Iterator[_Counts] = iter(())
        self._no_counts: _Counts = (0,) * (2 + len(self._misses))  # of batches that are none of the plan's
        self._open: Sized = ()

    def write_to(self, board: Board, worker: int) -> None:
        """Show what is measured from the next pass on to the loader that made ``board``."""
        self._board, self._worker = board, worker

    def begin_pass(self, open_shards: Sized) -> None:
        """Forget what was measured before; the first batch begins now."""
        for misses in self._misses.values():
            misses.clear()
        self._batches, self._open, self._counts = 0, open_shards, iter(())
        self._begin_batch()

    def begin_window(self, catalog: Catalog, shards: NDArray[np.int64], batch_size: int) -> None:
        """Say which shards the samples of the next batches are in."""
        if self._board is not None:
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

    def end_batch(self) -> None:
        """Note that a batch is made, and write what it took where the loader reads it."""
        if self._board is None:
            return
        samples, sample_bytes, *per_stream = next(self._counts, self._no_counts)
        measures = BatchMeasures(
            samples=samples,
            sample_bytes=sample_bytes,
            download_ns=self._download_ns,
            decompress_ns=self._decompress_ns,
            work_ns=perf_counter_ns() - self._began,
            shards_opened=self._opened,
            cache_hits=self._hits,
            fetched_bytes=self._fetched_bytes,
            shards_open=len(self._open),
        )
        self._board.write(self._worker, self._batches, measures, per_stream)
        self._batches += 1
        self._begin_batch()

    def __getstate__(self) -> dict[str, Misses]:
        return self._misses

    def __setstate__(self, misses: dict[str, Misses]) -> None:
        self.__init__(misses)  # type: ignore[misc]

    def _begin_batch(self) -> None:
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
