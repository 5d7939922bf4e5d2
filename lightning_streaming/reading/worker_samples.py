"""A worker's samples of a pass, one by one: read, decoded and transformed.

With ``decode.threads`` a sample is read in this thread and finished in another, up to a batch before it is yielded::

    here       read 0-3 | read 4-7 | read 8-11 | yield 0-3    | read 12-15 | yield 4-7    ...
    thread     .........|finish 0-3 ..............| finish 8-11 ...
    thread     ....................|finish 4-7 ...............| finish 12-15 ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch

from lightning_streaming.dataset.sample_key import Row
from lightning_streaming.dataset.samples import DecodeSample
from lightning_streaming.errors import FormatError, StreamingError
from lightning_streaming.reading.assemble import Scheduler
from lightning_streaming.reading.packs.documents import CutDocuments
from lightning_streaming.reading.plan import Window, WorkerPlan

_LAST_USE, _BATCH_ENDS, _IS_PIECE = 1, 2, 4
_MOST_TOGETHER = 8
"""Samples that a thread takes at once: handing one over takes as long as decoding a tenth of a small image."""


class PassProgress:
    """Progress of a worker's pass, which ends when its iterator is not referenced, even if this is.

    Args:
        samples: Yields the samples.
    """

    def __init__(self, samples: Generator[Any, None, None]) -> None:
        self.samples_read = 0
        """Samples, or packs, yielded so far."""
        self._samples = ref(samples)

    def close(self) -> None:
        """End the iteration, and stop prefetching."""
        samples = self._samples()
        if samples is not None:
            samples.close()


class WorkerSamples(Iterator[Any]):
    """Iterates over a worker's samples of a pass, or packs of them, and counts. It ends when it is not referenced.

    Args:
        plan: The worker's plan.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        read = _read if plan.factory.make is None else _make
        samples = _read_in_threads(plan) if plan.threads else read(plan)
        if plan.watch is not None:
            samples = plan.watch.samples(samples)
        self._samples = plan.assembler.items(plan, samples)
        self.progress = PassProgress(self._samples)

    def __next__(self) -> Any:
        sample = next(self._samples)
        self.progress.samples_read += 1
        return sample

    def close(self) -> None:
        """End the iteration, and stop prefetching."""
        self._samples.close()


def _read(plan: WorkerPlan) -> Generator[Any, None, None]:
    source, transform, watch, bad = plan.source, plan.factory.transform, plan.watch, plan.bad
    cut = _cut_documents(plan)
    with Scheduler.of(plan) as scheduler:
        readers, latest, decode = source.open_shards.readers, -1, source.decoder()
        for window in scheduler.windows():
            rows = _rows(window, plan, scheduler)
            for position, shard, index, events in rows if watch is None else watch.rows(rows):
                # Looked up for each sample: what the caller does between two of them may close shards.
                reader = readers.get(shard) if shard == latest else scheduler.reader(shard)
                if reader is None:
                    reader = scheduler.reader(shard)
                latest = shard
                try:
                    if bad is not None and bad.known:
                        bad.refuse_known(position, shard, index)
                    if cut is not None and events & _IS_PIECE:
                        row = position, shard, index, events
                        sample = cut.made(row, partial(_whole, plan, scheduler, row))
                    else:
                        try:
                            sample = reader[index]
                            if decode is not None:
                                sample = decode(sample, shard, index)
                        except FormatError as error:
                            raise source.named(error, shard) from error
                        if transform is not None:
                            try:
                                sample = transform(sample, position)
                            except Exception as error:
                                raise plan.failed((position, shard, index, events), error, sample) from error
                except StreamingError as error:
                    if bad is None:
                        raise
                    sample = plan.replacement((position, shard, index, events), error, partial(_whole, plan, scheduler))
                if events:
                    _note(events, shard, scheduler)
                yield sample


