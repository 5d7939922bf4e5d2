"""Ending the workers of a loader soon, even those that are in the middle of something."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.context import Process
from typing import Any

from torch._C import _remove_worker_pids

_PATIENCE = 1.0
"""Seconds for a worker to end by itself, and then again for one that was told to by a signal."""


def end_workers(batches: Any) -> None:
    """End the worker processes behind torch's iterator over batches; nothing to do where there are none.

    Torch tells its workers to end and waits five seconds for each, one after another, before it sends a signal. A
    worker that is in a long transform or download, or stands still, would take that long. So a thread beside it sends
    the signal sooner. It cannot hurt: by then nobody reads what workers send, and their files bear being killed.

    Args:
        batches: What ``iter`` of a torch ``DataLoader`` gave, or None.
    """
    workers = getattr(batches, "_workers", ())
    if not workers:
        return
    if batches._worker_pids_set:
        _remove_worker_pids(id(batches))  # or torch's handler of SIGCHLD would call a killed worker an error
        batches._worker_pids_set = False
    pinning = getattr(batches, "_pin_memory_thread", None)
    hurry = threading.Thread(target=_hurry, args=(workers, pinning), name="end-workers", daemon=True)
    hurry.start()
    batches._shutdown_workers()
    hurry.join()


def _hurry(workers: Sequence[Process], pinning: threading.Thread | None) -> None:
    if pinning is not None:
        pinning.join()  # torch ends it first; it must not be left with half a message of a worker that is gone
    late = _late(workers)
    for worker in late:
        worker.terminate()
    for worker in _late(late):
        worker.kill()  # it holds the interpreter, and its shield cannot let the first signal through


def _late(workers: Sequence[Process]) -> list[Process]:
    """Those that have not ended when patience has."""
    left = {worker.sentinel: worker for worker in workers}
    deadline = time.monotonic() + _PATIENCE
    while left and (seconds := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(left), seconds):
            del left[sentinel]  # type: ignore[arg-type]  # which are all numbers
    return list(left.values())
