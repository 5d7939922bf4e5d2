"""Parts written by processes of this machine.

Each worker has a pipe of its own, so that one that is killed can spoil nothing that others use, and it is known which
part it was at.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import FrameType, TracebackType
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.writing.engines.events import Event, PartDone, PartFailed, PartProgress, failure, write_part
from lightning_streaming.writing.engines.interrupts import ignore_interrupts, without_interrupts
from lightning_streaming.writing.parts import PartJob

_SECONDS_BETWEEN_REPORTS = 0.1
_SECONDS_TO_END = 5.0


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    number: int | None = None
    """The part it was told to write."""
    has_begun: bool = False
    """Whether it ever answered."""


class ProcessWorkers:
    """Processes of this machine, that end with this one, however it ends."""

    def __init__(self, job: PartJob[Any], inputs: Sequence[Any], num_workers: int, start_method: str) -> None:
        """Processes are started when the context is entered.

        Args:
            job: What to write.
            inputs: What its parts are made of.
            num_workers: How many processes.
            start_method: ``spawn``, ``forkserver`` or ``fork``.

        Raises:
            ConfigError: There is no such start method, or the job's function or an input cannot be sent to a process.
        """
        if start_method not in multiprocessing.get_all_start_methods():
            known = ", ".join(multiprocessing.get_all_start_methods())
            raise ConfigError(f"start_method must be one of {known}, but got {start_method!r}")
        if start_method != "fork":
            _check_pickles(job)
        for number, part_input in enumerate(inputs):
            _pickled(number, part_input)
        self.capacity = num_workers
        self._job = job
        self._context: Any = multiprocessing.get_context(start_method)
        self._workers: list[_Worker] = []

    def __enter__(self) -> ProcessWorkers:
        try:
            for _ in range(self.capacity):
                self._workers.append(self._start())
        except BaseException:
            self._end_now()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._end()
        else:
            self._end_now()

    def begin(self, number: int, part_input: Any) -> None:
        """Send a part to a worker that has none.

        Raises:
            ConfigError: The input cannot be sent to a process.
        """
        worker = next(worker for worker in self._workers if worker.number is None)
        worker.number = number
        pickled = _pickled(number, part_input)
        with suppress(OSError):  # it has died; wait() will tell
            worker.connection.send((number, pickled))

    def wait(self) -> list[Event]:
        """Wait until a worker says something, or dies."""
        busy = [worker for worker in self._workers if worker.number is not None]
        ready = wait_for_any([one for worker in busy for one in (worker.connection, worker.process.sentinel)])
        return [self._hear(worker) for worker in busy if worker.connection in ready or worker.process.sentinel in ready]

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._job), name="write_parallel")
        with without_interrupts():
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _hear(self, worker: _Worker) -> Event:
        event = _receive(worker.connection)
        if event is None:
            return self._bury(worker)
        worker.has_begun = True
        if not isinstance(event, PartProgress):
            worker.number = None
        return event

    def _bury(self, worker: _Worker) -> PartFailed:
        self._workers.remove(worker)
        worker.connection.close()
        worker.process.join()
        assert worker.number is not None
        return PartFailed(worker.number, _obituary(worker.process.exitcode or 0, worker.has_begun))

    def _end(self) -> None:
        for worker in self._workers:
            with suppress(OSError):
                worker.connection.send(None)
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()

    def _end_now(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(_SECONDS_TO_END)
            worker.process.kill()
            worker.process.join()
            worker.connection.close()


def _check_pickles(job: PartJob[Any]) -> None:
    try:
        pickle.dumps(job)
    except Exception as error:
        raise ConfigError(
            f"fn cannot be sent to a process: {error}; it must be a function of a module that can be imported, or a "
            "functools.partial of one"
        ) from error


def _pickled(number: int, part_input: Any) -> bytes:
    """An input as it is sent to a process."""
    try:
        return bytes(ForkingPickler.dumps(part_input))
    except Exception as error:
        raise ConfigError(f"input {number} cannot be sent to a process: {error}; inputs must pickle") from error


def _receive(connection: Connection) -> Event | None:
    """What a worker said; None if it has died, also in the middle of a word."""
    try:
        event: Event | None = connection.recv() if connection.poll() else None
    except (EOFError, OSError):
        return None
    return event


def _obituary(exitcode: int, has_begun: bool) -> str:
    """What became of a worker; killed by signal 9 is what running out of memory looks like."""
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = "; it may have run out of memory: use fewer workers" if name == "SIGKILL" else ""
        return f"its worker process was killed by {name}{hint}"
    if has_begun:
        return f"its worker process ended with exit code {exitcode}"
    return (
        f"its worker process ended with exit code {exitcode} before it began; a script must call write_parallel under "
        'if __name__ == "__main__":, because workers import it; if it does, its own message tells more'
    )


def _serve(connection: Connection, job: PartJob[Any]) -> None:
    """Write the parts that come through the pipe, until None does, or nobody is there any more."""
    ignore_interrupts()
    signal.signal(signal.SIGTERM, _exit_in_order)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent was killed, and no one is left to be told
        while (task := connection.recv()) is not None:
            number, pickled = task
            connection.send(PartProgress(number, 0))
            connection.send(_write(job, number, pickled, _Reporter(connection, number)))


def _write(job: PartJob[Any], number: int, pickled: bytes, reporter: _Reporter) -> PartDone | PartFailed:
    try:
        part_input = pickle.loads(pickled)  # noqa: S301 - from our own parent
    except Exception as error:  # noqa: BLE001 - whatever its class raises here
        return failure(number, error, "it could be pickled, but not unpickled in a worker process: ")
    return write_part(job, number, part_input, reporter.count)


class _Reporter:
    """Tells how far a part is, now and then."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._samples = 0
        self._due = time.monotonic() + _SECONDS_BETWEEN_REPORTS

    def count(self) -> None:
        """One more sample is written."""
        self._samples += 1
        if time.monotonic() >= self._due:
            self._connection.send(PartProgress(self._number, self._samples))
            self._due = time.monotonic() + _SECONDS_BETWEEN_REPORTS


def _exit_in_order(signal_number: int, _: FrameType | None) -> None:
    """Leave all ``with`` blocks, so that temporary files go away."""
    sys.exit(128 + signal_number)


def _end_with_parent() -> None:
    """End at once when the parent was killed: who resumes its work must not meet us."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
