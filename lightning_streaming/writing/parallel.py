"""Write a dataset in parts, many concurrently, by processes of this machine or tasks of a Ray cluster, and merge it."""

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
from dataclasses import KW_ONLY, dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Literal

from lightning_streaming.errors import ConfigError, MissingDependencyError, PartError
from lightning_streaming.escaping import short_repr
from lightning_streaming.signatures import explains_options_of
from lightning_streaming.units import store_whole
from lightning_streaming.waits import bar
from lightning_streaming.writing import parts
from lightning_streaming.writing.parts import Input, PartsOptions
from lightning_streaming.writing.shards import Sample, options_from

_ENGINES = ("processes", "ray")
_LONGEST_INPUT = 200
_REPORT_SECONDS = 0.1
_END_SECONDS = 5.0
_RAY_RETRIES = 3


@dataclass(frozen=True)
class ParallelOptions(PartsOptions, Generic[Input]):
    """Options of :func:`write_parallel`.

    Args:
        inputs: Input of each part: file names, ranges, lists of records. All are held in memory, also those of a
            generator. The repr of each must be the same in every run: it is stored in the plan, by which a resume
            checks that it continues the same dataset.
        fn: Function that yields the samples of an input, the same ones each time. With processes a function of a
            module.
        out: A directory that is missing or empty, or a URL with no dataset.
        num_workers: Number of parts that are written concurrently; None for one per CPU of this machine, or of the Ray
            cluster.
        engine: ``processes`` of this machine; or ``ray``, tasks of a Ray cluster, all of whose nodes can access
            ``out``.
        start_method: Start method of processes: ``spawn``, ``forkserver`` or ``fork``.
        progress_bar: Whether to show finished parts and written samples, on stderr.
    """

    inputs: Iterable[Input]
    fn: Callable[[Input], Iterable[Sample]]
    out: str | Path
    _: KW_ONLY
    num_workers: int | None = None
    engine: Literal["processes", "ray"] = "processes"
    start_method: Literal["spawn", "forkserver", "fork"] = "spawn"
    progress_bar: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine not in _ENGINES:
            raise ConfigError(
                f"engine must be one of {', '.join(_ENGINES)}, but got {short_repr(self.engine)}", option="engine"
            )
        store_whole(self, "num_workers", 1, or_none=True)


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

    After a failure no further part is started; parts in progress are finished, and then the error is raised. When the
    program is interrupted its workers end immediately.

    Raises:
        ConfigError: An argument is invalid, ``out`` is not empty, or a job with other inputs or options was started
            there.
        PartError: A part could not be written; the message names its input, the cause is the error of ``fn``.
        MissingDependencyError: A package that an option needs is not installed.
        StorageError: The store did not answer.
    """
    options: ParallelOptions[Input] = options_from(ParallelOptions, locals())
    if isinstance(inputs, Mapping | Set | str | bytes) or not isinstance(inputs, Iterable):
        # An input without a fixed order has no parts that a resume would recognise.
        raise ConfigError(
            f"inputs must be a list of at least one, one for each part, but got {type(inputs).__name__} "
            f"{inputs!r:.100}",
            option="inputs",
        )
    known = inputs if isinstance(inputs, Sequence) else list(inputs)
    job, plan = parts.make_job(known, options.fn, options.out, options)
    # These check their arguments, so they are created before the plan is stored, which a corrected call would find.
    workers = _workers(job, known, engine, num_workers, start_method)
    parts.store_plan(plan, job, mode)
    _write_all(workers, known, progress_bar)
    job.publish()


def run_job(job: parts.PartJob[Input], inputs: Sequence[Input], *, num_workers: int, progress_bar: bool) -> int:
    """Write every part of a job by processes: :func:`write_parallel` without the plan before and the index after.

    Returns:
        Number of samples of all parts.

    Raises:
        PartError: A part could not be written.
    """
    return _write_all(_workers(job, inputs, "processes", num_workers, "spawn"), inputs, progress_bar)


def _workers(
    job: parts.PartJob[Any], inputs: Sequence[Any], engine: str, num_workers: int | None, start_method: str
) -> AbstractContextManager[parts.Workers]:
    if engine == "ray":
        return RayWorkers(job, num_workers)
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ProcessWorkers(job, inputs, min(num_workers or num_cpus, job.num_parts), start_method)


def _write_all(started: AbstractContextManager[parts.Workers], inputs: Sequence[Any], progress_bar: bool) -> int:
    with started as workers:
        with _PartsProgress(len(inputs), shown=progress_bar) as progress:
            failures = _run(workers, inputs, progress)
        if failures:
            raise _error(failures, inputs) from failures[0].cause()
    return progress.samples


def _run(workers: parts.Workers, inputs: Sequence[Any], progress: _PartsProgress) -> list[parts.PartFailed]:
    """Write all parts, in order; start none after a failure.

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
    also = f" (also failed: parts {', '.join(str(other.number) for other in others)})" if others else ""
    return PartError(
        f"part {first.number} could not be written, from input {shown}: {first.summary}{also}",
        hint="finished parts are kept; mode='resume' writes the others",
    )


