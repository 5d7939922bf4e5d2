"""The passes over a dataset: where each begins, what a worker reads of it, and how far it has come.

CurrentRun      the run that a dataset is read by: kept from pass to pass, and what is to be said about it
Passes          of a dataset: begins one pass after another, and says how far the one under way has come
WorkerPass      what one worker reads in a pass, and what it makes of it
Reading         such a pass under way: shards fetched ahead, opened, let go of, measured
WorkerSamples   its samples, one by one; :mod:`~lightning_streaming.loading.batches` has the way by whole batches
WorkerPartition which positions of the epoch are the worker's own, and where their samples are
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.shard_cache import Misses
from lightning_streaming.errors import ConfigError, FormatError, StreamingError
from lightning_streaming.formats.shard import ShardReader
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.measures import BatchMeter
from lightning_streaming.loading.order_files import OrderAhead, shared_order
from lightning_streaming.loading.prefetch import (
    BatchShards,
    LastUses,
    Lookahead,
    NodePlan,
    ShardNeed,
    ShardPrefetcher,
    default_lookahead,
)
from lightning_streaming.loading.run import Epoch, Machines, OnChange, Run, RunRequest, new_run, order_told, resume
from lightning_streaming.loading.sample_key import Row, SampleKey, keys_of_rows
from lightning_streaming.loading.sample_log import SampleWatch, WatchSettings
from lightning_streaming.loading.sample_source import SampleSource
from lightning_streaming.loading.shared_memory import PassCounter
from lightning_streaming.loading.state import Cursor, PassStart, SavedPosition
from lightning_streaming.loading.transform import KeyedSample, Making, failed_sample
from lightning_streaming.order.batchings import Batched, batched
from lightning_streaming.order.draw import Shuffled
from lightning_streaming.order.partition import Partition
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.weights import ResolvedWeights
from lightning_streaming.world import World

if TYPE_CHECKING:
    from lightning_streaming.loading.dataset import StreamingDataset

_log = logging.getLogger(__name__)
_NEAR_END = 0.5
"""Part of a partition after which what the next pass needs is made ready."""
_WINDOW_SAMPLES = 8192
"""Samples whose ids are worked out together: enough for numpy to be fast, few enough to start at once."""
_LAST_USE, _BATCH_ENDS = 1, 2
MakingOf = Callable[[int, int], Making]
"""Says how the samples of an epoch are made, by shuffle seed and epoch."""


class CurrentRun:
    """The run that a dataset is read by, as far as it has come in this process.

    Args:
        asked: What the user asked for.
        source: Where the data is known from; looked at only when it is needed.
    """

    def __init__(self, asked: RunRequest, source: SampleSource) -> None:
        self.asked = asked
        self.reader = ""
        """What messages call whoever reads, where there are several: like "train loader 'text'"."""
        self._source = source
        self._loaded: tuple[SavedPosition, OnChange] | None = None
        self._initial_nodes: int | None = None
        self._run: Run | None = None  # as long as no pass has begun, only remembered for the next question
        self._has_begun = False
        self._ahead = OrderAhead()

    @property
    def settings(self) -> OrderSettings:
        """The settings as they are by now: as asked, as saved, or with defaults filled in since the first look."""
        if self._run is not None:
            return self._run.settings
        return self.asked.settings if self._loaded is None else self.asked.resumed(self._loaded[0])

    @property
    def initial_nodes(self) -> int | None:
        """Nodes of the run's first start, once they are known."""
        return self._initial_nodes if self._run is None else self._run.initial_nodes

    @property
    def weights(self) -> ResolvedWeights:
        """Each stream's share of an epoch, in stream order."""
        return self.asked.resolved_weights(self._source.catalog, self.settings.shuffle_seed)

    def are_of(self, other: CurrentRun) -> bool:
        """Whether the same order of the same data was asked for."""
        if self.asked.of_order() != other.asked.of_order():
            return False
        mine, theirs = (
            [(name, index.data_digest) for name, index in zip(one.stream_names, one.indexes, strict=True)]
            for one in (self._source.catalog, other._source.catalog)
        )
        return mine == theirs

    def load(self, saved: SavedPosition, on_change: OnChange) -> None:
        """Go on from a saved position. Whether it is of this data is checked when the data is looked at."""
        if on_change not in get_args(OnChange):
            raise ConfigError(f"on_change must be one of {', '.join(get_args(OnChange))}, but got {on_change!r}")
        asked = self.asked.settings.num_canonical_nodes
        if asked not in (None, 0, saved.num_canonical_nodes):
            told = f"{self.reader}: " if self.reader else ""
            words = "%snum_canonical_nodes=%s gives way to the saved %d"
            _log.warning(words, told, asked, saved.num_canonical_nodes)
        self._loaded, self._initial_nodes = (saved, on_change), saved.initial_physical_nodes
        self._run, self._has_begun = None, False

    def call(self, reader: str) -> None:
        """Let messages call whoever reads so."""
        self.reader = reader
        self._run = self._run and replace(self._run, reader=reader)

    def on(self, world: World, batch_size: int | None = None, drop_last: bool | None = None) -> Run:
        """The run as it stands, read by these machines. The index is read at the first look.

        Args:
            world: Nodes and ranks, replication divided out.
            batch_size: Samples per batch on each rank; None for what is known.
            drop_last: Whether a last batch that is not full is left out; None for what is known.

        Raises:
            StateMismatchError: A position was loaded that belongs to other data or another order.
        """
        run = self._run
        # Nodes settle the order for good when the first pass begins, not when somebody looks.
        if run is None or (self._initial_nodes is None and run.initial_nodes != world.num_nodes):
            run = self._run = self._new_run(world)
        known = run.machines
        return run.on(
            Machines(
                num_nodes=world.num_nodes,
                ranks_per_node=world.ranks_per_node,
                batch_size=known.batch_size if batch_size is None else batch_size,
                drop_last=known.drop_last if drop_last is None else drop_last,
            )
        )

    def keep(self, run: Run) -> None:
        """Go on with this run, which has begun, or counts batches from somewhere."""
        self._run, self._initial_nodes = run, run.initial_nodes

    def begin(self, cursor: Cursor, world: World, batch_size: int, drop_last: bool) -> PassStart:
        """Begin a pass at ``cursor``, or where it leads to, and say what there is to say about it."""
        run = self.on(world, batch_size, drop_last)
        late = [] if self._has_begun else run.skipped_too_late(cursor)
        if late:
            words = "%sskip: batches %s have been read already, so nothing is left out for them"
            _log.warning(words, run.told, ", ".join(map(str, late)))
        cursor = self.normalise(run, cursor)
        for why in run.why_uneven(cursor):
            _log.warning("%s", why)
        self._has_begun = True
        self.keep(run.at(cursor))
        return run.epoch(cursor).pass_start(world)

    def normalise(self, run: Run, cursor: Cursor) -> Cursor:
        """:meth:`Run.normalise`, saying so where the data has become smaller and the cursor lies beyond its end."""
        for why in run.why_moved(cursor):
            _log.warning("%s", why)
        return run.normalise(cursor)

    def _new_run(self, world: World) -> Run:
        machines = Machines(
            num_nodes=world.num_nodes, ranks_per_node=world.ranks_per_node, batch_size=self.asked.batch_size
        )
        catalog = self._source.catalog
        if self._loaded is None:
            return new_run(self.asked, catalog, machines, self._initial_nodes, self.reader)
        saved, on_change = self._loaded
        resumed = resume(saved, self.asked, catalog, machines, on_change, self.reader)
        for note in resumed.notes():
            _log.warning("%s", note)
        return resumed.run

    def reads(self, start: PassStart) -> Epoch:
        """The epoch of a pass that was begun, here or in the process that has started this one."""
        told = order_told(self.asked, self._source.catalog, start)
        known = self._run and self._run.order
        return Epoch.told(known if known and known.settings == told.settings else told, start)

    def prepare_after(self, start: PassStart) -> None:
        """Begin to make the order of the epoch after a pass, so that nobody waits for it then."""
        order = self.reads(start).order
        self._ahead.prepare(Shuffled(order.settings, order.shape, start.cursor.epoch + 1))

    def close(self) -> None:
        """Keep no order that was made ahead."""
        self._ahead.close()

    def __getstate__(self) -> dict[str, Any]:
        # A process that is spawned reads the index itself.
        return {**self.__dict__, "_run": None, "_initial_nodes": self.initial_nodes}


