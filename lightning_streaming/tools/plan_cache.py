"""A node's cache directory under a limit, simulated: which shards are fetched, and fetched again, by which readers.

The rules are those of the library: shares of the limit, what goes when room is wanted, what an epoch needs no more.
Time is simulated as in :mod:`~lightning_streaming.tools.plan_node`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.quota import bytes_to_free, reader_share
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.loading.open_shards import OpenShards, ShardsAhead
from lightning_streaming.loading.prefetch import ShardNeed, batches_until
from lightning_streaming.loading.reading import Window, WorkerPartition, located, shard_needs
from lightning_streaming.tools.plan_node import NodeReads, ShardBytes

_NOW = 1_800_000_000 * 10**9
"""When the simulation begins, in nanoseconds since 1970: after all that the cache takes for finished."""
_MOST_REMEMBERED = 1 << 14
"""Shards of which is remembered what the index says."""


class NodeCache:
    """What a node's cache directory holds, by the rules of ``cache/quota.py``.

    Args:
        sizes: Bytes of each shard.
        limit: Most bytes; None for no limit.
        fixed: Bytes that always stay: indexes, and what else is kept.
    """

    def __init__(self, sizes: ShardBytes, limit: int | None, fixed: int = 0) -> None:
        self._kept, self._making, self._fetched = (of.tolist() for of in (sizes.kept, sizes.making, sizes.fetched))
        self.room = None if limit is None else limit - fixed
        """Bytes for shards; None for no limit."""
        self.largest = int(sizes.making.max())
        self._limit, self._clock = limit, count(_NOW, 1000)
        self._unused = OrderedDict[int, int]()
        """When each shard was last used that is here and that nobody has open; that of long ago first."""
        self._finished = dict[int, None]()
        """Those of them that the epoch needs no more, the last one finished last."""
        self._here = set[int]()
        self.holders = Counter[int]()
        """How many have each shard open."""
        self.used = self.peak = fixed
        """Bytes now, and at most so far."""
        self.times_fetched = np.zeros(len(sizes.kept), np.int32)
        """Of each shard."""
        self.downloads = self.fetched_bytes = 0
        self.exceeded = 0
        """How often a reader went beyond the limit."""
        self.on_fetch: Callable[[int], object] = lambda _: None
        """Called with each shard that is fetched."""

    def put(self, shards: Iterable[int]) -> None:
        """Let some shards be here that were fetched before."""
        for shard in shards:
            if self._making[shard]:
                self._here.add(shard)
                self._unused[shard] = self.now()
                self.used += self._kept[shard]
        self.peak = max(self.peak, self.used)

    def now(self) -> int:
        """A moment later than all before."""
        return next(self._clock)

    def size(self, shard: int) -> int:
        """Bytes of a shard that is here."""
        kept: int = self._kept[shard]
        return kept

    def touch(self, shard: int) -> bool:
        """Note that a shard is used, if it is here; says whether it is."""
        if not self._making[shard]:
            return True  # it is read in place
        if shard not in self._here:
            return False
        self._finished.pop(shard, None)
        self._unused.pop(shard, None)
        if not self.holders[shard]:
            self._unused[shard] = self.now()
        return True

    def hold(self, shard: int) -> None:
        """Note that one more has a shard open, which is here."""
        self.holders[shard] += 1
        self._unused.pop(shard, None)
        self._finished.pop(shard, None)

    def let_go(self, shard: int) -> None:
        """Note that one has closed a shard."""
        self.holders[shard] -= 1
        if not self.holders[shard]:
            del self.holders[shard]
        self.touch(shard)

    def finish(self, shard: int) -> None:
        """Note that the epoch needs a shard no more, unless somebody has it open."""
        if self._unused.pop(shard, None) is not None:
            self._finished[shard] = None

    def fetch(self, shard: int, spare_since: int | None = None, *, must: bool = False) -> bool:
        """Fetch a shard if there is room, or in any case; says whether it was."""
        size = self._making[shard]
        if self._limit is not None:
            self._make_room(size, spare_since)
            if self.used + size > self._limit:
                if not must:
                    return False
                self.exceeded += 1
        self.peak = max(self.peak, self.used + size)
        self.used += self._kept[shard]
        self._here.add(shard)
        self._unused[shard] = self.now()
        self.times_fetched[shard] += 1
        self.downloads += 1
        self.fetched_bytes += self._fetched[shard]
        self.on_fetch(shard)
        return True

    def _make_room(self, size: int, spare_since: int | None) -> None:
        assert self._limit is not None, "looked at by the caller"
        enough = bytes_to_free(self.used, size, self._limit)
        while enough > 0 and self._finished:
            enough -= self._remove(self._finished.popitem()[0])
        while enough > 0 and self._unused:
            shard, used = next(iter(self._unused.items()))
            if spare_since is not None and used >= spare_since:
                break
            del self._unused[shard]
            enough -= self._remove(shard)

    def _remove(self, shard: int) -> int:
        self._here.discard(shard)
        size: int = self._kept[shard]
        self.used -= size
        return size


class _Opened:
    """In the place of a shard's reader."""

    def close(self) -> None:
        """Nothing is mapped."""


