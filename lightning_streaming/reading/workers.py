"""The worker processes of a loader: how torch starts and ends them, what they do, and how they return batches.

torch's DataLoader runs the workers and never sees a sample: it iterates over :class:`WorkerBatches`, of which each item
is a :class:`BatchGroup`. What touches torch's private parts is here, and nowhere else in this room.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import wait
from multiprocessing.context import Process
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from lightning_streaming.dataset.collation import Collate, CollateError
from lightning_streaming.dataset.sample_key import Replacement
from lightning_streaming.dataset.transform import describe_keys, kind_of, rng_of_worker, seed_global_generators
from lightning_streaming.errors import ConfigError, SampleError, StreamingError
from lightning_streaming.escaping import in_one_line
from lightning_streaming.reading.measures import FetchCounts
from lightning_streaming.reading.plan import Batches, WorkerPlan
from lightning_streaming.reading.transport import BatchMessage, BatchSender, BatchSlots, shared
from lightning_streaming.reading.worker_process import prepare_worker_process, signals_held_back
from lightning_streaming.resume.appended_data import NO_GROWTH, Growth
from lightning_streaming.resume.state import EpochStart

if TYPE_CHECKING:
    from lightning_streaming.reading.dataset import StreamingDataset

_PATIENCE = 1.0
"""Seconds for a worker to end, and again after a signal."""
_START_BYTES, _RUN_BYTES = 4096, 64
"""Several times the size of a pickled pass start without appended data, and of each skipped range."""


class BatchGroup(NamedTuple):
    """Consecutive batches of one worker."""

    worker: int
    batches: Iterable[Any]
    measures: NDArray[np.int64]
    """Measures of each, of shape (batches, numbers): see :meth:`BatchMeter.end_batches`."""
    replaced: Sequence[Replacement] = ()
    """Replacements of bad samples in these batches, or in later ones."""


Measured = tuple[Any, NDArray[np.int64]]
"""A batch, and what it took to make, as :meth:`BatchMeter.end_batches` says."""


class SharedEpochStart:
    """Shared memory through which a loader sends its workers where each pass begins.

    It has no name: it reaches workers by inheritance or through their start-up pickle, serves those that live on from
    pass to pass, and is gone with the last process that holds it.

    Args:
        most_skipped_runs: The most runs of skipped positions that an epoch may have.
        growth: How much epochs read of streams that have grown.
    """

    def __init__(self, most_skipped_runs: int = 0, growth: Growth = NO_GROWTH) -> None:
        size = _START_BYTES + _RUN_BYTES * most_skipped_runs + len(pickle.dumps(growth))
        self._memory = shared(torch.zeros(size, dtype=torch.uint8))

    def has_room_for(self, start: EpochStart) -> bool:
        """Return whether a pass start can be assigned: data may have grown again since."""
        return len(pickle.dumps(start)) <= len(self._memory)

    def assign(self, start: EpochStart) -> None:
        """Set the pass that workers read from now on."""
        pickled = bytearray(pickle.dumps(start))
        self._memory[: len(pickled)] = torch.frombuffer(pickled, dtype=torch.uint8)

    def assigned(self) -> EpochStart:
        """Return the pass that was assigned last."""
        start: EpochStart = pickle.loads(self._memory.numpy().tobytes())  # noqa: S301  # what our own loader has put there
        return start


@dataclass(frozen=True, slots=True)
class WorkerChannel:
    """Shared memory of a loader and of the workers that it has started together, for as long as they live."""

    pass_start: SharedEpochStart
    """Where the pass begins."""
    slots: BatchSlots | None
    """The batches themselves; None where torch is left to send them."""
    fetched: FetchCounts | None = None
    """Counts of the shards that workers fetch; None without a callback for them."""

    def opened(self, group: BatchGroup) -> BatchGroup:
        """Return the group as its worker made it, from what torch returns. Call it once for each."""
        message = group.batches
        if not isinstance(message, BatchMessage):
            return group
        assert self.slots is not None, "there the message is"
        return group._replace(batches=message.open(self.slots))


def start_iterator(loader: DataLoader[Any], groups: WorkerBatches) -> Iterator[BatchGroup]:
    """Return torch's iterator over groups, with the loader's options: workers, pinning, timeout, ...

    With persistent workers the iterator is kept by the loader, and continues with its first arguments.
    """
    twin = object.__new__(type(loader))
    # Past torch's refusal of changes, and past what a subclass pickles of itself; but without what Lightning notes, so
    # that it notes no iterator.
    vars(twin).update((name, value) for name, value in vars(loader).items() if not name.startswith("__pl_"))
    vars(twin).update(
        dataset=groups,
        batch_size=None,
        batch_sampler=None,
        drop_last=False,
        collate_fn=_unchanged,
        worker_init_fn=partial(_start_worker, groups.pass_start, groups.dataset, loader.worker_init_fn),
    )
    if not loader.num_workers:
        return DataLoader.__iter__(twin)
    with signals_held_back((loader.multiprocessing_context or multiprocessing).get_start_method()):
        iterator = DataLoader.__iter__(twin)
    vars(loader)["_iterator"] = twin._iterator
    return iterator


def _unchanged(group: BatchGroup) -> BatchGroup:
    return group


def _start_worker(
    pass_start: SharedEpochStart, dataset: StreamingDataset, users_init: Callable[[int], None] | None, worker: int
) -> None:
    """Initialise a worker process: its signal shield, its random generators, then the user's ``worker_init_fn``."""
    prepare_worker_process()
    # torch's dataset is the groups; code of the user that gets the dataset of a worker means their own.
    object.__setattr__(get_worker_info(), "dataset", dataset)
    start = pass_start.assigned()
    seed_global_generators(rng_of_worker(start.shuffle_seed, *start.cursor, start.world.rank, worker))
    if users_init is not None:
        users_init(worker)


