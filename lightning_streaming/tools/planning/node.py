"""One node of a planned run, simulated: what its workers read, and which shards its cache directory fetches for them.

The order, the partition, what each worker needs and how far it prefetches are those of the run itself; what is evicted
is decided by ``cache/eviction.py``. Only time is simulated: all workers take their batches in turn, and a
shard that is fetched is there at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import count, pairwise, zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.eviction import (
    FINISHED_BEFORE,
    bytes_to_free,
    evict,
    finished_time,
    is_spared,
    reader_share,
)
from lightning_streaming.dataset.open_shards import OpenShards, ShardsAhead
from lightning_streaming.reading.assemble import GATHERED_BYTES
from lightning_streaming.reading.plan import Window, WorkerPartition, located
from lightning_streaming.reading.prefetch import Lookahead, batches_until, lookahead_of, shard_needs
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.batching import Batched
from lightning_streaming.sequence.partition import Partition
from lightning_streaming.tools.stored.summary import ShardBytes

_NEVER = np.iinfo(np.int64).max
_MOST_LAST_USES = 1 << 26
"""Readers times shards of which the last uses are kept, in 4 bytes each; with more, none are known."""
_START = 1_800_000_000 * 10**9
"""Start of a simulation, in nanoseconds since 1970: after all times that mean that a shard is finished."""


# What a node reads


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NodeReads:
    """An epoch of a run, or the rest of one, as one node reads it."""

    catalog: Catalog
    sequence: Batched
    """Sample ids by position."""
    partition: Partition
    node: int
    """Node of the partition, replication divided out."""
    num_workers: int
    """Readers of each rank: worker processes, or the rank itself."""
    num_batches: int
    """Batches of each rank that its workers prepare; they prefetch beyond them."""
    predownload: int | None = None
    """Option of the dataset."""
    batch_bytes: int = 0
    """Bytes of a batch, if a worker gathers several batches at once; else 0."""
    ranks: Sequence[int] | None = None
    """Ranks of the node that share a cache; None for all. With replication, a node may be several machines."""

    @property
    def ranks_here(self) -> Sequence[int]:
        """Ranks that share the cache, counted within the node."""
        return range(self.partition.geometry.ranks_per_node) if self.ranks is None else self.ranks

    @property
    def num_readers(self) -> int:
        """Readers of all ranks of the node, by which shares of the cache are computed."""
        return self.partition.geometry.ranks_per_node * self.num_workers

    @property
    def num_shards(self) -> int:
        """Number of shards, those of joined datasets included."""
        joins = self.catalog.joins
        return len(self.catalog.shards) if joins is None else joins.num_shards

    def worker(self, rank: int, worker: int) -> WorkerPartition:
        """Return what one of its workers reads."""
        return WorkerPartition(
            sequence=self.sequence,
            epoch_partition=self.partition,
            node=self.node,
            rank_of_node=rank,
            worker=worker,
            num_workers=self.num_workers,
        )

    def workers(self) -> Iterator[WorkerPartition]:
        """Yield what all workers of its first rank here read, then of its second, and so on."""
        for rank in self.ranks_here:
            for worker in range(self.num_workers):
                yield self.worker(rank, worker)

    def lookahead(self, partition: WorkerPartition) -> Lookahead:
        """Return how far one of its workers prefetches."""
        if self.predownload:
            return Lookahead(self.predownload, self.predownload)
        return lookahead_of(partition, self.catalog)

    def uses_of_rank(self, rank: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield what one of its ranks needs, some batches at a time.

        Yields:
            The global batch of each sample, of shape (samples,), and its shards, (samples, shards); -1 for none.
        """
        alone = replace(self.worker(rank, 0), num_workers=1)
        for window in located(alone, self.catalog):
            rows = np.diff(window.stops, prepend=0)
            yield np.repeat(np.arange(len(rows)) + window.batches_before, rows), window.needed()

    def first_shards(self) -> list[list[int]]:
        """Return the shards that the first batch of each rank here needs, in the order of its samples."""
        uses = [next(self.uses_of_rank(rank)) for rank in self.ranks_here]
        needed = [shards[batches < 1].reshape(-1) for batches, shards in uses]
        return [shards[shards >= 0].tolist() for shards in needed]

    def last_uses(self) -> LastBatches | None:
        """Return when shards are needed for the last time; None if that is too much to keep."""
        num_readers = len(self.ranks_here) * self.num_workers
        if num_readers * self.num_shards > _MOST_LAST_USES:
            return None
        last, elsewhere = np.full((num_readers, self.num_shards), -1, np.int32), np.full(self.num_shards, -1, np.int32)
        for rank in range(self.partition.geometry.ranks_per_node):
            number = self.ranks_here.index(rank) if rank in self.ranks_here else None
            for batches, shards in self.uses_of_rank(rank):
                for column in shards.T:
                    used = column >= 0  # of equal indexes the last one counts
                    if number is None:
                        np.maximum.at(elsewhere, column[used], batches[used].astype(np.int32))
                    else:
                        readers = number * self.num_workers + batches % self.num_workers
                        last[readers[used], column[used]] = batches[used]
        return LastBatches(last, np.maximum(last.max(axis=0), elsewhere))