def drawn_sequence(epoch: Epoch) -> Batched:
    """The sample ids of an epoch by position; a large order is made once on a node, and mapped."""
    order = Shuffled(epoch.order.settings, epoch.order.shape, epoch.cursor.epoch, shared_order)
    return batched(order.drawn(), epoch.composed)


class Passes:
    """The passes over one dataset, in one process after another.

    Args:
        run: The run that they are of.
        source: The samples.
        misses: Where each stream's cache notes what was not there, by stream name.
        predownload: Samples ahead of each worker for which shards are fetched.
        watched: Who is told of each sample.
    """

    def __init__(
        self,
        run: CurrentRun,
        source: SampleSource,
        misses: Mapping[str, Misses],
        predownload: int | None,
        watched: WatchSettings,
    ) -> None:
        self.run = run
        self._source = source
        self._misses = dict(misses)
        self._predownload = predownload
        self._watched = watched
        self._next = Cursor(0, 0)
        self._counter = PassCounter()
        self._latest: PassStart | None = None
        self._handed_out: Cursor | None = None
        self._assigned: WorkerPass | None = None
        self._reading: WorkerSamples | None = None
        self._has_told = False

    @property
    def catalog(self) -> Catalog:
        """Every shard and sample of the streams, in one numbering."""
        return self._source.catalog

    def say_whose(self, place: str) -> None:
        """Let errors say where the streams are configured, like ``data.val``."""
        self._source.say_whose(place)

    def next_cursor(self) -> Cursor:
        """Where the next pass begins."""
        return self._next.passes_later(self._counter.passes_counted())

    def seek(self, cursor: Cursor) -> None:
        """Let the next pass begin at ``cursor``; a pass under way goes on undisturbed, and counts no longer."""
        self._next = cursor
        self._counter.reset(cursor)
        self._latest = self._handed_out = self._reading = self._assigned = None

    def begin(self, world: World, batch_size: int, drop_last: bool = False) -> PassStart:
        """Begin the next pass and say where; the pass after it is that of the next epoch."""
        self._source.prepare()
        start = self.run.begin(self.next_cursor(), world, batch_size, drop_last)
        self.seek(start.cursor.passes_later(1))
        self._latest = start
        return start

    def begin_in_worker(self, worker: int, world: World, batch_size: int) -> PassStart:
        """The same in a worker of a plain torch DataLoader, which tells it nothing."""
        start = self.run.begin(self._counter.count_pass(worker), world, batch_size, drop_last=False)
        if worker == 0 and self._counter.passes_counted() == 1:
            self.tell_unsuited(start)
        return start

    def tell_unsuited(self, start: PassStart) -> None:
        """Say once, on one rank, which settings do not suit the data or the machines."""
        if self._has_told or start.world.rank:
            return
        self._has_told = True
        catalog = self._source.catalog
        ahead = self._predownload if self._source.is_remote else None
        for sentence in _unsuited(self.run.settings, start, catalog, self.run.weights.epoch_size, ahead):
            _log.warning("streams %s: %s", ", ".join(catalog.stream_names[:3]), sentence)

    def of_worker(
        self, making_of: MakingOf, start: PassStart, worker: int, num_workers: int, *, is_measured: bool = False
    ) -> WorkerPass:
        """What one of a loader's workers, or the only reader there is, reads of a pass that was begun."""
        # Not self, which may hold the pass: it ends with its last user.
        run, source = self.run, self._source

        def make_partition() -> WorkerPartition:
            epoch = run.reads(start)
            return WorkerPartition(
                sequence=drawn_sequence(epoch),
                epoch_partition=epoch.partition,
                node=start.world.node,
                rank_of_node=start.world.rank_of_node,
                worker=worker,
                num_workers=num_workers,
            )

        return WorkerPass(
            make_partition=make_partition,
            source=source,
            making=making_of(start.shuffle_seed, start.cursor.epoch),
            key=lambda row: keys_of_rows(source.catalog, start)(row),
            predownload=self._predownload,
            near_end=partial(run.prepare_after, start),
            meter=BatchMeter(self._misses, is_read=is_measured),
            watch=self._watched.watch(source, start, worker),
        )

    def assign(self, of_pass: WorkerPass) -> None:
        """Let the next ``iter`` of the dataset in this process read this."""
        self._assigned = of_pass

    def take_assigned(self) -> WorkerPass | None:
        """What was assigned and not taken yet."""
        of_pass, self._assigned = self._assigned, None
        return of_pass

    def read_here(self, of_pass: WorkerPass) -> WorkerSamples:
        """Read the pass under way in this process; what is taken counts as read."""
        self._reading = WorkerSamples(of_pass)
        return self._reading

    def hand_out(self, start: PassStart, end: Cursor) -> None:
        """Take note that a loader has handed out a pass up to here; of no meaning if another has begun since."""
        if start is self._latest:
            self._handed_out = end

    def handed_out(self) -> Cursor | None:
        """Up to where a loader has handed out the pass under way; None if there is no loader, or no such pass."""
        return None if self._counter.passes_counted() else self._handed_out

    def began(self) -> Cursor:
        """Where the pass under way began, or the next one begins if none is."""
        passes = self._counter.passes_counted()
        if passes:
            return self._next.passes_later(passes - 1)
        return self._next if self._latest is None else self._latest.cursor

    def samples_read(self) -> int:
        """Samples of the pass under way that were taken in this process."""
        if self._reading is None or self._counter.passes_counted():
            return 0
        return self._reading.samples_read

    def close(self) -> None:
        """Stop fetching."""
        if self._reading is not None:
            self._reading.close()
        self.run.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_assigned": None}


