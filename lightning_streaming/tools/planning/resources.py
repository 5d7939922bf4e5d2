"""Resources of a planned run: downloads of its nodes under cache limits, time to the first batch, and memory."""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.prefetch import shard_needs
from lightning_streaming.tools.planning.node import (
    FirstRequests,
    LastBatches,
    NodeCache,
    NodeReads,
    first_requests,
    read_epoch,
)
from lightning_streaming.tools.runs.describe import RunDescription
from lightning_streaming.tools.runs.training_run import TracedRun
from lightning_streaming.tools.stored.summary import ShardBytes

MOST_SAMPLES = 4_000_000
"""Samples that are read in simulations under limits, of all together."""
_FULL = 0.8
"""Part of a limit that a full cache takes at least: an eviction leaves a tenth of it free."""
_FEWEST_BATCHES = 16
"""Batches that are simulated in any case."""
_AT_A_TIME = 4
"""Files that each reader downloads at once."""
_TOKENS = re.compile(r"ndarray:u?int(?:8|16|32|64):(\d+)")
_TOKEN_COLUMNS = ("input_ids", "tokens", "token_ids")
"""Columns that are taken for the tokens of a sample, if several could be."""
_PREFETCH_FACTOR = 2
"""Batches that torch has each worker prepare by default."""


# Downloads of a node under several limits


@dataclass(kw_only=True, slots=True, eq=False)
class Fetches:
    """Downloads of one node under one limit."""

    limit: int | None
    samples_left: int
    """Samples that may still be read in simulations."""
    cache: NodeCache | None = None
    """The simulated cache; None as long as it holds all that was requested."""
    epochs: list[NDArray[np.int64]] = field(default_factory=list)
    """Bytes between each two ticks of each stream, by epoch: of shape (ticks, streams)."""
    used: list[NDArray[np.int64]] = field(default_factory=list)
    """Bytes in the cache at the end of each tick, by epoch: of shape (ticks,)."""
    downloads: list[int] = field(default_factory=list)
    """Downloads of shards, by epoch."""
    peak: int = 0
    """Most bytes in the cache."""
    exceeded: int = 0
    """How often a reader exceeded the limit, as far as was simulated."""
    part: float = 1.0
    """Part of the reads that was simulated; the rest is taken to be like that."""
    was_full: bool = True
    """Whether what was simulated fills the cache; else repeated downloads are not known."""

    @property
    def keeps_all(self) -> bool:
        """Whether nothing was evicted."""
        return self.cache is None


