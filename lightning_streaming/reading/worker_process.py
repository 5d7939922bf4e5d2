"""The life of a worker process: it ends with its parent, and only its parent ends it by a signal."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

SHIELDED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler or a terminal may send to the whole process group; workers ignore them."""


@contextmanager
def signals_held_back(start_method: str) -> Iterator[None]:
    """Start the workers in this block with the shielded signals blocked, until their shield is set up.

    Without it a worker is unprotected while it imports, and the threads that its imports start stay so. A signal to
    this process meanwhile is not lost: another thread receives it, or it waits for the end of the block.

    Args:
        start_method: "fork", "spawn" or "forkserver". The last starts workers from a server that other users of
            multiprocessing share, and that must not pass this on to theirs.
    """
    if sys.platform == "darwin":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED_SIGNALS)
    try:
        if start_method != "fork":
            resource_tracker.ensure_running()  # it is started but once, and then lets SIGINT and SIGTERM through
        held_back = before if start_method == "forkserver" else before.union(SHIELDED_SIGNALS)
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@cache
def prepare_worker_process() -> None:
    """Make this worker live and end with its parent, and spare it the parent's objects. Works once.

    Torch's workers look for a dead parent every few seconds. A thread that waits for it ends them at once, so that a
    ``kill -9`` of the trainer leaves no process behind. Linux could send a signal instead, but already when the
    parent's *thread* ends that started the worker. Freezing the collector keeps it from walking over the parent's
    objects, which would copy memory shared by fork.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        _shield_from_signals(parent.pid)
        _start_thread("parent-watch", _end_with, parent.sentinel)
    gc.freeze()


def _shield_from_signals(parent: int | None) -> None:
    """Let signals to the whole process group pass: the trainer still needs its workers, to come to a good end.

    Torch and multiprocessing end workers with SIGTERM, so that one counts if, and only if, the parent sent it. Python's
    signal handlers do not receive the sender, hence a thread that waits for signals; programs that a transform starts
    inherit the shield, and are ended with SIGKILL alone.
    """
    if sys.platform == "darwin":  # which does not report the sender of a signal
        for signum in {*SHIELDED_SIGNALS} - {signal.SIGTERM}:
            signal.signal(signum, signal.SIG_IGN)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED_SIGNALS)
    _start_thread("signal-shield", _end_at_signal_of, parent)


def _end_at_signal_of(parent: int | None) -> None:
    while True:
        received = signal.sigwaitinfo(SHIELDED_SIGNALS)
        if received.si_signo == signal.SIGTERM and received.si_pid == parent:
            os._exit(0)  # as torch's own handler does: any other status would count as a worker's failure


def _end_with(parent: int) -> None:
    wait([parent])
    os.kill(os.getpid(), signal.SIGKILL)


def _start_thread(name: str, run: Callable[..., None], *args: object) -> None:
    threading.Thread(target=run, args=args, name=name, daemon=True).start()
