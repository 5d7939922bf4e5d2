"""Readers who wait for room, one at a time: only one looks through the files, and who fetches ahead stands back.

The file whose lock is the queue also says when somebody last waited in vain, so that others need not find out again.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lightning_streaming.cache.arrival import unwritable
from lightning_streaming.cache.layout import QUEUE_BASENAME
from lightning_streaming.cache.locks import LocksUnsupportedError, pauses, try_lock, unlock_and_close
from lightning_streaming.cache.permissions import open_shared

_PAUSE = 0.004
"""Seconds between two looks."""
_IN_VAIN_NANOSECONDS = 600 * 10**9
"""For so long after somebody waited in vain nobody waits: workers of the next epoch would, each for itself."""
_DIGITS = 20


class Turn:
    """A place in the queue of a cache directory, given back at the end of the block or when this process dies."""

    def __init__(self, root: Path) -> None:
        """Queue up.

        Raises:
            StorageError: The directory is gone, or may not be written to.
        """
        path = root / QUEUE_BASENAME
        try:
            self._descriptor = open_shared(path, root)
        except OSError as error:
            raise unwritable(root, error) from error

    def wait(self, seconds: float) -> bool:
        """Wait until it is this reader's turn; False if it does not come in time.

        All look equally often, so that who came first has no worse a chance than who comes last.
        """
        with suppress(LocksUnsupportedError):
            return any(try_lock(self._descriptor, shared=False) for _ in pauses(seconds, _PAUSE))
        return True

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unlock_and_close(self._descriptor)


def note_in_vain(root: Path) -> None:
    """Say that a reader has waited for room in a cache directory, and got none."""
    with suppress(OSError):  # then others wait as well
        descriptor = open_shared(root / QUEUE_BASENAME, root)
        try:
            os.pwrite(descriptor, f"{time.time_ns():<{_DIGITS - 1}}\n".encode(), 0)
        finally:
            os.close(descriptor)


def was_in_vain(root: Path) -> bool:
    """Whether a reader has waited for room in vain a short time ago."""
    with suppress(OSError, ValueError):
        return 0 <= time.time_ns() - int((root / QUEUE_BASENAME).read_bytes()[:_DIGITS]) < _IN_VAIN_NANOSECONDS
    return False


def somebody_waits(root: Path) -> bool:
    """Whether it is some reader's turn in a cache directory."""
    with suppress(OSError):
        descriptor = os.open(root / QUEUE_BASENAME, os.O_RDONLY)
        try:
            return not try_lock(descriptor, shared=True)
        except LocksUnsupportedError:
            return False
        finally:
            unlock_and_close(descriptor)
    return False