class _PartsProgress:
    """A progress bar of the parts, with the number of samples written so far."""

    def __init__(self, num_parts: int, *, shown: bool) -> None:
        self._bar = bar("writing", "part", num_parts, shown=shown, stays=True)
        self._of_part: dict[int, int] = {}
        self.samples = 0
        """Samples written so far."""

    def __enter__(self) -> _PartsProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, event: parts.PartProgress | parts.PartDone | parts.PartFailed) -> None:
        """Show an event of a worker."""
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
    """The part that it writes."""
    has_started: bool = False
    """Whether it ever sent an event."""


class ProcessWorkers:
    """Processes of this machine that end with this one, even if it is killed."""

    def __init__(self, job: parts.PartJob[Any], inputs: Sequence[Any], num_workers: int, start_method: str) -> None:
        """Start no process before the context is entered.

        Args:
            job: Job to write.
            inputs: Inputs of its parts.
            num_workers: Number of processes.
            start_method: ``spawn``, ``forkserver`` or ``fork``.

        Raises:
            ConfigError: The start method is unknown, or the job's function or an input cannot be pickled.
        """
        if start_method not in multiprocessing.get_all_start_methods():
            known = ", ".join(multiprocessing.get_all_start_methods())
            raise ConfigError(
                f"start_method must be one of {known}, but got {short_repr(start_method)}", option="start_method"
            )
        if start_method != "fork":
            try:
                pickle.dumps(job)
            except Exception as error:
                raise ConfigError(
                    f"fn cannot be sent to a process: {error}",
                    hint="it must be a function of a module that can be imported, or a functools.partial of one",
                    option="fn",
                ) from error
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
        """Send a part to an idle worker.

        Raises:
            ConfigError: The input cannot be sent to a process.
        """
        worker = next(worker for worker in self._workers if worker.number is None)
        worker.number = number
        pickled = _pickled(number, part_input)
        with suppress(OSError):  # it has died; wait() returns the failure
            worker.connection.send((number, pickled))

    def wait(self) -> list[parts.Event]:
        """Wait until a worker sends an event, or dies."""
        busy = [worker for worker in self._workers if worker.number is not None]
        ready = wait_for_any([handle for worker in busy for handle in (worker.connection, worker.process.sentinel)])
        return [
            self._event_of(worker) for worker in busy if worker.connection in ready or worker.process.sentinel in ready
        ]

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._job), name="write_parallel")
        with without_interrupts():
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _event_of(self, worker: _Worker) -> parts.Event:
        try:
            event: parts.Event | None = worker.connection.recv() if worker.connection.poll() else None
        except (EOFError, OSError):
            event = None
        if event is None:  # it has died, maybe while it sent an event
            self._workers.remove(worker)
            worker.connection.close()
            worker.process.join()
            assert worker.number is not None
            return parts.PartFailed(worker.number, _describe_exit(worker.process.exitcode or 0, worker.has_started))
        worker.has_started = True
        if not isinstance(event, parts.PartProgress):
            worker.number = None
        return event

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
            worker.process.join(_END_SECONDS)
            worker.process.kill()
            worker.process.join()
            worker.connection.close()


def _pickled(number: int, part_input: Any) -> bytes:
    """Return an input as it is sent to a process."""
    try:
        return bytes(ForkingPickler.dumps(part_input))
    except Exception as error:
        raise ConfigError(
            f"input {number} cannot be sent to a process: {error}", hint="inputs must pickle", option="inputs"
        ) from error


