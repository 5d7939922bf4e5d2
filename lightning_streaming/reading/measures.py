"""Counts and waiting times of the batches that a loader yielded.

:class:`BatchMeter` measures in the process that makes batches, :class:`StatisticsCollector` adds up in the one that
consumes them, and :class:`LoaderStatistics` is what users see.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from itertools import chain
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from lightning_streaming.cache.shard_cache import Miss, Misses
from lightning_streaming.reading.transport import shared
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.signatures import public


@public("logs")
class WaitTimes(NamedTuple):
    """Seconds that the consumer of the batches waited for them, by reason."""

    download: float = 0
    """Seconds of downloading files to this node."""
    decompress: float = 0
    """Seconds of decompressing files."""
    decode: float = 0
    """Seconds of reading, decoding, transforming and collating samples."""
    queue: float = 0
    """Seconds of moving finished batches from the worker process."""
    start: float = 0
    """Seconds of starting passes: starting workers, reading indexes, computing the order."""

    @property
    def total(self) -> float:
        """Sum over all reasons."""
        return sum(self)


_NO_WAIT = WaitTimes()
_SECONDS_BETWEEN_REPORTS = 0.2
_READY_NS = 1_000_000
"""Wait up to which a batch counts as ready: less than any training step takes."""
_Seconds = NDArray[np.float64]
_Number = TypeVar("_Number", int, float)


@public("logs")
@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStatistics:
    """Counts and waiting times of the loader of a rank. Times are in seconds."""

    batches: int = 0
    """Batches that were yielded."""
    samples: int = 0
    """Samples in these; with packs: documents, where one that is cut between packs counts once for each part."""
    samples_per_stream: Mapping[str, int] = field(default_factory=dict)
    """Samples by name of the stream, counted as in ``samples``."""
    tokens_per_stream: Mapping[str, int] = field(default_factory=dict)
    """Tokens by name of the stream, where lengths of samples are known: with packs, or weights that count tokens."""
    sample_bytes: int = 0
    """Bytes of these samples uncompressed, estimated by the mean sample of each shard."""
    tokens: int = 0
    """Tokens of documents in packs; 0 where documents are not packed."""
    token_room: int = 0
    """Capacity of these packs in tokens."""
    wait: WaitTimes = _NO_WAIT
    """Time that the consumer waited."""
    download_per_stream: Mapping[str, float] = field(default_factory=dict)
    """Seconds of ``wait.download`` by name of the stream whose files were missing; empty if there was no such wait."""
    ready_batches: int = 0
    """Batches that the consumer waited for less than a millisecond."""
    shards_opened: int = 0
    """Number of times that a worker opened a shard."""
    cache_hits: int = 0
    """Number of times that the shard was on this node before; one that was prefetched in time is no hit."""
    fetched_bytes: int = 0
    """Bytes that were downloaded, compressed where the shards are."""
    shards_open: int = 0
    """Number of shards that this rank's workers have mapped now."""
    bad_samples: int = 0
    """Number of samples that could not be read and were replaced, or left out of packs."""

    def __add__(self, later: LoaderStatistics) -> LoaderStatistics:
        """Add the counts of ``later``; ``shards_open`` is that of ``later``."""
        return self._combined(later, 1, later.shards_open)

    def since(self, earlier: LoaderStatistics) -> LoaderStatistics:
        """Return the counts since ``earlier``, of the same loader; ``shards_open`` stays."""
        return self._combined(earlier, -1, self.shards_open)

    def _combined(self, other: LoaderStatistics, sign: int, shards_open: int) -> LoaderStatistics:
        apart = ("samples_per_stream", "tokens_per_stream", "download_per_stream", "wait", "shards_open")
        counted = (item.name for item in fields(LoaderStatistics) if item.name not in apart)
        counts = {name: getattr(self, name) + sign * getattr(other, name) for name in counted}
        return LoaderStatistics(
            **counts,
            samples_per_stream=_combined(self.samples_per_stream, other.samples_per_stream, sign),
            tokens_per_stream=_combined(self.tokens_per_stream, other.tokens_per_stream, sign),
            download_per_stream=_combined(self.download_per_stream, other.download_per_stream, sign),
            wait=WaitTimes(*(mine + sign * its for mine, its in zip(self.wait, other.wait, strict=True))),
            shards_open=shards_open,
        )