class _Worker:
    """One worker under way: the steps of ``loading/reading.py`` and ``loading/prefetch.py``, one batch at a time.

    Args:
        partition: What it reads.
        reads: Of which node.
        cache: Of that node.
        last: The last batch in which it needs each shard; None where nobody knows.
        info: Finds what the index says of a shard.
    """

    def __init__(
        self,
        partition: WorkerPartition,
        reads: NodeReads,
        cache: NodeCache,
        last: NDArray[np.int32] | None,
        info: Callable[[int], ShardInfo],
    ) -> None:
        self._partition, self._cache, self._last, self._info = partition, cache, last, info
        self._share = None if cache.room is None else reader_share(cache.room, reads.num_readers)
        self._needs = shard_needs(partition, reads.catalog)
        self._need: ShardNeed | None = self._next_need()
        self._ahead, self._open = ShardsAhead(), OpenShards(cache.let_go, self._share)
        self._ahead.most_bytes = self._share
        self._lookahead = reads.lookahead(partition)
        self._batches = _batches(located(partition, reads.catalog))
        self._finished: list[tuple[int, int]] = []
        self._read = self._rows = 0

    def plan_ends(self, node_last: NDArray[np.int32]) -> None:
        """Find when the node is done with each of its shards."""
        assert self._last is not None, "or the node's would not be known"
        mine = np.flatnonzero(self._last >= 0)
        after = batches_until(node_last[mine].astype(np.int64), self._partition.worker, self._partition.num_workers)
        order = np.argsort(after, kind="stable")[::-1]
        self._finished = list(zip(after[order].tolist(), mine[order].tolist(), strict=True))

    def fetch_ahead(self) -> None:
        """Fetch what comes within reach, until there is no room."""
        reach = self._rows + (self._lookahead.later if self._read else self._lookahead.at_first)
        while self._need is not None and self._need.sample < reach:
            if not self._fetch_one(self._need.shard):
                return
            self._need = self._next_need()

    def _next_need(self) -> ShardNeed | None:
        """The next that is known by place: what is joined by ids is not."""
        return next((need for need in self._needs if need.indexes is None), None)

    def _fetch_one(self, shard: int) -> bool:
        cache, size = self._cache, self._cache.size(shard)
        spare_since = self._ahead.spare_since(size)
        if not cache.touch(shard) and not cache.fetch(shard, spare_since):
            return False
        if shard not in self._open.readers:
            self._ahead.begin(shard, size, cache.now())
        return True

    def read(self, others: Sequence[_Worker]) -> None:
        """Read the next batch, and go on as a worker does after one."""
        shards = next(self._batches, None)
        if shards is None:
            return
        self._rows += len(shards)
        needed = dict.fromkeys(shards.reshape(-1).tolist())
        needed.pop(-1, None)
        for shard in needed:
            if shard in self._open.readers:
                self._open.readers.move_to_end(shard)
            else:
                self._open_shard(shard, others)
        if self._share is not None and self._last is not None:
            batch = self._partition.worker + self._read * self._partition.num_workers
            for shard in needed:
                if self._last[shard] == batch:
                    self._open.close(shard)
                    self._ahead.end(shard)
        self._read += 1
        while self._finished and self._finished[-1][0] <= self._read:
            self._cache.finish(self._finished.pop()[1])
        if self._share is not None and self._share < self._cache.largest:
            self._open.close_all()
        self.fetch_ahead()

    def _open_shard(self, shard: int, others: Sequence[_Worker]) -> None:
        info = self._info(shard)
        self._open.make_room(info)
        self._ahead.end(shard)
        cache = self._cache
        if not cache.touch(shard) and not cache.fetch(shard):
            self.close_all()
            if not cache.fetch(shard):  # then others rest, and close theirs
                for other in others:
                    other.close_all()
                cache.fetch(shard, must=True)
        cache.hold(shard)
        self._open.add(shard, info, _opened())

    def close_all(self) -> None:
        """Close what is open, as a pass does at its end, or for somebody who waits for room."""
        self._open.close_all()


def _opened() -> Any:
    return _Opened()


def _batches(windows: Iterator[Window]) -> Iterator[NDArray[np.int64]]:
    """The shards that the samples of each batch need, of shape (samples, shards)."""
    for window in windows:
        needed, start = window.needed(), 0
        for stop in window.stops.tolist():
            yield needed[start:stop]
            start = stop


def read_epoch(
    reads: NodeReads,
    cache: NodeCache,
    goes_on: Callable[[int], bool] = lambda _: True,
    last: NDArray[np.int32] | None = None,
) -> int:
    """Let all workers of a node read an epoch, by way of its cache.

    Args:
        reads: What they read.
        cache: What is here before and after.
        goes_on: Told of the batches that each rank has read, before the next; False where that is enough.
        last: What :meth:`NodeReads.last_uses` gives, if that is known already.

    Returns:
        The batches of each rank that were read.
    """
    info = _Remembered(reads.info)
    if cache.room is not None and last is None:
        last = reads.last_uses()
    workers = [
        _Worker(partition, reads, cache, None if last is None else last[number], info)
        for number, partition in enumerate(reads.workers())
    ]
    if cache.room is not None and last is not None:
        node_last = last.max(axis=0)
        for worker in workers:
            worker.plan_ends(node_last)
    for worker in workers:
        worker.fetch_ahead()
    done = 0
    while done < reads.num_batches and goes_on(done):
        for rank in range(reads.num_ranks):
            workers[rank * reads.num_workers + done % reads.num_workers].read(workers)
        done += 1
    for worker in workers:
        worker.close_all()
    return done


class _Remembered(dict[int, ShardInfo]):
    """What an index says of the shards that were asked for lately."""

    def __init__(self, find: Callable[[int], ShardInfo]) -> None:
        super().__init__()
        self._find = find

    def __call__(self, shard: int) -> ShardInfo:
        if len(self) > _MOST_REMEMBERED:
            self.clear()
        return self[shard]

    def __missing__(self, shard: int) -> ShardInfo:
        self[shard] = self._find(shard)
        return self[shard]
