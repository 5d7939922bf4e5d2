"""The files of selections in a cache directory: mapping them, the lock of the process that creates one, and removal.

Indexes of ids, and lengths of documents, are cached in the same way.

    selections/2f6c...e1.npy      the bits: mapped, and locked (shared), by every process that reads them
    selections/2f6c...e1.parts/   while it is created: the bits of some shards each
    selections/2f6c...e1.lock     held by the one process that creates it

Names are 32 hexadecimal digits, a digest of the data and of the options.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import records, shared_files
from lightning_streaming.cache.config import SELECTIONS_BASENAME
from lightning_streaming.cache.index_files import remove_unlocked
from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import open_regular
from lightning_streaming.formats.npy import header_of
from lightning_streaming.waits import waiting

_ABANDONED_SECONDS = 24 * 3600
"""After this time without another part, a writer on another machine counts as dead: its lock is invisible here."""

_LONGEST_PAUSE = 0.1
"""Seconds between two checks whether another process has created a selection."""
_WARN_SECONDS = 3.0
"""Time after which a waiting process logs it: all processes of a node start together, and most selections are quick."""

_logger = package_logger(__name__)


def selection_path(root: Path, key: str) -> Path:
    """Return the path of the bits of a selection in a cache directory."""
    return root / SELECTIONS_BASENAME / f"{key}.npy"


def map_bits(path: Path) -> NDArray[Any] | None:
    """Map cached bits, which are in use until the map is gone; None if there are none, or they are damaged.

    Through a link they are only read: their access time belongs to the users of the directory that holds them.
    """
    with suppress(OSError, ValueError, ShardCorruptError), open(path, "rb", opener=open_regular) as file:
        with suppress(shared_files.LocksUnsupportedError):
            shared_files.try_lock(file.fileno(), shared=True)  # the map keeps the lock
        if not path.is_symlink():
            records.set_used(file.fileno())
        header = header_of(file)
        return np.memmap(file, header.dtype, "r", header.stop, header.shape)
    return None


def are_bits(path: Path) -> bool:
    """Return whether a file of a selection is the complete bits."""
    return path.suffix == ".npy" and path.parent.name == SELECTIONS_BASENAME


@contextmanager
def selection_lock(path: Path, root: Path, work: str) -> Iterator[None]:
    """Hold the lock for creating a selection, for any time; without locks in the filesystem others may create it, too.

    Args:
        path: Path of its bits, in an existing directory.
        root: The cache directory.
        work: Action of this process, for messages of processes that wait.

    Raises:
        StorageError: The lock may not be written to.
    """
    descriptor = _hold_lock(path.with_suffix(".lock"), root, work)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        shared_files.unlock_and_close(descriptor)


def _hold_lock(lock: Path, root: Path, work: str) -> int:
    def message() -> str:
        return f"waiting for {shared_files.lock_owner(lock)}, which {work} that is wanted"

    began, has_warned = time.monotonic(), False
    with ExitStack() as shown:
        for _ in shared_files.pauses(longest=_LONGEST_PAUSE):
            descriptor, is_free = shared_files.open_shared(lock, root), True
            with suppress(shared_files.LocksUnsupportedError):
                is_free = shared_files.try_lock(descriptor, shared=False)
            if is_free and os.fstat(descriptor).st_nlink:  # else it was removed just now
                return descriptor
            shared_files.unlock_and_close(descriptor)
            if not is_free and not has_warned and time.monotonic() > began + _WARN_SECONDS:
                has_warned = True
                _logger.warning("%s", message())
                shown.enter_context(waiting(message))
    raise AssertionError("pauses without end")


def stays_with(kept: Container[str], path: Path) -> bool:
    """Return whether a file is the bits or the lock of one of these selections; other files of them are left over."""
    return key_of(path) in kept and (are_bits(path) or is_lock(path))


def is_lock(path: Path) -> bool:
    """Return whether a file of a selection is the lock of its writer."""
    return path.suffix == ".lock"


def key_of(path: Path) -> str:
    """Return the name of the selection of a file."""
    return (path if path.parent.name == SELECTIONS_BASENAME else path.parent).name.partition(".")[0]


def is_in_use(path: Path) -> bool:
    """Return whether a process of this machine has the bits mapped, or creates them, or one elsewhere may do so."""
    if are_bits(path):
        return shared_files.is_locked(path)
    lock = _lock_of(path)
    return shared_files.is_locked(lock) or _may_be_created_elsewhere(lock)


def remove_unused(path: Path) -> bool:
    """Remove a file of a selection, and directories of it that are empty then, unless it is in use.

    Returns:
        Whether it is gone.
    """
    if are_bits(path):
        remove_unlocked(path)
    else:
        lock = _lock_of(path)
        try:
            descriptor = shared_files.open_to_lock(lock)
        except FileNotFoundError:  # so no process creates it
            with suppress(OSError):
                path.unlink()
        except OSError:  # another user's
            pass
        else:
            try:
                if shared_files.try_lock(descriptor, shared=False) and not _may_be_created_elsewhere(lock):
                    path.unlink(missing_ok=True)
            except OSError:
                pass
            finally:
                shared_files.unlock_and_close(descriptor)
    if path.parent.name != SELECTIONS_BASENAME:
        with suppress(OSError):  # there are more
            path.parent.rmdir()
    with suppress(OSError):
        selections_of(path).rmdir()
    return not path.exists()


def selections_of(path: Path) -> Path:
    """Return the directory of selections that a file of one is in."""
    return path.parent if path.parent.name == SELECTIONS_BASENAME else path.parent.parent


def _lock_of(path: Path) -> Path:
    return selections_of(path) / f"{key_of(path)}.lock"


def _may_be_created_elsewhere(lock: Path) -> bool:
    with suppress(OSError):
        if not lock.read_text().endswith(f" on {socket.gethostname()}"):
            # Not the directory of parts itself: that changes when we remove one.
            times = (path.stat().st_mtime for path in (lock, *lock.with_suffix(".parts").glob("*")))
            return max(times) > time.time() - _ABANDONED_SECONDS
    return False
