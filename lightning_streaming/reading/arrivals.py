"""Progress of the downloads before a loader's first batch.

Each process counts in shared memory. A thread of the loader reads the counts a few times a second, from the start of
the workers until the first batch. So no reader waits for the progress bar, and no worker inherits the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch

from lightning_streaming.reading.transport import shared

_BETWEEN_LOOKS = 0.2
"""Seconds."""


class Fetched(NamedTuple):
    """The files fetched so far."""

    begun: int
    """Shards that were asked for, those that are here included."""
    here: int
    """Shards that have arrived."""
    of: int
    """Shards of the whole dataset."""
    bytes: int
    """Of those that have arrived, as they are stored."""
    seconds: float
    """Since the workers were started."""


DownloadCallback = Callable[[Fetched | None], object]
"""Callback for the first download: called in a separate thread with all that was fetched, and None at the end."""


class ArrivalCounts:
    """Shared memory in which each process that reads counts what it fetches.

    Args:
        readers: How many there are, at least 1.
    """

    def __init__(self, readers: int) -> None:
        self._counts = shared(torch.zeros((readers, 3), dtype=torch.int64))

    def teller(self, reader: int) -> Callable[[int, int], None]:
        """Return the callback of one process for each shard it fetches; see :class:`Misses`."""
        own, lock = self._counts[reader].numpy(), threading.Lock()

        def tell(begun: int, num_bytes: int) -> None:
            with lock:
                own[:] += (begun, 1 - begun, num_bytes)

        return tell

    def sums(self) -> tuple[int, int, int]:
        """Return the shards requested, the shards that have arrived, and their bytes, over all processes."""
        begun, here, num_bytes = self._counts.sum(dim=0).tolist()
        return begun, here, num_bytes


class ArrivalWatch:
    """Reports what is fetched to a callback whenever it changes, until it is closed.

    Args:
        callback: Callback of the report.
        counts: What is fetched.
        of: Shards of the whole dataset.
    """

    def __init__(self, callback: DownloadCallback, counts: ArrivalCounts, of: int) -> None:
        self._callback, self._counts, self._of = callback, counts, of
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning-streaming-arrivals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report the last counts, and stop; the callback has returned when this returns."""
        self._is_closed.set()
        self._thread.join()

    def _watch(self) -> None:
        began, seen, is_over = perf_counter(), (0, 0, 0), False
        try:
            while not is_over:
                is_over = self._is_closed.wait(_BETWEEN_LOOKS)
                found = self._counts.sums()
                if found != seen:
                    seen, (begun, here, num_bytes) = found, found
                    # What is tried again is asked for twice.
                    self._callback(
                        Fetched(min(begun, self._of), min(here, self._of), self._of, num_bytes, perf_counter() - began)
                    )
        finally:
            self._callback(None)
