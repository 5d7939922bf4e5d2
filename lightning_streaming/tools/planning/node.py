"""One node of a planned run, simulated: what its workers read, and which shards its cache directory fetches for them.

The order, the partition, what each worker needs and how far it prefetches are those of the run itself; what is evicted
is decided by ``cache/eviction.py``. What is left to simulate is time: all workers take their batches in turn, and a
shard that is fetched is there at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import count, pairwise, zip_longest
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
from lightning_streaming.formats.shard_table import PART, ShardTable
from lightning_streaming.reading.batches import GATHERED_BYTES
from lightning_streaming.reading.plan import Window, WorkerPartition, located, lookahead_of, shard_needs
from lightning_streaming.reading.prefetch import Lookahead, batches_until
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.batchings import Batched
from lightning_streaming.sequence.partition import Partition

_NEVER = np.iinfo(np.int64).max
_MOST_LAST_USES = 1 << 26
"""Readers times shards of which the last uses are kept, in 4 bytes each; with more, none are known."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NodeReads:
    """An epoch of a run, or what is left of it, as one node reads it."""

    catalog: Catalog
    sequence: Batched
    """Its ids by position."""
    partition: Partition
    node: int
    """Among those of the partition, replication divided out."""
    num_workers: int
    """Readers of each rank: worker processes, or the rank itself."""
    num_batches: int
    """Batches of each rank that its workers make; they look ahead beyond them."""
    predownload: int | None = None
    """As a dataset is told."""
    batch_bytes: int = 0
    """Bytes of a batch, where a worker reads as many batches at once as are quick to gather; else 0."""
    ranks: Sequence[int] | None = None
    """Those of the node that share a cache; None for all. Replication makes one node of several machines."""

    @property
    def ranks_here(self) -> Sequence[int]:
        """Those that share a cache, counted within the node."""
        return range(self.partition.geometry.ranks_per_node) if self.ranks is None else self.ranks

    @property
    def num_readers(self) -> int:
        """Those that take themselves to share the cache: of all ranks of the node."""
        return self.partition.geometry.ranks_per_node * self.num_workers

    @property
    def num_shards(self) -> int:
        """Those of joined datasets included."""
        joins = self.catalog.joins
        return len(self.catalog.shards) if joins is None else joins.num_shards

    def worker(self, rank: int, worker: int) -> WorkerPartition:
        """What one of its workers reads."""
        return WorkerPartition(
            sequence=self.sequence,
            epoch_partition=self.partition,
            node=self.node,
            rank_of_node=rank,
            worker=worker,
            num_workers=self.num_workers,
        )

    def workers(self) -> Iterator[WorkerPartition]:
        """All workers of its first rank here, then of its second, and so on."""
        for rank in self.ranks_here:
            for worker in range(self.num_workers):
                yield self.worker(rank, worker)

    def lookahead(self, partition: WorkerPartition) -> Lookahead:
        """How far one of its workers looks."""
        if self.predownload:
            return Lookahead(self.predownload, self.predownload)
        return lookahead_of(partition, self.catalog)

    def uses_of_rank(self, rank: int) -> Iterator[Uses]:
        """What one of its ranks needs, some batches at a time."""
        alone = replace(self.worker(rank, 0), num_workers=1)
        for window in located(alone, self.catalog):
            rows = np.diff(window.stops, prepend=0)
            yield Uses(np.repeat(np.arange(len(rows)) + window.batches_before, rows), window.needed())

    def first_shards(self, batches: int) -> NDArray[np.int64]:
        """The shards that the first batches of all its ranks here need; of some thousand samples at most."""
        found = (next(self.uses_of_rank(rank)) for rank in self.ranks_here)
        shards = np.unique(np.concatenate([uses.shards[uses.batches < batches].reshape(-1) for uses in found]))
        return shards[shards >= 0]

    def last_uses(self) -> LastBatches | None:
        """When shards are needed for the last time; None where that is too much to keep."""
        num_readers = len(self.ranks_here) * self.num_workers
        if num_readers * self.num_shards > _MOST_LAST_USES:
            return None
        last, of_others = np.full((num_readers, self.num_shards), -1, np.int32), np.full(self.num_shards, -1, np.int32)
        for rank in range(self.partition.geometry.ranks_per_node):
            place = self.ranks_here.index(rank) if rank in self.ranks_here else None
            for batches, shards in self.uses_of_rank(rank):
                for column in shards.T:
                    here = column >= 0  # of equal places the last one counts
                    if place is None:
                        np.maximum.at(of_others, column[here], batches[here].astype(np.int32))
                    else:
                        readers = place * self.num_workers + batches % self.num_workers
                        last[readers[here], column[here]] = batches[here]
        return LastBatches(last, np.maximum(last.max(axis=0), of_others))


