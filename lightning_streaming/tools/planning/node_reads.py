"""What one node reads of an epoch, and when its workers ask for each shard if nothing is ever removed.

The order, the partition, what each worker needs and how far it looks ahead are those of the run itself. What is left to
simulate is time: all workers take their batches in turn, and what is fetched is there at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.formats.shard_table import PART, ShardTable
from lightning_streaming.reading.plan import WorkerPartition, located, lookahead_of
from lightning_streaming.reading.prefetch import Lookahead
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
