"""What a DataLoader worker process does before its first sample."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
from functools import cache

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


@cache
def prepare_worker_process() -> None:
    """Make this worker end with its parent, and keep its garbage collector away from inherited objects. Works once.

    Torch's workers look for a dead parent every few seconds; on Linux the kernel can tell them at once, so that a
    ``kill -9`` of the trainer leaves nobody behind. Freezing the collector spares the copies that walking over the
    parent's objects would make of memory shared by fork.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()