class Uses(NamedTuple):
    """The shards that consecutive samples need."""

    batches: NDArray[np.int64]
    """The global batch of each sample, of shape (samples,)."""
    shards: NDArray[np.int64]
    """Of shape (samples, shards), -1 for none."""


class LastBatches(NamedTuple):
    """The last global batches in which shards are needed; -1 where they are in none."""

    of_readers: NDArray[np.int32]
    """By each reader here, of shape (readers, shards)."""
    of_node: NDArray[np.int32]
    """By any reader of the node, also those on other machines; of shape (shards,)."""


class Asked(NamedTuple):
    """What a node asks for in an epoch when nothing is removed: each shard once. Arrays of one shape."""

    steps: NDArray[np.int64]
    """After how many steps; 0 for what is asked for before the first batch is read."""
    shards: NDArray[np.int64]


def asked_for(reads: NodeReads) -> Asked:
    """When each shard is first asked for by any worker, all of them reading in step."""
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
                here = column >= 0
                np.minimum.at(first, column[here], steps[here])
            if partition.worker + (read[-1] - 1) * partition.num_workers >= reads.num_batches:
                break
    shards = np.flatnonzero(first <= reads.num_batches)
    return Asked(first[shards], shards)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardBytes:
    """Bytes of each shard, those of joined datasets included; arrays of shape (shards,)."""

    fetched: NDArray[np.int64]
    """Over the link; 0 where it is read in place."""
    kept: NDArray[np.int64]
    """In a cache directory; 0 where nothing is written."""
    making: NDArray[np.int64]
    """The same while it is decompressed, which takes room for both of its forms."""

    @classmethod
    def plain(cls, sizes: NDArray[np.int64]) -> ShardBytes:
        """Of shards that are stored uncompressed, and fetched."""
        return cls(fetched=sizes, kept=sizes, making=sizes)


def stored_bytes(table: ShardTable, *, in_place: bool, keep_zip: bool) -> ShardBytes:
    """Add up what an index says of files.

    Args:
        table: The shards of one dataset.
        in_place: Whether its own directory is read.
        keep_zip: Whether compressed files are kept.
    """
    raw, packed = np.zeros((2, len(table)), np.int64)
    is_packed = np.zeros(len(table), np.bool_)
    for number, kind in enumerate(table.kinds):
        here = np.flatnonzero(table.kind_of_shard == number)
        is_packed[here] = kind.example.compression is not None
        for place, field in enumerate(kind.files):
            of = packed if field.startswith("zip") else raw
            of[here] += table.sizes[table.first_file[here] + place]
        if kind.example.compression == PART:  # of a file that holds several, what is made of its part
            packed[here] = 0
    if in_place:
        kept = np.where(is_packed, raw, 0)
        return ShardBytes(fetched=np.zeros_like(raw), kept=kept, making=kept)
    fetched = np.where(packed > 0, packed, raw)
    return ShardBytes(fetched=fetched, kept=raw + packed if keep_zip else raw, making=raw + packed)


_NOW = 1_800_000_000 * 10**9
"""When the simulation begins, in nanoseconds since 1970: after all that the cache takes for finished."""