def _whole(plan: WorkerPlan, scheduler: Scheduler, row: Row) -> Any:
    """Return a sample, decoded and transformed as in the loop above."""
    return plan.transformed(row, scheduler.decoded(row))


def _make(plan: WorkerPlan) -> Generator[Any, None, None]:
    """Yield samples as a subclass of the dataset creates them, each while its shard is open."""
    source, make, watch, bad = plan.source, plan.factory.make, plan.watch, plan.bad
    assert make is not None, "checked by the caller"
    cut = _cut_documents(plan)
    with Scheduler.of(plan) as scheduler:

        def made(row: Row, sample_id: int | None = None) -> Any:
            position, shard, index, _ = row
            if sample_id is None:
                sample_id = int(source.catalog.ids(np.array([shard]), np.array([index]))[0])
            scheduler.reader(shard)
            source.open_shards.is_in_pass = True
            try:
                return make(sample_id, position)
            except Exception as error:
                raise plan.failed(row, error) from error
            finally:
                source.open_shards.is_in_pass = False

        for window in scheduler.windows():
            ids = source.catalog.ids(window.shards, window.indexes).tolist()
            rows = _rows(window, plan, scheduler)
            for row, sample_id in zip(rows if watch is None else watch.rows(rows), ids, strict=True):
                try:
                    if bad is not None and bad.known:
                        bad.refuse_known(*row[:3])
                    if cut is not None and row[3] & _IS_PIECE:
                        sample = cut.made(row, partial(made, row, sample_id))
                    else:
                        sample = made(row, sample_id)
                except StreamingError as error:
                    sample = plan.replacement(row, error, made)
                if row[3]:
                    _note(row[3], row[1], scheduler)
                yield sample


def _cut_documents(plan: WorkerPlan) -> CutDocuments | None:
    """Return a memory of documents that are cut between packs, for one pass; None where none is cut."""
    packing = plan.state.request.pack
    if packing is None or not plan.cuts_documents:
        return None
    is_seeded = not plan.factory.keeps_samples and not plan.threads
    return CutDocuments(packing.columns, plan.key if is_seeded else None)


def _note(events: int, shard: int, scheduler: Scheduler) -> None:
    if events & _LAST_USE:
        scheduler.release(shard)
    if events & _BATCH_ENDS:
        scheduler.have_read(batches=1)


def _rows(window: Window, plan: WorkerPlan, scheduler: Scheduler) -> Iterator[Row]:
    """Yield position, shard, index in the shard, and events after it, for each sample."""
    events = np.zeros(len(window.positions), np.uint8)
    events[window.stops - 1] = _BATCH_ENDS
    are_last = scheduler.last_uses(window.shards)
    if are_last is not None:
        events[are_last] |= _LAST_USE
    if window.pieces is not None and plan.cuts_documents:
        events[(window.pieces.starts > 0) | ~window.pieces.are_ends] |= _IS_PIECE
    columns = window.positions.tolist(), window.shards.tolist(), window.indexes.tolist(), events.tobytes()
    return zip(*columns, strict=True)


# --- in threads ---


class _Half(NamedTuple):
    """A sample that is read and not finished."""

    row: Row
    sample: Any
    error: BaseException | None = None
    """Why it could not be read."""


