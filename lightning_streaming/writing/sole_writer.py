"""One writer at a time in a directory of this machine.

The lock is on the directory itself, so no file is left; the kernel gives it back when its owner dies. Some network
filesystems lock no directories; there nobody is waited for or refused.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_streaming.errors import ConfigError
from lightning_streaming.writing.system_errors import system_errors


@contextmanager
def after_others(directory: Path | None) -> Iterator[None]:
    """Make a directory, and wait until no other process is in this block with it.

    A worker whose program was killed may live a moment longer: the next run waits for it. None for a place that is no
    directory.
    """
    if directory is None:
        yield
        return
    with system_errors("make a directory"):
        directory.mkdir(parents=True, exist_ok=True)
    with _opened(directory) as handle:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def instead_of_others(directory: Path) -> Iterator[None]:
    """Be the only one in this block with a directory, which exists.

    Raises:
        ConfigError: Another one is, in this process or in another.
    """
    owner = os.getpid()
    with _opened(directory) as handle:
        if not _is_locked(handle, directory):
            raise ConfigError(
                f"another writer is at work in {directory}; let it end, or close it if it is of this program"
            )
        try:
            yield
        finally:
            if os.getpid() == owner:  # a child has the handle too, and would give back its parent's lock
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)


def _is_locked(handle: int, directory: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a filesystem without locks
        pass
    # Meanwhile a writer that gave up may have removed the directory, and the next one made another of this name.
    return directory.exists() and os.path.samestat(os.fstat(handle), directory.stat())


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    with system_errors("open a directory"):
        handle = os.open(directory, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
