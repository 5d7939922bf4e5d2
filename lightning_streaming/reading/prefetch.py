"""Prefetching of the shards that a worker is about to need, and release of those it no longer needs.

A worker releases a shard after its own last sample of it. Other workers of the node may still need it: the shard is
*finished* once all of them must have read beyond the batch with its last sample.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.escaping import package_logger
from lightning_streaming.reading.plan import Window, WorkerPartition, by_shard, located
from lightning_streaming.selection.catalog import Catalog

_logger = package_logger(__name__)
_ROOM_SECONDS = 5.0
"""How often to look for room while the reader stays with its shard: other processes make room too."""
_BATCHES, _SAMPLES, _SHARDS = 8, 64, 4
_GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, without their whole parts, lie evenly between 0 and 1, however many there are."""
_MOST_SAMPLES = 2 * 10**8
"""Above this the plan is not read ahead to its end: shards then go by when they were used."""
_FEW_SAMPLES = 2**16
"""So few samples are looked through at once, before the first is read."""
_ROUNDS_BEHIND = 2
"""How many batches behind another a worker may be: as many as torch requests ahead of each by default."""


class Lookahead(NamedTuple):
    """Number of samples for which a worker prefetches."""

    at_first: int
    """Before its first batch is read, which is not to share the network with many shards that only later ones need."""
    later: int


def default_lookahead(batch_size: int, samples_per_shard: float, readers: int, node: int = 0) -> Lookahead:
    """Return the default lookahead: 8 batches, or 4 shards that are read in order; on other nodes up to twice that.

    Fewer shards than that would leave the network idle between one and the next. Nodes in step reach the
    end of a shard, or of a block of shards, together; with different lookaheads they do not request the next at once.

    Args:
        batch_size: Samples per batch.
        samples_per_shard: On average.
        readers: Workers of all this node's ranks, who share each shard that is read in order.
        node: Counts from 0.
    """
    at_first = max(_BATCHES * batch_size, _SAMPLES)
    later = max(at_first, _SHARDS * samples_per_shard / readers)
    return Lookahead(at_first, math.ceil(later * (1 + node * _GOLDEN % 1)))


class ShardNeed(NamedTuple):
    """The first use of a shard in a run of a worker's samples."""

    sample: int
    """How many samples the worker reads before it needs the shard."""
    shard: int
    """Shard, counted over all streams."""
    indexes: NDArray[np.int64] | None = None
    """Where not the shard itself is meant, but what is joined by the ids of its samples: which of them."""


class _Read(NamedTuple):
    samples: int
    """That the reader has read."""
    soon: int
    """The same, when it is done with what it is about to read."""