def ordered_map(
    groups: Iterator[BatchGroup], channel: WorkerChannel, num_workers: int, replaced: dict[int, Replacement]
) -> Iterator[Measured]:
    """Yield the batches of all workers in order: the first of each, the second of each, and so on.

    Args:
        groups: Groups in order for each worker, of all workers in any order.
        channel: Channel that has their batches.
        num_workers: Number of workers; 0 counts as one.
        replaced: Receives replacements of bad samples, by position.
    """
    arrived = [deque[Iterator[Measured]]() for _ in range(max(1, num_workers))]
    for batches in cycle(arrived):
        measured = None
        while measured is None:
            while not batches:
                group = next(groups, None)
                if group is None:
                    return
                group = channel.opened(group)
                for replacement in group.replaced:
                    replaced[replacement.position] = replacement
                arrived[group.worker].append(zip(group.batches, group.measures, strict=True))
            measured = next(batches[0], None)
            if measured is None:
                batches.popleft()
        yield measured


class WorkerBatches(IterableDataset[BatchGroup]):
    """The batches of one worker, or of the loader itself, in a pass.

    Args:
        dataset: The dataset.
        channel: Has the start of the pass, and receives the batches.
        collate: The loader's collate function.
        drop_last: Whether to leave out a last batch that is not full.
        separately: Whether each group must have a single batch.
    """

    def __init__(
        self, dataset: StreamingDataset, channel: WorkerChannel, collate: Collate, *, drop_last: bool, separately: bool
    ) -> None:
        self.dataset = dataset
        self.pass_start = channel.pass_start
        self._sender = None if channel.slots is None else BatchSender(channel.slots)
        self._fetched = channel.fetched
        self._collate = collate
        self._drop_last = drop_last
        self._separately = separately

    def __iter__(self) -> Iterator[BatchGroup]:
        info = get_worker_info()
        if info is None:
            yield from self._groups(0, 1)
            return
        try:
            yield from self._groups(info.id, info.num_workers)
        except StreamingError as error:
            yield BatchGroup(info.id, WorkerFailure(error, info.id), np.zeros((1, 0), np.int64))

    def _groups(self, worker: int, num_workers: int) -> Generator[BatchGroup, None, None]:
        if self._sender is not None:
            self._sender.begin_pass()
        start, dataset = self.pass_start.assigned(), self.dataset
        empty = np.empty if self._sender is None else self._sender.empty
        plan = dataset._planner.plan(dataset._sample_factory, start, worker, num_workers, is_measured=True, empty=empty)
        groups, batches_before = self._batches(plan), 0
        if self._fetched is not None:
            plan.source.report_fetching(self._fetched.counter(worker))
        with closing(groups):
            try:
                for batches in groups:
                    measures = plan.meter.end_batches(len(batches))
                    sent = batches if self._sender is None else self._sender.send(batches)
                    replaced = () if plan.bad is None else plan.bad.take_replacements()
                    yield BatchGroup(worker, sent, measures, replaced)
                    plan.meter.begin_batch()
                    batches_before += len(batches)
            except GeneratorExit:
                raise  # maybe as the interpreter ends, when the next name is gone
            except CollateError as error:
                words = in_one_line(str(error)) + self._described_keys(plan, batches_before, error.places)
                raise SampleError(message=words) from error.__cause__
            finally:
                if self._fetched is not None:
                    plan.source.report_fetching(None)

    def _batches(self, plan: WorkerPlan) -> Generator[Batches, None, None]:
        """Return the batches of a pass: read many at a time, or collated of single samples."""
        # A collate function or an __iter__ of the user sees single samples.
        if self._collate is default_collate and self.dataset._iterates_as_usual():
            batches = plan.assembler.batches(plan, drop_last=self._drop_last, separately=self._separately)
            if batches is not None:
                return batches
        return self._collated(plan)

    def _collated(self, plan: WorkerPlan) -> Generator[Batches, None, None]:
        planner, batch_size = self.dataset._planner, plan.start.batch_size
        planner.assign(plan)
        items = iter(self.dataset)
        by_torch = self._sender is None and get_worker_info() is not None
        collate = plan.assembler.collate(self._collate, by_torch=by_torch)
        while batch := list(islice(items, batch_size)):
            if planner.take_assigned() is not None:
                raise ConfigError(
                    f"{type(self.dataset).__name__}.__iter__ yields samples without going through "
                    "super().__iter__(), so their order and position are unknown and could not be saved",
                    hint="take samples from there, override __getitem__ instead, or use torch's DataLoader",
                )
            if self._drop_last and len(batch) < batch_size:
                return
            yield [collate(batch)]

    def _described_keys(self, plan: WorkerPlan, batch: int, places: Sequence[int]) -> str:
        """Return how an error names samples of a batch; empty where a subclass iterates differently."""
        if not places or not self.dataset._iterates_as_usual():
            return ""
        keys = plan.keys_of_batch(batch)
        if not plan.assembler.collates_packs:  # whose places are those of packs
            replaced = {} if plan.bad is None else {other.position: other for other in plan.bad.take_replacements()}
            keys = [keys[place] for place in places]
            for place, key in enumerate(keys):
                if other := replaced.get(key.position):
                    keys[place] = replace(key, shard=other.shard, sample_index=other.sample)
        return describe_keys(keys)


