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

import numpy as np
import torch

from lightning_streaming.dataset.sample_key import Row
from lightning_streaming.dataset.samples import DecodeSample
from lightning_streaming.dataset.transform import KeyedSample
from lightning_streaming.errors import FormatError, StreamingError
from lightning_streaming.options.packing import Packing, PackingConfig
from lightning_streaming.options.token_budget import TokenBudget
from lightning_streaming.reading.packs.documents import CutDocuments
from lightning_streaming.reading.packs.groups import groups_of
from lightning_streaming.reading.packs.values import packs_of
from lightning_streaming.reading.plan import Reading, Window, WorkerPass, decoded, located
from lightning_streaming.selection.catalog import Catalog

_LAST_USE, _BATCH_ENDS, _IS_PIECE = 1, 2, 4
_MOST_TOGETHER = 8
"""Samples that a thread is given at once: to give one takes as long as to decode a small picture's tenth."""


class WorkerSamples(Iterator[Any]):
    """Iterates over a worker's samples of a pass and counts them. It ends when it is no longer referenced.

    Args:
        of_pass: What to read.
    """

    def __init__(self, of_pass: WorkerPass) -> None:
        self.samples_read = 0
        """Samples handed out so far."""
        make = of_pass.making.make
        if make is not None:
            samples = _make(of_pass, make)
        else:
            samples = _read_in_threads(of_pass) if of_pass.threads else _read(of_pass)
        if of_pass.watch is not None:
            samples = of_pass.watch.samples(samples)
        self._samples = samples if of_pass.pack is None else _packed(of_pass, samples, of_pass.pack)

    def __next__(self) -> Any:
        sample = next(self._samples)
        self.samples_read += 1
        return sample

    def close(self) -> None:
        """End the iteration, and stop prefetching."""
        self._samples.close()


def _packed(of_pass: WorkerPass, samples: Generator[Any, None, None], pack: Packing) -> Generator[Any, None, None]:
    """Yield packs or groups of samples."""
    types = of_pass.types
    assert types is not None, "as of packs"
    with closing(samples):
        if of_pass.making.transform is None and of_pass.making.make is None:
            types.check_stored()
        for window in located(of_pass.make_partition(), of_pass.source.catalog):
            assert window.pieces is not None, "as of packs"
            if isinstance(pack, PackingConfig):
                yield from packs_of(samples, window.pieces, pack, types)
            elif isinstance(pack, TokenBudget):
                yield from groups_of(samples, window.pieces, pack, types)


def _read(of_pass: WorkerPass) -> Generator[Any, None, None]:
    source, transform, watch, bad = of_pass.source, of_pass.making.transform, of_pass.watch, of_pass.bad
    cut = _cut_documents(of_pass)
    with of_pass.begun() as reading:
        readers, latest, decode = source.readers, -1, source.decoder()
        for window in reading.windows():
            rows = _rows(window, reading)
            for position, shard, index, events in rows if watch is None else watch.rows(rows):
                # At every sample anew: what the caller does between two of them may close shards.
                reader = readers.get(shard) if shard == latest else reading.reader(shard)
                if reader is None:
                    reader = reading.reader(shard)
                latest = shard
                try:
                    if bad is not None and bad.known:
                        bad.refuse_known(position, shard, index)
                    if events & _IS_PIECE:
                        row = position, shard, index, events
                        sample = cut.made(row, partial(_one, of_pass, reading, row))
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
                                raise of_pass.failed((position, shard, index, events), error, sample) from error
                except StreamingError as error:
                    if bad is None:
                        raise
                    sample = of_pass.instead((position, shard, index, events), error, partial(_one, of_pass, reading))
                if events:
                    _note(events, shard, reading)
                yield sample


def _one(of_pass: WorkerPass, reading: Reading, row: Row) -> Any:
    """Return a sample that replaces another, made as in the loop above."""
    sample = decoded(of_pass, reading, row)
    if of_pass.making.transform is None:
        return sample
    try:
        return of_pass.making.transform(sample, row[0])
    except Exception as error:
        raise of_pass.failed(row, error, sample) from error


def _make(of_pass: WorkerPass, make: KeyedSample) -> Generator[Any, None, None]:
    """Yield samples as a subclass of the dataset makes them, each while its shard is open."""
    source, watch, bad, cut = of_pass.source, of_pass.watch, of_pass.bad, _cut_documents(of_pass)
    with of_pass.begun() as reading:

        def one(row: Row, sample_id: int) -> Any:
            position, shard, _, _ = row
            reading.reader(shard)
            source.is_in_pass = True
            try:
                return make(sample_id, position)
            except Exception as error:
                raise of_pass.failed(row, error) from error
            finally:
                source.is_in_pass = False

        for window in reading.windows():
            ids = source.catalog.ids(window.shards, window.indexes).tolist()
            rows = _rows(window, reading)
            for row, sample_id in zip(rows if watch is None else watch.rows(rows), ids, strict=True):
                try:
                    if bad is not None and bad.known:
                        bad.refuse_known(*row[:3])
                    sample = cut.made(row, partial(one, row, sample_id)) if row[3] & _IS_PIECE else one(row, sample_id)
                except StreamingError as error:
                    sample = of_pass.instead(row, error, lambda other: one(other, _id_of(source.catalog, other)))
                if row[3]:
                    _note(row[3], row[1], reading)
                yield sample


