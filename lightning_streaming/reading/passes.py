"""The passes over a dataset: the run that is kept between them, where each begins, and how far it has come.

CurrentRun      the run that a dataset is read by, kept from pass to pass; logs what its user must know
Passes          of a dataset: begins one pass after another, and says how far the one under way has come
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.shard_cache import Misses
from lightning_streaming.dataset.bad_samples import BadSamples, BadTally
from lightning_streaming.dataset.sample_key import keys_of_rows
from lightning_streaming.dataset.samples import SampleSource
from lightning_streaming.dataset.transform import Making
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.escaping import package_logger, short_repr
from lightning_streaming.options.bad_samples import BadSamplesConfig
from lightning_streaming.options.debug import DebugConfig
from lightning_streaming.options.packing import Packing
from lightning_streaming.reading.measures import BatchMeter
from lightning_streaming.reading.packs.types import ColumnTypes, stored_types
from lightning_streaming.reading.plan import WorkerPartition, WorkerPass
from lightning_streaming.reading.sample_log import watch_of
from lightning_streaming.reading.transport import PassCounter
from lightning_streaming.reading.worker_samples import WorkerSamples
from lightning_streaming.resume.appended_data import NO_GROWTH, Growth, growth_since
from lightning_streaming.resume.order_files import OrderAhead, shared_order
from lightning_streaming.resume.run import (
    Epoch,
    Machines,
    OnMismatch,
    Run,
    new_run,
    order_of_pass,
    resume,
    run_again,
    settings_of_pass,
)
from lightning_streaming.resume.run_order import RunRequest
from lightning_streaming.resume.state import Cursor, EpochStart, SavedPosition
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.selection.missing_ids import MissingIds
from lightning_streaming.selection.scanning import Watched
from lightning_streaming.sequence.batching import Batched
from lightning_streaming.sequence.draw import Shuffled
from lightning_streaming.sequence.partition import BatchGeometry
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.sequence.weights import ResolvedWeights
from lightning_streaming.units import is_one_of
from lightning_streaming.waits import Shown
from lightning_streaming.world import World

if TYPE_CHECKING:
    from lightning_streaming.reading.dataset import StreamingDataset

_log = package_logger(__name__)
_MIX_STREAMS = ("random", "stratified")
"""Batching methods by which one rank's batch has samples of several streams."""
MakingOf = Callable[[int, int], Making]
"""Says how the samples of an epoch are made, by shuffle seed and epoch."""


class _Called(NamedTuple):
    """How messages call things, where somebody knows."""

    reader: str = ""
    checkpoint: str = "CHECKPOINT"


