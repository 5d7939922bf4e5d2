"""How long to wait for another process that is at a file we need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from lightning_streaming.cache.locks import lock_owner
from lightning_streaming.errors import LockTimeoutError


class Patience:
    """Ends the wait for a process that is stopped; one that goes on, however slowly, is waited for.

    Args:
        seconds: How long it may show no sign of life.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: list[tuple[int, int] | None] = []
        self._since = 0.0

    def check(self, parts: Sequence[Path]) -> None:
        """To be called while waiting.

        Args:
            parts: What the other writes to, which need not exist; the one that it holds the lock of first.

        Raises:
            LockTimeoutError: Nothing has changed for too long.
        """
        seen = [identity(part) for part in parts]
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        elif time.monotonic() > self._since + self._seconds:
            owner = lock_owner(parts[0])
            raise LockTimeoutError(
                f"waited {self._seconds:g} s for a sign of life of {owner}, which holds {parts[0]}; let it go on, or "
                "end it"
            )


def identity(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced or written to; None if there is no such file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