def _read_in_threads(plan: WorkerPlan) -> Generator[Any, None, None]:
    """Yield the same samples as :func:`_read`, finished in threads."""
    threads = plan.threads
    with Scheduler.of(plan) as scheduler:
        together = max(1, min(_MOST_TOGETHER, scheduler.batch_size // (2 * threads)))
        ahead = max(2 * threads, scheduler.batch_size // together)
        cut = _cut_documents(plan)
        finish = partial(_finished, plan, plan.source.decoder(), cut)
        for window in scheduler.windows():
            halves = _halves(plan, scheduler, window)
            groups = iter(lambda halves=halves: list(islice(halves, together)), [])  # type: ignore[misc]
            with closing(_in_threads(finish, groups, threads, ahead)) as finished:
                for group in finished:
                    for row, sample, error in group:
                        if isinstance(error, StreamingError):
                            sample = plan.replacement(row, error, partial(_whole, plan, scheduler))
                        elif error is not None:
                            raise error
                        if row[3]:
                            _note(row[3], row[1], scheduler)
                        yield sample


def _halves(plan: WorkerPlan, scheduler: Scheduler, window: Window) -> Iterator[_Half]:
    """Yield the samples of a window as they are stored, up to one that cannot be replaced."""
    source, watch, bad = plan.source, plan.watch, plan.bad
    rows = _rows(window, plan, scheduler)
    for row in rows if watch is None else watch.rows(rows):
        position, shard, index, _ = row
        try:
            if bad is not None and bad.known:
                bad.refuse_known(position, shard, index)
            reader = scheduler.reader(shard)
            try:
                sample = reader[index]
            except FormatError as error:
                raise source.named(error, shard) from error
        except StreamingError as error:
            yield _Half(row, None, error)
            if bad is None or not bad.replaces(error):
                return
        else:
            yield _Half(row, sample)


def _finished(plan: WorkerPlan, decode: DecodeSample | None, cut: CutDocuments | None, half: _Half) -> _Half:
    """Decode and transform a sample, in a thread."""
    row, stored, failure = half
    if failure is not None:
        return half

    def finish() -> Any:
        sample = stored
        if decode is not None:
            try:
                sample = decode(sample, row[1], row[2])
            except FormatError as error:
                raise plan.source.named(error, row[1]) from error
        return plan.transformed(row, sample)

    try:
        return _Half(row, finish() if cut is None or not row[3] & _IS_PIECE else cut.made(row, finish))
    except BaseException as error:  # noqa: BLE001  raised again in the thread that waits for it
        return _Half(row, None, error)


def _in_threads(
    work: Callable[[_Half], _Half], groups: Iterator[list[_Half]], threads: int, ahead: int
) -> Generator[list[_Half], None, None]:
    """Yield the results of a function that threads apply to groups of samples, in order.

    Samples are taken in the calling thread. The threads end with the generator, each after its current
    sample.

    Args:
        work: Raises nothing.
        groups: Samples.
        threads: Which call ``work``.
        ahead: Most groups that are taken before the first of them is yielded.
    """
    # Ctrl-C cannot leave these queues locked, unlike those of concurrent.futures.
    todo: SimpleQueue[tuple[list[_Half], SimpleQueue[list[_Half]]] | None] = SimpleQueue()
    waiting, running, started = deque[SimpleQueue[list[_Half]]](), list[Thread](), SimpleQueue[None]()
    is_closed = False

    def work_off() -> None:
        torch.get_num_threads()  # the first call would overrule a setting made before it
        torch.set_num_threads(1)
        started.put(None)
        while (task := todo.get()) is not None:
            group, results = task
            results.put([work(half) for half in group if not is_closed])
        todo.put(None)  # for the next thread, which may not be in the list yet

    try:
        while True:
            for group in islice(groups, ahead - len(waiting)):
                waiting.append(SimpleQueue())
                todo.put((group, waiting[-1]))
                if len(running) < threads:
                    running.append(_started(work_off, started))
            if not waiting:
                return
            yield waiting.popleft().get()
    finally:
        is_closed = True
        todo.put(None)
        for thread in running:
            thread.join()


def _started(work_off: Callable[[], None], started: SimpleQueue[None]) -> Thread:
    """Initialise a thread so that torch computes with one thread: else each of ours would have one per core.

    Another thread that uses torch for the first time meanwhile keeps one, too: new threads use the last setting.
    """
    num_threads = torch.get_num_threads()
    thread = Thread(target=work_off, name="make-samples", daemon=True)
    thread.start()
    try:
        started.get()
    finally:
        torch.set_num_threads(num_threads)  # for threads that begin later: the latest setting is their default
    return thread
