"""How many bytes of a cache directory are ours: a number in a file, changed under the file's lock.

It is never too small while its rules are kept: a part grows, and a file of ours is removed, only by who holds the
ledger, and the number changes with it. A kill in between leaves it too big, until somebody who needs room counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_streaming.cache.arrival import directory_gone, unwritable
from lightning_streaming.cache.layout import USAGE_BASENAME
from lightning_streaming.cache.locks import lock_owner, pauses, try_lock, unlock_and_close
from lightning_streaming.cache.permissions import open_shared
from lightning_streaming.errors import LockTimeoutError

_PATIENCE_SECONDS = 120.0
"""Holders are quick, except when they remove thousands of files."""
_DIGITS = 20


class Ledger:
    """One directory's count, held by this process alone."""

    def __init__(self, root: Path, descriptor: int) -> None:
        self._root = root
        self._descriptor = descriptor
        text = os.pread(descriptor, _DIGITS, 0).strip()
        self._used = int(text) if text.isdigit() else None

    @property
    def used(self) -> int | None:
        """Bytes of files that are ours, parts included; None if nobody has counted yet."""
        return self._used

    @used.setter
    def used(self, count: int) -> None:
        self._used = max(0, count)
        # One write of the same length each time: whoever is killed here leaves the old number or the new one.
        try:
            os.pwrite(self._descriptor, f"{self._used:<{_DIGITS - 1}}\n".encode(), 0)
        except OSError as error:  # the disk is full, and the file empty as yet
            raise unwritable(self._root, error) from error


@contextmanager
def held_ledger(root: Path, count: Callable[[], int]) -> Iterator[Ledger]:
    """Hold the ledger of a cache directory.

    Args:
        root: The cache directory.
        count: Counts the bytes there; called while holding the ledger, if it has no number.

    Raises:
        LocksUnsupportedError: The filesystem has no locks.
        LockTimeoutError: Another process has held it for too long.
        StorageError: The directory is gone, or may not be written to.
    """
    descriptor = _open(root)
    try:
        if not any(try_lock(descriptor, shared=False) for _ in pauses(_PATIENCE_SECONDS)):
            path = root / USAGE_BASENAME
            raise LockTimeoutError(
                f"waited {_PATIENCE_SECONDS:g} s for {path}, held by {lock_owner(path)}, to change it"
            )
        ledger = Ledger(root, descriptor)
        if ledger.used is None:
            ledger.used = count()
        yield ledger
    finally:
        unlock_and_close(descriptor)


def read_ledger(root: Path) -> int | None:
    """The count as it is now; None if there is none yet."""
    try:
        text = (root / USAGE_BASENAME).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _open(root: Path) -> int:
    path = root / USAGE_BASENAME
    try:
        return open_shared(path, root)
    except FileNotFoundError:
        raise directory_gone(root) from None
    except OSError as error:
        raise unwritable(root, error) from error
