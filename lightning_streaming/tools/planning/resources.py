"""Resources of a planned run: downloads of its nodes under cache limits, time to the first batch, and memory."""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard_table import INDEX_BASENAME
from lightning_streaming.options.packing import PackingConfig
from lightning_streaming.reading.dataset import StreamingDataset
from lightning_streaming.reading.loader import StreamingDataLoader
from lightning_streaming.reading.packs.types import ColumnTypes, stored_types
from lightning_streaming.reading.passes import passes_of
from lightning_streaming.reading.plan import WorkerPartition, shard_needs
from lightning_streaming.sequence.packing.packed import rows_per_entry
from lightning_streaming.sequence.phased import Mixture
from lightning_streaming.tools.planning.node import (
    Asked,
    LastBatches,
    NodeCache,
    NodeReads,
    ShardBytes,
    asked_for,
    read_epoch,
    stored_bytes,
)
from lightning_streaming.tools.runs.describe import cache_configs, is_in_place
from lightning_streaming.tools.runs.training_run import TracedRun

MOST_SAMPLES = 4_000_000
"""Samples that are read in simulations under limits, of all together."""
_FULL = 0.8
"""Part of a limit that a full cache takes at least: a sweep leaves a tenth of it free."""
_FEWEST_BATCHES = 16
"""Batches that are simulated in any case."""
_AT_A_TIME = 4
"""Files that each reader fetches at once."""


def bytes_of_dataset(dataset: StreamingDataset) -> ShardBytes:
    """Bytes of each shard, those of joined datasets included, by what the indexes say."""
    catalog, found = passes_of(dataset).catalog, list[ShardBytes]()
    configs = list(cache_configs(dataset).values())
    for config, index in zip(configs, catalog.indexes, strict=True):
        found.append(stored_bytes(index.shards, in_place=is_in_place(config), keep_zip=config.keep_zip))
    for stream, joins in () if catalog.joins is None else catalog.joins.streams.items():
        for one in joins.all:
            in_place, keep_zip = one.cache.reads_in_place, configs[stream].keep_zip
            found.append(stored_bytes(one.index.shards, in_place=in_place, keep_zip=keep_zip))
    names = ("fetched", "kept", "making")
    return ShardBytes(**{name: np.concatenate([getattr(one, name) for one in found]) for name in names})


def streams_of_shards(dataset: StreamingDataset) -> NDArray[np.int64]:
    """The stream that each shard is of, or is joined with, by place; of shape (shards,)."""
    catalog = passes_of(dataset).catalog
    joined = [] if catalog.joins is None else catalog.joins.streams.items()
    more = [np.full(len(one.index.shards), stream) for stream, joins in joined for one in joins.all]
    return np.concatenate([catalog.stream_of_shard, *more])


@dataclass(kw_only=True, slots=True, eq=False)
class Fetches:
    """What one node fetches with one limit."""

    limit: int | None
    epochs: list[NDArray[np.int64]] = field(default_factory=list)
    """Bytes between each two ticks of each stream, of each epoch: of shape (ticks, streams)."""
    used: list[NDArray[np.int64]] = field(default_factory=list)
    """Bytes that the cache holds at the end of each tick, of each epoch: of shape (ticks,)."""
    downloads: list[int] = field(default_factory=list)
    """Shards of each epoch, as often as each is fetched."""
    peak: int = 0
    """Bytes that the cache holds at most."""
    exceeded: int = 0
    """How often a reader had to go beyond the limit, as far as was simulated."""
    keeps_all: bool = True
    """Whether nothing had to be removed."""
    part: float = 1.0
    """Which part of what is read was simulated; the rest goes on like that."""
    was_full: bool = True
    """Whether what was simulated fills the cache; else what is fetched again is not known."""