class CachedShards:
    """Shards in a cache directory with their access times, which decide what is evicted first.

    The cache sorts its files at each eviction; here a heap does the same for very many shards.
    """

    def __init__(self) -> None:
        self._clock = count(_NOW, 1000)
        self._accessed = dict[int, int]()
        """Access time of each shard, in nanoseconds."""
        self._coldest = list[tuple[int, int]]()
        """A heap of access times and shards; entries of shards that were used again, or are open, are ignored."""
        self._holders = Counter[int]()
        """Readers that have each shard open."""

    def __contains__(self, shard: int) -> bool:
        return shard in self._accessed

    def now(self) -> int:
        """Return a time later than all before."""
        return next(self._clock)

    def add(self, shard: int) -> None:
        """Note that a shard was written, or is used."""
        self._set_accessed(shard, self.now())

    def hold(self, shard: int) -> None:
        """Note that one more reader has a shard open."""
        self._holders[shard] += 1

    def release(self, shard: int) -> None:
        """Note that a reader has closed a shard."""
        self._holders[shard] -= 1
        if shard in self._accessed:
            self.add(shard)

    def finish(self, shard: int) -> None:
        """Note that the epoch does not need a shard again, unless a reader has it open."""
        if self._accessed.get(shard, 0) >= FINISHED_BEFORE and not self._holders[shard]:
            self._set_accessed(shard, finished_time(self.now()))

    def take_coldest(self, spare_since: int | None) -> Iterator[int]:
        """Remove and yield the shards that may be evicted, the first to go first.

        Args:
            spare_since: As for :func:`~lightning_streaming.cache.eviction.is_spared`.
        """
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
            self._coldest = [(time, one) for one, time in self._accessed.items()]
            heapify(self._coldest)
        else:
            heappush(self._coldest, (accessed, shard))


class NodeCache:
    """What a node's cache directory holds, by the rules of ``cache/eviction.py``.

    Args:
        sizes: Bytes of each shard.
        limit: Most bytes; None for no limit.
        fixed: Bytes that always stay: indexes, and what else is kept.
    """

    def __init__(self, sizes: ShardBytes, limit: int | None, fixed: int = 0) -> None:
        self._kept, self._making = sizes.kept.tolist(), sizes.making.tolist()
        self._limit = limit
        self.room = None if limit is None else limit - fixed
        """Bytes for shards; None for no limit."""
        self.largest = int(sizes.making.max())
        self.shards = CachedShards()
        self.used = self.peak = fixed
        """Bytes now, and at most so far."""
        self.times_fetched = np.zeros(len(sizes.kept), np.int32)
        """Of each shard."""
        self.downloads = self.exceeded = 0
        """How often shards were fetched, and a reader went beyond the limit."""
        self.on_fetch: Callable[[int], object] = lambda _: None
        """Called with each shard that is fetched."""

    def put(self, shards: Iterable[int]) -> None:
        """Let some shards be here that were fetched before."""
        for shard in shards:
            if self._making[shard]:
                self.shards.add(shard)
                self.used += self._kept[shard]
        self.peak = max(self.peak, self.used)

    def size(self, shard: int) -> int:
        """Bytes of a shard that is here."""
        kept: int = self._kept[shard]
        return kept

    def touch(self, shard: int) -> bool:
        """Note that a shard is used, if it is here; says whether it is."""
        if shard in self.shards:
            self.shards.add(shard)
            return True
        return not self._making[shard]  # it is read in place

    def fetch(self, shard: int, spare_since: int | None = None, *, must: bool = False) -> bool:
        """Fetch a shard if there is room, or in any case; says whether it was."""
        size = self._making[shard]
        if self._limit is not None:
            enough = bytes_to_free(self.used, size, self._limit)
            self.used -= evict(self.shards.take_coldest(spare_since), enough, self._kept.__getitem__)
            if self.used + size > self._limit:
                if not must:
                    return False
                self.exceeded += 1
        self.peak = max(self.peak, self.used + size)
        self.used += self._kept[shard]
        self.shards.add(shard)
        self.times_fetched[shard] += 1
        self.downloads += 1
        self.on_fetch(shard)
        return True