def _combined(mine: Mapping[str, _Number], other: Mapping[str, _Number], sign: int) -> dict[str, _Number]:
    return {name: mine.get(name, 0) + sign * other.get(name, 0) for name in dict.fromkeys((*mine, *other))}


def split_wait(
    wait: _Seconds, *, download: _Seconds, decompress: _Seconds, work: _Seconds, are_first: NDArray[np.bool_]
) -> tuple[_Seconds, _Seconds, _Seconds, _Seconds, _Seconds]:
    """Attribute the waits for some batches to reasons. Arrays of shape (batches,), all times in one unit.

    The part of a wait up to the time of making the batch is divided like that work: a consumer that came late waited
    for the end of it, of which the reason is unknown. The rest is time in the queue. For example a wait of 8 for a
    batch whose 4 of work were 1 of download and 3 of decoding: 1 and 3, and 4 in the queue.

    Args:
        wait: How long the consumer waited for each batch.
        download: How long the worker that made the batch waited for files.
        decompress: How long it waited for decompression.
        work: How long it took for the batch, both included.
        are_first: Which batches are the first of their pass.

    Returns:
        The fields of :class:`WaitTimes`, for each batch.
    """
    explained = np.minimum(wait, work)
    share = np.divide(explained, work, out=np.zeros_like(work), where=work > 0)
    for_download, for_decompress = download * share, decompress * share
    rest = wait - explained
    start = np.where(are_first, rest, 0.0)
    return for_download, for_decompress, explained - for_download - for_decompress, rest - start, start


class BatchMeasures(NamedTuple):
    """The cost of one batch."""

    samples: int = 0
    sample_bytes: int = 0
    """Bytes of its samples as they are stored uncompressed."""
    tokens: int = 0
    """Tokens of documents in its packs."""
    token_room: int = 0
    """Tokens that these packs have room for."""
    download_ns: int = 0
    """Time for which their reader waited for files to be on this node, but for decompression."""
    decompress_ns: int = 0
    """Time for which it waited for files to be decompressed."""
    work_ns: int = 0
    """Time from the first sample to the collated batch, the two above included."""
    shards_opened: int = 0
    cache_hits: int = 0
    """Of those, how many were on this node when this process first wanted them."""
    fetched_bytes: int = 0
    """Bytes that this process fetched of the others, or had fetched ahead."""
    bad_samples: int = 0
    """Samples that could not be read."""
    shards_open: int = 0
    """Shards that are mapped now."""


NUM_MEASURES = len(BatchMeasures._fields)
_Counts = tuple[int, ...]
"""Of a batch: the first fields of :class:`BatchMeasures`, and its samples and tokens of each stream."""
_NUM_COUNTED = 4
_PER_STREAM = 3
"""Numbers of each stream: samples, tokens and ``download_ns``."""
_AT_ONCE = 256
"""Batches that are noted before they are added up: a note is all that a step should have to wait for."""


