"""What a DataLoader worker process does before its first sample: how it ends, and which signals it lives through."""

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
"""What a scheduler or a terminal may send to the whole process group, and what no worker is to die of."""


@contextmanager
def signals_held_back(start_method: str) -> Iterator[None]:
    """Have the workers started in the block be born with the shielded signals held back, until their shield is up.

    Without it a worker is without shelter while it imports, and so are, for ever, the threads that its imports start.
    What comes to this process meanwhile is not lost: it reaches another thread, or waits for the end of the block.

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
    ``kill -9`` of the trainer leaves nobody behind. Linux could send a signal instead, but it does so as soon as the
    parent's *thread* ends that made the worker. Freezing the collector spares the copies that walking over the parent's
    objects would make of memory shared by fork.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        _shield_from_signals(parent.pid)
        _start_thread("parent-watch", _end_with, parent.sentinel)
    gc.freeze()


def _shield_from_signals(parent: int | None) -> None:
    """Let signals to the whole process group pass: the trainer still needs its workers, to come to a good end.

    Torch and multiprocessing end workers with SIGTERM, so that one counts if, and only if, the parent sent it. Python's
    signal handlers are not told who did, hence a thread that waits for signals; programs that a transform starts
    inherit the shield, and are ended with SIGKILL alone.
    """
    if sys.platform == "darwin":  # where nobody says who sent a signal
        for signum in {*SHIELDED_SIGNALS} - {signal.SIGTERM}:
            signal.signal(signum, signal.SIG_IGN)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED_SIGNALS)
    _start_thread("signal-shield", _end_if_told_by, parent)


def _end_if_told_by(parent: int | None) -> None:
    while True:
        told = signal.sigwaitinfo(SHIELDED_SIGNALS)
        if told.si_signo == signal.SIGTERM and told.si_pid == parent:
            os._exit(0)  # as torch's own handler does: any other status would count as a worker's failure


def _end_with(parent: int) -> None:
    wait([parent])
    os.kill(os.getpid(), signal.SIGKILL)


def _start_thread(name: str, run: Callable[..., None], *args: object) -> None:
    threading.Thread(target=run, args=args, name=name, daemon=True).start()