class _Opened:
    """In the place of a shard's reader."""

    def close(self) -> None:
        """Nothing is mapped."""


class _Uses(NamedTuple):
    """When shards are used for the last time."""

    last: NDArray[np.int32]
    """The worker's last batch of each shard, of shape (shards,)."""
    finished: list[tuple[int, int]]
    """After how many of the worker's batches the node is done with a shard, and which one; the last one first."""

    @classmethod
    def of(cls, last: NDArray[np.int32], node_last: NDArray[np.int32], partition: WorkerPartition) -> _Uses:
        mine = np.flatnonzero(last >= 0)
        after = batches_until(node_last[mine].astype(np.int64), partition.worker, partition.num_workers)
        order = np.argsort(after, kind="stable")[::-1]
        return cls(last, list(zip(after[order].tolist(), mine[order].tolist(), strict=True)))


class _Group(NamedTuple):
    """Batches that a worker reads at once."""

    shards: list[int]
    """What they need, in the order in which it is opened."""
    rows: list[int]
    """Samples of each."""

    @property
    def rows_before_last(self) -> int:
        """Samples of all but the last one."""
        return sum(self.rows[:-1])


_NOTHING = _Group([], [])


@dataclass(slots=True)
class _Done:
    """What a worker has read."""

    batches: int = 0
    rows: int = 0


class _SimulatedWorker:
    """One worker under way: the steps of ``reading/plan.py`` and ``reading/prefetch.py``, one batch at a time.

    Args:
        partition: What it reads.
        reads: Of which node.
        cache: Of that node.
        uses: When it uses shards for the last time; None where nobody knows.
    """

    def __init__(
        self,
        partition: WorkerPartition,
        reads: NodeReads,
        cache: NodeCache,
        uses: _Uses | None,
    ) -> None:
        share = None if cache.room is None else reader_share(cache.room, reads.num_readers)
        self._partition, self._cache, self._uses = partition, cache, uses
        # What is joined by ids is not known by its place, and left out.
        self._needs = (need for need in shard_needs(partition, reads.catalog) if need.indexes is None)
        self._need = next(self._needs, None)
        self._ahead, self._open = ShardsAhead(share), OpenShards(cache.shards.release, share)
        self._lookahead = reads.lookahead(partition)
        self._groups = _groups(located(partition, reads.catalog), reads.batch_bytes)
        self._done = _Done()
        self.group, self.ready = _NOTHING, 0
        """What it reads at once, and batches of that which are left to hand out."""

    def fetch_ahead(self, rows: int = 0, batches: int = 0) -> None:
        """Fetch what comes within reach, until there is no room; as if so much more had been read."""
        has_begun = self._done.batches or batches
        reach = self._done.rows + rows + (self._lookahead.later if has_begun else self._lookahead.at_first)
        while self._need is not None and self._need.sample < reach:
            is_passed = self._need.sample < self._done.rows
            if not is_passed and not self._fetch_one(self._need.shard):
                return
            self._need = next(self._needs, None)

    def _fetch_one(self, shard: int) -> bool:
        cache, size = self._cache, self._cache.size(shard)
        spare_since = self._ahead.spare_since(size)
        if not cache.touch(shard) and not cache.fetch(shard, spare_since):
            return False
        if shard not in self._open.readers:
            self._ahead.begin(shard, size, cache.shards.now())
        return True

    def begin(self) -> _Group:
        """Begin to read what comes next; nothing is left of what was read before."""
        self.group = next(self._groups, _NOTHING)
        self.ready = len(self.group.rows)
        self.fetch_ahead(self.group.rows_before_last, self.ready - 1)
        return self.group

    def open(self, shard: int, others: Sequence[_SimulatedWorker]) -> None:
        """Open a shard, unless it is open."""
        if shard in self._open.readers:
            self._open.readers.move_to_end(shard)
        else:
            self._open_shard(shard, others)

    def end(self) -> None:
        """Go on as a worker does after what it has read."""
        if self.group is _NOTHING:
            return
        self._done.rows += sum(self.group.rows)
        self._let_go(self.group.shards, len(self.group.rows))
        share = self._open.most_bytes
        if share is not None and share < self._cache.largest:
            self._open.close_all()
        self.fetch_ahead()

    def _let_go(self, needed: Iterable[int], batches: int) -> None:
        """Close shards that the batches just read needed last; and say which ones the node is done with."""
        self._done.batches += batches
        if self._uses is None:
            return
        batch, (last, finished) = (
            self._partition.worker + (self._done.batches - 1) * self._partition.num_workers,
            self._uses,
        )
        for shard in needed:
            if last[shard] <= batch:
                self._open.close(shard)
                self._ahead.end(shard)
        while finished and finished[-1][0] <= self._done.batches:
            self._cache.shards.finish(finished.pop()[1])

    def _open_shard(self, shard: int, others: Sequence[_SimulatedWorker]) -> None:
        info = _files(self._cache.size(shard))
        self._open.make_room(info)
        self._ahead.end(shard)
        cache = self._cache
        if not cache.touch(shard) and not cache.fetch(shard):
            self.close_all()
            if not cache.fetch(shard):  # then others rest, and close theirs
                for other in others:
                    other.close_all()
                cache.fetch(shard, must=True)
        cache.shards.hold(shard)
        self._open.add(shard, info, _opened())

    def close_all(self) -> None:
        """Close what is open, as a pass does at its end, or for somebody who waits for room."""
        self._open.close_all()