class LastBatches(NamedTuple):
    """The last global batches that need each shard; -1 if none does."""

    of_readers: NDArray[np.int32]
    """By reader here, of shape (readers, shards)."""
    of_node: NDArray[np.int32]
    """By any reader of the node, also those on other machines; of shape (shards,)."""


class FirstRequests(NamedTuple):
    """The first request of a node for each shard in an epoch, if nothing is evicted. Arrays of one shape."""

    steps: NDArray[np.int64]
    """Steps before the request; 0 for shards that are requested before the first batch is read."""
    shards: NDArray[np.int64]


def first_requests(reads: NodeReads) -> FirstRequests:
    """Return when each shard is first requested by any worker, all of them reading in step."""
    first = np.full(reads.num_shards, _NEVER, np.int64)
    for partition in reads.workers():
        ahead = reads.lookahead(partition)
        # Samples up to the end of each of the worker's batches, as far as they are known.
        ends = np.full(len(range(partition.worker, reads.partition.num_batches(), partition.num_workers)), _NEVER)
        for window in located(partition, reads.catalog):
            ends[window.batches_before : window.batches_before + len(window.stops)] = window.rows_before + window.stops
            rows = np.arange(window.rows_before, window.rows_before + len(window.shards))
            read = np.searchsorted(ends, rows - ahead.later, side="right") + 1
            steps = np.where(rows < ahead.at_first, 0, partition.worker + (read - 1) * partition.num_workers + 1)
            for column in window.needed().T:
                used = column >= 0
                np.minimum.at(first, column[used], steps[used])
            if partition.worker + (read[-1] - 1) * partition.num_workers >= reads.num_batches:
                break
    shards = np.flatnonzero(first <= reads.num_batches)
    return FirstRequests(first[shards], shards)


# Its cache directory


class NodeCache:
    """The cache directory of a node: its shards with their access times, which decide what is evicted first.

    A cache sorts its files at each eviction; here a heap does the same for very many shards.

    Args:
        sizes: Bytes of each shard.
        limit: Most bytes; None for no limit.
        fixed: Bytes of files that are never evicted: indexes and selections.
    """

    def __init__(self, sizes: ShardBytes, limit: int | None, fixed: int = 0) -> None:
        self.kept: list[int] = sizes.kept.tolist()
        """Bytes of each shard in the cache."""
        self._making, self._limit = sizes.making.tolist(), limit
        self.room = None if limit is None else limit - fixed
        """Bytes for shards; None for no limit."""
        self.largest = int(sizes.making.max())
        self.used = self.peak = fixed
        """Bytes now, and at most so far."""
        self.times_fetched = np.zeros(len(sizes.kept), np.int32)
        """Downloads of each shard."""
        self.downloads = self.exceeded = 0
        """Downloads of all shards, and how often a reader exceeded the limit."""
        self.on_fetch: Callable[[int], object] = lambda _: None
        """Called with each shard that is fetched."""
        self._clock = count(_START, 1000)
        self._accessed = dict[int, int]()
        """Access time of each shard, in nanoseconds."""
        self._coldest = list[tuple[int, int]]()
        """A heap of access times and shards; entries of shards that were used again, or are open, are ignored."""
        self._holders = Counter[int]()
        """Readers that have each shard open."""

    def now(self) -> int:
        """Return a time later than all before."""
        return next(self._clock)

    def put(self, shards: Iterable[int]) -> None:
        """Add shards that were fetched before."""
        for shard in shards:
            if self._making[shard]:
                self._set_accessed(shard, self.now())
                self.used += self.kept[shard]
        self.peak = max(self.peak, self.used)

    def touch(self, shard: int) -> bool:
        """Note that a shard is used, and return whether it is here."""
        if shard in self._accessed:
            self._set_accessed(shard, self.now())
            return True
        return not self._making[shard]  # it is read in place

    def hold(self, shard: int) -> None:
        """Note that one more reader has a shard open."""
        self._holders[shard] += 1

    def release(self, shard: int) -> None:
        """Note that a reader has closed a shard."""
        self._holders[shard] -= 1
        self.touch(shard)

    def finish(self, shard: int) -> None:
        """Note that the epoch does not need a shard again, unless a reader has it open."""
        if self._accessed.get(shard, 0) >= FINISHED_BEFORE and not self._holders[shard]:
            self._set_accessed(shard, finished_time(self.now()))

    def fetch(self, shard: int, spare_since: int | None = None, *, must: bool = False) -> bool:
        """Fetch a shard if there is room, or in any case; return whether it was fetched."""
        size = self._making[shard]
        if self._limit is not None:
            enough = bytes_to_free(self.used, size, self._limit)
            self.used -= evict(self._take_coldest(spare_since), enough, self.kept.__getitem__)
            if self.used + size > self._limit:
                if not must:
                    return False
                self.exceeded += 1
        self.peak = max(self.peak, self.used + size)
        self.used += self.kept[shard]
        self._set_accessed(shard, self.now())
        self.times_fetched[shard] += 1
        self.downloads += 1
        self.on_fetch(shard)
        return True

    def _take_coldest(self, spare_since: int | None) -> Iterator[int]:
        """Remove and yield the shards that may be evicted, the first to go first."""
        while self._coldest:
            accessed, shard = self._coldest[0]
            is_stale = self._accessed.get(shard) != accessed or self._holders[shard]
            if not is_stale and is_spared(accessed, spare_since):
                return
            heappop(self._coldest)
            if not is_stale:
                del self._accessed[shard]
                yield shard

    def _set_accessed(self, shard: int, accessed: int) -> None:
        self._accessed[shard] = accessed
        if len(self._coldest) > 2 * len(self._accessed) + 1000:  # most of it is stale
            self._coldest = [(time, other) for other, time in self._accessed.items()]
            heapify(self._coldest)
        else:
            heappush(self._coldest, (accessed, shard))