def _cut_documents(of_pass: WorkerPass) -> CutDocuments:
    """Return what keeps documents that are cut between packs, for one pass."""
    columns = () if of_pass.pack is None else of_pass.pack.columns
    is_made_by_user = of_pass.making.transform is not None or of_pass.making.make is not None
    return CutDocuments(columns, of_pass.key if is_made_by_user and not of_pass.threads else None)


def _id_of(catalog: Catalog, row: Row) -> int:
    _, shard, index, _ = row
    return int(catalog.ids(np.array([shard]), np.array([index]))[0])


def _note(events: int, shard: int, reading: Reading) -> None:
    if events & _LAST_USE:
        reading.let_go(shard)
    if events & _BATCH_ENDS:
        reading.have_read(batches=1)


def _rows(window: Window, reading: Reading) -> Iterator[Row]:
    """Yield position, shard, index in the shard, and what to do after it, for each sample."""
    events = np.zeros(len(window.positions), np.uint8)
    events[window.stops - 1] = _BATCH_ENDS
    are_last = reading.last_uses(window.shards)
    if are_last is not None:
        events[are_last] |= _LAST_USE
    if window.pieces is not None and reading.cuts_documents:
        events[(window.pieces.starts > 0) | ~window.pieces.are_ends] |= _IS_PIECE
    columns = window.positions.tolist(), window.shards.tolist(), window.indexes.tolist(), events.tobytes()
    return zip(*columns, strict=True)


# --- in threads ---


class _Half(NamedTuple):
    """A sample that is read and not finished."""

    row: Row
    sample: Any
    error: BaseException | None = None
    """Why there is none."""


def _read_in_threads(of_pass: WorkerPass) -> Generator[Any, None, None]:
    """Yield the same samples as :func:`_read`, finished in threads."""
    threads = of_pass.threads
    with of_pass.begun() as reading:
        together = max(1, min(_MOST_TOGETHER, reading.batch_size // (2 * threads)))
        ahead = max(2 * threads, reading.batch_size // together)
        finish = partial(_finished, of_pass, of_pass.source.decoder(), _cut_documents(of_pass))
        for window in reading.windows():
            halves = _halves(of_pass, reading, window)
            groups = iter(lambda halves=halves: list(islice(halves, together)), [])  # type: ignore[misc]
            with closing(_in_threads(finish, groups, threads, ahead)) as finished:
                for group in finished:
                    for row, sample, error in group:
                        if isinstance(error, StreamingError):
                            sample = of_pass.instead(row, error, partial(_one, of_pass, reading))
                        elif error is not None:
                            raise error
                        if row[3]:
                            _note(row[3], row[1], reading)
                        yield sample


def _halves(of_pass: WorkerPass, reading: Reading, window: Window) -> Iterator[_Half]:
    """Yield the samples of a window as they are stored, up to one that cannot be replaced."""
    source, watch, bad = of_pass.source, of_pass.watch, of_pass.bad
    rows = _rows(window, reading)
    for row in rows if watch is None else watch.rows(rows):
        position, shard, index, _ = row
        try:
            if bad is not None and bad.known:
                bad.refuse_known(position, shard, index)
            reader = reading.reader(shard)
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


def _finished(of_pass: WorkerPass, decode: DecodeSample | None, cut: CutDocuments, half: _Half) -> _Half:
    """Decode and transform a sample, in a thread."""
    row, sample, failed = half
    if failed is not None:
        return half
    make = partial(_whole, of_pass, decode, row, sample)
    try:
        return _Half(row, cut.made(row, make) if row[3] & _IS_PIECE else make())
    except BaseException as error:  # noqa: BLE001  raised again where it is waited for
        return _Half(row, None, error)


def _whole(of_pass: WorkerPass, decode: DecodeSample | None, row: Row, sample: Any) -> Any:
    if decode is not None:
        try:
            sample = decode(sample, row[1], row[2])
        except FormatError as error:
            raise of_pass.source.named(error, row[1]) from error
    if of_pass.making.transform is None:
        return sample
    try:
        return of_pass.making.transform(sample, row[0])
    except Exception as error:
        raise of_pass.failed(row, error, sample) from error


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
        ahead: Groups that are taken before the first of them is given; at most.
    """
    # Ctrl-C cannot leave these queues locked, as it can what concurrent.futures waits with.
    todo: SimpleQueue[tuple[list[_Half], SimpleQueue[list[_Half]]] | None] = SimpleQueue()
    waiting, running, started = deque[SimpleQueue[list[_Half]]](), list[Thread](), SimpleQueue[None]()
    is_closed = False

    def work_off() -> None:
        _take_one_thread_of_torch(started)
        while (asked := todo.get()) is not None:
            group, answer = asked
            answer.put([work(one) for one in group if not is_closed])
        todo.put(None)  # for the next, which may not be among those that are known to run

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
        for one in running:
            one.join()


def _started(work_off: Callable[[], None], started: SimpleQueue[None]) -> Thread:
    """Initialise a thread so that torch computes with one thread: else each of ours would have one per core.

    Another thread that uses torch for the first time meanwhile keeps one, too: new threads use the last setting.
    """
    of_torch = torch.get_num_threads()
    thread = Thread(target=work_off, name="make-samples", daemon=True)
    thread.start()
    try:
        started.get()
    finally:
        torch.set_num_threads(of_torch)  # for threads that begin later: what a thread says is the default of those, too
    return thread


def _take_one_thread_of_torch(started: SimpleQueue[None]) -> None:
    torch.get_num_threads()  # what is asked first overrules what is set before
    torch.set_num_threads(1)
    started.put(None)
