"""The share of a worker in a pass: its positions in the epoch, and how their samples become batches.

PassPlanner     plans the passes over one dataset
WorkerPlan      what one worker reads in a pass, and how
WorkerPartition positions of the worker in the epoch
Window          samples of some of its batches, with shard and index
Assembler       how samples become batches
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_streaming.dataset.bad_samples import BadSamples, BadTally
from lightning_streaming.dataset.collation import Collate
from lightning_streaming.dataset.options import DatasetOptions
from lightning_streaming.dataset.sample_key import Row, SampleKey, keys_of_rows
from lightning_streaming.dataset.samples import SampleSource
from lightning_streaming.dataset.transform import SampleFactory, failed_sample
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.escaping import package_logger
from lightning_streaming.formats.shard_format import Allocate
from lightning_streaming.options.groups import group_of
from lightning_streaming.options.reading import BadSamplesConfig, DebugConfig, DecodeConfig
from lightning_streaming.reading.measures import BatchMeter
from lightning_streaming.reading.sample_log import SampleWatch, watch_of
from lightning_streaming.resume.run_state import RunState, drawn_sequence
from lightning_streaming.resume.state import EpochStart
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.batching import Batched, RowPieces
from lightning_streaming.sequence.partition import Partition
from lightning_streaming.world import World

_log = package_logger(__name__)
_MIX_STREAMS = ("random", "stratified")
"""Batching methods by which one rank's batch has samples of several streams."""
_WINDOW_SAMPLES = 8192
"""Samples whose ids are computed together: enough for numpy to be fast, few enough to start at once."""
_Measures = TypeVar("_Measures")


