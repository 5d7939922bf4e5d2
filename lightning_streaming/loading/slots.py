"""Shared memory, cut into slots, through which workers hand their batches to the loader.

    worker 0   | batch 3 | batch 1 | batch 2 |       batch 3 has taken the place of batch 0,
    worker 1   | batch 0 | batch 1 | batch 2 |       which the loader has copied by now

A worker that finds no slot free is not made to wait: it sends its batch in another way.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
import weakref
from multiprocessing import reduction
from typing import Any

_SLOT_BYTES = 64 << 20
"""Address space of a slot, not memory: only what batches have filled takes room."""
_WORD = 8


def make_slots(workers: int, slots: int) -> BatchSlots | None:
    """Slots for the workers of a loader; None where there are none, or the system refuses so much address space."""
    if not workers:
        return None
    try:
        return BatchSlots(workers, slots)
    except OSError as error:
        warnings.warn(f"batches come from workers in torch's slower way: no shared memory ({error})", stacklevel=2)
        return None


class BatchSlots:
    """Some slots for each worker, reused in turn, in shared memory that has no name.

    It reaches workers by inheritance or through their start-up pickle, and is gone with the last process that has it.

    Args:
        workers: How many workers there are.
        slots: Slots of each: enough if as many batches of one worker may be under way.
    """

    def __init__(self, workers: int, slots: int) -> None:
        self._workers, self._slots = workers, slots
        self._first = -(-workers * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map(_unnamed_file(self._first + workers * slots * _SLOT_BYTES))

    def free(self, worker: int, number: int) -> memoryview | None:
        """The slot for a worker's batch of this number, counted from 0; None if an earlier batch is still in it."""
        return self.slot(worker, number) if number - self._done[worker] < self._slots else None

    def slot(self, worker: int, number: int) -> memoryview:
        """The slot that this batch was put into."""
        start = self._first + (worker * self._slots + number % self._slots) * _SLOT_BYTES
        return self._memory[start : start + _SLOT_BYTES]

    def done_before(self, worker: int, number: int) -> None:
        """Say that nobody will look at a worker's batches before this one any more."""
        self._done[worker] = number

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("_workers", "_slots", "_first")}
        return {**state, "descriptor": reduction.DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        descriptor = state.pop("descriptor").detach()
        self.__dict__.update(state)
        self._map(descriptor)

    def _map(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._memory = memoryview(mmap.mmap(descriptor, 0))
        self._done = self._memory[: self._workers * _WORD].cast("q")


def _unnamed_file(size: int) -> int:
    if hasattr(os, "memfd_create"):  # Linux: memory that no limit of /dev/shm is about
        descriptor = os.memfd_create("batches")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.truncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