def _opened() -> Any:
    return _Opened()


class _Files(NamedTuple):
    """In the place of what an index says of a shard's files."""

    bytes: int
    files: Any


@lru_cache(maxsize=1 << 12)
def _files(size: int) -> Any:
    return _Files(0, ((_Files(size, None), None),))


def _groups(windows: Iterator[Window], batch_bytes: int) -> Iterator[_Group]:
    """What a worker reads at once: one batch, then twice as many each time, as many as are quick to gather.

    Args:
        windows: Its samples.
        batch_bytes: Of each batch; 0 where batches are read one by one.
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
    reads: NodeReads,
    cache: NodeCache,
    goes_on: Callable[[int], bool] = lambda _: True,
    last: LastBatches | None = None,
) -> int:
    """Let all workers of a node read an epoch, by way of its cache.

    Args:
        reads: What they read.
        cache: What is here before and after.
        goes_on: Told of the batches that each rank has read, before the next; False where that is enough.
        last: What :meth:`NodeReads.last_uses` gives, if that is known already; looked at where there is a limit.

    Returns:
        The batches of each rank that were read.
    """
    if cache.room is not None and last is None:
        last = reads.last_uses()
    workers = list[_SimulatedWorker]()
    for number, partition in enumerate(reads.workers()):
        uses = None if last is None else _Uses.of(last.of_readers[number], last.of_node, partition)
        workers.append(_SimulatedWorker(partition, reads, cache, uses))
    for worker in workers:
        worker.fetch_ahead()
    done = 0
    while done < reads.num_batches and goes_on(done):
        of_ranks = workers[done % reads.num_workers :: reads.num_workers]
        if not all(worker.ready for worker in of_ranks):
            _read_on(workers)
        for worker in of_ranks:
            worker.ready -= 1
        done += 1
    for worker in workers:
        worker.close_all()
    return done


def _read_on(workers: Sequence[_SimulatedWorker]) -> None:
    """Let all who have nothing left read what comes next, at the same time: a shard of each in turn."""
    waiting = [worker for worker in workers if worker.ready <= 0]
    groups = [worker.begin().shards for worker in waiting]
    for shards in zip_longest(*groups):
        for worker, shard in zip(waiting, shards, strict=True):
            if shard is not None:
                worker.open(shard, workers)
    for worker in waiting:
        worker.end()