class NodeFetches:
    """One node, which reads epoch after epoch with caches of several limits, all empty at first.

    Args:
        sizes: Bytes of each shard.
        streams: The stream of each shard.
        limits: Of the caches; None for no limit.
        fixed: Bytes that a cache holds besides: indexes, and what else is kept.
        most_samples: That may be read in simulations.
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
        self.found = [Fetches(limit=limit, peak=fixed) for limit in limits]
        self._caches: list[NodeCache | None] = [None] * len(limits)
        self._here = np.zeros(len(streams), np.bool_)
        """What would be here if nothing were removed."""
        self._samples_left = [most_samples // len(limits)] * len(limits)
        self._batches = 0
        """Of the epoch before."""

    @property
    def needed(self) -> NDArray[np.int64]:
        """Bytes of all shards that were asked for, each once, of each stream; of shape (streams,)."""
        return self._by_stream(self._sizes.fetched * self._here)

    @property
    def not_asked(self) -> NDArray[np.int64]:
        """The same of all other shards."""
        return self._by_stream(self._sizes.fetched * ~self._here)

    def _by_stream(self, of_shards: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(self._streams, of_shards, self._num_streams).astype(np.int64)

    def read(self, reads: NodeReads, edges: NDArray[np.int64]) -> None:
        """Read an epoch.

        Args:
            reads: What is read.
            edges: Batches at its ticks, of shape (ticks + 1,).
        """
        asked = asked_for(reads)
        new = ~self._here[asked.shards]
        firsts = Asked(asked.steps[new], asked.shards[new])
        before = self._here.copy()
        self._here[asked.shards] = True
        room = self._fixed + int(self._sizes.kept[self._here].sum())
        most = room + int((self._sizes.making - self._sizes.kept).max())
        last = None
        for number, found in enumerate(self.found):
            cache = self._caches[number]
            if cache is None and (found.limit is None or most <= found.limit):
                self._without_limit(found, firsts, edges, before)
                continue
            found.keeps_all = False
            if cache is None:
                cache = self._caches[number] = NodeCache(self._sizes, found.limit, self._fixed)
                cache.put(np.flatnonzero(before).tolist())
            if self._samples_left[number] <= 0 and found.epochs:
                self._repeat(found, edges)
                continue
            last = reads.last_uses() if last is None else last
            left = self._samples_left[number]
            self._samples_left[number] -= self._with_limit((found, cache), reads, asked, edges, last, left)
            if found.part < 1 and found.limit is not None:
                found.peak = max(found.peak, min(room, found.limit))
        self._batches = int(edges[-1])

    def _repeat(self, found: Fetches, edges: NDArray[np.int64]) -> None:
        """Let an epoch be as the one before was, or as so much of it."""
        ticks, times = len(edges) - 1, int(edges[-1]) / self._batches
        so_far = np.rint(np.outer(edges / edges[-1], found.epochs[-1].sum(axis=0) * times)).astype(np.int64)
        found.epochs.append(np.diff(so_far, axis=0))
        found.downloads.append(round(found.downloads[-1] * times))
        found.used.append(np.full(ticks, found.used[-1][-1]))
        found.part *= (len(found.epochs) - 1) / len(found.epochs)

    def _without_limit(
        self, found: Fetches, firsts: Asked, edges: NDArray[np.int64], before: NDArray[np.bool_]
    ) -> None:
        self._append(found, firsts.steps, firsts.shards, edges)
        here = self._fixed + int(self._sizes.kept[before].sum())
        kept = np.bincount(_ticks(firsts.steps, edges), self._sizes.kept[firsts.shards], len(edges) - 1)
        found.used.append(here + np.cumsum(kept).astype(np.int64))
        found.downloads.append(int((self._sizes.making[firsts.shards] > 0).sum()))
        making = int((self._sizes.making - self._sizes.kept)[firsts.shards].max(initial=0))
        found.peak = max(found.peak, int(found.used[-1][-1]) + making)

    def _append(
        self, found: Fetches, steps: NDArray[np.int64], shards: NDArray[np.int64], edges: NDArray[np.int64]
    ) -> None:
        """Count the first fetches of an epoch."""
        ticks, streams = len(edges) - 1, self._num_streams
        key = _ticks(steps, edges) * streams + self._streams[shards]
        counted = np.bincount(key, weights=self._sizes.fetched[shards], minlength=ticks * streams)
        found.epochs.append(counted.reshape(ticks, streams).astype(np.int64))

    def _with_limit(
        self,
        of: tuple[Fetches, NodeCache],
        reads: NodeReads,
        asked: Asked,
        edges: NDArray[np.int64],
        last: LastBatches | None,
        most_samples: int,
    ) -> int:
        """Simulate an epoch, or as much of it as is affordable; gives the samples that were read."""
        (found, cache), ticks = of, len(edges) - 1
        fetched, used = np.zeros((ticks, self._num_streams), np.int64), np.zeros(ticks, np.int64)
        times, downloads, at = cache.times_fetched.copy(), cache.downloads, _At()
        samples = len(reads.ranks_here) * reads.partition.geometry.batch_size * rows_per_entry(reads.sequence)
        most = max(_FEWEST_BATCHES, int(most_samples / samples))

        def fetch(shard: int) -> None:
            fetched[at.tick, self._streams[shard]] += self._sizes.fetched[shard]

        def goes_on(done: int) -> bool:
            while at.tick + 1 < ticks and done > edges[at.tick + 1]:
                used[at.tick] = cache.used
                at.tick += 1
            return done < most

        cache.on_fetch = fetch
        done = read_epoch(reads, cache, goes_on, last)
        used[at.tick :] = cache.used
        found.downloads.append(cache.downloads - downloads)
        if done < reads.num_batches:
            found.was_full = cache.peak > _FULL * (found.limit or 0)
            kept = np.bincount(_ticks(asked.steps, edges), self._sizes.kept[asked.shards], ticks)
            whole = self._fixed + np.cumsum(kept).astype(np.int64)
            used[at.tick :] = np.maximum(cache.used, np.minimum(whole, found.limit or 0))[at.tick :]
            self._go_on(found, fetched, (times, cache.times_fetched), asked, edges, done)
        found.epochs.append(fetched)
        found.used.append(used)
        part, epochs = min(1.0, done / reads.num_batches), len(found.epochs)
        found.part = (found.part * (epochs - 1) + part) / epochs
        found.peak, found.exceeded = max(found.peak, cache.peak), cache.exceeded
        return int(done * samples)

    def _go_on(
        self,
        found: Fetches,
        fetched: NDArray[np.int64],
        times: tuple[NDArray[np.int32], NDArray[np.int32]],
        asked: Asked,
        edges: NDArray[np.int64],
        done: int,
    ) -> None:
        """Add what the rest of an epoch fetches: shards for the first time when they are asked for, and others again as
        often as in the part that was simulated."""
        before, now = times
        is_new = (asked.steps > done) & (now[asked.shards] == before[asked.shards])
        steps, shards = asked.steps[is_new], asked.shards[is_new]
        again = np.maximum(now.astype(np.int64) - np.maximum(before, 1), 0)
        rest = np.maximum(np.diff(np.maximum(edges, done)), 0)
        by_stream = np.bincount(self._streams, again * self._sizes.fetched, self._num_streams)
        key = _ticks(steps, edges) * self._num_streams + self._streams[shards]
        first = np.bincount(key, self._sizes.fetched[shards], fetched.size).reshape(fetched.shape)
        fetched += (first + rest[:, None] * by_stream / max(1, done)).astype(np.int64)
        found.downloads[-1] += len(shards) + int(again.sum() * rest.sum() / max(1, done))


@dataclass(slots=True)
class _At:
    """Where a simulation is."""

    tick: int = 0


def _ticks(steps: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tick in which something happens after so many batches."""
    return np.clip(np.searchsorted(edges, steps, side="left") - 1, 0, len(edges) - 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Between a node and the store."""

    bytes_per_second: float
    latency: float
    """Seconds before an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstBatch:
    """What the first batch of a node waits for, in seconds but for the bytes."""

    index: float
    """Fetching the indexes."""
    order: float
    """Making the order of the first epoch, as measured here."""
    shards: float
    """From then on until the shards of the first batch are here, beside all that is fetched ahead meanwhile."""
    index_bytes: int
    shard_bytes: int
    """Of the shards that the first batch of every rank needs."""
    ahead_bytes: int
    """Of all that is asked for before it."""

    @property
    def seconds(self) -> float:
        """Altogether; without the start of processes."""
        return self.index + self.order + self.shards


def first_batch(reads: NodeReads, sizes: ShardBytes, link: Link, indexes: int, order_seconds: float) -> FirstBatch:
    """How long a node with an empty cache waits for its first batch.

    Args:
        reads: What it reads.
        sizes: Bytes of each shard.
        link: Of the node.
        indexes: Bytes of those that are fetched.
        order_seconds: That making the order takes.
    """
    needed = [shard for shard in reads.first_shards(1).tolist() if sizes.fetched[shard]]
    queues = [_asked_at_first(partition, reads, sizes) for partition in reads.workers()]
    everything = {shard for queue in queues for shard in queue}
    arrived = _arrivals(queues, sizes.fetched, link)
    # What lies beyond the look-ahead each reader fetches itself, one after another, as it comes to it.
    beyond = [deque(shard for shard in of_rank if shard not in everything) for of_rank in _first_of_ranks(reads, sizes)]
    begins = max((arrived[shard] for shard in needed if shard in arrived), default=0.0)
    arrived |= {shard: begins + at for shard, at in _arrivals(beyond, sizes.fetched, link, 1).items()}
    everything.update(arrived)
    return FirstBatch(
        index=2 * link.latency + indexes / link.bytes_per_second if indexes else 0.0,
        order=order_seconds,
        shards=max((arrived[shard] for shard in needed), default=0.0),
        index_bytes=indexes,
        shard_bytes=int(sizes.fetched[needed].sum()),
        ahead_bytes=int(sizes.fetched[sorted(everything)].sum()),
    )


def _first_of_ranks(reads: NodeReads, sizes: ShardBytes) -> Iterator[list[int]]:
    """The shards that the first batch of each rank needs, in order."""
    for rank in reads.ranks_here:
        uses = next(reads.uses_of_rank(rank))
        shards = uses.shards[uses.batches < 1].reshape(-1).tolist()
        yield [shard for shard in shards if shard >= 0 and sizes.fetched[shard]]


def _asked_at_first(partition: WorkerPartition, reads: NodeReads, sizes: ShardBytes) -> deque[int]:
    """The shards that a worker fetches before it has read anything, in order."""
    near, queue = reads.lookahead(partition).at_first, dict[int, None]()
    for need in shard_needs(partition, reads.catalog):
        if need.sample >= near:
            break
        if need.indexes is None and sizes.fetched[need.shard]:
            queue[need.shard] = None
    return deque(queue)


def _arrivals(
    queues: Sequence[deque[int]], sizes: NDArray[np.int64], link: Link, at_a_time: int = _AT_A_TIME
) -> dict[int, float]:
    """When each shard has arrived, if all that is on its way shares the link evenly, and each reader asks for so many
    at a time and for none that another has asked for."""
    arrived, asked = dict[int, float](), set[int]()
    # By events: what begins to arrive, at a time; and what has arrived, by the bytes that each had by then.
    begins, ends = list[tuple[float, int, int]](), list[tuple[float, int, int]]()
    now = each = 0.0

    def ask(reader: int) -> None:
        for shard in _not_asked(queues[reader], asked):
            heapq.heappush(begins, (now + link.latency, shard, reader))
            return

    for _ in range(at_a_time):
        for reader in range(len(queues)):
            ask(reader)
    while begins or ends:
        per_second = link.bytes_per_second / max(1, len(ends))
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
            ask(reader)
    return arrived


def _not_asked(queue: deque[int], asked: set[int]) -> Iterator[int]:
    while queue:
        shard = queue.popleft()
        if shard not in asked:
            asked.add(shard)
            yield shard


def index_bytes(dataset: StreamingDataset) -> int:
    """Bytes of the indexes that a node fetches; 0 where all data is read in place."""
    paths = (
        config.cache_directory() / INDEX_BASENAME
        for config in cache_configs(dataset).values()
        if not is_in_place(config)
    )
    return sum(path.stat().st_size for path in paths if path.exists())


_TOKENS = re.compile(r"ndarray:u?int(?:8|16|32|64):(\d+)")
_NAMES = ("input_ids", "tokens", "token_ids")
"""Columns that are taken for the tokens of a sample, where there are several."""
_PREFETCH_FACTOR = 2
"""Batches that torch has each worker prepare unless told otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that a node takes, once for all of its processes but where it says otherwise."""

    order: int
    """Of the orders that are drawn, in files of the runtime directory that all processes map."""
    lengths: int
    """Of documents and of the plan of their packs, in mapped files."""
    index: int
    """Of what the indexes say of shards."""
    batches: int
    """Of batches that workers have ready, of all ranks."""

    @property
    def total(self) -> int:
        """Altogether."""
        return self.order + self.lengths + self.index + self.batches


def memory_of(run: TracedRun, num_epochs: int) -> Memory:
    """What a run needs on a node.

    Args:
        run: The run.
        num_epochs: That it reads.
    """
    loader, order = run.loader, run.order.order
    catalog = passes_of(loader.dataset).catalog
    sequence = run.order.epoch(run.begins).sequence
    first = order.first_draw(0)
    drawn = 0
    if first.is_drawn and order.mixture is None:
        drawn = len(first) * first.dtype.itemsize * min(2, max(1, num_epochs))  # the next is made while one is read
    elif first.is_drawn:
        assert order.mixture is not None, "looked at above"
        drawn = 2 * _longest_step(order.mixture) * first.dtype.itemsize
    lengths = 0
    if order.packer is not None:
        lengths = 4 * sum(index.num_samples for index in catalog.indexes) + 4 * len(sequence)
        lengths += round(2 * len(sequence) * rows_per_entry(sequence))
    ready = max(1, batches_ahead(loader))
    sample_bytes = float(np.average(catalog.mean_sample_bytes, weights=np.maximum(catalog.samples_per_shard, 1e-9)))
    samples = run.order.epoch(run.begins).partition.geometry.batch_size * rows_per_entry(sequence)
    tables = (index.shards for index in catalog.indexes)
    return Memory(
        order=drawn,
        lengths=lengths,
        index=sum(one.samples.nbytes + one.sizes.nbytes + one.text.nbytes + one.text_stops.nbytes for one in tables),
        batches=round(run.ranks_per_node * ready * samples * sample_bytes),
    )


def batches_ahead(loader: StreamingDataLoader) -> int:
    """Batches that the workers of a rank make before they are asked for."""
    return loader.num_workers * (loader.prefetch_factor or _PREFETCH_FACTOR)


def _longest_step(mixture: Mixture) -> int:
    return int(np.diff(mixture.plan.stops, prepend=0).max())


def gathered_bytes(run: TracedRun) -> int:
    """Bytes of a batch, where workers read as many batches at once as are quick to gather; 0 where one by one."""
    loader, dataset = run.loader, run.loader.dataset
    passes, packing = passes_of(dataset), passes_of(dataset).run.asked.pack
    if loader.collate_fn is not default_collate or not dataset._are_as_stored():
        return 0
    batch_size = run.order.epoch(run.begins).partition.geometry.batch_size
    if packing is None:
        return round(batch_size * float(np.mean(passes.catalog.mean_sample_bytes))) if passes.may_be_plain() else 0
    if not isinstance(packing, PackingConfig) or not passes.may_be_joined():
        return 0
    types = ColumnTypes(packing, lambda: stored_types(packing, passes.catalog))
    bytes_of_token = sum(types.unseen(name).itemsize for name in packing.columns)
    return batch_size * packing.capacity * bytes_of_token


def tokens_of_samples(dataset: StreamingDataset) -> NDArray[np.int64]:
    """Of each stream the tokens of a sample, where its index says that all have equally many; else 0."""
    catalog = passes_of(dataset).catalog
    found = np.zeros(len(catalog.stream_names), np.int64)
    told: dict[int, set[int]] = {}
    for shard, info in catalog.examples():
        told.setdefault(int(catalog.stream_of_shard[shard]), set()).add(_tokens_of(info))
    for stream, numbers in told.items():
        found[stream] = next(iter(numbers)) if len(numbers) == 1 else 0
    return found


def _tokens_of(info: ShardInfo) -> int:
    names, encodings = info.schema.get("column_names", ()), info.schema.get("column_encodings", ())
    columns = {
        name: int(match[1])
        for name, encoding in zip(names, encodings, strict=False)
        if (match := _TOKENS.fullmatch(str(encoding)))
    }
    if len(columns) == 1:
        return next(iter(columns.values()))
    return next((columns[name] for name in _NAMES if name in columns), 0)
