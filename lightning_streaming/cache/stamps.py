"""When a file was last used: its access time, which we set ourselves, since filesystems do so seldom or never.

A shard that the plan needs no more this epoch gets a stamp of before the year 2000, the later the smaller. So sorting
by stamp puts first what was finished last, which is needed again last; then what was used longest ago.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from lightning_streaming.cache.locks import open_to_lock, try_lock, unlock_and_close

FINISHED_BEFORE = 946_684_800 * 10**9
"""Stamps of this time, when the year 2000 begins, and later are of shards that may be needed again this epoch."""
_FAR = 4_102_444_800 * 10**9
"""The year 2100 begins, in nanoseconds."""
_SLOWER = 5
"""Such stamps go back by a second in five: those of 2026 are of the year 1984."""


def finished_stamp(now: int) -> int:
    """The stamp of a shard finished at ``now``; both in nanoseconds since 1970."""
    return max(0, (_FAR - now) // _SLOWER)


def time_of(stamp: int) -> int:
    """When a file with this stamp was last used, finished or not; both in nanoseconds since 1970."""
    return stamp if stamp >= FINISHED_BEFORE else _FAR - _SLOWER * stamp


def stamp_used(file: int | Path) -> None:
    """Say that a file is in use now.

    Args:
        file: Its path, or the descriptor of the open file.
    """
    _stamp(file, time.time_ns())


def stamp_finished(path: Path) -> None:
    """Say that a file is not needed any more in this epoch, unless another reader has it open."""
    with suppress(OSError):  # gone, another user's, or a filesystem without locks
        descriptor = open_to_lock(path)
        try:
            if try_lock(descriptor, shared=False):
                _stamp(descriptor, finished_stamp(time.time_ns()))
        finally:
            unlock_and_close(descriptor)


def _stamp(file: int | Path, stamp: int) -> None:
    with suppress(OSError):  # another user's, or gone
        os.utime(file, ns=(stamp, os.stat(file).st_mtime_ns))  # noqa: PTH116  a descriptor has no Path