# Its workers


class _Group(NamedTuple):
    """Batches that a worker reads at once."""

    shards: list[int]
    """Shards that they need, in the order in which they are opened."""
    rows: list[int]
    """Samples of each batch."""


_NOTHING = _Group([], [])


class _SimulatedWorker:
    """A worker: the steps of ``reading/plan.py`` and ``reading/prefetch.py``, one group of batches at a time.

    Args:
        number: Number of the worker among all readers of the node.
        partition: What it reads.
        reads: What its node reads.
        cache: The cache of that node.
        last: When shards are used for the last time; None if that is not known.
    """

    def __init__(
        self, number: int, partition: WorkerPartition, reads: NodeReads, cache: NodeCache, last: LastBatches | None
    ) -> None:
        share = None if cache.room is None else reader_share(cache.room, reads.num_readers)
        self._partition, self._cache = partition, cache
        # Shards that are joined by id are not known by position, and left out.
        self._needs = (need for need in shard_needs(partition, reads.catalog) if need.indexes is None)
        self._need = next(self._needs, None)
        self._ahead, self._open = ShardsAhead(share), OpenShards(cache.release, share)
        self._lookahead = reads.lookahead(partition)
        self._groups = _groups(located(partition, reads.catalog), reads.batch_bytes)
        self._batches = self._rows = 0
        """Batches and samples that it has read."""
        self._last = None if last is None else last.of_readers[number]
        """Its last batch with each shard."""
        self._finished = list[tuple[int, int]]()
        """After how many of its batches the node does not need a shard again, and which one; the last first."""
        if last is not None:
            mine = np.flatnonzero(last.of_readers[number] >= 0)
            after = batches_until(last.of_node[mine].astype(np.int64), partition.worker, partition.num_workers)
            order = np.argsort(after, kind="stable")[::-1]
            self._finished = list(zip(after[order].tolist(), mine[order].tolist(), strict=True))
        self.group, self.ready = _NOTHING, 0
        """Batches that it reads at once, and the number of them that it has not yielded."""

    def prefetch(self, rows: int = 0, batches: int = 0) -> None:
        """Fetch what is within reach, until there is no room; as if so much more had been read."""
        has_begun = self._batches or batches
        reach = self._rows + rows + (self._lookahead.later if has_begun else self._lookahead.at_first)
        cache = self._cache
        while self._need is not None and self._need.sample < reach:
            shard, size = self._need.shard, cache.kept[self._need.shard]
            if self._need.sample >= self._rows:
                spare_since = self._ahead.spare_since(size)
                if not cache.touch(shard) and not cache.fetch(shard, spare_since):
                    return
                if shard not in self._open.readers:
                    self._ahead.begin(shard, size, cache.now())
            self._need = next(self._needs, None)

    def begin(self) -> _Group:
        """Begin to read the next group, and return it."""
        self.group = next(self._groups, _NOTHING)
        self.ready = len(self.group.rows)
        self.prefetch(sum(self.group.rows[:-1]), self.ready - 1)
        return self.group

    def open(self, shard: int, others: Sequence[_SimulatedWorker]) -> None:
        """Open a shard, unless it is open."""
        cache = self._cache
        if shard in self._open.readers:
            self._open.readers.move_to_end(shard)
            return
        info = _shard_info(cache.kept[shard])
        self._open.make_room(info)
        self._ahead.end(shard)
        if not cache.touch(shard) and not cache.fetch(shard):
            self.close_all()
            if not cache.fetch(shard):  # then the other workers pause, and close theirs
                for other in others:
                    other.close_all()
                cache.fetch(shard, must=True)
        cache.hold(shard)
        self._open.add(shard, info, _NO_READER)

    def end(self) -> None:
        """Finish the group: close what it needed last, report what the node has finished, and prefetch."""
        if self.group is _NOTHING:
            return
        self._rows += sum(self.group.rows)
        self._batches += len(self.group.rows)
        if self._last is not None:
            batch = self._partition.worker + (self._batches - 1) * self._partition.num_workers
            for shard in self.group.shards:
                if self._last[shard] <= batch:
                    self._open.close(shard)
                    self._ahead.end(shard)
            while self._finished and self._finished[-1][0] <= self._batches:
                self._cache.finish(self._finished.pop()[1])
        share = self._open.most_bytes
        if share is not None and share < self._cache.largest:
            self.close_all()
        self.prefetch()

    def close_all(self) -> None:
        """Close all shards, as at the end of an epoch, or because another reader waits for room."""
        self._open.close_all()


