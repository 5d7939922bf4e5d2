"""A loader's sums over the batches that it has handed out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
        """Of the pass, that is not added up yet."""
        self._noted: list[tuple[NDArray[np.int64], int]] = []

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
        self._noted.append((measures, wait_ns))
        if len(self._noted) == _AT_ONCE:
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
        if not self._noted:
            return
        measures, waits = zip(*self._noted, strict=True)
        rows, batches = np.stack(measures), self._next_batch + np.arange(len(waits))
        columns = dict(zip(BatchMeasures._fields, rows.T, strict=False))  # those of streams follow
        parts = split_wait(
            _seconds(waits),
            download=_seconds(columns["download_ns"]),
            decompress=_seconds(columns["decompress_ns"]),
            work=_seconds(columns["work_ns"]),
            are_first=batches == 0,
        )
        self._wait = WaitTimes(*(sum_ + float(part.sum()) for sum_, part in zip(self._wait, parts, strict=True)))
        self._sums += rows.sum(axis=0)
        self._batches += len(waits)
        workers = (batches % self._num_workers).tolist()
        self._open_in_worker.update(zip(workers, columns["shards_open"].tolist(), strict=True))
        self._next_batch += len(waits)
        self._noted = []


def _seconds(nanoseconds: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(nanoseconds, np.float64) * 1e-9