def passes_of(dataset: StreamingDataset) -> Passes:
    """The passes over a dataset: for loaders and tools, not for users, whose own names may be any other."""
    return dataset._passes


def _unsuited(
    settings: OrderSettings, start: PassStart, catalog: Catalog, epoch_size: int, predownload: int | None
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


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPass:
    """What one worker reads in a pass, where from, and what it makes of it."""

    make_partition: Callable[[], WorkerPartition]
    """Says what to read. Called with the first sample: torch reports an error of ``next``, but loses one of ``iter`` in
    a worker that lives on from pass to pass."""
    source: SampleSource
    making: Making
    key: Callable[[Row], SampleKey]
    """Finds the key of a sample."""
    predownload: int | None
    """Samples ahead of the reader for which shards are fetched; None for :func:`default_reach`."""
    near_end: Callable[[], None]
    """Called once, when most of it has been read."""
    meter: BatchMeter
    watch: SampleWatch | None
    """Is told of each sample; None for no one."""

    def may_be_tables(self) -> bool:
        """Whether samples may be plain, and nobody looks at them one by one."""
        making = self.making
        is_untouched = making.transform is None and making.make is None and self.watch is None
        return is_untouched and self.source.may_be_plain()

    def failed(self, row: Row, error: Exception) -> StreamingError:
        """What to raise from an error of the user's own code about a sample."""
        return failed_sample(error, self.making.name, self.key(row))

    def keys_of_batch(self, number: int) -> list[SampleKey]:
        """The keys of one of the worker's batches, counted from the first of the pass."""
        partition, catalog = self.make_partition(), self.source.catalog
        positions = partition.batch(number)
        places = (positions, *catalog.places(partition.sequence.ids(positions)))
        rows = zip(*(numbers.tolist() for numbers in places), strict=True)
        return [self.key((position, shard, index, 0)) for position, shard, index in rows]

    @contextmanager
    def begun(self) -> Iterator[Reading]:
        """Read. Shards are fetched ahead meanwhile, if they are not all here, and the last use of each is watched for,
        where there is a limit on how many are kept."""
        partition, source = self.make_partition(), self.source
        self.meter.begin_pass(source.readers)
        with ExitStack() as stack:
            source.begin_pass(partition.num_workers * partition.epoch_partition.geometry.ranks_per_node)
            stack.callback(source.end_pass)
            prefetcher = last_uses = None
            if source.is_remote:
                ahead = self.predownload
                lookahead = Lookahead(ahead, ahead) if ahead else _default_lookahead(partition, source.catalog)
                needs = _shard_needs(partition, source.catalog)
                prefetcher = stack.enter_context(closing(ShardPrefetcher(needs, source.fetch_ahead, lookahead)))
            if source.cache_limit is not None:
                last_uses = stack.enter_context(closing(LastUses(_node_plan(partition, source.catalog))))
            yield Reading(partition, self, prefetcher, last_uses)


class Reading:
    """One worker's pass under way.

    Args:
        partition: What is read.
        of_pass: How.
        prefetcher: Fetches shards ahead; None where they are all here.
        last_uses: Tells of shards' last uses; None where nobody need know.
    """

    def __init__(
        self,
        partition: WorkerPartition,
        of_pass: WorkerPass,
        prefetcher: ShardPrefetcher | None,
        last_uses: LastUses | None,
    ) -> None:
        self.batch_size = partition.epoch_partition.geometry.batch_size
        self._partition = partition
        self._source = of_pass.source
        self._meter = of_pass.meter
        self._near_end = of_pass.near_end
        self._prefetcher = prefetcher
        self._last_uses = last_uses
        self._batches_read = 0

    def windows(self) -> Iterator[_Window]:
        """The worker's samples in order, some batches at a time."""
        # A partition of one batch that is not full has all of its end in sight.
        near_end_at = (self._partition.num_samples() - self.batch_size) * _NEAR_END
        samples_before, is_near_end, catalog = 0, False, self._source.catalog
        for window in _located(self._partition, catalog):
            self._meter.begin_window(catalog, window.shards, self.batch_size)
            samples_before += len(window.positions)
            if not is_near_end and samples_before > near_end_at:
                is_near_end = True
                self._near_end()
            yield window

    def last_uses(self, shards: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which of the samples that follow the batches read so far are this worker's last of their shards.

        Args:
            shards: The shard of each of these samples.

        Returns:
            None where nobody need know.
        """
        if self._last_uses is None:
            return None
        return self._last_uses.among(shards, self._batches_read * self.batch_size)

    def reader(self, shard: int) -> ShardReader:
        """The reader of a shard whose sample is next; opened, and fetched, if need be."""
        readers = self._source.readers
        reader = readers.get(shard)
        if reader is None:
            return self._open(shard)
        readers.move_to_end(shard)
        return reader

    def let_go(self, shard: int) -> None:
        """Take note that the worker's last sample of a shard was read."""
        self._source.let_go(shard)
        if self._prefetcher is not None:
            self._prefetcher.moved_on()

    def about_to_read(self, batches: int) -> None:
        """Fetch ahead as if so many more batches had been read: they are about to be, all at once."""
        if self._prefetcher is not None:
            self._prefetcher.reader_at((self._batches_read + max(0, batches)) * self.batch_size)

    def have_read(self, batches: int) -> None:
        """Take note that so many more batches were read, and are not handed out yet."""
        self._batches_read += batches
        self.about_to_read(0)
        for finished in () if self._last_uses is None else self._last_uses.finished(self._batches_read):
            self._source.finish(finished)
        self._source.rest()

    def _open(self, shard: int) -> ShardReader:
        began = perf_counter_ns()
        if self._prefetcher is not None:
            self._prefetcher.retry_if_failed(shard)
        reader = self._source.open(shard)
        self._meter.opened(began, self._source.catalog, shard)
        if self._prefetcher is not None:
            self._prefetcher.moved_on()
        return reader


def _default_lookahead(partition: WorkerPartition, catalog: Catalog) -> Lookahead:
    readers = partition.num_workers * partition.epoch_partition.geometry.ranks_per_node
    return default_lookahead(
        partition.epoch_partition.geometry.batch_size, catalog.num_samples / len(catalog.shards), readers
    )


class WorkerSamples(Iterator[Any]):
    """Iterates over a worker's samples of a pass and counts them. It ends when nobody holds it any more.

    Args:
        of_pass: What to read.
    """

    def __init__(self, of_pass: WorkerPass) -> None:
        self.samples_read = 0
        """Samples handed out so far."""
        make = of_pass.making.make
        samples = _read(of_pass) if make is None else _make(of_pass, make)
        self._samples = samples if of_pass.watch is None else of_pass.watch.samples(samples)

    def __next__(self) -> Any:
        sample = next(self._samples)
        self.samples_read += 1
        return sample

    def close(self) -> None:
        """Hand out no more, and stop fetching ahead."""
        self._samples.close()


def _read(of_pass: WorkerPass) -> Generator[Any, None, None]:
    source, transform, watch = of_pass.source, of_pass.making.transform, of_pass.watch
    with of_pass.begun() as reading:
        readers, latest = source.readers, -1
        for window in reading.windows():
            rows = _rows(window, reading)
            for position, shard, index, events in rows if watch is None else watch.rows(rows):
                # At every sample anew: what the caller does between two of them may close shards.
                reader = readers.get(shard) if shard == latest else reading.reader(shard)
                if reader is None:
                    reader = reading.reader(shard)
                latest = shard
                try:
                    sample = reader[index]
                except FormatError as error:
                    raise source.named(error, shard) from error
                if events:
                    _note(events, shard, reading)
                if transform is not None:
                    try:
                        sample = transform(sample, position)
                    except Exception as error:
                        raise of_pass.failed((position, shard, index, events), error) from error
                yield sample


def _make(of_pass: WorkerPass, make: KeyedSample) -> Generator[Any, None, None]:
    """The samples as a subclass of the dataset makes them, each while its shard is open."""
    source, watch = of_pass.source, of_pass.watch
    with of_pass.begun() as reading:
        first_ids = source.catalog.first_sample_of_shard
        for window in reading.windows():
            rows = _rows(window, reading)
            for position, shard, index, events in rows if watch is None else watch.rows(rows):
                reading.reader(shard)
                source.is_in_pass = True
                try:
                    sample = make(int(first_ids[shard]) + index, position)
                except Exception as error:
                    raise of_pass.failed((position, shard, index, events), error) from error
                finally:
                    source.is_in_pass = False
                if events:
                    _note(events, shard, reading)
                yield sample


def _note(events: int, shard: int, reading: Reading) -> None:
    if events & _LAST_USE:
        reading.let_go(shard)
    if events & _BATCH_ENDS:
        reading.have_read(batches=1)


def _rows(window: _Window, reading: Reading) -> Iterator[Row]:
    """Position, shard, index within it, and what happens after it, sample by sample."""
    events = np.zeros(len(window.positions), np.uint8)
    events[reading.batch_size - 1 :: reading.batch_size] = _BATCH_ENDS
    are_last = reading.last_uses(window.shards)
    if are_last is not None:
        events[are_last] |= _LAST_USE
    columns = window.positions.tolist(), window.shards.tolist(), window.indexes.tolist(), events.tobytes()
    return zip(*columns, strict=True)


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
        """Positions of this worker's samples in the epoch's sequence, some batches at a time."""
        batches = range(self.worker, self.epoch_partition.num_batches(), self.num_workers)
        for window in _some_at_a_time(batches, self.epoch_partition.geometry.batch_size):
            positions = self.epoch_partition.batches(window, self.node, self.rank_of_node).reshape(-1)
            # Only an epoch's last batch may be short of samples.
            yield positions if positions[-1] >= 0 else positions[positions >= 0]

    def batch(self, number: int) -> NDArray[np.int64]:
        """Positions of one of this worker's batches, counted from its first."""
        batches = np.array([self.worker + number * self.num_workers])
        positions = self.epoch_partition.batches(batches, self.node, self.rank_of_node).reshape(-1)
        return positions[positions >= 0]

    def windows_of_node(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Global batches, and positions of the samples that this node reads of each, of shape (batches, samples).

        Where the last batch is short of samples, its positions are -1.
        """
        ranks = range(self.epoch_partition.geometry.ranks_per_node)
        for window in _some_at_a_time(
            range(self.epoch_partition.num_batches()), self.epoch_partition.geometry.batch_size * len(ranks)
        ):
            yield window, np.hstack([self.epoch_partition.batches(window, self.node, rank) for rank in ranks])

    def num_samples(self) -> int:
        """About how many samples :meth:`windows` gives, exactly if the last batch is full."""
        return (
            len(range(self.worker, self.epoch_partition.num_batches(), self.num_workers))
            * self.epoch_partition.geometry.batch_size
        )


def _some_at_a_time(batches: range, samples_per_batch: int) -> Iterator[NDArray[np.int64]]:
    step = max(1, _WINDOW_SAMPLES // samples_per_batch)
    return (np.asarray(batches[first : first + step], np.int64) for first in range(0, len(batches), step))


class _Window(NamedTuple):
    """Some consecutive samples of a worker, by position and place. Arrays of equal length."""

    positions: NDArray[np.int64]
    shards: NDArray[np.int64]
    indexes: NDArray[np.int64]


def _located(partition: WorkerPartition, catalog: Catalog) -> Iterator[_Window]:
    """The worker's samples in order, some batches at a time."""
    for positions in partition.windows():
        shards, indexes = catalog.places(partition.sequence.ids(positions))
        yield _Window(positions, shards, indexes)


def _shard_needs(partition: WorkerPartition, catalog: Catalog) -> Iterator[ShardNeed]:
    """Shards in the order in which this worker first needs them, once per window of samples."""
    samples_before = 0
    for window in _located(partition, catalog):
        shards, first_uses = np.unique(window.shards, return_index=True)
        for use in np.argsort(first_uses, kind="stable"):
            yield ShardNeed(samples_before + int(first_uses[use]), int(shards[use]))
        samples_before += len(window.positions)


def _node_plan(partition: WorkerPartition, catalog: Catalog) -> NodePlan:
    """What the worker reads, and what all workers of its node read together."""

    def of_node() -> Iterator[BatchShards]:
        for batches, positions in partition.windows_of_node():
            is_sample = positions >= 0
            ids = partition.sequence.ids(positions[is_sample])
            yield BatchShards(np.repeat(batches, is_sample.sum(axis=1)), catalog.shard_of(ids))

    return NodePlan(
        worker=partition.worker,
        num_workers=partition.num_workers,
        num_shards=len(catalog.shards),
        num_samples=partition.epoch_partition.num_batches()
        * partition.epoch_partition.geometry.batch_size
        * partition.epoch_partition.geometry.ranks_per_node,
        own=lambda: (window.shards for window in _located(partition, catalog)),
        of_node=of_node,
    )
