"""The files of selections in a cache directory: who has one mapped or makes one, and removing those that nobody needs.

Indexes of ids, and lengths of documents, are kept as selections are.

    selections/2f6c...e1.npy      the bits: mapped, and locked (shared), by every process that reads them
    selections/2f6c...e1.parts/   while it is made: the bits of some shards each
    selections/2f6c...e1.lock     held by the one process that makes it

Names are 32 hexadecimal digits, made of the data and of what is asked for.
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

from lightning_streaming.cache import shared_files, usage
from lightning_streaming.cache.config import SELECTIONS_BASENAME
from lightning_streaming.cache.index_files import remove_unlocked
from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import open_regular
from lightning_streaming.formats.arrays.npy import header_of
from lightning_streaming.waits import waiting

_ABANDONED_SECONDS = 24 * 3600
"""After so long without another part, one that another machine made is taken to be dead: its lock says nothing here."""

_LONGEST_PAUSE = 0.1
"""Seconds between two looks whether another process has made a selection."""
_TOLD_SECONDS = 3.0
"""After so long whoever waits for that says so: all processes of a node come at once, and most selections are quick."""

_logger = package_logger(__name__)


def selection_path(root: Path, key: str) -> Path:
    """Where the bits of a selection are kept in a cache directory."""
    return root / SELECTIONS_BASENAME / f"{key}.npy"


def map_bits(path: Path) -> NDArray[Any] | None:
    """Map kept bits, which are then in use until the map is gone; None if there are none, or they are damaged.

    By way of a link they are only looked at: when they were used last is for those to say whose directory has them.
    """
    with suppress(OSError, ValueError, ShardCorruptError), open(path, "rb", opener=open_regular) as file:
        with suppress(shared_files.LocksUnsupportedError):
            shared_files.try_lock(file.fileno(), shared=True)  # the map keeps the lock
        if not path.is_symlink():
            usage.set_used(file.fileno())
        header = header_of(file)
        return np.memmap(file, header.dtype, "r", header.stop, header.shape)
    return None


def are_bits(path: Path) -> bool:
    """Whether a file of a selection holds its bits, whole."""
    return path.suffix == ".npy" and path.parent.name == SELECTIONS_BASENAME


@contextmanager
def made_by_one(path: Path, root: Path, work: str) -> Iterator[None]:
    """Be the one process that makes a selection, however long that takes; where there are no locks others may, too.

    Args:
        path: Where its bits will be; the directory is there.
        root: The cache directory.
        work: What this process does, as others are told who wait for it.

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
    def words() -> str:
        return f"waiting for {shared_files.lock_owner(lock)}, which {work} that is wanted"

    began, has_told = time.monotonic(), False
    with ExitStack() as shown:
        for _ in shared_files.pauses(longest=_LONGEST_PAUSE):
            descriptor, is_free = shared_files.open_shared(lock, root), True
            with suppress(shared_files.LocksUnsupportedError):
                is_free = shared_files.try_lock(descriptor, shared=False)
            if is_free and os.fstat(descriptor).st_nlink:  # else it was removed just now
                return descriptor
            shared_files.unlock_and_close(descriptor)
            if not is_free and not has_told and time.monotonic() > began + _TOLD_SECONDS:
                has_told = True
                _logger.warning("%s", words())
                shown.enter_context(waiting(words))
    raise AssertionError("pauses without end")


def stays_with(kept: Container[str], path: Path) -> bool:
    """Whether a file of a selection stays as one of these does: its bits, and its lock; all else is left over then."""
    return key_of(path) in kept and (are_bits(path) or is_lock(path))


def is_lock(path: Path) -> bool:
    """Whether a file of a selection is the lock of who makes it."""
    return path.suffix == ".lock"


def key_of(path: Path) -> str:
    """The name of the selection that a file is of."""
    return (path if path.parent.name == SELECTIONS_BASENAME else path.parent).name.partition(".")[0]


def is_in_use(path: Path) -> bool:
    """Whether a process of this machine has the bits mapped, or makes them, or one of another machine may do so."""
    if are_bits(path):
        return shared_files.is_locked(path)
    lock = _lock_of(path)
    return shared_files.is_locked(lock) or _may_be_made_elsewhere(lock)


def remove_unused(path: Path) -> bool:
    """Remove a file of a selection, and directories of it that are empty then, unless it is in use.

    Returns:
        Whether it is gone.
    """
    if are_bits(path):
        remove_unlocked(path)
    else:
        _remove_leftover(path)
    if path.parent.name != SELECTIONS_BASENAME:
        with suppress(OSError):  # there are more
            path.parent.rmdir()
    with suppress(OSError):
        selections_of(path).rmdir()
    return not path.exists()


def selections_of(path: Path) -> Path:
    """The directory of selections that a file of one is in."""
    return path.parent if path.parent.name == SELECTIONS_BASENAME else path.parent.parent


def _lock_of(path: Path) -> Path:
    return selections_of(path) / f"{key_of(path)}.lock"


def _remove_leftover(path: Path) -> None:
    lock = _lock_of(path)
    try:
        descriptor = shared_files.open_to_lock(lock)
    except FileNotFoundError:  # so nobody makes it
        with suppress(OSError):
            path.unlink()
        return
    except OSError:  # another user's
        return
    try:
        if shared_files.try_lock(descriptor, shared=False) and not _may_be_made_elsewhere(lock):
            path.unlink(missing_ok=True)
    except OSError:
        pass
    finally:
        shared_files.unlock_and_close(descriptor)


def _may_be_made_elsewhere(lock: Path) -> bool:
    with suppress(OSError):
        if not lock.read_text().endswith(f" on {socket.gethostname()}"):
            # Not the directory of parts itself: that changes when we remove one.
            told = (path.stat().st_mtime for path in (lock, *lock.with_suffix(".parts").glob("*")))
            return max(told) > time.time() - _ABANDONED_SECONDS
    return False