class ShardPrefetcher:
    """Keeps shards fetched ahead of their reader, as far as its lookahead.

    Args:
        needs: Shards in the order of need; may be endless, and may name a shard again.
        fetch: Fetches one shard to this node; called from several threads, outside any lock of ours. It may skip a
            shard that another process is fetching; its reader then waits. It returns False if there is no room: all
            threads then wait until the reader has moved on.
        lookahead: Samples to look ahead of the reader.
        num_threads: Shards fetched at a time.
        find: Finds what is joined by ids, for needs that mean that.
    """

    def __init__(
        self,
        needs: Iterator[ShardNeed],
        fetch: Callable[[int], bool],
        lookahead: Lookahead,
        num_threads: int = 4,
        find: Callable[[int, NDArray[np.int64]], list[int]] = lambda *_: [],
    ) -> None:
        self._needs = needs
        self._fetch = fetch
        self._find = find
        self._lookahead = lookahead
        self._changed = threading.Condition()
        # These change only while holding it.
        self._read = _Read(0, 0)
        self._moves = 0
        self._waiting_for_room: int | None = None
        self._closed = False
        self._numbers = count()
        self._under_way: dict[int, int] = {}
        """The shards of needs that were taken and are not fetched yet, by the number of the need; far ones too."""
        for number in range(num_threads):
            # Daemon threads: a download that stalls must not keep a process alive that wants to end.
            threading.Thread(target=self._fetch_in_order, name=f"shard-prefetch-{number}", daemon=True).start()

    def reader_at(self, sample: int, about_to_be: int = 0) -> None:
        """Set how many samples the reader has read, so that the threads prefetch further.

        Args:
            sample: Those that it has read: what was needed before is fetched no more.
            about_to_be: Those that it reads next, all at once, where these are more: from there the threads look ahead.
        """
        with self._changed:
            self._read = _Read(sample, max(sample, about_to_be))
            self._changed.notify_all()

    def moved_on(self) -> None:
        """Note that the reader moved to another shard, or released one, so that there may be room now."""
        with self._changed:
            self._moves += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Let the threads end; one in the middle of a download ends after it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _fetch_in_order(self) -> None:
        """Fetch shards in order, in one of the threads."""
        while (taken := self._next_need()) is not None:
            number, need = taken
            for shard in self._shards_of(number, need):
                self._fetch_with_room(shard, need.sample)
            with self._changed:
                self._under_way.pop(number, None)
                self._changed.notify_all()

    def _shards_of(self, number: int, need: ShardNeed) -> list[int]:
        if need.indexes is None:
            return [need.shard]
        with self._changed:
            # Needs that come later may wait for the reader, who would then wait for what is joined.
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or not any(before < number and shard == need.shard for before, shard in self._under_way.items())
                )
            )
            if self._closed:
                return []
        try:
            return self._find(need.shard, need.indexes)
        except Exception as error:  # noqa: BLE001  of reading the ids, as the reader does: it is raised there if it lasts
            _logger.debug("what is joined with shard %d was not found ahead: %s", need.shard, error)
            return []

    def _fetch_with_room(self, shard: int, sample: int) -> None:
        moves = self._moves
        try:
            # Else a thread that comes late would bring back what the reader is done with and what has made room.
            while sample >= self._read.samples and not self._fetch(shard) and self._wait_for_room(shard, moves):
                moves = self._moves
        except Exception as error:  # noqa: BLE001  the reader makes the last attempt, and raises what then fails
            _logger.debug("shard %d was not prefetched: %s", shard, error)
        finally:
            with self._changed:
                if self._waiting_for_room == shard:  # let those after it be fetched
                    self._waiting_for_room = None
                    self._changed.notify_all()

    def _next_need(self) -> tuple[int, ShardNeed] | None:
        """Wait until the next need in order comes within the lookahead; None when there is nothing more to fetch.

        Returns:
            Its number in that order, and the need.
        """
        with self._changed:
            need = None if self._closed else next(self._needs, None)
            if need is None:
                return None
            number = next(self._numbers)
            if need.indexes is None:
                self._under_way[number] = need.shard
            self._changed.wait_for(lambda: self._closed or (self._is_near(need) and self._waiting_for_room is None))
            return None if self._closed else (number, need)

    def _is_near(self, need: ShardNeed) -> bool:
        ahead = self._lookahead.later if self._read.soon else self._lookahead.at_first
        return need.sample < self._read.soon + ahead

    def _wait_for_room(self, shard: int, moves: int) -> bool:
        """Wait until there may be room for a shard that found none; the shards after it wait as well.

        Args:
            shard: The shard.
            moves: How often the reader had moved on before there was no room.

        Returns:
            Whether to try again; False if the shard is no longer needed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting_for_room in (None, shard))
            self._waiting_for_room = shard
            self._changed.wait_for(lambda: self._closed or self._moves != moves, _ROOM_SECONDS)
            return not self._closed


class BatchShards(NamedTuple):
    """The shards of some batches' samples, in order of batches."""

    batches: NDArray[np.int64]
    """The batch of each sample, of shape (samples,), not descending."""
    shards: NDArray[np.int64]
    """The shard of each sample, of shape (samples,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """The samples that one worker reads in a pass, and those that all workers of its node read together."""

    worker: int
    """The worker's first batch."""
    num_workers: int
    """Batches from one of the worker's to its next."""
    num_shards: int
    """Shards of the dataset."""
    num_samples: int
    """About how many samples the node reads."""
    own: Callable[[], Iterator[NDArray[np.int64]]]
    """Gives the shards that each of the worker's samples needs, in order, as arrays of shape (samples, shards), -1 for
    none, one after another. What one column names no other does."""
    of_node: Callable[[], Iterator[BatchShards]]
    """Gives the same of all samples of the node."""