class CurrentRun:
    """The run that a dataset is read by, as far as it has come in this process.

    Args:
        asked: What the user asked for.
        source: Where the data is known from; looked at only when it is needed.
    """

    def __init__(self, asked: RunRequest, source: SampleSource) -> None:
        self.asked = asked
        self._called = _Called()
        self._source = source
        self._loaded: tuple[SavedPosition, OnMismatch] | None = None
        self._settings = asked.settings
        self._initial_nodes: int | None = None
        self._read_by: tuple[int | None, bool] = asked.batch_size, False
        self._run: Run | None = None  # as long as no pass has begun, only remembered for the next question
        self._brought: Mapping[str, Any] | None = None
        """In a copy: what its original's run was, but for the data."""
        self._has_begun = self._has_told_changes = False
        self._ahead = OrderAhead()

    @property
    def reader(self) -> str:
        """What messages call whoever reads, where there are several: like "train loader 'text'"."""
        return self._called.reader

    @property
    def settings(self) -> OrderSettings:
        """The settings as they are by now: as asked, as saved, or with the defaults that the first pass filled in."""
        return self._settings

    @property
    def initial_nodes(self) -> int | None:
        """Nodes of the run's first start, once a pass or a saved position has said them."""
        return self._initial_nodes

    @property
    def weights(self) -> ResolvedWeights:
        """Each stream's share of the epoch under way, in stream order."""
        if self._run is not None and self._run.settings == self._settings:
            return self._run.order.of_epoch(self._epoch).weights
        catalog = self._source.catalog
        growth = self._growth(catalog)
        return self.asked.resolved_weights(catalog.head(growth.shards_in(self._epoch)), self.settings, growth)

    @property
    def _epoch(self) -> int:
        """The latest that was begun, or where a loaded position lies."""
        composed: Mapping[int, BatchGeometry] = {}
        if self._run is not None:
            composed = self._run.composed
        elif self._brought is not None:
            composed = self._brought["composed"]
        return max(composed, default=0 if self._loaded is None else self._loaded[0].cursor.epoch)

    def _growth(self, catalog: Catalog) -> Growth:
        """How much is read of streams that have grown."""
        if self._brought is not None:
            growth: Growth = self._brought["growth"]
            return growth
        if self._loaded is None:
            return NO_GROWTH
        saved, _ = self._loaded
        return growth_since(saved.fingerprint, saved.cursor, catalog, self.asked.followed)

    def go_on_from(self, other: CurrentRun) -> bool:
        """Whether the same order of the same data was asked for; streams that are followed may be longer by now."""
        if self.asked.of_order() != other.asked.of_order():
            return False
        mine, theirs = self._source.catalog, other._source.catalog
        return mine.stream_names == theirs.stream_names and all(
            now.begins_like(then) if stream in self.asked.followed else now.data_digest == then.data_digest
            for stream, (now, then) in enumerate(zip(mine.indexes, theirs.indexes, strict=True))
        )

    def load(self, saved: SavedPosition, on_mismatch: OnMismatch) -> None:
        """Go on from a saved position. Whether it is of this data is checked when the data is looked at."""
        if not is_one_of(on_mismatch, get_args(OnMismatch)):
            raise ConfigError(
                f"on_mismatch must be one of {', '.join(get_args(OnMismatch))}, but got {short_repr(on_mismatch)}",
                option="on_mismatch",
            )
        asked = self.asked.settings.num_canonical_nodes
        if asked not in (None, 0, saved.num_canonical_nodes):
            told = f"{self.reader}: " if self.reader else ""
            words = "%snum_canonical_nodes=%s gives way to the saved %d"
            _log.warning(words, told, asked, saved.num_canonical_nodes)
        self._loaded, self._initial_nodes = (saved, on_mismatch), saved.initial_physical_nodes
        self._settings, self._run, self._brought = self.asked.resumed(saved), None, None
        self._has_begun = self._has_told_changes = False

    def read_by(self, batch_size: int, drop_last: bool) -> None:
        """Take note of how a loader reads, for whoever asks before it has begun a pass."""
        self._read_by = batch_size, drop_last
        self._run = self._run and self._run.on(replace(self._run.machines, batch_size=batch_size, drop_last=drop_last))

    def call(self, reader: str | None = None, checkpoint: str | None = None) -> None:
        """Let messages call whoever reads so, and the file of a position that is loaded; None leaves it as it is."""
        reader = self.reader if reader is None else reader
        self._called = _Called(reader, self._called.checkpoint if checkpoint is None else checkpoint)
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
        self._run, self._settings, self._initial_nodes = run, run.settings, run.initial_nodes

    def begin(self, cursor: Cursor, world: World, batch_size: int, drop_last: bool) -> EpochStart:
        """Begin a pass at ``cursor``, or where it leads to, and say what there is to say about it.

        Raises:
            ConfigError: A phase needs a stream that is gone, or was cut in an epoch before.
        """
        run = self.on(world, batch_size, drop_last)
        # Not of the cursor: what is skipped has moved that, and was not read.
        read_up_to = None if self._has_begun or self._loaded is None else self._loaded[0].cursor
        late = [] if read_up_to is None else run.skipped_too_late(read_up_to)
        if late:
            words = "%sskip: batches %s have been read already, so nothing is left out for them"
            _log.warning(words, run.message_prefix, ", ".join(map(str, late)))
        cursor = self.normalise(run, cursor)
        run.check_phases(cursor)
        if run.order.mixture is not None:
            run.order.mixture.check_epoch(cursor.epoch)  # here, before threads and workers ask for it
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
            num_nodes=world.num_nodes,
            ranks_per_node=world.ranks_per_node,
            batch_size=self._read_by[0],
            drop_last=self._read_by[1],
        )
        catalog = self._source.catalog
        if self._brought is not None:
            return run_again(self.asked, catalog, self._settings, self._brought)
        if self._loaded is None:
            return new_run(self.asked, catalog, machines, self._initial_nodes, self.reader)
        saved, on_mismatch = self._loaded
        resumed = resume(saved, self.asked, catalog, machines, on_mismatch, *self._called)
        for note in () if self._has_told_changes else resumed.notes():
            _log.warning("%s", note)
        for note in () if self._has_told_changes or world.rank else resumed.growth:
            _log.warning("%s", note)
        self._has_told_changes = True
        return resumed.run

    def epoch_of(self, start: EpochStart) -> Epoch:
        """The epoch of a pass that was begun, here or in the process that has started this one."""
        settings = settings_of_pass(self.asked, start)
        self._settings = settings
        if self._run is None and self._brought is not None:
            # Kept: phases that were cut take long to work out.
            self._run = run_again(self.asked, self._source.catalog, settings, self._brought)
        known = None if self._run is None else self._run.order
        if known is None or known.settings != settings or known.growth != start.growth:
            known = order_of_pass(self.asked, self._source.catalog, start)
        return Epoch.of_pass(known, start)

    def prepare_after(self, start: EpochStart) -> None:
        """Begin to make the order of the epoch after a pass, so that nobody waits for it then."""
        epoch = start.cursor.epoch + 1
        order = self.epoch_of(start).order.of_epoch(epoch)
        if order.can_draw_first():
            self.prepare(order.first_draw(epoch))

    def prepare(self, draw: Shuffled) -> None:
        """Begin to make what will have to be drawn next."""
        self._ahead.prepare(draw)

    def close(self) -> None:
        """Keep no order that was made ahead."""
        self._ahead.close()

    def __getstate__(self) -> dict[str, Any]:
        # A process that is spawned reads the index itself.
        has_begun = self._run is not None and self._run.settings == self._settings
        brought = self._run.without_data() if self._run is not None and has_begun else self._brought
        return {**self.__dict__, "_run": None, "_brought": brought}


