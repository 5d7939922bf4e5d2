"""What the processes of a loader fetch before its first batch is there, shown to people.

Each process counts in memory that they share; a thread of the loader's own looks at it a few times a second, from when
the workers are started until the first batch. So nobody who reads ever waits for who looks on, and no worker inherits
that thread.
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
    """What was fetched so far."""

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


LookOn = Callable[[Fetched | None], object]
"""Is told what was fetched so far, in a thread of its own, and None at the end."""


class ArrivalCounts:
    """Shared memory in which each process that reads counts what it fetches.

    Args:
        readers: How many there are, at least 1.
    """

    def __init__(self, readers: int) -> None:
        self._counts = shared(torch.zeros((readers, 3), dtype=torch.int64))

    def teller(self, reader: int) -> Callable[[int, int], None]:
        """What one of them, which alone writes its numbers, calls for each shard: see :class:`Misses`."""
        own, lock = self._counts[reader].numpy(), threading.Lock()

        def tell(begun: int, num_bytes: int) -> None:
            with lock:
                own[:] += (begun, 1 - begun, num_bytes)

        return tell

    def sums(self) -> tuple[int, int, int]:
        """Shards asked for, shards that are here, and their bytes, of all processes."""
        begun, here, num_bytes = self._counts.sum(dim=0).tolist()
        return begun, here, num_bytes


class ArrivalWatch:
    """Tells somebody what is fetched, whenever that has changed, until it is closed.

    Args:
        look_on: Who is told.
        counts: What is fetched.
        of: Shards of the whole dataset.
    """

    def __init__(self, look_on: LookOn, counts: ArrivalCounts, of: int) -> None:
        self._look_on, self._counts, self._of = look_on, counts, of
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning-streaming-arrivals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The first batch is there, or will not come: whoever looks on is told so before this returns."""
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
                    self._look_on(
                        Fetched(min(begun, self._of), min(here, self._of), self._of, num_bytes, perf_counter() - began)
                    )
        finally:
            self._look_on(None)
