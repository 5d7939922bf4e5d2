"""What a step reads, and when a sample is read: both from the plan of an epoch, without reading any sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.cursor import Cursor
from lightning_streaming.loading.keyed_access import find_shard
from lightning_streaming.loading.passes import passes_of
from lightning_streaming.loading.sample_key import SampleKey
from lightning_streaming.order.deal import Deal
from lightning_streaming.order.plan import EpochPlan
from lightning_streaming.tools.traces.run import TracedRun

_AT_A_TIME = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """One sample in one batch."""

    step: int
    """The trainer's ``global_step`` while the sample is trained on."""
    batch: int
    """Batch of the epoch, as the trainer counts: its ``batch_idx``."""
    rank: int
    """Rank that reads it; with replication, the first of those that do."""
    place: int
    """Place in the batch."""
    sample: int
    """Id over all streams, as ``dataset[sample]`` takes it."""
    key: SampleKey


def reads_of_step(run: TracedRun, step: int, rank: int | None = None) -> list[Read]:
    """The samples of a global step, by rank, batch and place.

    Args:
        run: The run.
        step: The trainer's ``global_step`` in the step; the first is 0.
        rank: Only what this rank reads; None for all.

    Raises:
        ConfigError: The run has no such step or rank.
    """
    if rank is not None and not rank < run.num_ranks:
        raise ConfigError(f"there is no rank {rank}; the run has {run.num_ranks}, see --nodes and --ranks-per-node")
    epoch, of_epoch = run.steps.find(step)
    ranks = range(0, run.num_ranks, run.replication) if rank is None else [rank]
    return list(_EpochReads.of(run, epoch).in_batches(run.steps.of_epoch(epoch).batches_of(of_epoch), ranks))


def reads_of_sample(run: TracedRun, stream: str, shard: int, index: int, epochs: int) -> list[Read]:
    """When a sample is read: all times in the first epoch that reads it, in order.

    Args:
        run: The run.
        stream: Name of the stream.
        shard: Counted within the stream.
        index: Counted within the shard.
        epochs: How many epochs to look through, from where the run begins.

    Raises:
        SampleIndexError: There is no such sample.
    """
    sample = _sample_id(passes_of(run.loader.dataset).catalog, stream, shard, index)
    for epoch in range(run.begins.epoch, run.begins.epoch + epochs):
        reads = _EpochReads.of(run, epoch)
        found = [read for position in reads.positions_of(sample) for read in reads.of_position(position)]
        if found:
            return sorted(found, key=lambda read: (read.batch, read.rank, read.place))
    return []


def reads_of_key(run: TracedRun, key: SampleKey) -> list[Read]:
    """When the sample with this key is read, in the very place that the key names.

    Raises:
        SampleIndexError: There is no such sample.
        ConfigError: The run reads another sample at that place, or none.
    """
    sample = _sample_id(passes_of(run.loader.dataset).catalog, key.stream, key.shard, key.index)
    begins = run.begins
    if (key.epoch, key.position) < begins:
        raise ConfigError(
            f"epoch {key.epoch}, position {key.position} lies before the checkpoint, which is at {begins}"
        )
    reads = _EpochReads.of(run, key.epoch)
    there = reads.plan.ids(np.asarray([key.position]))[0] if key.position < len(reads.plan) else None
    if there != sample or reads.of_pass_seed != key.shuffle_seed:
        raise ConfigError(
            f"the run does not read this sample at position {key.position} of epoch {key.epoch}, so the key is of "
            "another run: other data, seed or order; ask for STREAM:SHARD:INDEX instead"
        )
    return reads.of_position(key.position)


@dataclass(frozen=True, kw_only=True, slots=True)
class _EpochReads:
    """One epoch, as far as the run reads it."""

    run: TracedRun
    epoch: int
    plan: EpochPlan
    deal: Deal
    of_pass_seed: int

    @classmethod
    def of(cls, run: TracedRun, epoch: int) -> _EpochReads:
        dataset = run.loader.dataset
        dataset.seek(run.begins if epoch == run.begins.epoch else Cursor(epoch, 0))
        batch_size = run.loader.samples_per_global_batch // dataset.current_world().num_ranks
        start = passes_of(dataset).begin(dataset.current_world(), batch_size, run.loader.drop_last)
        plan, deal = passes_of(dataset).epochs.plan(start), passes_of(dataset).epochs.deal(start)
        return cls(run=run, epoch=epoch, plan=plan, deal=deal, of_pass_seed=start.shuffle_seed)

    def in_batches(self, batches: range, ranks: Sequence[int]) -> Iterator[Read]:
        """What these ranks read in batches, which are counted from the first one that the run reads."""
        for rank in ranks:
            reader = self.run.reader(rank)
            positions = self.deal.batches(np.asarray(batches), reader.node, reader.rank_of_node)
            for batch, row in zip(batches, positions, strict=True):
                read = row[row >= 0]
                ids = self.plan.ids(read)
                for place in range(len(read)):
                    yield self._read(batch, rank, place, int(read[place]), int(ids[place]))

    def positions_of(self, sample: int) -> list[int]:
        """Where in the rest of the epoch a sample stands."""
        found: list[NDArray[np.int64]] = []
        for start in range(self.deal.start, len(self.plan), _AT_A_TIME):
            ids = self.plan.ids_between(start, min(start + _AT_A_TIME, len(self.plan)))
            found.append(np.flatnonzero(ids == sample) + start)
        return [int(position) for positions in found for position in positions]

    def of_position(self, position: int) -> list[Read]:
        """Who reads a position, and when; more than once where it is read again to keep the ranks even."""
        batches = self.run.steps.of_epoch(self.epoch).batches
        size = self.deal.global_batch_size
        # Only what fills no global batch is dealt in another way, and only there anything is read again.
        last = range(self.deal.remaining // size, self.deal.num_batches())
        entry = self.deal.gaps.kept_before(position) - self.deal.gaps.kept_before(self.deal.start)
        candidates = sorted({entry // size, *last})
        ranks = range(0, self.run.num_ranks, self.run.replication)
        return [
            read
            for batch in candidates
            if batch < batches
            for read in self.in_batches(range(batch, batch + 1), ranks)
            if read.key.position == position
        ]

    def _read(self, batch: int, rank: int, place: int, position: int, sample: int) -> Read:
        steps, catalog = self.run.steps, passes_of(self.run.loader.dataset).catalog
        stored = catalog.place(sample)
        key = SampleKey(
            stream=catalog.stream_names[stored.stream],
            shard=stored.shard - sum(catalog.shards_per_stream[: stored.stream]),
            index=stored.sample,
            epoch=self.epoch,
            position=position,
            shuffle_seed=self.of_pass_seed,
        )
        return Read(
            step=steps.global_step(self.epoch, batch),
            batch=steps.of_epoch(self.epoch).done + batch,
            rank=rank,
            place=place,
            sample=sample,
            key=key,
        )


def _sample_id(catalog: Catalog, stream: str, shard: int, index: int) -> int:
    key = SampleKey(stream=stream, shard=shard, index=index, epoch=0, position=0, shuffle_seed=0)
    return int(catalog.first_sample_of_shard[find_shard(catalog, key)]) + index
