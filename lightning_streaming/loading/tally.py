"""A loader's sums over the batches that it has handed out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.loading.measures import LoaderStatistics, WaitTimes, split_wait
from lightning_streaming.loading.meter import NUM_MEASURES, BatchMeasures

_AT_ONCE = 256
"""Batches that are noted before they are added up: a note is all that a step should have to wait for."""


class Tally:
    """Adds up what the workers of one loader have measured.

    Args:
        streams: Names of the streams whose samples are counted.
    """

    def __init__(self, streams: Sequence[str]) -> None:
        self._streams = list(streams)
        self._sums = np.zeros(NUM_MEASURES + len(self._streams), np.int64)
        self._wait = WaitTimes()
        self._batches = 0
        self._open_in_worker: dict[int, int] = {}
        self._num_workers = 1
        self._next_batch = 0
        self._noted = 0
        self._rows = np.zeros((_AT_ONCE, len(self._sums)), np.int64)
        self._waits = np.zeros(_AT_ONCE, np.int64)

    def begin_pass(self, num_workers: int) -> None:
        """Count the batches of another pass, made by so many processes in turn."""
        self._add_up()
        self._num_workers, self._next_batch = max(1, num_workers), 0
        self._open_in_worker = {}

    def add(self, measures: NDArray[np.int64], wait_ns: int) -> None:
        """Count the next batch of the pass.

        Args:
            measures: What it took, as :meth:`Meter.end_batches` says.
            wait_ns: For how long its consumer waited.
        """
        self._rows[self._noted] = measures
        self._waits[self._noted] = wait_ns
        self._noted += 1
        self._next_batch += 1
        if self._noted == _AT_ONCE:
            self._add_up()

    def statistics(self) -> LoaderStatistics:
        """What was counted so far."""
        self._add_up()
        values = self._sums.tolist()
        sums = BatchMeasures(*values[:NUM_MEASURES])
        return LoaderStatistics(
            batches=self._batches,
            samples=sums.samples,
            samples_per_stream=dict(zip(self._streams, values[NUM_MEASURES:], strict=True)),
            sample_bytes=sums.sample_bytes,
            wait=self._wait,
            shards_opened=sums.shards_opened,
            cache_hits=sums.cache_hits,
            fetched_bytes=sums.fetched_bytes,
            shards_open=sum(self._open_in_worker.values()),
        )

    def _add_up(self) -> None:
        """Add what was noted since the last time to the sums."""
        rows, first = self._rows[: self._noted], self._next_batch - self._noted
        columns = dict(zip(BatchMeasures._fields, rows.T, strict=False))  # those of streams follow
        parts = split_wait(
            _seconds(self._waits[: self._noted]),
            download=_seconds(columns["download_ns"]),
            decompress=_seconds(columns["decompress_ns"]),
            work=_seconds(columns["work_ns"]),
            are_first=np.arange(first, self._next_batch) == 0,
        )
        self._wait = WaitTimes(*(sum_ + float(part.sum()) for sum_, part in zip(self._wait, parts, strict=True)))
        self._sums += rows.sum(axis=0)
        self._batches += self._noted
        for batch, shards_open in enumerate(columns["shards_open"].tolist(), start=first):
            self._open_in_worker[batch % self._num_workers] = shards_open
        self._noted = 0


def _seconds(nanoseconds: NDArray[np.int64]) -> NDArray[np.float64]:
    return nanoseconds.astype(np.float64) * 1e-9
