"""What a DataLoader worker process does before its first sample."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from functools import cache
from multiprocessing.connection import wait


@cache
def prepare_worker_process() -> None:
    """Make this worker end with its parent, and keep its garbage collector away from inherited objects. Works once.

    Torch's workers look for a dead parent every few seconds. A thread that waits for it ends them at once, so that a
    ``kill -9`` of the trainer leaves nobody behind. Linux could send a signal instead, but it does so as soon as the
    parent's *thread* ends that made the worker. Freezing the collector spares the copies that walking over the parent's
    objects would make of memory shared by fork.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), name="parent-watch", daemon=True).start()
    gc.freeze()


def _end_with(parent: int) -> None:
    wait([parent])
    os.kill(os.getpid(), signal.SIGKILL)
