"""The samples that a worker reads in a pass, with their shards: fetched ahead, opened and released.

WorkerPass      the configuration of one worker's pass: what it reads and how it makes samples
Reading         a pass under way: shards fetched ahead, opened, released, measured
WorkerPartition the positions of the epoch that the worker reads, and where their samples are

Its samples are made one by one in :mod:`~lightning_streaming.reading.worker_samples`, and by whole batches in
:mod:`~lightning_streaming.reading.batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.dataset.bad_samples import BadSamples
from lightning_streaming.dataset.sample_key import Row, SampleKey
from lightning_streaming.dataset.samples import SampleSource
from lightning_streaming.dataset.transform import Making, failed_sample
from lightning_streaming.errors import FormatError, StreamingError
from lightning_streaming.formats.readers import ShardReader
from lightning_streaming.options.packing import Packing
from lightning_streaming.reading.measures import BatchMeter
from lightning_streaming.reading.packs.types import ColumnTypes
from lightning_streaming.reading.prefetch import (
    BatchShards,
    LastUses,
    Lookahead,
    NodePlan,
    ShardNeed,
    ShardPrefetcher,
    default_lookahead,
)
from lightning_streaming.reading.sample_log import SampleWatch
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.batching import Batched, PackRows
from lightning_streaming.sequence.partition import Partition

_NEAR_END = 0.5
"""Part of a partition after which what the next pass needs is made ready."""
_WINDOW_SAMPLES = 8192
"""Samples whose ids are worked out together: enough for numpy to be fast, few enough to start at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPass:
    """The configuration of one worker's pass: what it reads, where from, and how it makes samples."""

    make_partition: Callable[[], WorkerPartition]
    """Says what to read. Called with the first sample: torch reports an error of ``next``, but loses one of ``iter`` in
    a worker that lives on from pass to pass."""
    source: SampleSource
    making: Making
    key: Callable[[Row], SampleKey]
    """Finds the key of a sample."""
    predownload: int | None
    """Samples ahead of the reader for which shards are fetched; None for what :func:`default_lookahead` says."""
    near_end: Callable[[], None]
    """Called once, when most of it has been read."""
    meter: BatchMeter
    watch: SampleWatch | None
    """Observes each sample; None for no log and no watchdog."""
    pack: Packing | None = None
    """How samples are brought together; None where they are not."""
    types: ColumnTypes | None = None
    """Of what is brought together."""
    bad: BadSamples | None = None
    """Replaces samples that cannot be read; None where they are errors."""
    threads: int = 0
    """In which samples are decoded and transformed, beside the one that reads; 0 for none."""

    def may_be_tables(self) -> bool:
        """Return whether samples may be plain, and need not be made one by one."""
        making = self.making
        is_untouched = making.transform is None and making.make is None and self.watch is None
        return is_untouched and self.source.may_be_plain()

    def may_be_joined(self) -> bool:
        """Return whether documents may be packed by their bytes, as they need not be made one by one."""
        making = self.making
        is_untouched = making.transform is None and making.make is None and self.watch is None
        return is_untouched and self.source.may_be_joined()

    def failed(self, row: Row, error: Exception, sample: Any = None) -> StreamingError:
        """Return the error to raise for a failure of the user's code on a sample."""
        return failed_sample(error, self.making.name, self.key(row), sample)

    def instead(self, row: Row, error: StreamingError, make: Callable[[Row], Any]) -> Any:
        """Return the replacement of a sample that could not be made; see :meth:`BadSamples.instead`."""
        if self.bad is None:
            raise error

        def watched(other: Row) -> Any:
            if self.watch is not None:
                self.watch.begun(other)
            return make(other)

        return self.bad.instead(row, error, watched)

    def keys_of_batch(self, number: int) -> list[SampleKey]:
        """Return the keys of one of the worker's batches, counted from the first of the pass."""
        partition, catalog = self.make_partition(), self.source.catalog
        found = partition.sequence.rows(partition.batch(number))
        places = (found.positions, *catalog.places(found.ids))
        rows = zip(*(numbers.tolist() for numbers in places), strict=True)
        return [self.key((position, shard, index, 0)) for position, shard, index in rows]

    @contextmanager
    def begun(self) -> Iterator[Reading]:
        """Read. Shards are fetched ahead meanwhile, if they are not all here, and the last use of each is watched for,
        where there is a limit on how many are kept."""
        partition, source = self.make_partition(), self.source
        self.meter.begin_pass(source.readers)
        if self.bad is not None:
            self.bad.begin()
        with ExitStack() as stack:
            source.begin_pass(partition.num_workers * partition.epoch_partition.geometry.ranks_per_node)
            stack.callback(source.end_pass)
            prefetcher = last_uses = None
            if source.is_remote:
                ahead = self.predownload
                lookahead = Lookahead(ahead, ahead) if ahead else lookahead_of(partition, source.catalog)
                needs, find = shard_needs(partition, source.catalog), source.find_joined()
                ahead_of_reader = ShardPrefetcher(needs, source.fetch_ahead, lookahead, find=find)
                prefetcher = stack.enter_context(closing(ahead_of_reader))
            if source.cache_limit is not None:
                last_uses = stack.enter_context(closing(LastUses(_node_plan(partition, source.catalog))))
            reading = Reading(partition, self, prefetcher, last_uses)
            with source.opened_by(reading.open):
                yield reading