class _WorkerError(Exception):
    """An error that was raised in a worker process; its message is the traceback there."""


class WorkerFailure:
    """The error of a worker, sent instead of its next batches and raised when the first of them is read.

    torch sends only the text of an error, below the traceback of the worker, and no cause.

    Args:
        error: What the worker raised.
        worker: Which worker it was.
    """

    def __init__(self, error: StreamingError, worker: int) -> None:
        self._kind, self._words, self._fields = kind_of(error), error.words, error.fields
        self._cause = None if error.__cause__ is None else _pickled(error.__cause__)
        is_complete = error.__cause__ is None and error.__suppress_context__
        lines = "".join(traceback.format_exception(error))
        self._traceback = None if is_complete else f"in worker process {worker}:\n{lines}"

    def __iter__(self) -> Iterator[Any]:
        # Not from a local variable: the error would refer to this frame, and the frame to the error.
        raise self._error()
        yield

    def _error(self) -> StreamingError:
        error = self._kind(message=self._words, **self._fields)
        cause = None if self._cause is None else _unpickled(self._cause)
        where = None if self._traceback is None else _WorkerError(self._traceback)
        if cause is None:
            error.__cause__ = where
        else:
            error.__cause__, cause.__cause__ = cause, where
        return error


def _pickled(error: BaseException) -> bytes | None:
    """Return the error if it can be pickled and unpickled; many errors of other packages cannot."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301  # what was pickled right here
    except Exception:  # noqa: BLE001  # an exception class of the user may raise anything
        return None
    return data


def _unpickled(data: bytes) -> BaseException | None:
    try:
        error = pickle.loads(data)  # noqa: S301  # from our own worker
    except Exception:  # noqa: BLE001  # as above
        return None
    return error if isinstance(error, BaseException) else None


class DeadWorker(NamedTuple):
    """A worker process that ended before its loader ended it."""

    worker: int
    pid: int
    exit_code: int
    """The negative number of the signal that killed it, or its exit status."""

    @property
    def read_lost_bytes(self) -> bool:
        """Return whether it read a part of a mapped file that no longer exists, or was out of shared memory."""
        return self.exit_code == -signal.SIGBUS

    def __str__(self) -> str:
        said = f"worker process {self.worker} (pid {self.pid})"
        if self.exit_code >= 0:
            return f"{said} exited with {self.exit_code}"
        name = signal.Signals(-self.exit_code).name
        return f"{said} was killed by {name}{_LIKELY_CAUSES.get(name, '')}"


_NATIVE_CODE = " (a crash in native code, such as that of a decoder)"
_LIKELY_CAUSES = {
    "SIGKILL": " (often by the system, when memory runs out: use fewer workers or smaller batches)",
    "SIGBUS": " (when shared memory runs out, see /dev/shm, or a file that is read in place was truncated)",
    **dict.fromkeys(("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"), _NATIVE_CODE),
}


def dead_worker(batches: Any) -> DeadWorker | None:
    """Return the first worker process behind torch's iterator that has died; None if none has.

    Args:
        batches: An iterator of a torch ``DataLoader``, or None.
    """
    for number, process in enumerate(getattr(batches, "_workers", ())):
        if process.exitcode:
            return DeadWorker(number, process.pid, process.exitcode)
    return None


def end_workers(batches: Any) -> None:
    """End the worker processes behind torch's iterator over batches; nothing to do where there are none.

    Torch has its workers end and waits five seconds for each, one after another, before it sends a signal. A
    worker that is in a long transform or download, or hangs, would take that long. So a thread sends the signal
    earlier. It does no harm: nothing reads what workers send by then, and their files are safe against kills.

    Args:
        batches: An iterator of a torch ``DataLoader``, or None.
    """
    workers = getattr(batches, "_workers", ())
    if not workers:
        return
    if batches._worker_pids_set:
        _remove_worker_pids(id(batches))  # or torch's handler of SIGCHLD would call a killed worker an error
        batches._worker_pids_set = False
    pinning = getattr(batches, "_pin_memory_thread", None)

    def signal_late_workers() -> None:
        if pinning is not None:
            pinning.join()  # torch ends it first; it must not be left with half a message of a worker that is gone
        late = _late(workers)
        for worker in late:
            worker.terminate()
        for worker in _late(late):
            worker.kill()  # it holds the interpreter, and its shield cannot let the first signal through

    signals = threading.Thread(target=signal_late_workers, name="end-workers", daemon=True)
    signals.start()
    batches._shutdown_workers()
    signals.join()


def _late(workers: Sequence[Process]) -> list[Process]:
    """Return the processes that have not ended after the timeout."""
    left = {worker.sentinel: worker for worker in workers}
    deadline = time.monotonic() + _PATIENCE
    while left and (seconds := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(left), seconds):
            del left[sentinel]  # type: ignore[arg-type]  # which are all numbers
    return list(left.values())
