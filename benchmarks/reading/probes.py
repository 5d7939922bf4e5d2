"""What is measured of a system. Each is a generator that takes one turn whenever it is asked for the next value.

What takes long and is not measured comes before the first turn. Starts are measured in processes forked for one turn,
as nothing is left over there from the one before.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.reading.case import Case
from benchmarks.reading.forks import in_fork
from benchmarks.reading.memory import resident_mebibytes
from benchmarks.reading.systems import System

Turn = dict[str, float]
PLACES_AT_ONCE = 500
RESUME_AT = 0.9
"""Of an epoch's batches."""


def samples_of(batch: Any) -> int:
    """How many samples a batch holds: of a dict, also of a dict of dicts, as many as its first column."""
    while isinstance(batch, dict):
        batch = next(iter(batch.values()))
    return len(batch)


def write(system: System, case: Case) -> Iterator[Turn]:
    """Seconds to store the samples."""
    started = perf_counter()
    system.write(case)
    yield {"seconds": perf_counter() - started}


def epochs(system: System, case: Case) -> Iterator[Turn]:
    """Samples a second of whole epochs, as many as fill the time of a turn; workers start with each."""
    loader = system.loader(case)
    while True:
        started, count, passes, seconds = perf_counter(), 0, 0, 0.0
        while seconds < case.seconds:
            count += sum(samples_of(batch) for batch in loader)
            passes += 1
            seconds = perf_counter() - started
        if count < passes * case.samples:
            raise RuntimeError(f"{passes} epochs of {case.samples} samples had only {count}")
        yield {"rate": count / seconds}


def access(system: System, case: Case) -> Iterator[Turn]:
    """Samples a second of ``dataset[i]``, at random places; every sample was looked at once before."""
    dataset, rng = system.dataset(case), np.random.default_rng(0)
    for place in range(case.samples):
        dataset[place]
    while True:
        started, count, seconds = perf_counter(), 0, 0.0
        while seconds < case.seconds:
            for place in rng.integers(0, case.samples, PLACES_AT_ONCE).tolist():
                dataset[place]
            count += PLACES_AT_ONCE
            seconds = perf_counter() - started
        yield {"rate": count / seconds}


def first(system: System, case: Case) -> Iterator[Turn]:
    """Seconds from making dataset and loader to the first batch."""
    while True:
        yield in_fork(lambda: {"seconds": _seconds_to_first(system, case, None)})


def resume(system: System, case: Case) -> Iterator[Turn]:
    """The same, of a loader that goes on late in an epoch, and of one that begins."""
    state = in_fork(lambda: _late_state(system, case))
    while True:
        late = in_fork(lambda: _seconds_to_first(system, case, state))
        yield {"seconds": late, "from_beginning": in_fork(lambda: _seconds_to_first(system, case, None))}


def gap(system: System, case: Case) -> Iterator[Turn]:
    """Seconds from the last batch of an epoch to the first of the next."""
    loader = system.loader(case)
    batches, ended = iter(loader), 0.0
    next(batches)
    while True:
        for _ in batches:
            ended = perf_counter()
        del batches  # as a loop would, before the next begins
        batches = iter(loader)
        next(batches)
        yield {"seconds": perf_counter() - ended}


def memory(system: System, case: Case) -> Iterator[Turn]:
    """MiB that a worker has in memory near the end of an epoch, in the mean over workers; they live on."""
    loader = system.loader(case)
    late = RESUME_AT * case.samples
    while True:
        count, found = 0, None
        for batch in loader:
            count += samples_of(batch)
            if found is None and count >= late:
                found = resident_mebibytes([child.pid for child in multiprocessing.active_children()])
        assert found is not None
        yield found


def _seconds_to_first(system: System, case: Case, state: Any) -> float:
    started = perf_counter()
    loader: Any = system.loader(case)
    if state is not None:
        loader.load_state_dict(state)
    batches = iter(loader)
    next(batches)
    return perf_counter() - started


def _late_state(system: System, case: Case) -> Any:
    loader: Any = system.loader(case)
    until = int(RESUME_AT * (case.samples // case.batch_size)) or 1
    for number, _ in enumerate(loader, start=1):
        if number == until:
            return loader.state_dict()
    raise RuntimeError(f"an epoch ended before batch {until}")


PROBES: dict[str, Callable[[System, Case], Iterable[Turn]]] = {
    "write": write,
    "epochs": epochs,
    "access": access,
    "first": first,
    "resume": resume,
    "gap": gap,
    "memory": memory,
}