class NodeFetches:
    """One node, which reads epoch after epoch with caches of several limits, all empty at first.

    Args:
        sizes: Bytes of each shard.
        streams: The stream of each shard.
        limits: Limits of the caches; None for no limit.
        fixed: Bytes of indexes and selections in a cache.
        most_samples: Samples that may be read in simulations.
    """

    def __init__(
        self,
        sizes: ShardBytes,
        streams: NDArray[np.int64],
        limits: Sequence[int | None],
        fixed: int,
        most_samples: int = MOST_SAMPLES,
    ) -> None:
        self._sizes, self._streams, self._fixed = sizes, streams, fixed
        self._num_streams = int(streams.max()) + 1
        each = most_samples // len(limits)
        self.by_limit = [Fetches(limit=limit, samples_left=each, peak=fixed) for limit in limits]
        self._requested = np.zeros(len(streams), np.bool_)
        """Shards that would be cached without a limit."""
        self._batches = 0
        """Batches of the epoch before."""

    @property
    def needed(self) -> NDArray[np.int64]:
        """Bytes of all shards that were requested, each once, by stream; of shape (streams,)."""
        return self._by_stream(self._sizes.fetched * self._requested)

    @property
    def not_requested(self) -> NDArray[np.int64]:
        """Bytes of all other shards, by stream."""
        return self._by_stream(self._sizes.fetched * ~self._requested)

    def _by_stream(self, of_shards: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(self._streams, of_shards, self._num_streams).astype(np.int64)

    def _by_tick(self, requests: FirstRequests, edges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes that first requests download, of shape (ticks, streams)."""
        shape = (len(edges) - 1, self._num_streams)
        key = _ticks(requests.steps, edges) * self._num_streams + self._streams[requests.shards]
        counts = np.bincount(key, self._sizes.fetched[requests.shards], shape[0] * shape[1])
        return counts.reshape(shape).astype(np.int64)

    def read(self, reads: NodeReads, edges: NDArray[np.int64]) -> None:
        """Read an epoch.

        Args:
            reads: The epoch as the node reads it.
            edges: Batches at its ticks, of shape (ticks + 1,).
        """
        requests, sizes, ticks = first_requests(reads), self._sizes, len(edges) - 1
        new, before = ~self._requested[requests.shards], self._requested.copy()
        self._requested[requests.shards] = True
        room = self._fixed + int(sizes.kept[self._requested].sum())
        most = room + int((sizes.making - sizes.kept).max())
        last = None
        for fetches in self.by_limit:
            if fetches.cache is None and (fetches.limit is None or most <= fetches.limit):
                # Each shard is downloaded once, when it is first requested.
                firsts = FirstRequests(requests.steps[new], requests.shards[new])
                kept, making = sizes.kept[firsts.shards], sizes.making[firsts.shards]
                added = np.cumsum(np.bincount(_ticks(firsts.steps, edges), kept, ticks)).astype(np.int64)
                fetches.epochs.append(self._by_tick(firsts, edges))
                fetches.used.append(self._fixed + int(sizes.kept[before].sum()) + added)
                fetches.downloads.append(int((making > 0).sum()))
                fetches.peak = max(fetches.peak, int(fetches.used[-1][-1]) + int((making - kept).max(initial=0)))
                continue
            if fetches.cache is None:
                fetches.cache = NodeCache(sizes, fetches.limit, self._fixed)
                fetches.cache.put(np.flatnonzero(before).tolist())
            if fetches.samples_left <= 0 and fetches.epochs:  # like the epoch before, or as much of it
                times = int(edges[-1]) / self._batches
                shares = np.outer(edges / edges[-1], fetches.epochs[-1].sum(axis=0) * times)
                so_far: NDArray[np.int64] = np.rint(shares).astype(np.int64)
                fetches.epochs.append(np.diff(so_far, axis=0))
                fetches.downloads.append(round(fetches.downloads[-1] * times))
                fetches.used.append(np.full(ticks, fetches.used[-1][-1]))
                fetches.part *= (len(fetches.epochs) - 1) / len(fetches.epochs)
                continue
            last = reads.last_uses() if last is None else last
            self._simulate(fetches, fetches.cache, reads, requests, edges, last)
            if fetches.part < 1 and fetches.limit is not None:
                fetches.peak = max(fetches.peak, min(room, fetches.limit))
        self._batches = int(edges[-1])

    def _simulate(
        self,
        fetches: Fetches,
        cache: NodeCache,
        reads: NodeReads,
        requests: FirstRequests,
        edges: NDArray[np.int64],
        last: LastBatches | None,
    ) -> None:
        """Simulate an epoch, or as much of it as is affordable."""
        ticks, tick = len(edges) - 1, 0
        fetched, used = np.zeros((ticks, self._num_streams), np.int64), np.zeros(ticks, np.int64)
        times, downloads = cache.times_fetched.copy(), cache.downloads
        samples = len(reads.ranks_here) * reads.partition.geometry.batch_size * reads.sequence.rows_per_entry
        most = max(_FEWEST_BATCHES, int(fetches.samples_left / samples))

        def on_fetch(shard: int) -> None:
            fetched[tick, self._streams[shard]] += self._sizes.fetched[shard]

        def goes_on(done: int) -> bool:
            nonlocal tick
            while tick + 1 < ticks and done > edges[tick + 1]:
                used[tick] = cache.used
                tick += 1
            return done < most

        cache.on_fetch = on_fetch
        done = read_epoch(reads, cache, goes_on, last)
        fetches.samples_left -= int(done * samples)
        used[tick:] = cache.used
        fetches.downloads.append(cache.downloads - downloads)
        if done < reads.num_batches:
            # The rest of the epoch downloads shards when they are first requested, and others again as often as before.
            fetches.was_full = cache.peak > _FULL * (fetches.limit or 0)
            kept = np.bincount(_ticks(requests.steps, edges), self._sizes.kept[requests.shards], ticks)
            whole = self._fixed + np.cumsum(kept).astype(np.int64)
            used[tick:] = np.maximum(cache.used, np.minimum(whole, fetches.limit or 0))[tick:]
            now = cache.times_fetched
            is_new = (requests.steps > done) & (now[requests.shards] == times[requests.shards])
            firsts = FirstRequests(requests.steps[is_new], requests.shards[is_new])
            again = np.maximum(now.astype(np.int64) - np.maximum(times, 1), 0)
            rest = np.maximum(np.diff(np.maximum(edges, done)), 0)
            repeated = rest[:, None] * self._by_stream(again * self._sizes.fetched) / max(1, done)
            fetched += self._by_tick(firsts, edges) + repeated.astype(np.int64)
            fetches.downloads[-1] += len(firsts.shards) + int(again.sum() * rest.sum() / max(1, done))
        fetches.epochs.append(fetched)
        fetches.used.append(used)
        epochs = len(fetches.epochs)
        fetches.part = (fetches.part * (epochs - 1) + min(1.0, done / reads.num_batches)) / epochs
        fetches.peak, fetches.exceeded = max(fetches.peak, cache.peak), cache.exceeded


def _ticks(steps: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tick of what happens after so many batches."""
    return np.clip(np.searchsorted(edges, steps, side="left") - 1, 0, len(edges) - 2)


# Time to the first batch


def first_batch(
    reads: NodeReads, sizes: ShardBytes, link: float, latency: float, indexes: int, order_seconds: float
) -> dict[str, float]:
    """Return how long a node with an empty cache waits for its first batch, as part of a plan's report.

    Args:
        reads: What it reads.
        sizes: Bytes of each shard.
        link: Bytes per second between the node and the store.
        latency: Seconds before the store answers.
        indexes: Bytes of the indexes that are downloaded.
        order_seconds: Seconds that computing the order takes, as measured on this machine.

    Returns:
        Seconds of the indexes, of the order, of the shards from then on, next to all that is prefetched meanwhile, and
        their sum, without the start of processes; bytes of the indexes, of the shards that the first batch of every
        rank needs, and of all shards that are requested before it.
    """
    firsts = [[shard for shard in shards if sizes.fetched[shard]] for shards in reads.first_shards()]
    needed = sorted(set(chain.from_iterable(firsts)))
    queues = list[deque[int]]()
    for partition in reads.workers():  # the shards that a worker fetches before it has read anything, in order
        near, queue = reads.lookahead(partition).at_first, dict[int, None]()
        for need in shard_needs(partition, reads.catalog):
            if need.sample >= near:
                break
            if need.indexes is None and sizes.fetched[need.shard]:
                queue[need.shard] = None
        queues.append(deque(queue))
    requested = {shard for queue in queues for shard in queue}
    arrived = _arrivals(queues, sizes.fetched, link, latency, _AT_A_TIME)
    # Each reader fetches what it needs beyond its lookahead itself, one shard after another.
    beyond = [deque(shard for shard in shards if shard not in requested) for shards in firsts]
    begins = max((arrived[shard] for shard in needed if shard in arrived), default=0.0)
    arrived |= {shard: begins + at for shard, at in _arrivals(beyond, sizes.fetched, link, latency, 1).items()}
    index_seconds = 2 * latency + indexes / link if indexes else 0.0
    shard_seconds = max((arrived[shard] for shard in needed), default=0.0)
    return {
        "seconds": index_seconds + order_seconds + shard_seconds,
        "index_seconds": index_seconds,
        "order_seconds": order_seconds,
        "shard_seconds": shard_seconds,
        "index_bytes": indexes,
        "shard_bytes": int(sizes.fetched[needed].sum()),
        "ahead_bytes": int(sizes.fetched[sorted(requested.union(arrived))].sum()),
        "link_bytes_per_second": link,
        "latency": latency,
    }


def _arrivals(
    queues: Sequence[deque[int]], sizes: NDArray[np.int64], link: float, latency: float, at_a_time: int
) -> dict[int, float]:
    """Return when each shard has arrived.

    Downloads share the link evenly. Each reader downloads so many shards at a time, and none that another one has
    requested.
    """
    arrived, requested = dict[int, float](), set[int]()
    # Two heaps of events: shards whose download begins, by time; and that end, by the bytes that each has by then.
    begins, ends = list[tuple[float, int, int]](), list[tuple[float, int, int]]()
    now = each = 0.0

    def request(reader: int) -> None:
        queue = queues[reader]
        while queue:
            shard = queue.popleft()
            if shard not in requested:
                requested.add(shard)
                heapq.heappush(begins, (now + latency, shard, reader))
                return

    for _ in range(at_a_time):
        for reader in range(len(queues)):
            request(reader)
    while begins or ends:
        per_second = link / max(1, len(ends))
        next_end = now + (ends[0][0] - each) / per_second if ends else np.inf
        if begins and begins[0][0] <= next_end:
            at, shard, reader = heapq.heappop(begins)
            each += (at - now) * per_second if ends else 0
            now = at
            heapq.heappush(ends, (each + int(sizes[shard]), shard, reader))
        else:
            at, shard, reader = heapq.heappop(ends)
            now, each = next_end, at
            arrived[shard] = now
            request(reader)
    return arrived


# Memory, and tokens of samples


def memory_of(run: TracedRun, num_epochs: int) -> dict[str, int]:
    """Return the bytes of memory that a run takes on a node, once for all of its processes.

    Args:
        run: The run.
        num_epochs: Epochs that it reads.

    Returns:
        ``order``: orders that are drawn, in mapped files of the runtime directory; ``lengths``: lengths of documents
        and the plan of their packs, in mapped files; ``index``: tables of shards; ``batches``: batches that the workers
        of all ranks have ready; and the ``total``.
    """
    described = run.described
    catalog, epoch = described.catalog, described.epoch(run.begins)
    sample_bytes = float(np.average(catalog.mean_sample_bytes, weights=np.maximum(catalog.samples_per_shard, 1e-9)))
    samples = epoch.partition.geometry.batch_size * epoch.rows_per_entry
    tables = [index.shards for index in catalog.indexes]
    memory = {
        "order": described.order_bytes(num_epochs),
        "lengths": described.lengths_bytes(epoch),
        "index": sum(table.samples.nbytes + table.sizes.nbytes + table.text.nbytes for table in tables)
        + sum(table.text_stops.nbytes for table in tables),
        "batches": round(run.ranks_per_node * max(1, batches_ahead(run.loader)) * samples * sample_bytes),
    }
    return {**memory, "total": sum(memory.values())}


def batches_ahead(loader: StreamingDataLoader) -> int:
    """Return the number of batches that the workers of a rank prepare in advance."""
    return loader.num_workers * (loader.prefetch_factor or _PREFETCH_FACTOR)


def tokens_of_samples(run: RunDescription) -> NDArray[np.int64]:
    """Return the tokens of a sample of each stream; 0 if its index does not say, or lengths of samples are known."""
    catalog = run.catalog
    tokens = np.zeros(len(catalog.stream_names), np.int64)
    numbers: dict[int, set[int]] = {}
    for shard, info in catalog.examples() if catalog.lengths is None else ():
        names, encodings = info.schema.get("column_names", ()), info.schema.get("column_encodings", ())
        matches = {name: _TOKENS.fullmatch(str(encoding)) for name, encoding in zip(names, encodings, strict=False)}
        columns = {name: int(match[1]) for name, match in matches.items() if match}
        named = [columns[name] for name in _TOKEN_COLUMNS if name in columns]
        number = next(iter(columns.values())) if len(columns) == 1 else named[0] if named else 0
        numbers.setdefault(int(catalog.stream_of_shard[shard]), set()).add(number)
    for stream, of_shards in numbers.items():
        tokens[stream] = of_shards.pop() if len(of_shards) == 1 else 0
    return tokens