class _Found(NamedTuple):
    last: NDArray[np.int64]
    """The worker's last sample of each shard, counted among its own; -1 for a shard that it does not read."""
    finished: list[int]
    """The worker's shards in the order in which the node is done with them."""
    after: list[int]
    """After how many of the worker's batches each of them is finished."""


class LastUses:
    """The last uses of shards, found in one scan of the plan while the samples are read."""

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._found: _Found | None = None
        self._num_reported = 0
        self._closed = False
        if plan.num_samples <= _FEW_SAMPLES:
            self._find()
        elif plan.num_samples <= _MOST_SAMPLES:
            threading.Thread(target=self._find, name="last-uses", daemon=True).start()

    def among(self, shards: NDArray[np.int64], first_sample: int) -> NDArray[np.bool_]:
        """Return which of some consecutive samples are this worker's last of their shards; none while that is unknown.

        Args:
            shards: The shard of each sample, of shape (samples,).
            first_sample: How many samples were read before them.
        """
        if self._found is None:
            return np.zeros(len(shards), np.bool_)
        is_last: NDArray[np.bool_] = self._found.last[shards] == np.arange(first_sample, first_sample + len(shards))
        return is_last

    def finished(self, batches_read: int) -> list[int]:
        """Return shards that no worker of this node needs any more; each is returned once.

        Args:
            batches_read: How many batches this worker has read.
        """
        if self._found is None:
            return []
        before, after = self._num_reported, self._found.after
        while self._num_reported < len(after) and after[self._num_reported] <= batches_read:
            self._num_reported += 1
        return self._found.finished[before : self._num_reported]

    def close(self) -> None:
        """Stop the scan."""
        self._closed = True

    def _find(self) -> None:
        plan = self._plan
        last, last_batch = np.full((2, plan.num_shards), -1, np.int64)
        samples_before = 0
        for shards in plan.own():
            for column in shards.T:
                # Where a shard is named more than once, numpy keeps the last.
                here = np.flatnonzero(column >= 0)
                last[column[here]] = samples_before + here
            samples_before += len(shards)
            if self._closed:
                return
        for batches, shards in plan.of_node():
            last_batch[shards] = batches
            if self._closed:
                return
        mine = np.flatnonzero(last >= 0)
        after = batches_until(last_batch[mine], plan.worker, plan.num_workers)
        order = np.argsort(after, kind="stable")
        self._found = _Found(last, mine[order].tolist(), after[order].tolist())


def batches_until(batches: NDArray[np.int64], worker: int, num_workers: int) -> NDArray[np.int64]:
    """Return how many batches a worker has read when all workers have finished those up to a given batch.

    For example the second of three workers reads batches 1, 4, 7, 10, ...: after one of them it is beyond batch 1, and
    after three all of them are, even one that is two rounds behind.

    Args:
        batches: Batches, counted over all workers.
        worker: The worker's first batch.
        num_workers: Batches from one of the worker's to its next.
    """
    passed: NDArray[np.int64] = 1 - (worker - batches) // num_workers
    return passed + _ROUNDS_BEHIND


def lookahead_of(partition: WorkerPartition, catalog: Catalog) -> Lookahead:
    """Return how far a worker prefetches by default."""
    geometry, per_entry = partition.epoch_partition.geometry, partition.sequence.rows_per_entry
    readers = partition.num_workers * geometry.ranks_per_node
    shard_samples = catalog.num_samples / len(catalog.shards)
    return default_lookahead(round(geometry.batch_size * per_entry), shard_samples, readers, partition.node)


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


def node_plan(partition: WorkerPartition, catalog: Catalog) -> NodePlan:
    """Return what the worker reads, and what all workers of its node read together."""

    def of_node() -> Iterator[BatchShards]:
        for batches, positions in partition.windows_of_node():
            is_entry = positions >= 0
            rows = partition.sequence.rows(positions[is_entry])
            ids, of_samples = rows.ids, np.repeat(batches, is_entry.sum(axis=1))
            if rows.pieces is not None:
                of_samples = of_samples[rows.pieces.entries]
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
