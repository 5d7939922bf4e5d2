"""The passes over a dataset: the share of each worker, and what reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_streaming.cache.shard_cache import Misses
from lightning_streaming.dataset.bad_samples import BadSamples, BadTally
from lightning_streaming.dataset.sample_key import keys_of_rows
from lightning_streaming.dataset.samples import SampleSource
from lightning_streaming.dataset.transform import Making
from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import package_logger
from lightning_streaming.options.bad_samples import BadSamplesConfig
from lightning_streaming.options.debug import DebugConfig
from lightning_streaming.options.packing import Packing
from lightning_streaming.reading.measures import BatchMeter
from lightning_streaming.reading.packs.types import ColumnTypes, stored_types
from lightning_streaming.reading.plan import WorkerPartition, WorkerPass
from lightning_streaming.reading.sample_log import watch_of
from lightning_streaming.reading.worker_samples import WorkerSamples
from lightning_streaming.resume.run_state import RunState, drawn_sequence
from lightning_streaming.resume.state import EpochStart
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.world import World

if TYPE_CHECKING:
    from lightning_streaming.reading.dataset import StreamingDataset

_log = package_logger(__name__)
_MIX_STREAMS = ("random", "stratified")
"""Batching methods by which one rank's batch has samples of several streams."""
MakingOf = Callable[[int, int], Making]
"""Says how the samples of an epoch are made, by shuffle seed and epoch."""


class PassSettings(NamedTuple):
    """How passes are read."""

    predownload: int | None
    """Samples ahead of each worker for which shards are fetched; None for a number that suits."""
    debug: DebugConfig
    """The log of samples and the watchdog."""
    bad: BadSamplesConfig
    """Handling of samples that cannot be read."""
    threads: int
    """In which each process that reads finishes samples; 0 for none beside the one that reads."""


class Passes:
    """The passes over one dataset, in one process after another.

    Args:
        state: The run, and its position.
        source: The samples.
        misses: Where each stream's cache notes what was not there, by stream name.
        settings: How they are read.
    """

    def __init__(
        self, state: RunState, source: SampleSource, misses: Mapping[str, Misses], settings: PassSettings
    ) -> None:
        self.state = state
        self.source = source
        self._misses = dict(misses)
        self._settings = settings
        self._assigned: tuple[int, WorkerPass] | None = None
        self._reading: tuple[int, WorkerSamples] | None = None
        self._reported = set[str]()
        self._settled_types = dict[str, np.dtype[Any]]()
        """Of packed columns, by name: a pass has those of the passes before."""

    @property
    def debug(self) -> DebugConfig:
        """The log of samples and the watchdog."""
        return self._settings.debug

    def begin_in_worker(self, worker: int, world: World, batch_size: int) -> EpochStart:
        """Begin the next pass in a worker of a plain torch DataLoader."""
        start = self.state.begin_in_worker(worker, world, batch_size)
        if self.state.is_first_in_workers(worker):
            self.warn_unsuitable_settings(start)
        return start

    def warn_unsuitable_settings(self, start: EpochStart) -> None:
        """Say once, on one rank, which settings do not suit the data or the machines."""
        if start.world.rank or "unsuited" in self._reported:
            return
        self._reported.add("unsuited")
        catalog = self.source.catalog
        ahead = self._settings.predownload if self.source.is_remote else None
        for sentence in _unsuited(self.state.settings, start, catalog, self.state.weights.epoch_size, ahead):
            _log.warning("streams %s: %s", ", ".join(catalog.stream_names[:3]), sentence)

    def warn_mixed_columns(self, start: EpochStart) -> None:
        """Say once, on one rank, where torch's default collate will meet samples of different columns."""
        if start.world.rank or "columns" in self._reported:
            return
        self._reported.add("columns")
        warning = self.mixed_columns(self.state.weights.choose, self.state.settings.batching_method)
        if warning and start.batch_size > 1:
            _log.warning("%s", warning)

    def mixed_columns(self, shares: Sequence[int], batching_method: str) -> str | None:
        """A sentence where torch's default collate would meet samples of different columns; else None.

        Args:
            shares: Samples that an epoch draws of each stream.
            batching_method: Which samples share a batch.
        """
        if not self.source.has_all_columns():
            return None
        return _mixed_columns(self.source.catalog, shares, in_a_batch=batching_method in _MIX_STREAMS)

    def of_worker(
        self, making_of: MakingOf, start: EpochStart, worker: int, num_workers: int, *, is_measured: bool = False
    ) -> WorkerPass:
        """What one of a loader's workers, or the only reader there is, reads of a pass that was begun."""
        # Not self, which may hold the pass: it ends with its last user.
        state, source = self.state, self.source

        def make_partition() -> WorkerPartition:
            epoch = state.epoch_of(start)
            return WorkerPartition(
                sequence=drawn_sequence(epoch, state.prepare),
                epoch_partition=epoch.partition,
                node=start.world.node,
                rank_of_node=start.world.rank_of_node,
                worker=worker,
                num_workers=num_workers,
            )

        making = making_of(start.shuffle_seed, start.cursor.epoch)
        if self._settings.threads and making.make is not None:
            raise ConfigError(
                f"decode.threads={self._settings.threads} has threads decode samples and apply transform, but "
                f"{making.name} makes them one by one",
                hint="leave decode.threads out, or give the dataset a transform=",
                option="decode.threads",
            )
        meter = BatchMeter(self._misses, is_read=is_measured)
        return WorkerPass(
            make_partition=make_partition,
            source=source,
            making=making,
            key=lambda row: keys_of_rows(source.catalog, start)(row),
            predownload=self._settings.predownload,
            near_end=partial(state.prepare_after, start),
            meter=meter,
            watch=watch_of(self._settings.debug, source, start, worker),
            pack=state.request.pack,
            types=self._types(state.request.pack),
            bad=self._bad_samples(start, worker, meter, is_measured),
            threads=self._settings.threads,
        )

    def _types(self, packing: Packing | None) -> ColumnTypes | None:
        if packing is None:
            return None
        source = self.source
        return ColumnTypes(packing, lambda: stored_types(packing, source.catalog), self._settled_types)

    def _bad_samples(self, start: EpochStart, worker: int, meter: BatchMeter, is_measured: bool) -> BadSamples | None:
        if not self._settings.bad.replaces:
            return None
        tally, in_packs = None if is_measured else self.bad_tally(start), self.state.request.pack is not None
        found = meter.found_bad
        return BadSamples(self._settings.bad, self.source, start, worker, in_packs=in_packs, found=found, tally=tally)

    def bad_tally(self, start: EpochStart) -> BadTally | None:
        """Counts the bad samples of a pass for who consumes it; None where they are errors."""
        return BadTally(self._settings.bad, start, self._reported) if self._settings.bad.replaces else None

    def assign(self, of_pass: WorkerPass) -> None:
        """Let the next ``iter`` of the dataset in this process read this pass."""
        self._assigned = self.state.moves, of_pass

    def take_assigned(self) -> WorkerPass | None:
        """Return what was assigned and not taken yet."""
        assigned, self._assigned = self._assigned, None
        return assigned[1] if assigned is not None and assigned[0] == self.state.moves else None

    def read_here(self, of_pass: WorkerPass) -> WorkerSamples:
        """Read the pass under way in this process; samples that are taken count as read."""
        samples = WorkerSamples(of_pass)
        self._reading = self.state.moves, samples
        return samples

    def samples_read(self) -> int:
        """Return the samples of the pass under way that were taken in this process."""
        reading = self._under_way()
        return 0 if reading is None or self.state.counts_in_workers() else reading.samples_read

    def close(self) -> None:
        """Stop fetching."""
        reading = self._under_way()
        if reading is not None:
            reading.close()
        self.state.close()

    def _under_way(self) -> WorkerSamples | None:
        return self._reading[1] if self._reading is not None and self._reading[0] == self.state.moves else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_assigned": None}


