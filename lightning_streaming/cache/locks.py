"""Locks that the kernel gives back when their owner dies: ``flock`` on files that are there anyway."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF)
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02


class LocksUnsupportedError(OSError):
    """The filesystem has no such locks; never leaves this room."""


def try_lock(descriptor: int, *, shared: bool) -> bool:
    """Lock an open file, or turn a shared lock into an exclusive one or back, without waiting.

    Args:
        descriptor: The open file. Its copies, those of forked children too, share the lock.
        shared: Whether others may have it too.

    Returns:
        Whether it is locked now; False if another holds it. A lock that was to be turned into another one may be lost.

    Raises:
        LocksUnsupportedError: The filesystem has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise LocksUnsupportedError(*error.args) from error
        raise
    return True


def open_to_lock(path: str | Path) -> int:
    """Open a file to lock it for ourselves, for which some network filesystems want it opened for writing.

    Raises:
        OSError: It is gone, or may not be read either.
    """
    try:
        return os.open(path, os.O_RDWR)
    except OSError:  # another user's, or on a disk that may only be read
        return os.open(path, os.O_RDONLY)


def unlock_and_close(descriptor: int) -> None:
    """Close a file and let go of its lock, also where a child forked meanwhile has a copy of it."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def pauses(seconds: float = math.inf, longest: float = _LONGEST_PAUSE) -> Iterator[None]:
    """Give way for a moment between tries: at once, then after longer and longer pauses, until time is up.

    There is no waiting for a kernel lock with a time limit, and one without would hang where its holder is stopped.

    Args:
        seconds: For how long; the last try comes when they have passed. Without end where the caller knows when.
        longest: Longest pause, in seconds.
    """
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    yield
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
        yield


def lock_owner(path: Path) -> str:
    """Who holds the lock of a file, for an error message."""
    try:
        inode = str(path.stat().st_ino)
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:  # gone just now, or not Linux
        return "another process"
    # For example "1: FLOCK  ADVISORY  WRITE 4711 fe:00:131072 0 EOF".
    owners = [words[4] for words in locks if len(words) > 5 and words[5].rpartition(":")[2] == inode]
    return f"process {owners[0]}" if owners else "another process"
