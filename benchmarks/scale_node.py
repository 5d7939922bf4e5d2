"""One node of a job of many, by the library's own planner: what its workers ask for, when, and what is fetched.

The index is real, and so are the run, its order, the partition, what each worker needs and how far it looks ahead. Of
the cache its rules are used: shares of the limit, what goes when room is wanted, what an epoch needs no more. What is
simulated is time: all workers take their batches in turn, and what is fetched is there at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming import StreamingDataset, World
from lightning_streaming.cache.quota import bytes_to_free, coldest_first, reader_share
from lightning_streaming.cache.usage import CacheEntry, finished_time
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.open_shards import OpenShards, ShardsAhead
from lightning_streaming.loading.passes import drawn_sequence, passes_of
from lightning_streaming.loading.prefetch import Lookahead, ShardNeed, batches_until
from lightning_streaming.loading.reading import (
    Window,
    WorkerPartition,
    _default_lookahead,
    _shard_needs,
    by_shard,
    located,
)
from lightning_streaming.loading.run import Epoch
from lightning_streaming.loading.state import Cursor
from lightning_streaming.order.partition import INTERLEAVED
from lightning_streaming.order.settings import OrderSettings

_NOW = 1_800_000_000 * 10**9
"""When the simulation begins, in nanoseconds since 1970: after all that the cache takes for finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The data and the machines."""

    samples: int
    shards: int
    shard_bytes: int
    nodes: int
    ranks: int
    """Of each node."""
    workers: int
    """Of each rank."""
    batch_size: int
    """Samples of a rank's batch."""

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.nodes * self.ranks * self.batch_size

    @property
    def share_bytes(self) -> int:
        """What a node reads in an epoch."""
        return self.shards * self.shard_bytes // self.nodes

    def of_fewer_nodes(self, nodes: int) -> Cluster:
        """So many nodes, each with as much to read."""
        nodes = min(nodes, self.nodes)
        samples, shards = (number * nodes // self.nodes for number in (self.samples, self.shards))
        return replace(self, nodes=nodes, samples=samples, shards=shards)


def put_plain_index(directory: Path, cluster: Cluster) -> Path:
    """Write an index of that many shards, without hashes; gives the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    each, more = divmod(cluster.samples, cluster.shards)
    text = (
        '{"column_encodings": ["bytes"], "column_names": ["x"], "column_sizes": [null], "compression": null, "format": '
        '"mds", "hashes": [], "raw_data": {"basename": "shard.%05d.mds", "bytes": %d, "hashes": {}}, "samples": %d, '
        '"size_limit": 67108864, "version": 2, "zip_data": null}'
    )
    with (directory / "index.json").open("w") as file:
        file.write('{"shards": [')
        for shard in range(cluster.shards):
            file.write((", " if shard else "") + text % (shard, cluster.shard_bytes, each + (shard < more)))
        file.write('], "version": 2}')
    return directory


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An order as it is asked for; None for ``stored``."""

    name: str
    block_size: int | None = None
    canonical_each: int | None = None
    """Canonical nodes of each node."""

    def settled_for(self, nodes: int) -> Order:
        """With the defaults of a run on so many nodes, to be used on others."""
        algo: Any = "py1e" if self.name == "stored" else self.name
        settled = OrderSettings(shuffle=self.name != "stored", shuffle_algo=algo).settled(nodes)
        return replace(
            self,
            block_size=self.block_size or settled.shuffle_block_size,
            canonical_each=self.canonical_each or settled.num_canonical_nodes // nodes,
        )

    def options(self, nodes: int) -> dict[str, Any]:
        """Arguments of a dataset whose run begins on so many nodes."""
        if self.name == "stored":
            return {"shuffle": False}
        return {
            "shuffle": True,
            "shuffle_algo": self.name,
            "shuffle_block_size": self.block_size,
            "num_canonical_nodes": None if self.canonical_each is None else self.canonical_each * nodes,
        }


class NodeEpoch:
    """An epoch of a run, or what is left of it, as one node reads it.

    Args:
        dataset: Whose run it is; where a state was loaded, the one that goes on from there.
        cluster: The machines that read now.
        node: Which of them.
        epoch: Which epoch; None for where the dataset stands.
        in_turn: Whether global batches are dealt in turn where canonical nodes do not fit, to compare.
    """

    def __init__(
        self, dataset: StreamingDataset, cluster: Cluster, node: int, epoch: int | None = None, in_turn: bool = False
    ) -> None:
        self.cluster, self._node = cluster, node
        run = passes_of(dataset).run.on(
            World(num_nodes=cluster.nodes, ranks_per_node=cluster.ranks), cluster.batch_size, False
        )
        cursor = run.normalise(dataset.next_cursor() if epoch is None else Cursor(epoch, 0))
        found: Epoch = run.at(cursor).epoch(cursor)
        catalog = found.order.catalog
        assert isinstance(catalog, Catalog), "as the data has not grown"
        self.catalog = catalog
        self._sequence = drawn_sequence(found)
        self._partition = replace(found.partition, layout=INTERLEAVED) if in_turn else found.partition
        self.num_batches = self._partition.num_batches()
        self._infos = dict[int, ShardInfo]()

    def info(self, shard: int) -> ShardInfo:
        """A shard as the index has it."""
        if shard not in self._infos:
            self._infos[shard] = self.catalog.shards[shard]
        return self._infos[shard]

    def worker(self, rank: int, worker: int) -> WorkerPartition:
        """What one of its workers reads."""
        return WorkerPartition(
            sequence=self._sequence,
            epoch_partition=self._partition,
            node=self._node,
            rank_of_node=rank,
            worker=worker,
            num_workers=self.cluster.workers,
        )

    def workers(self) -> Iterator[WorkerPartition]:
        """All workers of its first rank, then of its second, and so on."""
        for rank, worker in np.ndindex(self.cluster.ranks, self.cluster.workers):
            yield self.worker(rank, worker)

    def first_shards(self, batches: int) -> NDArray[np.int64]:
        """The shards that the first batches of all its ranks need."""
        ranks = range(self.cluster.ranks)
        positions = np.hstack([self._partition.batches(np.arange(batches), self._node, rank) for rank in ranks])
        return np.unique(self.catalog.shard_of(self._sequence.ids(positions[positions >= 0])))

    def last_batches(self) -> NDArray[np.int64]:
        """The last global batch in which the node needs each shard; -1 where it needs it in none."""
        last = np.full(len(self.catalog.shards), -1, np.int64)
        for batches, positions in self.worker(0, 0).windows_of_node():
            is_entry = positions >= 0
            shards = self.catalog.shard_of(self._sequence.ids(positions[is_entry]))
            last[shards] = np.repeat(batches, is_entry.sum(axis=1))
        return last


class Asked(NamedTuple):
    """What a node asks for in an epoch when nothing is removed: each shard once. Arrays of one shape."""

    steps: NDArray[np.int64]
    """After how many steps; 0 for what is asked for before the first batch is read."""
    shards: NDArray[np.int64]


def asked_for(epoch: NodeEpoch) -> Asked:
    """When each shard is first asked for by any worker, all of them reading in step."""
    first = np.full(len(epoch.catalog.shards), np.iinfo(np.int64).max, np.int64)
    size, workers = epoch.cluster.batch_size, epoch.cluster.workers
    for partition in epoch.workers():
        needs = np.array([need[:2] for need in _shard_needs(partition, epoch.catalog)], np.int64).reshape(-1, 2)
        ahead = _default_lookahead(partition, epoch.catalog)
        # Asked for once the worker has read so many of its batches.
        read = np.maximum(-(-(needs[:, 0] - ahead.later + 1) // size), 1)
        steps = np.where(needs[:, 0] < ahead.at_first, 0, partition.worker + (read - 1) * workers + 1)
        np.minimum.at(first, needs[:, 1], steps)
    shards = np.flatnonzero(first < np.iinfo(np.int64).max)
    return Asked(first[shards], shards)


class _Opened:
    """In the place of a shard's reader."""

    def close(self) -> None:
        """Nothing is mapped."""


class NodeCache:
    """What a node's cache directory holds, by the rules of ``cache/quota.py``.

    Args:
        sizes: Bytes of each shard.
        limit: Most bytes; None for no limit.
    """

    def __init__(self, sizes: NDArray[np.int64], limit: int | None) -> None:
        self.sizes: list[int] = sizes.tolist()
        self.largest = int(sizes.max())
        self._limit = limit
        self._clock = count(_NOW, 1000)
        self._used = 0
        self.accessed = dict[int, int]()
        """The access time of each shard that is here."""
        self.holders = Counter[int]()
        """How many have each shard open."""
        self.fetched = Counter[int]()
        """How often each shard was fetched."""
        self.exceeded = 0
        """How often a reader went beyond the limit."""

    def now(self) -> int:
        """A moment later than all before."""
        return next(self._clock)

    def touch(self, shard: int) -> bool:
        """Note that a shard is used, if it is here; says whether it is."""
        if shard not in self.accessed:
            return False
        self.accessed[shard] = self.now()
        return True

    def finish(self, shard: int) -> None:
        """Note that the epoch needs a shard no more, unless somebody has it open."""
        if shard in self.accessed and not self.holders[shard]:
            self.accessed[shard] = finished_time(self.now())

    def fetch(self, shard: int, spare_since: int | None = None, *, must: bool = False) -> bool:
        """Fetch a shard if there is room, or in any case; says whether it was."""
        size = self.sizes[shard]
        if self._limit is not None:
            self._make_room(size, spare_since)
            if self._used + size > self._limit:
                if not must:
                    return False
                self.exceeded += 1
        self._used += size
        self.accessed[shard] = self.now()
        self.fetched[shard] += 1
        return True

    def _make_room(self, size: int, spare_since: int | None) -> None:
        assert self._limit is not None, "looked at by the caller"
        enough = bytes_to_free(self._used, size, self._limit)
        if not enough:
            return
        entries = [CacheEntry(str(shard), self.sizes[shard], used, 0) for shard, used in self.accessed.items()]
        for entry in coldest_first(entries, spare_since):
            if enough <= 0:
                break
            if not self.holders[int(entry.path)]:
                del self.accessed[int(entry.path)]
                self._used -= entry.size
                enough -= entry.size


class _Worker:
    """One worker under way: the steps of ``loading/reading.py`` and ``loading/prefetch.py``, one batch at a time."""

    def __init__(self, partition: WorkerPartition, epoch: NodeEpoch, cache: NodeCache, share: int | None) -> None:
        self._partition, self._epoch, self._cache, self._share = partition, epoch, cache, share
        self._batch_size = epoch.cluster.batch_size
        self._needs = _shard_needs(partition, epoch.catalog)
        self._need: ShardNeed | None = next(self._needs, None)
        self._ahead, self._open = ShardsAhead(), OpenShards(self._closed, share)
        self._ahead.most_bytes = share
        self._lookahead: Lookahead = _default_lookahead(partition, epoch.catalog)
        self._windows = located(partition, epoch.catalog)
        self._window: Window | None = None
        self._last = dict[int, int]()
        self._finished = list[tuple[int, int]]()
        self._batches = 0

    def plan_last_uses(self, last_batches: NDArray[np.int64]) -> None:
        """Find its own last sample of each shard, and when the node is done with each of its shards."""
        for window in located(self._partition, self._epoch.catalog):
            # Of equal keys the last one counts.
            self._last.update(zip(window.shards.tolist(), range(window.rows_before, 10**18), strict=False))
        mine = np.array(sorted(self._last), np.int64)
        after = batches_until(last_batches[mine], self._partition.worker, self._partition.num_workers)
        order = np.argsort(after, kind="stable")[::-1]
        self._finished = list(zip(after[order].tolist(), mine[order].tolist(), strict=True))

    def fetch_ahead(self) -> None:
        """Fetch what comes within reach, until there is no room."""
        read = self._batches * self._batch_size
        reach = read + (self._lookahead.later if self._batches else self._lookahead.at_first)
        while self._need is not None and self._need.sample < reach:
            if not self._fetch_one(self._need.shard):
                return
            self._need = next(self._needs, None)

    def _fetch_one(self, shard: int) -> bool:
        cache, size = self._cache, self._cache.sizes[shard]
        spare_since = self._ahead.spare_since(size)
        if not cache.touch(shard) and not cache.fetch(shard, spare_since):
            return False
        if shard not in self._open.readers:
            self._ahead._fetched[shard] = (cache.now(), size)  # as its begin() does, by our clock
        return True

    def read(self, others: Sequence[_Worker]) -> None:
        """Read the next batch, and go on as a worker does after one."""
        window, start = self._next_rows()
        if window is None:
            return
        stop = min(start + self._batch_size, len(window.shards))
        shards = window.shards[start:stop]
        for places in by_shard(shards):
            shard = int(shards[places[0]])
            if shard in self._open.readers:
                self._open.readers.move_to_end(shard)
            else:
                self._open_shard(shard, others)
        if self._share is not None:
            for row, shard in enumerate(shards.tolist(), window.rows_before + start):
                if self._last[shard] == row:
                    self._open.close(shard)
                    self._ahead.end(shard)
        self._batches += 1
        while self._finished and self._finished[-1][0] <= self._batches:
            self._cache.finish(self._finished.pop()[1])
        if self._share is not None and self._share < self._cache.largest:
            self._open.close_all()
        self.fetch_ahead()

    def _next_rows(self) -> tuple[Window | None, int]:
        start = 0 if self._window is None else self._batches * self._batch_size - self._window.rows_before
        if self._window is None or start >= len(self._window.shards):
            self._window, start = next(self._windows, None), 0
        return self._window, start

    def _open_shard(self, shard: int, others: Sequence[_Worker]) -> None:
        info = self._epoch.info(shard)
        self._open.make_room(info)
        self._ahead.end(shard)
        cache = self._cache
        if not cache.touch(shard) and not cache.fetch(shard):
            self.close_all()
            if not cache.fetch(shard):  # then others rest, and close theirs
                for other in others:
                    other.close_all()
                cache.fetch(shard, must=True)
        cache.holders[shard] += 1
        self._open.add(shard, info, _Opened())  # type: ignore[arg-type]

    def close_all(self) -> None:
        """Close what is open, as a pass does at its end, or for somebody who waits for room."""
        self._open.close_all()

    def _closed(self, shard: int) -> None:
        self._cache.holders[shard] -= 1
        self._cache.touch(shard)


def bytes_of_shards(epoch: NodeEpoch) -> NDArray[np.int64]:
    """Bytes of each shard's raw file."""
    sizes: NDArray[np.int64] = np.concatenate([index.shards.data_bytes() for index in epoch.catalog.indexes])
    return sizes


def read_epoch(epoch: NodeEpoch, cache: NodeCache, room: int | None, most: float = np.inf) -> float:
    """Let all workers of a node read an epoch, by way of its cache.

    Args:
        epoch: What they read.
        cache: What is here before and after.
        room: Bytes that shards may take; None for no limit.
        most: Downloads after which to stop.

    Returns:
        The part of the epoch that was read; all of it, unless there were too many downloads.
    """
    most += cache.fetched.total()
    cluster = epoch.cluster
    share = None if room is None else reader_share(room, cluster.ranks * cluster.workers)
    workers = [_Worker(partition, epoch, cache, share) for partition in epoch.workers()]
    if room is not None:
        last = epoch.last_batches()
        for worker in workers:
            worker.plan_last_uses(last)
    for worker in workers:
        worker.fetch_ahead()
    for batch in range(epoch.num_batches):
        for rank in range(cluster.ranks):
            workers[rank * cluster.workers + batch % cluster.workers].read(workers)
        if batch % 64 == 0 and cache.fetched.total() > most:
            break
    for worker in workers:
        worker.close_all()
    return (batch + 1) / epoch.num_batches


def state_bytes(dataset: StreamingDataset, samples: int) -> int:
    """Bytes of a saved state in the middle of the first epoch, as JSON."""
    return len(json.dumps(dataset.state_at(Cursor(0, samples))))
