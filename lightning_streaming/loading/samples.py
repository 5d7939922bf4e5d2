"""A worker's samples of one pass, in order: where ids become samples."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from operator import getitem
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import FormatError
from lightning_streaming.formats.mds import MDSReader
from lightning_streaming.formats.shard import ShardReader
from lightning_streaming.loading.batch_maker import BatchMaker
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.last_uses import BatchShards, LastUses, NodePlan
from lightning_streaming.loading.meter import Meter
from lightning_streaming.loading.prefetch import Reach, ShardNeed, ShardPrefetcher, default_reach
from lightning_streaming.loading.source import SampleSource
from lightning_streaming.loading.watch import Row, SampleWatch
from lightning_streaming.order.deal import Deal
from lightning_streaming.order.plan import EpochPlan

_WINDOW_SAMPLES = 8192
"""Samples whose ids are worked out together: enough for numpy to be fast, few enough to start at once."""
_LAST_USE, _BATCH_ENDS = 1, 2
_NEAR_END = 0.5
"""Part of a share after which what the next pass needs is made ready."""

Transform = Callable[[dict[str, Any], int], Any]
"""Turns a decoded sample, and its position in the epoch, into what the worker hands out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One worker's share of a pass: every ``num_workers``-th global batch, beginning with number ``worker``."""

    plan: EpochPlan
    deal: Deal
    node: int
    rank_of_node: int
    worker: int = 0
    num_workers: int = 1

    def windows(self) -> Iterator[NDArray[np.int64]]:
        """Positions of this worker's samples in the epoch's sequence, some batches at a time."""
        batches = range(self.worker, self.deal.num_batches(), self.num_workers)
        for window in _stretches(batches, self.deal.batch_size):
            positions = self.deal.batches(window, self.node, self.rank_of_node).reshape(-1)
            # Only an epoch's last batch has gaps.
            yield positions if positions[-1] >= 0 else positions[positions >= 0]

    def windows_of_node(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Global batches, and positions of the samples that this node reads of each, of shape (batches, samples).

        Where the last batch has gaps, its positions are -1.
        """
        ranks = range(self.deal.ranks_per_node)
        for window in _stretches(range(self.deal.num_batches()), self.deal.batch_size * len(ranks)):
            yield window, np.hstack([self.deal.batches(window, self.node, rank) for rank in ranks])

    def num_samples(self) -> int:
        """About how many samples :meth:`windows` gives, exactly if the last batch is full."""
        return len(range(self.worker, self.deal.num_batches(), self.num_workers)) * self.deal.batch_size


def _stretches(batches: range, samples_per_batch: int) -> Iterator[NDArray[np.int64]]:
    step = max(1, _WINDOW_SAMPLES // samples_per_batch)
    return (np.asarray(batches[first : first + step], np.int64) for first in range(0, len(batches), step))


class _Window(NamedTuple):
    """Some consecutive samples of a worker, by position and place. Arrays of equal length."""

    positions: NDArray[np.int64]
    shards: NDArray[np.int64]
    indexes: NDArray[np.int64]


def _located(share: Share, catalog: Catalog) -> Iterator[_Window]:
    for positions in share.windows():
        shards, indexes = catalog.places(share.plan.ids(positions))
        yield _Window(positions, shards, indexes)


def shard_needs(share: Share, catalog: Catalog) -> Iterator[ShardNeed]:
    """Shards in the order in which this worker first needs them, once per window of samples."""
    samples_before = 0
    for window in _located(share, catalog):
        shards, first_uses = np.unique(window.shards, return_index=True)
        for use in np.argsort(first_uses, kind="stable"):
            yield ShardNeed(samples_before + int(first_uses[use]), int(shards[use]))
        samples_before += len(window.positions)


def _node_plan(share: Share, catalog: Catalog) -> NodePlan:
    def of_node() -> Iterator[BatchShards]:
        for batches, positions in share.windows_of_node():
            is_sample = positions >= 0
            ids = share.plan.ids(positions[is_sample])
            yield BatchShards(np.repeat(batches, is_sample.sum(axis=1)), catalog.shard_of(ids))

    return NodePlan(
        worker=share.worker,
        num_workers=share.num_workers,
        num_shards=len(catalog.shards),
        num_samples=share.deal.num_batches() * share.deal.batch_size * share.deal.ranks_per_node,
        own=lambda: (window.shards for window in _located(share, catalog)),
        of_node=of_node,
    )


_Take = Callable[[Any, int], Any]
"""Gives a sample of a shard's reader by its index."""


class WorkerSamples(Iterator[Any]):
    """Iterates over a worker's share of a pass; an iterator with a count, which ends when nobody holds it any more.

    Args:
        make_share: Says what to read. Called with the first ``next``: in a worker that lives on from pass to pass,
            torch reports an error of ``next``, and loses one of ``iter``.
        source: Where from.
        transform: What to make of each sample.
        predownload: Samples ahead of the reader for which shards are fetched; None for :func:`default_reach`.
        near_end: Called once, when most of the share has been read.
        maker: Makes batches of what is handed out, and is told of them; may be given rows.
        watch: Is told of each sample; None for no one.
    """

    def __init__(
        self,
        make_share: Callable[[], Share],
        source: SampleSource,
        transform: Transform | None,
        predownload: int | None,
        near_end: Callable[[], None],
        maker: BatchMaker,
        watch: SampleWatch | None = None,
    ) -> None:
        self.samples_read = 0
        """Samples handed out so far."""
        samples = _read(make_share, source, transform, predownload, near_end, maker, watch)
        self._samples = samples if watch is None else watch.samples(samples)

    def __next__(self) -> Any:
        sample = next(self._samples)
        self.samples_read += 1
        return sample

    def close(self) -> None:
        """Hand out no more, and stop fetching ahead."""
        self._samples.close()


def _read(
    make_share: Callable[[], Share],
    source: SampleSource,
    transform: Transform | None,
    predownload: int | None,
    near_end: Callable[[], None],
    maker: BatchMaker,
    watch: SampleWatch | None,
) -> Generator[Any, None, None]:
    share = make_share()
    take, meter = _way_to_take(source, transform, maker), maker.meter
    # A share of one batch that is not full has all of its end in sight.
    near_end_at = (share.num_samples() - share.deal.batch_size) * _NEAR_END
    readers, latest, is_near_end = source.readers, -1, False
    meter.begin_pass(readers)
    with _begun(share, source, predownload, meter) as reading:
        for window in _located(share, source.catalog):
            meter.begin_window(source.catalog, window.shards, share.deal.batch_size)
            if not is_near_end and reading.samples_located + len(window.positions) > near_end_at:
                is_near_end = True
                near_end()
            rows = reading.rows(window)
            for position, shard, index, events in rows if watch is None else watch.rows(rows):
                # At every sample anew: what the caller does between two of them may close shards.
                reader = readers.get(shard)
                if reader is None:
                    reader = reading.open(shard)
                elif shard != latest:
                    readers.move_to_end(shard)
                latest = shard
                try:
                    sample = take(reader, index)
                except FormatError as error:
                    raise source.named(error, shard) from error
                if events:
                    reading.after(events, shard)
                yield sample if transform is None else transform(sample, position)
                if events & _BATCH_ENDS:
                    meter.begin_batch()


def _way_to_take(source: SampleSource, transform: Transform | None, maker: BatchMaker) -> _Take:
    """Decode samples, or, where nobody but the maker of batches looks at them, leave them as rows for it."""
    rows = source.plain_rows() if maker.takes_rows and transform is None else None
    maker.begin_pass(rows)
    return getitem if rows is None else MDSReader.row  # the one format of plain rows


class _Reading:
    """What is to be done beside decoding: when a shard is opened, after its last sample, and after each batch."""

    def __init__(
        self,
        share: Share,
        source: SampleSource,
        meter: Meter,
        prefetcher: ShardPrefetcher | None,
        last_uses: LastUses | None,
    ) -> None:
        self.samples_located = 0
        """Samples in the windows whose rows were asked for."""
        self._batch_size = share.deal.batch_size
        self._source = source
        self._meter = meter
        self._prefetcher = prefetcher
        self._last_uses = last_uses
        self._batches_read = 0

    def rows(self, window: _Window) -> Iterator[Row]:
        """Position, shard, index within it, and what :meth:`after` is to be told if it is not 0, one by one."""
        events = np.zeros(len(window.positions), np.uint8)
        events[self._batch_size - 1 :: self._batch_size] = _BATCH_ENDS
        if self._last_uses is not None:
            events[self._last_uses.among(window.shards, self.samples_located)] |= _LAST_USE
        self.samples_located += len(events)
        columns = window.positions.tolist(), window.shards.tolist(), window.indexes.tolist(), events.tobytes()
        return zip(*columns, strict=True)

    def open(self, shard: int) -> ShardReader:
        """Open a shard whose sample is next."""
        began = perf_counter_ns()
        if self._prefetcher is not None:
            self._prefetcher.retry_if_failed(shard)
        reader = self._source.open(shard)
        self._meter.opened(began, self._source.catalog, shard)
        if self._prefetcher is not None:
            self._prefetcher.moved_on()
        return reader

    def after(self, events: int, shard: int) -> None:
        """Take note that a sample was read, and not handed out yet, that is the last of a batch or of its shard."""
        if events & _LAST_USE:
            self._source.let_go(shard)
            if self._prefetcher is not None:
                self._prefetcher.moved_on()
        if events & _BATCH_ENDS:
            self._batches_read += 1
            if self._prefetcher is not None:
                self._prefetcher.reader_at(self._batches_read * self._batch_size)
            for finished in () if self._last_uses is None else self._last_uses.finished(self._batches_read):
                self._source.finish(finished)
            self._source.rest()


@contextmanager
def _begun(share: Share, source: SampleSource, predownload: int | None, meter: Meter) -> Iterator[_Reading]:
    """Fetch shards ahead of a reader while it reads, if they are not all here; and watch for their last uses, where
    there is a limit on how many are kept."""
    with ExitStack() as stack:
        source.begin_pass(share.num_workers * share.deal.ranks_per_node)
        stack.callback(source.end_pass)
        prefetcher = last_uses = None
        if source.is_remote:
            reach = Reach(predownload, predownload) if predownload else _default_reach(share, source.catalog)
            needs = shard_needs(share, source.catalog)
            prefetcher = stack.enter_context(closing(ShardPrefetcher(needs, source.fetch_ahead, reach)))
        if source.cache_limit is not None:
            last_uses = stack.enter_context(closing(LastUses(_node_plan(share, source.catalog))))
        yield _Reading(share, source, meter, prefetcher, last_uses)


def _default_reach(share: Share, catalog: Catalog) -> Reach:
    readers = share.num_workers * share.deal.ranks_per_node
    return default_reach(share.deal.batch_size, catalog.num_samples / len(catalog.shards), readers)