def passes_of(dataset: StreamingDataset) -> Passes:
    """Return the passes over a dataset: for loaders and workers. Attributes of a subclass may have any other name."""
    return dataset._passes


def run_state_of(dataset: StreamingDataset) -> RunState:
    """Return the run of a dataset and its position."""
    return dataset._passes.state


def source_of(dataset: StreamingDataset) -> SampleSource:
    """Return the samples of a dataset."""
    return dataset._passes.source


def _mixed_columns(catalog: Catalog, shares: Sequence[int], *, in_a_batch: bool) -> str | None:
    """A sentence on samples of different columns that may share a batch; None if there are none.

    Args:
        catalog: What there is to read.
        shares: Samples that an epoch draws of each stream.
        in_a_batch: Whether samples of several streams share a batch.
    """
    read = zip(catalog.stream_names, catalog.columns_of_streams(), shares, strict=True)
    kinds = [(name, columns) for name, of_stream, share in read if share for columns in of_stream]
    firsts: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, columns in kinds:
        other, known = firsts.setdefault("" if in_a_batch else name, (name, columns))
        if set(known) != set(columns):
            everywhere = [column for column in kinds[0][1] if all(column in those for _, those in kinds)]
            way_out = f"name those that all have with columns={everywhere}, " if everywhere else ""
            return (
                f"samples have different columns: {list(known)} in stream {other!r}, {list(columns)} in {name!r}. "
                "Torch's default collate fails on a batch of both, or leaves out what the first of its samples lacks; "
                f"{way_out}give all the same in transform= or with join, or pass the loader a collate_fn="
            )
    return None


def _unsuited(
    settings: OrderSettings, start: EpochStart, catalog: Catalog, epoch_size: int, predownload: int | None
) -> Iterator[str]:
    """A sentence for each setting that does not suit, and what to do about it.

    Args:
        settings: With every default filled in.
        start: The pass that is about to begin.
        catalog: What there is to read.
        epoch_size: Samples drawn per epoch.
        predownload: Samples ahead of each worker for which shards are fetched; None where nobody has chosen, or there
            is nothing to fetch.
    """
    if epoch_size < start.num_canonical_nodes:
        yield (
            f"an epoch has {epoch_size} samples, fewer than its {start.num_canonical_nodes} canonical nodes, so that "
            f"some are read more than once to give each node as many; pass num_canonical_nodes= of at most {epoch_size}"
        )
    ranks = start.world.num_ranks
    if epoch_size < ranks:
        yield (
            f"an epoch has {epoch_size} samples, fewer than the {ranks} ranks that read it, so that some are read on "
            f"several ranks at once; use at most {epoch_size} ranks, or a larger epoch_size="
        )
    largest = int(catalog.samples_per_shard.max())
    if settings.shuffle and settings.shuffle_algo == "py1e" and start.shuffle_block_size < largest:
        yield (
            f"shuffle_block_size={start.shuffle_block_size} is below the {largest} samples of the largest shard, whose "
            f"samples 'py1e' then mixes with few others; pass at least {largest}"
        )
    if predownload is not None and predownload < start.batch_size:
        yield (
            f"predownload={predownload} is below batch_size={start.batch_size}, so that each batch waits for shards "
            f"that could have been fetched ahead; pass at least {start.batch_size}, or leave it out for 8 batches"
        )