def _describe_exit(exitcode: int, has_started: bool) -> str:
    """Return the reason why a worker ended. One that runs out of memory is killed by signal 9."""
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = "; it may have run out of memory: use fewer workers" if name == "SIGKILL" else ""
        return f"its worker process was killed by {name}{hint}"
    if has_started:
        return f"its worker process ended with exit code {exitcode}"
    return (
        f"its worker process ended with exit code {exitcode} before it started; a script must call write_parallel "
        'under if __name__ == "__main__":, because workers import it; if it does, see the message of the process'
    )


def _serve(connection: Connection, job: parts.PartJob[Any]) -> None:
    """Write the parts that arrive through the pipe, until None arrives, or the parent has died."""

    def exit_on_signal(signal_number: int, _: FrameType | None) -> None:
        sys.exit(128 + signal_number)  # leaves all `with` blocks, so that temporary files are removed

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)  # immediately: a process that resumes the work must not meet this one

    ignore_interrupts()
    signal.signal(signal.SIGTERM, exit_on_signal)
    threading.Thread(target=end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent was killed
        while (task := connection.recv()) is not None:
            number, pickled = task
            connection.send(parts.PartProgress(number, 0))
            try:
                part_input = pickle.loads(pickled)  # noqa: S301 - from our parent
            except Exception as error:  # noqa: BLE001 - an error of any class
                text = "it could be pickled, but not unpickled in a worker process: "
                connection.send(parts.failure(number, error, text))
            else:
                connection.send(parts.write_part(job, number, part_input, _Reporter(connection, number).count))


class _Reporter:
    """Reports the progress of a part, in intervals."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._samples = 0
        self._due = time.monotonic() + _REPORT_SECONDS

    def count(self) -> None:
        """Count a written sample."""
        self._samples += 1
        if time.monotonic() >= self._due:
            self._connection.send(parts.PartProgress(self._number, self._samples))
            self._due = time.monotonic() + _REPORT_SECONDS


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Block Ctrl-C while processes start, which inherit that; a signal that arrives meanwhile is raised afterwards.

    The processes have to call :func:`ignore_interrupts`.
    """
    ensure_running()  # otherwise the first process would start the tracker, which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C in a process that was started in :func:`without_interrupts`, and unblock the signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


# --- tasks of a Ray cluster ---


class RayWorkers:
    """Tasks of the Ray cluster that this program is connected to, or of a new one.

    A program that has not called ``ray.init`` is connected as ``ray.init()`` does: to the cluster that the environment
    names, or to one on this machine that ends with the context.
    """

    def __init__(self, job: parts.PartJob[Any], num_workers: int | None) -> None:
        """Start nothing before the context is entered.

        Args:
            job: Job to write.
            num_workers: Maximum number of concurrent tasks; None for one per CPU of the cluster.

        Raises:
            MissingDependencyError: Ray is not installed.
        """
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise MissingDependencyError(
                f"engine='ray' needs a package that is not installed ({error})",
                hint="run: pip install 'lightning-streaming[ray]'",
                option="engine",
            ) from error
        self._job = job
        self.capacity = num_workers or 1
        self._num_workers = num_workers
        self._running: dict[Any, int] = {}
        self._on_exit = ExitStack()

    def __enter__(self) -> RayWorkers:
        ray = self._ray
        if not ray.is_initialized():
            if threading.current_thread() is threading.main_thread():
                # Ray sets its handler, and does not restore ours when it is shut down.
                self._on_exit.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            ray.init(log_to_driver=False, logging_level=logging.WARNING)
            self._on_exit.callback(ray.shutdown)
        self.capacity = self._num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._sent_job = ray.put(self._job)
        # Ray retries only after the death of a worker or node; an error of the function is returned as a value.
        self._task = ray.remote(max_retries=_RAY_RETRIES)(parts.write_part)
        return self

    def __exit__(self, *_: object) -> None:
        with self._on_exit:
            for task in self._running:
                self._ray.cancel(task, force=True)

    def begin(self, number: int, part_input: Any) -> None:
        """Submit a part to the cluster."""
        task = self._task.options(name=f"part {number}").remote(self._sent_job, number, part_input)
        self._running[task] = number

    def wait(self) -> list[parts.Event]:
        """Wait until a task ends."""
        ended, _ = self._ray.wait(list(self._running), num_returns=1)
        events = list[parts.Event]()
        for task in ended:
            number = self._running.pop(task)
            try:
                events.append(self._ray.get(task))
            except self._ray.exceptions.RayError as error:
                summary = f"Ray gave it up after {_RAY_RETRIES} more attempts: {parts.summary_of(error)}"
                events.append(parts.PartFailed(number, summary))
        return events