_NO_READER: Any = SimpleNamespace(close=lambda: None)
"""Stands for the reader of a shard, which is not opened in a simulation."""


@lru_cache(maxsize=1 << 12)
def _shard_info(size: int) -> Any:
    """Return what :class:`OpenShards` reads of a shard's entry in an index."""
    return SimpleNamespace(files=((SimpleNamespace(bytes=size), None),))


def _groups(windows: Iterator[Window], batch_bytes: int) -> Iterator[_Group]:
    """Yield what a worker reads at once: one batch, then twice as many each time, as many as are quick to gather.

    Args:
        windows: Its samples.
        batch_bytes: Bytes of each batch; 0 if batches are read one by one.
    """
    together, most = 1, max(1, GATHERED_BYTES // batch_bytes) if batch_bytes else 1
    for window in windows:
        needed, stops = window.needed(), [0, *window.stops.tolist()]
        first = 0
        while first < len(stops) - 1:
            last = min(first + together, len(stops) - 1)
            shards = dict.fromkeys(needed[stops[first] : stops[last]].reshape(-1).tolist())
            shards.pop(-1, None)
            yield _Group(list(shards), [stop - start for start, stop in pairwise(stops[first : last + 1])])
            first, together = last, min(2 * together, most)


def read_epoch(
    reads: NodeReads, cache: NodeCache, goes_on: Callable[[int], bool] = lambda _: True, last: LastBatches | None = None
) -> int:
    """Let all workers of a node read an epoch through its cache.

    Args:
        reads: What they read.
        cache: The cache, which is changed.
        goes_on: Called with the batches that each rank has read, before the next; returns whether to read it.
        last: What :meth:`NodeReads.last_uses` returns, if that is known already; used with a limit.

    Returns:
        The batches of each rank that were read.
    """
    if cache.room is not None and last is None:
        last = reads.last_uses()
    workers = [
        _SimulatedWorker(number, partition, reads, cache, last) for number, partition in enumerate(reads.workers())
    ]
    for worker in workers:
        worker.prefetch()
    done = 0
    while done < reads.num_batches and goes_on(done):
        of_ranks = workers[done % reads.num_workers :: reads.num_workers]
        if not all(worker.ready for worker in of_ranks):
            # All workers without a batch read their next group at the same time: a shard of each in turn.
            waiting = [worker for worker in workers if worker.ready <= 0]
            for shards in zip_longest(*[worker.begin().shards for worker in waiting]):
                for worker, shard in zip(waiting, shards, strict=True):
                    if shard is not None:
                        worker.open(shard, workers)
            for worker in waiting:
                worker.end()
        for worker in of_ranks:
            worker.ready -= 1
        done += 1
    for worker in workers:
        worker.close_all()
    return done
