"""Writes a dataset in parts, many at a time, and joins them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

from tqdm import tqdm

from lightning_streaming.errors import ConfigError, PartError
from lightning_streaming.writing.arguments import check_count
from lightning_streaming.writing.engines.events import PartDone, PartFailed, PartProgress, Workers
from lightning_streaming.writing.engines.processes import ProcessWorkers
from lightning_streaming.writing.engines.ray import RayWorkers
from lightning_streaming.writing.parts import PartJob, make_job, record

Input = TypeVar("Input")

_ENGINES = ("processes", "ray")
_LONGEST_INPUT = 200


def write_parallel(
    inputs: Iterable[Input],
    fn: Callable[[Input], Iterable[Mapping[str, Any]]],
    out: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    compression: str | None = None,
    hashes: Sequence[str] | None = None,
    size_limit: int | float | str | None = "64mb",
    num_workers: int | None = None,
    engine: Literal["processes", "ray"] = "processes",
    start_method: Literal["spawn", "forkserver", "fork"] = "spawn",
    mode: Literal["create", "resume"] = "create",
    progress_bar: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> None:
    """Write the samples of each input into a part of its own, ``out/part.000000`` and so on, and join the parts.

    Samples stand in the order of the inputs, whatever is finished first. There is no dataset until all is written: the
    index of ``out`` appears last. After any end, ``mode="resume"`` goes on: finished parts are kept, others begun
    again.

    After a failure no further part is begun; those that are being written are finished, and then it is raised. When
    this program is interrupted its workers end at once.

    Args:
        inputs: What each part is made of: file names, ranges, lists of records. All are held in memory, a generator's
            too. The repr of each must be the same in every run; it is written down, and tells a resume whether it goes
            on with the same dataset.
        fn: Gives the samples of an input, the same ones each time. With processes a function of a module.
        out: A directory that is missing or empty, or a URL with no dataset.
        columns: As for :class:`~lightning_streaming.MDSWriter`. None tells them from each part's first sample; all
            parts must come to the same.
        compression: As for MDSWriter.
        hashes: As for MDSWriter.
        size_limit: As for MDSWriter.
        num_workers: Parts that are written at a time; None for one a CPU of this machine, or of the Ray cluster.
        engine: ``processes`` of this machine; or ``ray``, tasks of a Ray cluster, all of whose nodes reach ``out``.
        start_method: How processes start: ``spawn``, ``forkserver`` or ``fork``.
        mode: ``create``; or ``resume`` to go on with what the same call began, or begin if it began nothing.
        progress_bar: Whether to show finished parts and written samples, on stderr.
        storage_options: Arguments for the filesystem of a URL.
        strict: As for MDSWriter.

    Raises:
        ConfigError: An argument cannot work, ``out`` is not empty, or what was begun there has other inputs or
            settings.
        PartError: A part could not be written; the message names its input, the cause is the error of ``fn``.
        MissingDependencyError: A package that a setting needs is not installed.
        StorageError: The store did not answer.
    """
    if engine not in _ENGINES:
        raise ConfigError(f"engine must be one of {', '.join(_ENGINES)}, but got {engine!r}")
    if num_workers is not None:
        num_workers = check_count(num_workers, "num_workers")
    known = _as_list(inputs)
    job, plan = make_job(
        known,
        fn,
        out,
        columns=columns,
        compression=compression,
        hashes=hashes,
        size_limit=size_limit,
        storage_options=storage_options,
        strict=strict,
    )
    # These check what they are to do, so they come before anything is begun that a corrected call would find.
    workers = _workers(job, known, engine, num_workers, start_method)
    record(plan, job, mode)
    _write_all(workers, known, progress_bar)
    job.publish()


def run_job(job: PartJob[Input], inputs: Sequence[Input], *, num_workers: int, progress_bar: bool) -> int:
    """Write every part of a job by processes: all of :func:`write_parallel` but the plan before and the index after.

    Returns:
        The samples of all parts.

    Raises:
        PartError: A part could not be written.
    """
    return _write_all(_workers(job, inputs, "processes", num_workers, "spawn"), inputs, progress_bar)


def _write_all(begun: AbstractContextManager[Workers], inputs: Sequence[Any], progress_bar: bool) -> int:
    with begun as workers:
        with _Progress(len(inputs), shown=progress_bar) as progress:
            failures = _run(workers, inputs, progress)
        if failures:
            raise _error(failures, inputs) from failures[0].cause()
    return progress.samples


def _as_list(inputs: Iterable[Input]) -> Sequence[Input]:
    """Inputs that can be counted and named; what has no order of its own has no parts that a resume would know."""
    if isinstance(inputs, Mapping | Set | str | bytes) or not isinstance(inputs, Iterable):
        raise ConfigError(
            f"inputs must be a list of at least one, one for each part, but got {type(inputs).__name__} {inputs!r:.100}"
        )
    return inputs if isinstance(inputs, Sequence) else list(inputs)


def _workers(
    job: PartJob[Any], inputs: Sequence[Any], engine: str, num_workers: int | None, start_method: str
) -> AbstractContextManager[Workers]:
    if engine == "ray":
        return RayWorkers(job, num_workers)
    return ProcessWorkers(job, inputs, min(num_workers or _num_cpus(), job.num_parts), start_method)


def _num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(workers: Workers, inputs: Sequence[Any], progress: _Progress) -> list[PartFailed]:
    """Have all parts written, the first ones first; after a failure none is begun.

    Returns:
        The failures, in the order of the inputs.
    """
    waiting = iter(enumerate(inputs))
    failures: list[PartFailed] = []
    running: set[int] = set()
    while True:
        while not failures and len(running) < workers.capacity and (task := next(waiting, None)) is not None:
            running.add(task[0])
            workers.begin(*task)
        if not running:
            return sorted(failures, key=lambda failure: failure.number)
        for event in workers.wait():
            progress.show(event)
            if not isinstance(event, PartProgress):
                running.discard(event.number)
            if isinstance(event, PartFailed):
                failures.append(event)


def _error(failures: Sequence[PartFailed], inputs: Sequence[Any]) -> PartError:
    first, *others = failures
    shown = repr(inputs[first.number])
    if len(shown) > _LONGEST_INPUT:
        shown = f"{shown[:_LONGEST_INPUT]}..."
    also = f" (also failed: parts {', '.join(str(one.number) for one in others)})" if others else ""
    return PartError(
        f"part {first.number} could not be written, from input {shown}: {first.summary}{also}; finished parts are "
        "kept, mode='resume' goes on with the others"
    )


class _Bar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]
    """A bar without tqdm's thread that watches bars: forked workers should find no threads."""

    monitor_interval = 0


class _Progress:
    """One bar over the parts, with the samples written so far."""

    def __init__(self, num_parts: int, *, shown: bool) -> None:
        self._bar = _Bar(total=num_parts, unit="part", desc="writing", disable=not shown)
        self._of_part: dict[int, int] = {}
        self.samples = 0
        """Written so far."""

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, event: PartProgress | PartDone | PartFailed) -> None:
        """Take in what a worker said."""
        if isinstance(event, PartFailed):
            return
        self.samples += event.samples - self._of_part.get(event.number, 0)
        self._of_part[event.number] = event.samples
        self._bar.set_postfix(samples=self.samples, refresh=isinstance(event, PartProgress))
        if isinstance(event, PartDone):
            self._bar.update()