def drawn_sequence(epoch: Epoch, will_follow: Callable[[Shuffled], None] = lambda _: None) -> Batched:
    """The sample ids of an epoch by position; a large order is made once on a node, and mapped.

    Args:
        epoch: Which one.
        will_follow: Told what will have to be drawn next, where an epoch is not drawn as a whole.
    """
    number = epoch.cursor.epoch
    return epoch.order.of_epoch(number).drawn(epoch.composed, number, shared_order, will_follow)


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
        run: The run that they are of.
        source: The samples.
        misses: Where each stream's cache notes what was not there, by stream name.
        settings: How they are read.
    """

    def __init__(
        self,
        run: CurrentRun,
        source: SampleSource,
        misses: Mapping[str, Misses],
        settings: PassSettings,
    ) -> None:
        self.run = run
        self._source = source
        self._misses = dict(misses)
        self._settings = settings
        self._next = Cursor(0, 0)
        self._counter = PassCounter()
        self._latest: EpochStart | None = None
        self._handed_out: Cursor | None = None
        self._assigned: WorkerPass | None = None
        self._reading: WorkerSamples | None = None
        self._told = set[str]()
        self._settled_types = dict[str, np.dtype[Any]]()
        """Of packed columns, by name: a pass has those of the passes before."""

    @property
    def catalog(self) -> Catalog:
        """Every shard and sample of the streams, in one numbering."""
        return self._source.catalog

    @property
    def debug(self) -> DebugConfig:
        """The log of samples and the watchdog."""
        return self._settings.debug

    def index_anew(self, stream: str) -> IndexCache:
        """The index of a stream as it is by now; see :meth:`SampleSource.index_anew`."""
        return self._source.index_anew(stream)

    def read_more(self, newer: Mapping[str, IndexCache], num_shards: Mapping[str, int]) -> None:
        """Between two passes: read more shards from now on; see :meth:`SampleSource.read_more`."""
        self._source.read_more(newer, num_shards)

    def say_whose(self, place: str) -> None:
        """Let errors say where the streams are configured, like ``data.val``."""
        self._source.say_whose(place)

    def show_waits(self, shown: Shown) -> None:
        """Show waits for indexes, and for what is worked out of them, in this way."""
        self._source.shown = shown

    def make_ahead(self, watched: Watched) -> None:
        """Make selections and indexes of ids, where that was not done before, with somebody who looks on."""
        self._source.make_ahead(watched)

    def missing_ids(self, watched: Watched) -> list[MissingIds]:
        """See :meth:`~lightning_streaming.dataset.samples.SampleSource.missing_ids`."""
        return list(self._source.missing_ids(watched))

    def has(self, shard: int) -> bool:
        """See :meth:`~lightning_streaming.dataset.samples.SampleSource.has`."""
        return self._source.has(shard)

    def find_changed(self) -> StreamingError | None:
        """See :meth:`~lightning_streaming.dataset.samples.SampleSource.find_changed`."""
        return self._source.find_changed()

    def fixed_bytes(self) -> int:
        """See :meth:`~lightning_streaming.dataset.samples.SampleSource.fixed_bytes`."""
        return self._source.fixed_bytes()

    def may_be_plain(self) -> bool:
        """See :meth:`~lightning_streaming.dataset.samples.SampleSource.may_be_plain`."""
        return self._source.may_be_plain()

    def may_be_joined(self) -> bool:
        """See :meth:`~lightning_streaming.dataset.samples.SampleSource.may_be_joined`."""
        return self._source.may_be_joined()

    def next_cursor(self) -> Cursor:
        """Where the next pass begins."""
        return self._next.passes_later(self._counter.passes_counted())

    def seek(self, cursor: Cursor) -> None:
        """Let the next pass begin at ``cursor``; a pass under way goes on undisturbed, and counts no longer."""
        self._next = cursor
        self._counter.reset(cursor)
        self._latest = self._handed_out = self._reading = self._assigned = None

    def begin(self, world: World, batch_size: int, drop_last: bool = False) -> EpochStart:
        """Begin the next pass and say where; the pass after it is that of the next epoch."""
        self._source.prepare()
        start = self.run.begin(self.next_cursor(), world, batch_size, drop_last)
        self.seek(start.cursor.passes_later(1))
        self._latest = start
        return start

    def begin_in_worker(self, worker: int, world: World, batch_size: int) -> EpochStart:
        """The same in a worker of a plain torch DataLoader, which tells it nothing."""
        start = self.run.begin(self._counter.count_pass(worker), world, batch_size, drop_last=False)
        if worker == 0 and self._counter.passes_counted() == 1:
            self.tell_unsuited(start)
        return start

    def tell_unsuited(self, start: EpochStart) -> None:
        """Say once, on one rank, which settings do not suit the data or the machines."""
        if start.world.rank or "unsuited" in self._told:
            return
        self._told.add("unsuited")
        catalog = self._source.catalog
        ahead = self._settings.predownload if self._source.is_remote else None
        for sentence in _unsuited(self.run.settings, start, catalog, self.run.weights.epoch_size, ahead):
            _log.warning("streams %s: %s", ", ".join(catalog.stream_names[:3]), sentence)

    def tell_mixed_columns(self, start: EpochStart) -> None:
        """Say once, on one rank, where torch's default collate will meet samples of different columns."""
        if start.world.rank or "columns" in self._told:
            return
        self._told.add("columns")
        told = self.mixed_columns(self.run.weights.choose, self.run.settings.batching_method)
        if told and start.batch_size > 1:
            _log.warning("%s", told)

    def mixed_columns(self, shares: Sequence[int], batching_method: str) -> str | None:
        """A sentence where torch's default collate would meet samples of different columns; else None.

        Args:
            shares: Samples that an epoch draws of each stream.
            batching_method: Which samples share a batch.
        """
        if not self._source.has_all_columns():
            return None
        return _mixed_columns(self.catalog, shares, in_a_batch=batching_method in _MIX_STREAMS)

    def of_worker(
        self, making_of: MakingOf, start: EpochStart, worker: int, num_workers: int, *, is_measured: bool = False
    ) -> WorkerPass:
        """What one of a loader's workers, or the only reader there is, reads of a pass that was begun."""
        # Not self, which may hold the pass: it ends with its last user.
        run, source = self.run, self._source

        def make_partition() -> WorkerPartition:
            epoch = run.epoch_of(start)
            return WorkerPartition(
                sequence=drawn_sequence(epoch, run.prepare),
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
            near_end=partial(run.prepare_after, start),
            meter=meter,
            watch=watch_of(self._settings.debug, source, start, worker),
            pack=run.asked.pack,
            types=self._types(run.asked.pack),
            bad=self._bad_samples(start, worker, meter, is_measured),
            threads=self._settings.threads,
        )

    def _types(self, packing: Packing | None) -> ColumnTypes | None:
        if packing is None:
            return None
        source = self._source
        return ColumnTypes(packing, lambda: stored_types(packing, source.catalog), self._settled_types)

    def _bad_samples(self, start: EpochStart, worker: int, meter: BatchMeter, is_measured: bool) -> BadSamples | None:
        if not self._settings.bad.replaces:
            return None
        tally, in_packs = None if is_measured else self.bad_tally(start), self.run.asked.pack is not None
        found = meter.found_bad
        return BadSamples(self._settings.bad, self._source, start, worker, in_packs=in_packs, found=found, tally=tally)

    def bad_tally(self, start: EpochStart) -> BadTally | None:
        """Counts the bad samples of a pass for who consumes it; None where they are errors."""
        return BadTally(self._settings.bad, start, self._told) if self._settings.bad.replaces else None

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

    def hand_out(self, start: EpochStart, end: Cursor) -> None:
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
