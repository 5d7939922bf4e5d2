"""Writes a dataset in parts, many at a time, by processes of this machine or tasks of a Ray cluster, and joins them."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from lightning_streaming.errors import ConfigError, MissingDependencyError, PartError
from lightning_streaming.escaping import short_repr
from lightning_streaming.signatures import explains_options_of
from lightning_streaming.waits import bar
from lightning_streaming.writing import parts
from lightning_streaming.writing.writer_options import Input, ParallelOptions, Sample, options_from

_LONGEST_INPUT = 200
_SECONDS_BETWEEN_REPORTS = 0.1
_SECONDS_TO_END = 5.0
_TIMES_A_DEAD_WORKER_IS_REPLACED = 3


@explains_options_of(ParallelOptions)
def write_parallel(
    inputs: Iterable[Input],
    fn: Callable[[Input], Iterable[Sample]],
    out: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    compression: str | None = None,
    hashes: Sequence[str] | None = None,
    size_limit: int | float | str | None = 2**26,
    storage_options: Mapping[str, Any] | None = None,
    strict: bool = False,
    mode: Literal["create", "resume"] = "create",
    num_workers: int | None = None,
    engine: Literal["processes", "ray"] = "processes",
    start_method: Literal["spawn", "forkserver", "fork"] = "spawn",
    progress_bar: bool = True,
) -> None:
    """Write the samples of each input into its own part, ``out/part.000000`` and so on, and merge the parts.

    Samples are in the order of the inputs, whichever part finishes first. The index of ``out`` is written last, so
    there is no dataset until all parts are complete. ``mode="resume"`` continues a job that ended early: it keeps
    finished parts and starts the others over.

    After a failure no further part is started; parts under way are finished, and then the error is raised. When the
    program is interrupted its workers end at once.

    Raises:
        ConfigError: An argument is invalid, ``out`` is not empty, or a job with other inputs or options was started
            there.
        PartError: A part could not be written; the message names its input, the cause is the error of ``fn``.
        MissingDependencyError: A package that an option needs is not installed.
        StorageError: The store did not answer.
    """
    asked: ParallelOptions[Input] = options_from(ParallelOptions, locals())
    known = _as_list(inputs)
    job, plan = parts.make_job(known, asked)
    # These check what they are to do, so they come before anything is begun that a corrected call would find.
    workers = _workers(job, known, engine, num_workers, start_method)
    parts.record(plan, job, mode)
    _write_all(workers, known, progress_bar)
    job.publish()


def run_job(job: parts.PartJob[Input], inputs: Sequence[Input], *, num_workers: int, progress_bar: bool) -> int:
    """Write every part of a job by processes: all of :func:`write_parallel` but the plan before and the index after.

    Returns:
        The samples of all parts.

    Raises:
        PartError: A part could not be written.
    """
    return _write_all(_workers(job, inputs, "processes", num_workers, "spawn"), inputs, progress_bar)


def _write_all(begun: AbstractContextManager[parts.Workers], inputs: Sequence[Any], progress_bar: bool) -> int:
    with begun as workers:
        with _PartsProgress(len(inputs), shown=progress_bar) as progress:
            failures = _run(workers, inputs, progress)
        if failures:
            raise _error(failures, inputs) from failures[0].cause()
    return progress.samples


def _as_list(inputs: Iterable[Input]) -> Sequence[Input]:
    """Inputs that can be counted and named; what has no order of its own has no parts that a resume would know."""
    if isinstance(inputs, Mapping | Set | str | bytes) or not isinstance(inputs, Iterable):
        raise ConfigError(
            f"inputs must be a list of at least one, one for each part, but got {type(inputs).__name__} "
            f"{inputs!r:.100}",
            option="inputs",
        )
    return inputs if isinstance(inputs, Sequence) else list(inputs)


def _workers(
    job: parts.PartJob[Any], inputs: Sequence[Any], engine: str, num_workers: int | None, start_method: str
) -> AbstractContextManager[parts.Workers]:
    if engine == "ray":
        return RayWorkers(job, num_workers)
    return ProcessWorkers(job, inputs, min(num_workers or _num_cpus(), job.num_parts), start_method)


def _num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(workers: parts.Workers, inputs: Sequence[Any], progress: _PartsProgress) -> list[parts.PartFailed]:
    """Have all parts written, the first ones first; after a failure none is begun.

    Returns:
        The failures, in the order of the inputs.
    """
    waiting = iter(enumerate(inputs))
    failures: list[parts.PartFailed] = []
    running: set[int] = set()
    while True:
        while not failures and len(running) < workers.capacity and (task := next(waiting, None)) is not None:
            running.add(task[0])
            workers.begin(*task)
        if not running:
            return sorted(failures, key=lambda failure: failure.number)
        for event in workers.wait():
            progress.show(event)
            if not isinstance(event, parts.PartProgress):
                running.discard(event.number)
            if isinstance(event, parts.PartFailed):
                failures.append(event)


def _error(failures: Sequence[parts.PartFailed], inputs: Sequence[Any]) -> PartError:
    first, *others = failures
    shown = repr(inputs[first.number])
    if len(shown) > _LONGEST_INPUT:
        shown = f"{shown[:_LONGEST_INPUT]}..."
    also = f" (also failed: parts {', '.join(str(one.number) for one in others)})" if others else ""
    return PartError(
        f"part {first.number} could not be written, from input {shown}: {first.summary}{also}",
        hint="finished parts are kept; mode='resume' writes the others",
    )


class _PartsProgress:
    """One bar over the parts, with the samples written so far."""

    def __init__(self, num_parts: int, *, shown: bool) -> None:
        self._bar = bar("writing", "part", num_parts, shown=shown, stays=True)
        self._of_part: dict[int, int] = {}
        self.samples = 0
        """Written so far."""

    def __enter__(self) -> _PartsProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, event: parts.PartProgress | parts.PartDone | parts.PartFailed) -> None:
        """Take in what a worker said."""
        if isinstance(event, parts.PartFailed):
            return
        self.samples += event.samples - self._of_part.get(event.number, 0)
        self._of_part[event.number] = event.samples
        self._bar.set_postfix(samples=self.samples, refresh=isinstance(event, parts.PartProgress))
        if isinstance(event, parts.PartDone):
            self._bar.update()


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

    def __init__(self, job: parts.PartJob[Any], inputs: Sequence[Any], num_workers: int, start_method: str) -> None:
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
            raise ConfigError(
                f"start_method must be one of {known}, but got {short_repr(start_method)}", option="start_method"
            )
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

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
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

    def wait(self) -> list[parts.Event]:
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

    def _hear(self, worker: _Worker) -> parts.Event:
        event = _receive(worker.connection)
        if event is None:
            return self._bury(worker)
        worker.has_begun = True
        if not isinstance(event, parts.PartProgress):
            worker.number = None
        return event

    def _bury(self, worker: _Worker) -> parts.PartFailed:
        self._workers.remove(worker)
        worker.connection.close()
        worker.process.join()
        assert worker.number is not None
        return parts.PartFailed(worker.number, _obituary(worker.process.exitcode or 0, worker.has_begun))

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


def _check_pickles(job: parts.PartJob[Any]) -> None:
    try:
        pickle.dumps(job)
    except Exception as error:
        raise ConfigError(
            f"fn cannot be sent to a process: {error}",
            hint="it must be a function of a module that can be imported, or a functools.partial of one",
            option="fn",
        ) from error


def _pickled(number: int, part_input: Any) -> bytes:
    """An input as it is sent to a process."""
    try:
        return bytes(ForkingPickler.dumps(part_input))
    except Exception as error:
        raise ConfigError(
            f"input {number} cannot be sent to a process: {error}", hint="inputs must pickle", option="inputs"
        ) from error


def _receive(connection: Connection) -> parts.Event | None:
    """What a worker said; None if it has died, also in the middle of a word."""
    try:
        event: parts.Event | None = connection.recv() if connection.poll() else None
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


def _serve(connection: Connection, job: parts.PartJob[Any]) -> None:
    """Write the parts that come through the pipe, until None does, or nobody is there any more."""
    ignore_interrupts()
    signal.signal(signal.SIGTERM, _exit_in_order)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent was killed, and no one is left to be told
        while (task := connection.recv()) is not None:
            number, pickled = task
            connection.send(parts.PartProgress(number, 0))
            connection.send(_write(job, number, pickled, _Reporter(connection, number)))


def _write(job: parts.PartJob[Any], number: int, pickled: bytes, reporter: _Reporter) -> parts.Event:
    try:
        part_input = pickle.loads(pickled)  # noqa: S301 - from our own parent
    except Exception as error:  # noqa: BLE001 - whatever its class raises here
        return parts.failure(number, error, "it could be pickled, but not unpickled in a worker process: ")
    return parts.write_part(job, number, part_input, reporter.count)


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
            self._connection.send(parts.PartProgress(self._number, self._samples))
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


# --- tasks of a Ray cluster ---


class RayWorkers:
    """Tasks of the Ray cluster that this program is connected to, or of one of its own.

    A program that has not called ``ray.init`` is connected as ``ray.init()`` does it: to the cluster that the
    environment names, or to one on this machine that ends with the context.
    """

    def __init__(self, job: parts.PartJob[Any], num_workers: int | None) -> None:
        """Nothing is started before the context is entered.

        Args:
            job: What to write.
            num_workers: Most tasks at a time; None for one a CPU of the cluster.

        Raises:
            MissingDependencyError: Ray is not installed.
        """
        self._ray = _import_ray()
        self._job = job
        self.capacity = num_workers or 1
        self._num_workers = num_workers
        self._running: dict[Any, int] = {}
        self._on_exit = ExitStack()

    def __enter__(self) -> RayWorkers:
        ray = self._ray
        if not ray.is_initialized():
            if threading.current_thread() is threading.main_thread():
                # Ray sets a handler of its own, and leaves it when it is shut down.
                self._on_exit.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            ray.init(log_to_driver=False, logging_level=logging.WARNING)
            self._on_exit.callback(ray.shutdown)
        self.capacity = self._num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._sent_job = ray.put(self._job)
        # Only a dead worker or node is tried again by Ray; an error of the function comes back as a value.
        self._task = ray.remote(max_retries=_TIMES_A_DEAD_WORKER_IS_REPLACED)(parts.write_part)
        return self

    def __exit__(self, *_: object) -> None:
        with self._on_exit:
            for task in self._running:
                self._ray.cancel(task, force=True)

    def begin(self, number: int, part_input: Any) -> None:
        """Hand a part to the cluster."""
        task = self._task.options(name=f"part {number}").remote(self._sent_job, number, part_input)
        self._running[task] = number

    def wait(self) -> list[parts.Event]:
        """Wait until a task ends."""
        ended, _ = self._ray.wait(list(self._running), num_returns=1)
        return [self._end_of(task) for task in ended]

    def _end_of(self, task: Any) -> parts.Event:
        number = self._running.pop(task)
        try:
            event: parts.Event = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return parts.PartFailed(
                number, f"Ray gave it up after {_TIMES_A_DEAD_WORKER_IS_REPLACED} more tries: {parts.summary_of(error)}"
            )
        return event


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependencyError(
            f"engine='ray' needs a package that is not installed ({error})",
            hint="run: pip install 'lightning-streaming[ray]'",
            option="engine",
        ) from error