class BatchMeter:
    """Measures the batches that this process makes; its caller marks where each ends.

    Args:
        misses: Where each stream's cache notes what was not there, by stream name.
        is_read: Whether the measures are used.
    """

    def __init__(self, misses: Mapping[str, Misses], is_read: bool) -> None:
        self._misses = dict(misses)
        self._numbers = {name: number for number, name in enumerate(misses)}
        self._is_read = is_read
        self._began = 0
        self._took = Counter[str]()
        """By field of :class:`BatchMeasures`."""
        self._download_ns: NDArray[np.int64] = np.zeros(len(self._misses), np.int64)
        """That part of it by stream."""
        self._counts: Iterator[_Counts] = iter(())
        self._no_counts: _Counts = (0,) * (
            _NUM_COUNTED + 2 * len(self._misses)
        )  # of batches that are none of the plan's
        self._open: Sized = ()

    def begin_pass(self, open_shards: Sized) -> None:
        """Forget what was measured before; the first batch begins now."""
        for misses in self._misses.values():
            misses.clear()
        self._open, self._counts = open_shards, iter(())
        self._begin_batches()

    def begin_window(
        self,
        catalog: Catalog,
        shards: NDArray[np.int64],
        stops: NDArray[np.int64],
        tokens: NDArray[np.int64] | None = None,
        sample_tokens: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Set the samples of the next batches.

        Args:
            catalog: The data.
            shards: The shard of each sample.
            stops: Where each batch ends among these.
            tokens: Of packs, tokens in each batch and room for them, of shape (batches, 2).
            sample_tokens: Tokens of each sample, if they are known.
        """
        if not self._is_read:
            return
        num_streams, num_batches = len(catalog.stream_names), len(stops)
        samples = np.diff(stops, prepend=0)
        firsts = stops - samples
        sample_bytes = np.add.reduceat(catalog.mean_sample_bytes[shards], firsts, dtype=np.float64)
        if num_streams == 1:
            cells = np.repeat(np.arange(num_batches), samples) if sample_tokens is not None else None
            per_stream = samples[:, None]
        else:
            cells = np.repeat(np.arange(num_batches) * num_streams, samples) + catalog.stream_of_shard[shards]
            per_stream = np.bincount(cells, minlength=num_batches * num_streams).reshape(num_batches, num_streams)
        of_tokens: NDArray[np.int64] = np.zeros_like(per_stream)
        if sample_tokens is not None and cells is not None:
            sums = np.bincount(cells, sample_tokens, num_batches * num_streams)
            of_tokens = sums.astype(np.int64).reshape(per_stream.shape)
        tokens = np.zeros((num_batches, 2), np.int64) if tokens is None else tokens
        counts = np.column_stack([samples, np.rint(sample_bytes).astype(np.int64), tokens, per_stream, of_tokens])
        # The iterator over samples may be further ahead than the batch under way.
        self._counts = chain(self._counts, map(tuple, counts.tolist()))

    def begin_batch(self) -> None:
        """Note that the first sample of the next batch is requested."""
        self._began = perf_counter_ns()

    def opened(self, began: int, missed: Sequence[Miss], stream: str) -> None:
        """Note that a shard was opened, for which the reader has waited since ``began``, by ``perf_counter_ns``.

        Args:
            began: When it was wanted.
            missed: Its files that were not here then.
            stream: Name of its stream.
        """
        ended = perf_counter_ns()
        if missed:  # else it was only mapped, as a part of decoding
            unpacking = sum(max(0, min(ended, miss.unpack_ended) - max(began, miss.unpack_began)) for miss in missed)
            self._took["decompress_ns"] += unpacking
            self._took["download_ns"] += ended - began - unpacking
            self._download_ns[self._numbers[stream]] += ended - began - unpacking
        self._took["shards_opened"] += 1
        self._took["cache_hits"] += not missed
        self._took["fetched_bytes"] += sum(miss.fetched_bytes for miss in missed)

    def count_bad(self) -> None:
        """Note that a sample cannot be read."""
        self._took["bad_samples"] += 1

    def end_batches(self, batches: int) -> NDArray[np.int64]:
        """Note that some batches are made, which were made as one.

        Returns:
            Array of shape (batches, numbers): of each batch its :class:`BatchMeasures`, then its samples per stream,
            its tokens per stream, and the ``download_ns`` of each stream.
            What the batches took together is said of the first, for which their consumer waits.
        """
        counts = np.array([next(self._counts, self._no_counts) for _ in range(batches)], np.int64)
        num_streams = len(self._misses)
        measures = np.zeros((batches, NUM_MEASURES + _PER_STREAM * num_streams), np.int64)
        measures[0, :NUM_MEASURES] = BatchMeasures(work_ns=perf_counter_ns() - self._began, **self._took)
        measures[:, :_NUM_COUNTED] = counts[:, :_NUM_COUNTED]
        measures[:, NUM_MEASURES - 1] = len(self._open)
        measures[:, NUM_MEASURES : NUM_MEASURES + 2 * num_streams] = counts[:, _NUM_COUNTED:]
        measures[0, NUM_MEASURES + 2 * num_streams :] = self._download_ns
        self._begin_batches()
        return measures

    def _begin_batches(self) -> None:
        self._took.clear()
        self._download_ns[:] = 0
        self.begin_batch()


class StatisticsCollector:
    """Adds up the measures of the workers of one loader.

    Args:
        streams: Names of the streams whose samples are counted.
    """

    def __init__(self, streams: Sequence[str]) -> None:
        self._streams = list(streams)
        self._sums = np.zeros(NUM_MEASURES + _PER_STREAM * len(self._streams), np.int64)
        self._wait = WaitTimes()
        self._download_per_stream = np.zeros(len(self._streams))
        self._ready_batches = 0
        self._batches = 0
        self._open_in_worker: dict[int, int] = {}
        self._num_workers = 1
        self._next_batch = 0
        """Of the pass, that is not added up yet."""
        self._noted: list[tuple[NDArray[np.int64], int]] = []

    def begin_pass(self, num_workers: int) -> None:
        """Count the batches of another pass, made by so many processes in turn."""
        self._add_up()
        self._num_workers, self._next_batch = max(1, num_workers), 0
        self._open_in_worker = {}

    def close_shards(self) -> None:
        """Count no shard as open: the processes that had mapped some have ended."""
        self._add_up()
        self._open_in_worker = {}

    def nothing(self) -> NDArray[np.int64]:
        """Return the measures of a batch without samples."""
        return np.zeros_like(self._sums)

    def add(self, measures: NDArray[np.int64], wait_ns: int) -> None:
        """Count the next batch of the pass.

        Args:
            measures: Its cost, as :meth:`BatchMeter.end_batches` returns it.
            wait_ns: For how long its consumer waited.
        """
        self._noted.append((measures, wait_ns))
        if len(self._noted) == _AT_ONCE:
            self._add_up()

    def statistics(self) -> LoaderStatistics:
        """Return the counts so far."""
        self._add_up()
        values = self._sums.tolist()
        sums, num_streams = BatchMeasures(*values[:NUM_MEASURES]), len(self._streams)
        samples, tokens, _ = (values[NUM_MEASURES + part * num_streams :][:num_streams] for part in range(_PER_STREAM))
        return LoaderStatistics(
            batches=self._batches,
            samples=sums.samples,
            samples_per_stream=dict(zip(self._streams, samples, strict=True)),
            tokens_per_stream=dict(zip(self._streams, tokens, strict=True)) if any(tokens) else {},
            sample_bytes=sums.sample_bytes,
            tokens=sums.tokens,
            token_room=sums.token_room,
            wait=self._wait,
            download_per_stream=(
                dict(zip(self._streams, self._download_per_stream.tolist(), strict=True)) if self._wait.download else {}
            ),
            ready_batches=self._ready_batches,
            shards_opened=sums.shards_opened,
            cache_hits=sums.cache_hits,
            fetched_bytes=sums.fetched_bytes,
            shards_open=sum(self._open_in_worker.values()),
            bad_samples=sums.bad_samples,
        )

    def _add_up(self) -> None:
        """Add what was noted since the last time to the sums."""
        if not self._noted:
            return
        measures, waits = zip(*self._noted, strict=True)
        rows = np.concatenate(measures).reshape(len(waits), -1)  # a third of what np.stack takes
        batches = self._next_batch + np.arange(len(waits))
        columns = dict(zip(BatchMeasures._fields, rows.T, strict=False))  # those of streams follow
        parts = split_wait(
            _seconds(waits),
            download=_seconds(columns["download_ns"]),
            decompress=_seconds(columns["decompress_ns"]),
            work=_seconds(columns["work_ns"]),
            are_first=batches == 0,
        )
        self._wait = WaitTimes(*(sum_ + float(part.sum()) for sum_, part in zip(self._wait, parts, strict=True)))
        in_streams, downloaded = rows[:, -len(self._streams) :], columns["download_ns"]
        with_download = downloaded > 0
        self._download_per_stream += (parts[0][with_download] / downloaded[with_download]) @ in_streams[with_download]
        self._ready_batches += sum(wait < _READY_NS for wait in waits)
        self._sums += rows.sum(axis=0)
        self._batches += len(waits)
        workers = (batches % self._num_workers).tolist()
        self._open_in_worker.update(zip(workers, columns["shards_open"].tolist(), strict=True))
        self._next_batch += len(waits)
        self._noted = []


def _seconds(nanoseconds: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(nanoseconds, np.float64) * 1e-9


class Fetched(NamedTuple):
    """The files fetched before the first batch."""

    begun: int
    """Shards that were requested, with those that have arrived."""
    here: int
    """Shards that have arrived."""
    of: int
    """Shards of the whole dataset."""
    bytes: int
    """Bytes of those that have arrived, as they are stored."""
    seconds: float
    """Seconds since the workers were started."""


DownloadCallback = Callable[[Fetched | None], object]
"""Callback for the first download: called in a separate thread with all that was fetched, and None at the end."""


class FetchCounts:
    """Shared memory in which each process that reads counts the shards that it fetches.

    Args:
        readers: Number of processes, at least 1.
    """

    def __init__(self, readers: int) -> None:
        self._counts = shared(torch.zeros((readers, 3), dtype=torch.int64))

    def counter(self, reader: int) -> Callable[[int, int], None]:
        """Return the callback of one process for each shard it fetches; see :class:`Misses`."""
        own, lock = self._counts[reader].numpy(), threading.Lock()

        def count(begun: int, num_bytes: int) -> None:
            with lock:
                own[:] += (begun, 1 - begun, num_bytes)

        return count

    def sums(self) -> tuple[int, int, int]:
        """Return the shards requested, the shards that have arrived, and their bytes, over all processes."""
        begun, here, num_bytes = self._counts.sum(dim=0).tolist()
        return begun, here, num_bytes


class DownloadReporter:
    """Reports the fetched shards to a callback when their counts have changed, until it is closed.

    A thread reads the counts a few times a second: so no reader waits for the progress bar, and no worker inherits the
    thread.

    Args:
        callback: Callback of the report.
        counts: The fetched shards.
        of: Shards of the whole dataset.
    """

    def __init__(self, callback: DownloadCallback, counts: FetchCounts, of: int) -> None:
        self._callback, self._counts, self._of = callback, counts, of
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning-streaming-arrivals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report the last counts, and stop; the callback has returned when this returns."""
        self._is_closed.set()
        self._thread.join()

    def _watch(self) -> None:
        began, seen, is_over = perf_counter(), (0, 0, 0), False
        try:
            while not is_over:
                is_over = self._is_closed.wait(_SECONDS_BETWEEN_REPORTS)
                sums = self._counts.sums()
                if sums != seen:
                    seen, (begun, here, num_bytes) = sums, sums
                    # A shard that is tried again is counted twice.
                    self._callback(
                        Fetched(min(begun, self._of), min(here, self._of), self._of, num_bytes, perf_counter() - began)
                    )
        finally:
            self._callback(None)