class Reading:
    """One worker's pass under way.

    Args:
        partition: What is read.
        of_pass: How.
        prefetcher: Fetches shards ahead; None where they are all here.
        last_uses: Tells of shards' last uses; None where it does not matter.
    """

    def __init__(
        self,
        partition: WorkerPartition,
        of_pass: WorkerPass,
        prefetcher: ShardPrefetcher | None,
        last_uses: LastUses | None,
    ) -> None:
        self.batch_size = partition.epoch_partition.geometry.batch_size
        self._partition = partition
        self._source = of_pass.source
        self._meter = of_pass.meter
        self._near_end = of_pass.near_end
        self._bad = of_pass.bad
        self._pack = of_pass.pack
        self._prefetcher = prefetcher
        self._last_uses = last_uses
        self._batches_read = 0
        self._window = _NO_WINDOW
        self._joined: NDArray[np.int64] | None = None
        """Shards of joined datasets that the samples of the window need, from the first that is not read yet."""

    @property
    def cuts_documents(self) -> bool:
        """Return whether several packs may have pieces of one document."""
        return self._pack is not None and self._pack.settings().longer == "split"

    def windows(self) -> Iterator[Window]:
        """Yield the worker's samples in order, some batches at a time."""
        # A partition of one batch that is not full has all of its end in sight.
        near_end_at = (self._partition.num_samples() - self.batch_size) * _NEAR_END
        is_near_end, catalog = False, self._source.catalog
        for window in located(self._partition, catalog):
            self._meter.begin_window(catalog, window.shards, window.stops, self._tokens(window))
            if not is_near_end and (window.batches_before + len(window.stops)) * self.batch_size > near_end_at:
                is_near_end = True
                self._near_end()
            self._window, self._joined = window, window.joined
            yield window
        self._source.check_unchanged()

    def _tokens(self, window: Window) -> NDArray[np.int64] | None:
        """Return the tokens in each batch of a window, and the room for them; None without packs."""
        if window.pieces is None or self._pack is None:
            return None
        tokens, rooms = np.cumsum(window.pieces.lengths), np.cumsum(window.pieces.rooms(self._pack.settings()))
        last = window.stops - 1
        until = (tokens[last], rooms[window.pieces.packs[last]])
        return np.stack([np.diff(one, prepend=0) for one in until], axis=1)

    def last_uses(self, shards: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return which of the next samples are this worker's last of their shards.

        Args:
            shards: The shard of each of these samples.

        Returns:
            None where it does not matter.
        """
        if self._last_uses is None:
            return None
        return self._last_uses.among(shards, self._window.rows_until(self._batches_read))

    def reader(self, shard: int) -> ShardReader:
        """Return the reader of the next sample's shard; fetch and open it if necessary."""
        readers = self._source.readers
        reader = readers.get(shard)
        if reader is None:
            return self.open(shard)
        readers.move_to_end(shard)
        return reader

    def _let_go_of_joined(self, samples: int) -> None:
        """Release the shards of joined datasets that some of the next samples needed last."""
        assert self._joined is not None, "looked at by the caller"
        read, self._joined = self._joined[:samples], self._joined[samples:]
        for shards in read.T:
            are_last = self.last_uses(shards)
            for shard in () if are_last is None else np.unique(shards[are_last & (shards >= 0)]).tolist():
                self.let_go(shard)

    def open(self, shard: int) -> ShardReader:
        """Open a shard that is not open, and measure it; fetch it if necessary."""
        began = perf_counter_ns()
        reader = self._source.open(shard)
        self._meter.opened(began, self._source.take_misses(shard))
        if self._prefetcher is not None:
            self._prefetcher.moved_on()
        return reader

    def let_go(self, shard: int) -> None:
        """Release a shard after the worker's last sample of it."""
        self._source.let_go(shard)
        if self._prefetcher is not None:
            self._prefetcher.moved_on()

    def about_to_read(self, batches: int) -> None:
        """Prefetch for batches that are about to be read all at once."""
        if self._prefetcher is not None:
            read, next_ = (self._window.rows_until(self._batches_read + more) for more in (0, max(0, batches)))
            self._prefetcher.reader_at(read, next_)

    def have_read(self, batches: int) -> None:
        """Note that more batches were read, which are not yielded yet."""
        read = self._batches_read + batches
        if self._joined is not None or self._bad is not None:
            samples = self._window.rows_until(read) - self._window.rows_until(self._batches_read)
            if self._joined is not None:
                self._let_go_of_joined(samples)
            if self._bad is not None:
                self._bad.have_read(samples)
        self._batches_read = read
        self.about_to_read(0)
        for finished in () if self._last_uses is None else self._last_uses.finished(self._batches_read):
            self._source.finish(finished)
        self._source.rest()


def lookahead_of(partition: WorkerPartition, catalog: Catalog) -> Lookahead:
    """Return how far a worker prefetches by default."""
    geometry, per_entry = partition.epoch_partition.geometry, partition.sequence.rows_per_entry
    readers = partition.num_workers * geometry.ranks_per_node
    shard_samples = catalog.num_samples / len(catalog.shards)
    return default_lookahead(round(geometry.batch_size * per_entry), shard_samples, readers, partition.node)


def decoded(of_pass: WorkerPass, reading: Reading, row: Row) -> dict[str, Any]:
    """Return a sample as it is stored.

    Raises:
        FormatError: It is damaged; names the stream and the shard.
    """
    _, shard, index, _ = row
    reader = reading.reader(shard)
    decode = of_pass.source.decoder()
    try:
        sample = reader[index]
        return sample if decode is None else decode(sample, shard, index)
    except FormatError as error:
        raise of_pass.source.named(error, shard) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPartition:
    """One worker's part of a pass: every ``num_workers``-th global batch, beginning with number ``worker``."""

    sequence: Batched
    epoch_partition: Partition
    node: int
    rank_of_node: int
    worker: int = 0
    num_workers: int = 1

    def windows(self) -> Iterator[NDArray[np.int64]]:
        """Yield positions of this worker's samples in the epoch's sequence, some batches at a time."""
        batches = range(self.worker, self.epoch_partition.num_batches(), self.num_workers)
        for window in _some_at_a_time(batches, self.epoch_partition.geometry.batch_size):
            positions = self.epoch_partition.batches(window, self.node, self.rank_of_node).reshape(-1)
            # Only an epoch's last batch may be short of samples.
            yield positions if positions[-1] >= 0 else positions[positions >= 0]

    def batch(self, number: int) -> NDArray[np.int64]:
        """Return the positions of one of this worker's batches, counted from its first."""
        batches = np.array([self.worker + number * self.num_workers])
        positions = self.epoch_partition.batches(batches, self.node, self.rank_of_node).reshape(-1)
        return positions[positions >= 0]

    def windows_of_node(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield global batches, and positions of the samples that this node reads of each, of shape (batches, samples).

        Where the last batch is short of samples, its positions are -1.
        """
        ranks = range(self.epoch_partition.geometry.ranks_per_node)
        for window in _some_at_a_time(
            range(self.epoch_partition.num_batches()), self.epoch_partition.geometry.batch_size * len(ranks)
        ):
            yield window, np.hstack([self.epoch_partition.batches(window, self.node, rank) for rank in ranks])

    def num_samples(self) -> int:
        """Return about how many samples :meth:`windows` yields; exact if the last batch is full."""
        return (
            len(range(self.worker, self.epoch_partition.num_batches(), self.num_workers))
            * self.epoch_partition.geometry.batch_size
        )


def _some_at_a_time(batches: range, samples_per_batch: int) -> Iterator[NDArray[np.int64]]:
    step = max(1, _WINDOW_SAMPLES // samples_per_batch)
    return (np.asarray(batches[first : first + step], np.int64) for first in range(0, len(batches), step))


class Window(NamedTuple):
    """The samples of some consecutive batches of a worker. Arrays of one entry for each sample, but for ``stops``."""

    positions: NDArray[np.int64]
    shards: NDArray[np.int64]
    indexes: NDArray[np.int64]
    joined: NDArray[np.int64] | None
    """Shards of joined datasets, as :meth:`Catalog.joined_shards` tells them."""
    stops: NDArray[np.int64]
    """Samples up to the end of each batch, counted from the window's first."""
    rows_before: int
    """Samples of the worker's that come before."""
    batches_before: int
    pieces: PackRows | None
    """Of packs: which of the window's each sample is in, and which of its tokens."""

    def needed(self) -> NDArray[np.int64]:
        """Return all shards that are known to be needed; of shape (samples, shards), -1 for none."""
        own = self.shards[:, None]
        return own if self.joined is None else np.hstack([own, self.joined])

    def rows_until(self, batches: int) -> int:
        """Return how many samples the worker has read after some batches of this window, or of those before."""
        here = min(batches - self.batches_before, len(self.stops))
        return self.rows_before + (int(self.stops[here - 1]) if here > 0 else 0)


_NO_ROWS = np.empty(0, np.int64)
_NO_WINDOW = Window(_NO_ROWS, _NO_ROWS, _NO_ROWS, None, _NO_ROWS, 0, 0, None)


def located(partition: WorkerPartition, catalog: Catalog) -> Iterator[Window]:
    """Yield the worker's samples in order, some batches at a time."""
    rows_before = batches_before = 0
    batch_size = partition.epoch_partition.geometry.batch_size
    for entries in partition.windows():
        rows = partition.sequence.rows(entries)
        shards, indexes = catalog.places(rows.ids)
        ends = np.minimum(np.arange(batch_size, len(entries) + batch_size, batch_size), len(entries))
        stops = ends if rows.pieces is None else rows.stops(len(entries))[ends - 1]
        joined = catalog.joined_shards(shards, indexes)
        yield Window(rows.positions, shards, indexes, joined, stops, rows_before, batches_before, rows.pieces)
        rows_before += len(rows.positions)
        batches_before += len(stops)


def shard_needs(partition: WorkerPartition, catalog: Catalog) -> Iterator[ShardNeed]:
    """Yield shards in the order in which this worker first needs them, once per window of samples."""
    for window in located(partition, catalog):
        needed, before = window.needed(), window.rows_before
        shards, first_uses = np.unique(needed, return_index=True)
        needs = [
            ShardNeed(before + int(first_uses[use]) // needed.shape[1], int(shards[use]))
            for use in np.argsort(first_uses, kind="stable")
            if shards[use] >= 0
        ]
        if catalog.joins is not None and catalog.joins.by_id:
            by_id = _needs_by_id(window, np.isin(catalog.stream_of_shard, catalog.joins.by_id))
            needs += [need._replace(sample=before + need.sample) for need in by_id]
            needs.sort(key=lambda need: need.sample)
        yield from needs


def _needs_by_id(window: Window, is_joined: NDArray[np.bool_]) -> Iterator[ShardNeed]:
    """Yield what the samples of each batch need by their ids, after all of their own shards.

    Args:
        window: Samples.
        is_joined: Of each shard of a stream, whether something is joined with it by id.
    """
    for first, stop in pairwise([0, *window.stops.tolist()]):
        shards, indexes = window.shards[first:stop], window.indexes[first:stop]
        for places in by_shard(shards):
            shard = int(shards[places[0]])
            if is_joined[shard]:
                yield ShardNeed(first + len(shards) - 1, shard, indexes[places])


def by_shard(shards: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Return the indexes of each shard's samples, ascending; shards in the order of their first index.

    Args:
        shards: The shard of each sample; at least one.
    """
    if (shards == shards[0]).all():
        yield np.arange(len(shards))
        return
    # Of numbers of 16 bits numpy makes a radix sort, in a tenth of the time.
    order = (shards.astype(np.uint16) if shards.max() < 1 << 16 else shards).argsort(kind="stable")
    in_order = shards[order]
    starts = [0, *(1 + (in_order[1:] != in_order[:-1]).nonzero()[0]).tolist()]
    for _, start, stop in sorted(zip(order[starts].tolist(), starts, [*starts[1:], len(shards)], strict=True)):
        yield order[start:stop]


def _node_plan(partition: WorkerPartition, catalog: Catalog) -> NodePlan:
    """Return what the worker reads, and what all workers of its node read together."""

    def of_node() -> Iterator[BatchShards]:
        for batches, positions in partition.windows_of_node():
            is_entry = positions >= 0
            rows = partition.sequence.rows(positions[is_entry])
            ids, of_samples = rows.ids, np.repeat(batches, is_entry.sum(axis=1))
            if rows.pieces is not None:
                of_samples = of_samples[rows.pieces.packs]
            if catalog.joins is None:
                yield BatchShards(of_samples, catalog.shard_of(ids))
                continue
            shards, indexes = catalog.places(ids)
            yield BatchShards(of_samples, shards)
            joined = catalog.joined_shards(shards, indexes)
            for column in () if joined is None else joined.T:
                yield BatchShards(of_samples[column >= 0], column[column >= 0])

    return NodePlan(
        worker=partition.worker,
        num_workers=partition.num_workers,
        num_shards=len(catalog.shards) if catalog.joins is None else catalog.joins.num_shards,
        num_samples=round(
            partition.epoch_partition.num_batches()
            * partition.epoch_partition.geometry.batch_size
            * partition.epoch_partition.geometry.ranks_per_node
            * partition.sequence.rows_per_entry
        ),
        own=lambda: (window.needed() for window in located(partition, catalog)),
        of_node=of_node,
    )
