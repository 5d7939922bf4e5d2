"""A watchdog that barks and does not bite: it tells where a worker is that has been at one sample for too long."""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from torch.utils.data import get_worker_info

from lightning_streaming.loading.sample_key import SampleKey
from lightning_streaming.loading.watch import Row


class Watchdog:
    """Writes the stacks of all threads to stderr, once a sample, when one takes longer than it should.

    The reader leaves a note of when it asked and for what, which takes it well under a microsecond. A thread looks at
    the note when the time could be up, so at most twice in ``seconds``. In a worker process, which has no other use for
    it, Python's own ``faulthandler`` looks after that thread: it tells where a worker is that holds the interpreter
    itself, as a call into C may, after twice the time and without the sample's key.

    Args:
        seconds: How long a sample may take, from being asked for to being handed out.
        name: Whose samples, for the first line.
        key: Finds the key of a sample.
        also_to: A file to add the same text to.
    """

    def __init__(self, seconds: float, name: str, key: Callable[[Row], SampleKey], also_to: Path | None) -> None:
        self._seconds = seconds
        self._name = name
        self._key = key
        self._also_to = also_to
        self._asked_at: float | None = None
        self._row: Row | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def asked(self) -> None:
        """The time begins."""
        self._row = None
        self._asked_at = time.monotonic()

    def begun(self, row: Row) -> None:
        """For the first line, if need be."""
        self._row = row

    def given(self) -> None:
        """The time is over; what the reader does with the sample is none of it."""
        self._asked_at = None

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def _watch(self) -> None:
        told, wait, in_worker = None, self._seconds, get_worker_info() is not None
        while True:
            if in_worker:
                faulthandler.dump_traceback_later(2 * self._seconds, file=2)  # unless it is called again before
            if self._closed.wait(wait):
                break
            asked_at, wait = self._asked_at, self._seconds
            if asked_at is None or asked_at == told:
                continue
            left = asked_at + self._seconds - time.monotonic()
            if left > 0:
                wait = left
            else:
                told = asked_at
                self._tell()
        if in_worker:
            faulthandler.cancel_dump_traceback_later()

    def _tell(self) -> None:
        row = self._row
        which = "which one is not known yet" if row is None else json.dumps(self._key(row).as_dict())
        text = f"{self._name} has been at one sample for {self._seconds:g} s: {which}\n{_stacks()}\n"
        sys.stderr.write(text)
        sys.stderr.flush()
        if self._also_to is not None:
            self._also_to.parent.mkdir(parents=True, exist_ok=True)
            with self._also_to.open("a") as file:
                file.write(text)


def _stacks() -> str:
    """What every other thread of this process is doing, the innermost call last."""
    frames = sys._current_frames()
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return "\n".join(
        f"Thread {threads.get(ident, ident)!r}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
        if ident != own
    )