class PassPlanner:
    """Plans the passes over one dataset, in one process after another.

    Args:
        state: The run, and its position.
        source: The samples.
        options: Options of the dataset.
        assembler: How samples become batches.
    """

    def __init__(self, state: RunState, source: SampleSource, options: DatasetOptions, assembler: Assembler) -> None:
        self.state = state
        self.source = source
        self.assembler = assembler
        self.debug = group_of(options, DebugConfig)
        self._predownload = options.predownload
        self._bad = group_of(options, BadSamplesConfig)
        self._threads = group_of(options, DecodeConfig).threads
        self._assigned: tuple[int, WorkerPlan] | None = None
        self._reported = set[str]()

    def plan(
        self,
        sample_factory: Callable[[int, int], SampleFactory],
        start: EpochStart,
        worker: int,
        num_workers: int,
        *,
        is_measured: bool = False,
        empty: Allocate = np.empty,
    ) -> WorkerPlan:
        """Return the plan of one of a loader's workers, or of the only reader, for a pass that was begun.

        Args:
            sample_factory: Returns the factory of an epoch's samples, by shuffle seed and epoch.
            start: The pass.
            worker: Number of the worker.
            num_workers: Number of workers, at least 1.
            is_measured: Whether the consumer of the batches reads their measures.
            empty: See :attr:`WorkerPlan.empty`.

        Raises:
            ConfigError: Threads cannot call the code that creates samples.
        """
        factory = sample_factory(start.shuffle_seed, start.cursor.epoch)
        if self._threads and factory.make is not None:
            raise ConfigError(
                f"decode.threads={self._threads} has threads decode samples and apply transform, but {factory.name} "
                "creates them one by one",
                hint="leave decode.threads out, or give the dataset a transform=",
                option="decode.threads",
            )
        misses = {name: cache.misses for name, cache in self.source.catalogs.caches.items()}
        meter, debug, bad = BatchMeter(misses, is_read=is_measured), self.debug, None
        if self._bad.replaces:
            bad = BadSamples(
                self._bad,
                self.source,
                start,
                worker,
                in_packs=self.state.request.pack is not None,
                on_bad=meter.count_bad,
                tally=None if is_measured else self.bad_tally(start),
            )
        is_watched = debug.sample_log is not None or debug.watchdog_seconds is not None
        return WorkerPlan(
            state=self.state,
            source=self.source,
            assembler=self.assembler,
            factory=factory,
            start=start,
            worker=worker,
            num_workers=num_workers,
            predownload=self._predownload,
            meter=meter,
            watch=watch_of(debug, self.source, start, worker) if is_watched else None,
            bad=bad,
            threads=self._threads,
            empty=empty,
        )

    def bad_tally(self, start: EpochStart) -> BadTally | None:
        """Return a count of the bad samples of a pass for its consumer; None where they are errors."""
        return BadTally(self._bad, start, self._reported) if self._bad.replaces else None

    def assign(self, plan: WorkerPlan) -> None:
        """Let the next ``iter`` of the dataset in this process read this plan."""
        self._assigned = self.state.moves, plan

    def take_assigned(self) -> WorkerPlan | None:
        """Return the plan that was assigned and not taken yet."""
        assigned, self._assigned = self._assigned, None
        return assigned[1] if assigned is not None and assigned[0] == self.state.moves else None

    def begin_in_worker(self, worker: int, world: World, batch_size: int) -> EpochStart:
        """Begin the next pass in a worker of a plain torch DataLoader."""
        start = self.state.begin_in_worker(worker, world, batch_size)
        if self.state.is_first_in_workers(worker):
            self.warn_unsuitable_settings(start)
        return start

    def warn_unsuitable_settings(self, start: EpochStart) -> None:
        """Warn once, on one rank, about settings that do not suit the data or the machines."""
        if start.world.rank or "settings" in self._reported:
            return
        self._reported.add("settings")
        catalog = self.source.catalog
        for warning in self._unsuitable_settings(start, catalog):
            _log.warning("streams %s: %s", ", ".join(catalog.stream_names[:3]), warning)

    def warn_mixed_columns(self, start: EpochStart) -> None:
        """Warn once, on one rank, where torch's default collate will meet samples of different columns."""
        if start.world.rank or "columns" in self._reported:
            return
        self._reported.add("columns")
        warning = self.mixed_columns(self.state.weights.choose, self.state.settings.batching_method)
        if warning and start.batch_size > 1:
            _log.warning("%s", warning)

    def mixed_columns(self, shares: Sequence[int], batching_method: str) -> str | None:
        """Return a warning where torch's default collate would meet samples of different columns; else None.

        Args:
            shares: Samples that an epoch draws of each stream.
            batching_method: Which samples share a batch.
        """
        if self.source.catalogs.columns is not None or self.state.request.pack is not None:
            return None  # packs have the columns that are packed
        catalog, share_batches = self.source.catalog, batching_method in _MIX_STREAMS
        read = zip(catalog.stream_names, catalog.columns_of_streams(), shares, strict=True)
        kinds = [(name, columns) for name, of_stream, share in read if share for columns in of_stream]
        firsts: dict[str, tuple[str, tuple[str, ...]]] = {}
        for name, columns in kinds:
            other, known = firsts.setdefault("" if share_batches else name, (name, columns))
            if set(known) != set(columns):
                common = [column for column in kinds[0][1] if all(column in those for _, those in kinds)]
                hint = f"name those that all have with columns={common}, " if common else ""
                return (
                    f"samples have different columns: {list(known)} in stream {other!r}, {list(columns)} in {name!r}. "
                    "Torch's default collate fails on a batch of both, or leaves out what the first of its samples "
                    f"lacks; {hint}give all the same in transform= or with join, or pass the loader a collate_fn="
                )
        return None

    def _unsuitable_settings(self, start: EpochStart, catalog: Catalog) -> Iterator[str]:
        """Yield a warning for each setting that does not suit, with the fix."""
        settings, epoch_size = self.state.settings, self.state.weights.epoch_size
        if epoch_size < start.num_canonical_nodes:
            yield (
                f"an epoch has {epoch_size} samples, fewer than its {start.num_canonical_nodes} canonical nodes, so "
                "that some are read more than once to give each node as many; pass num_canonical_nodes= of at most "
                f"{epoch_size}"
            )
        ranks = start.world.num_ranks
        if epoch_size < ranks:
            yield (
                f"an epoch has {epoch_size} samples, fewer than the {ranks} ranks that read it, so that some are read "
                f"on several ranks at once; use at most {epoch_size} ranks, or a larger epoch_size="
            )
        largest = int(catalog.samples_per_shard.max())
        if settings.shuffle and settings.shuffle_algo == "py1e" and start.shuffle_block_size < largest:
            yield (
                f"shuffle_block_size={start.shuffle_block_size} is below the {largest} samples of the largest shard, "
                f"whose samples 'py1e' then mixes with few others; pass at least {largest}"
            )
        predownload = self._predownload
        if predownload is not None and predownload < start.batch_size and self.source.is_remote:
            yield (
                f"predownload={predownload} is below batch_size={start.batch_size}, so that each batch waits for "
                f"shards that could have been fetched ahead; pass at least {start.batch_size}, or leave it out for 8 "
                "batches"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_assigned": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """What one worker reads in a pass, from where, and how it creates samples.

    It refers to neither the dataset nor the planner, which may hold the reader of the pass: so a pass that is no longer
    referenced ends at once.
    """

    state: RunState
    source: SampleSource
    assembler: Assembler
    factory: SampleFactory
    start: EpochStart
    """Where the pass begins."""
    worker: int
    num_workers: int
    predownload: int | None
    """Samples ahead of the reader for which shards are fetched; None for the default lookahead."""
    meter: BatchMeter
    watch: SampleWatch | None
    """Observes each sample; None for no log and no watchdog."""
    bad: BadSamples | None
    """Replaces samples that cannot be read; None where they are errors."""
    threads: int
    """Threads that decode and transform samples, apart from the one that reads; 0 for none."""
    empty: Allocate
    """Returns memory for batches that are gathered, from which they are sent without another copy."""

    def partition(self) -> WorkerPartition:
        """Return the positions of the worker.

        To be called with the first sample: torch reports an error of ``next``, but loses one of ``iter`` in a worker
        that is kept from pass to pass.
        """
        epoch = self.state.epoch_of(self.start)
        return WorkerPartition(
            sequence=drawn_sequence(epoch, self.state.prepare),
            epoch_partition=epoch.partition,
            node=self.start.world.node,
            rank_of_node=self.start.world.rank_of_node,
            worker=self.worker,
            num_workers=self.num_workers,
        )

    @property
    def reads_as_stored(self) -> bool:
        """Return whether no code of the user and no watch sees single samples."""
        return self.factory.keeps_samples and self.watch is None

    @property
    def cuts_documents(self) -> bool:
        """Return whether several packs may have pieces of one document."""
        packing = self.state.request.pack
        return packing is not None and packing.settings().longer == "split"

    def key(self, row: Row) -> SampleKey:
        """Return the key of a sample."""
        return keys_of_rows(self.source.catalog, self.start)(row)

    def failed(self, row: Row, error: Exception, sample: Any = None) -> StreamingError:
        """Return the error to raise for a failure of the user's code on a sample."""
        return failed_sample(error, self.factory.name, self.key(row), sample)

    def transformed(self, row: Row, sample: Any) -> Any:
        """Return the transform of a sample; the sample itself without a transform."""
        if self.factory.transform is None:
            return sample
        try:
            return self.factory.transform(sample, row[0])
        except Exception as error:
            raise self.failed(row, error, sample) from error

    def replacement(self, row: Row, error: StreamingError, make: Callable[[Row], Any]) -> Any:
        """Return the replacement of a sample that could not be read; see :meth:`BadSamples.replacement`."""
        if self.bad is None:
            raise error

        def watched(other: Row) -> Any:
            if self.watch is not None:
                self.watch.begun(other)
            return make(other)

        return self.bad.replacement(row, error, watched)

    def keys_of_batch(self, number: int) -> list[SampleKey]:
        """Return the keys of one of the worker's batches, counted from the first of the pass."""
        partition, catalog = self.partition(), self.source.catalog
        batch = np.array([partition.worker + number * partition.num_workers])
        positions = partition.epoch_partition.batches(batch, partition.node, partition.rank_of_node).reshape(-1)
        rows = partition.sequence.rows(positions[positions >= 0])
        columns = (rows.positions, *catalog.places(rows.ids))
        places = zip(*(column.tolist() for column in columns), strict=True)
        return [self.key((position, shard, index, 0)) for position, shard, index in places]


class Batches(Protocol):
    """Collated batches that follow each other."""

    def __len__(self) -> int:
        """Return their number."""

    def __iter__(self) -> Iterator[Any]:
        """Yield each batch."""


class Assembler(ABC):
    """How a worker's samples become batches. A dataset has one for the run, by its packing."""

    collates_packs: ClassVar[bool] = False
    """Whether the items of a batch are packs, which have several samples."""

    def check_loader(self, batch_size: int, *, has_collate: bool) -> None:  # noqa: B027  most have nothing to check
        """Check the options of a loader.

        Args:
            batch_size: Samples or packs of a batch.
            has_collate: Whether the user has passed a collate function.

        Raises:
            ConfigError: They do not fit the packing.
        """

    def tokens(self, _window: Window) -> NDArray[np.int64] | None:
        """Return the tokens in each batch of a window, and the room for them; None without packing."""
        return None

    @abstractmethod
    def items(self, plan: WorkerPlan, samples: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield the items of batches: the samples, or packs of them."""

    @abstractmethod
    def batches(self, plan: WorkerPlan, *, drop_last: bool, separately: bool) -> Generator[Batches, None, None] | None:
        """Return collated batches that are read without decoding single samples; None where that cannot be.

        Args:
            plan: The worker's plan.
            drop_last: Whether to leave out a last batch that is not full.
            separately: Whether to yield each batch alone, and not some together.
        """

    @abstractmethod
    def collate(self, collate: Collate, *, by_torch: bool) -> Collate:
        """Return the function that collates :meth:`items`.

        Args:
            collate: The loader's collate function.
            by_torch: Whether torch sends batches from the worker.
        """

    def checked(
        self, batches: Iterator[tuple[Any, _Measures]], _types: MutableMapping[str, torch.dtype]
    ) -> Iterator[tuple[Any, _Measures]]:
        """Yield the batches of all workers, after a check that columns have one type in all.

        Args:
            batches: Batches by torch's default collate, each with its measures.
            _types: Types of columns in the batches before, by name; is added to.
        """
        return batches


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPartition:
    """One worker's part of a pass: every ``num_workers``-th global batch, beginning with number ``worker``."""

    sequence: Batched
    epoch_partition: Partition
    node: int
    rank_of_node: int
    worker: int = 0
    num_workers: int = 1

    def windows(self) -> Iterator[NDArray[np.int64]]:
        """Yield positions of this worker's samples in the epoch's sequence, some batches at a time."""
        batches = range(self.worker, self.epoch_partition.num_batches(), self.num_workers)
        for window in _some_at_a_time(batches, self.epoch_partition.geometry.batch_size):
            positions = self.epoch_partition.batches(window, self.node, self.rank_of_node).reshape(-1)
            # Only an epoch's last batch may be short of samples.
            yield positions if positions[-1] >= 0 else positions[positions >= 0]

    def windows_of_node(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield global batches, and positions of the samples that this node reads of each, of shape (batches, samples).

        Where the last batch is short of samples, its positions are -1.
        """
        ranks = range(self.epoch_partition.geometry.ranks_per_node)
        for window in _some_at_a_time(
            range(self.epoch_partition.num_batches()), self.epoch_partition.geometry.batch_size * len(ranks)
        ):
            yield window, np.hstack([self.epoch_partition.batches(window, self.node, rank) for rank in ranks])

    def num_samples(self) -> int:
        """Return about how many samples :meth:`windows` yields; exact if the last batch is full."""
        return (
            len(range(self.worker, self.epoch_partition.num_batches(), self.num_workers))
            * self.epoch_partition.geometry.batch_size
        )


def _some_at_a_time(batches: range, samples_per_batch: int) -> Iterator[NDArray[np.int64]]:
    step = max(1, _WINDOW_SAMPLES // samples_per_batch)
    return (np.asarray(batches[first : first + step], np.int64) for first in range(0, len(batches), step))


class Window(NamedTuple):
    """The samples of some consecutive batches of a worker. Arrays of one entry for each sample, except ``stops``."""

    positions: NDArray[np.int64]
    shards: NDArray[np.int64]
    indexes: NDArray[np.int64]
    joined: NDArray[np.int64] | None
    """Shards of joined datasets, as :meth:`Catalog.joined_shards` returns them."""
    stops: NDArray[np.int64]
    """Samples up to the end of each batch, counted from the window's first."""
    num_items: int
    """Samples, or packs."""
    rows_before: int
    """Samples of the worker that come before."""
    batches_before: int
    pieces: RowPieces | None
    """Of packs: which of the window's each sample is in, and which of its tokens."""

    def needed(self) -> NDArray[np.int64]:
        """Return all shards that are known to be needed; of shape (samples, shards), -1 for none."""
        own = self.shards[:, None]
        return own if self.joined is None else np.hstack([own, self.joined])

    def sample_tokens(self, catalog: Catalog) -> NDArray[np.integer[Any]] | None:
        """Return the tokens of each sample, as far as it is in a pack; None if lengths are not known."""
        if self.pieces is not None:
            return self.pieces.lengths
        return None if catalog.lengths is None else catalog.lengths(catalog.ids(self.shards, self.indexes))

    def rows_until(self, batches: int) -> int:
        """Return how many samples the worker has read after some batches of this window, or of those before."""
        here = min(batches - self.batches_before, len(self.stops))
        return self.rows_before + (int(self.stops[here - 1]) if here > 0 else 0)


def located(partition: WorkerPartition, catalog: Catalog) -> Iterator[Window]:
    """Yield the worker's samples in order, some batches at a time."""
    rows_before = batches_before = 0
    batch_size = partition.epoch_partition.geometry.batch_size
    for entries in partition.windows():
        rows = partition.sequence.rows(entries)
        shards, indexes = catalog.places(rows.ids)
        ends = np.minimum(np.arange(batch_size, len(entries) + batch_size, batch_size), len(entries))
        yield Window(
            positions=rows.positions,
            shards=shards,
            indexes=indexes,
            joined=catalog.joined_shards(shards, indexes),
            stops=ends if rows.pieces is None else rows.stops(len(entries))[ends - 1],
            num_items=len(entries),
            rows_before=rows_before,
            batches_before=batches_before,
            pieces=rows.pieces,
        )
        rows_before += len(rows.positions)
        batches_before += len(ends)


def by_shard(shards: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Return the indexes of each shard's samples, ascending; shards in the order of their first index.

    Args:
        shards: The shard of each sample; at least one.
    """
    if (shards == shards[0]).all():
        yield np.arange(len(shards))
        return
    # Numpy sorts 16-bit numbers by radix, in a tenth of the time.
    order = (shards.astype(np.uint16) if shards.max() < 1 << 16 else shards).argsort(kind="stable")
    in_order = shards[order]
    starts = [0, *(1 + (in_order[1:] != in_order[:-1]).nonzero()[0]).tolist()]
    for _, start, stop in sorted(zip(order[starts].tolist(), starts, [*starts[1:], len(shards)], strict=True)):
        yield order[start:stop]
