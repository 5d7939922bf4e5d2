"""How far storing has come, in bytes."""

from __future__ import annotations

import threading

from tqdm.auto import tqdm


class _Bar(tqdm):  # type: ignore[misc]
    monitor_interval = 0  # no thread that outlives the writer


class Progress:
    """A bar of the bytes stored, of those that are ready to be; or nothing to be seen."""

    def __init__(self, *, shown: bool) -> None:
        self._lock = threading.Lock()
        self._bar = _Bar(total=0, unit="B", unit_scale=True, unit_divisor=1024, disable=not shown, desc="stored")

    def expect(self, size: int) -> None:
        """So many bytes are to be stored."""
        with self._lock:
            self._bar.total += size if self._bar.total is not None else 0
            self._bar.refresh()

    def stored(self, size: int) -> None:
        """So many bytes have been."""
        with self._lock:
            self._bar.update(size)

    def close(self) -> None:
        """No more comes; the bar stays on the screen."""
        with self._lock:
            self._bar.close()
