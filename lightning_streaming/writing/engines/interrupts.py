"""Ctrl-C reaches all processes of a terminal; it is for the first one to end the others."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.resource_tracker import ensure_running


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes that no Ctrl-C reaches, not even while they import; one that comes to us is raised soon after.

    They have to call :func:`ignore_interrupts`.
    """
    ensure_running()  # or the first process would start it, and that lets through what is held back here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """In a process that was started so: ignore Ctrl-C, but no more than that: what it holds back for now is let go."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
