"""The run of a dataset and its position, from pass to pass: RunState owns both, and logs what the user must know."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import package_logger, short_repr
from lightning_streaming.resume.appended_data import NO_GROWTH, growth_since
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
from lightning_streaming.resume.run_order import RunRequest, resolved_order
from lightning_streaming.resume.state import Cursor, EpochStart, SavedPosition
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.batching import Batched
from lightning_streaming.sequence.draw import Shuffled
from lightning_streaming.sequence.partition import BatchGeometry
from lightning_streaming.sequence.phases import Mix, WeightChange
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.sequence.weights import ResolvedWeights
from lightning_streaming.units import is_one_of, plain_number
from lightning_streaming.world import World

_log = package_logger(__name__)


class Data(Protocol):
    """The data of a run, read when it is first needed."""

    @property
    def catalog(self) -> Catalog:
        """Return every shard and sample of the streams."""

    def prepare(self) -> None:
        """Get ready to read, before workers start."""


def _checked_mix(weights: Mapping[str, float], names: Sequence[str]) -> Mix:
    """Return weights by name.

    Raises:
        ConfigError: A stream is unknown, or a weight is invalid.
    """
    numbers = {str(name): plain_number(weight) for name, weight in weights.items()}
    for name, number in numbers.items():
        if name not in names:
            raise ConfigError(
                f"set_weights names stream {name!r}, and the streams are {', '.join(map(repr, names))}",
                option="weights",
                stream=name,
            )
        if number is None or number < 0:
            raise ConfigError(
                f"the weight of stream {name!r} must be a finite number that is not negative, but is "
                f"{short_repr(weights[name])}",
                option="weights",
                stream=name,
            )
    mix = tuple((name, float(number)) for name, number in sorted(numbers.items()) if number)
    if not mix or not math.isfinite(sum(number for _, number in mix)):
        raise ConfigError("set_weights needs a weight above 0, and a finite sum", option="weights")
    return mix


class SharedPassCounter(Protocol):
    """Counts the passes that workers of a plain DataLoader begin."""

    def reset(self, cursor: Cursor) -> None:
        """Count passes from ``cursor``."""

    def count_pass(self, worker: int) -> Cursor:
        """Begin a worker's next pass, and return where it begins."""

    def passes_counted(self) -> int:
        """Return the passes begun since the last reset."""


class _Labels(NamedTuple):
    """Names in messages."""

    reader: str = ""
    checkpoint: str = "CHECKPOINT"


class RunState:
    """The run of a dataset and its position: the one owner of both in a process.

    It knows where the next pass begins, where the pass under way began, and up to where a loader has yielded it. What
    a trainer counts over several loaders is not here, nor are the batches that a loader has yielded and a trainer has
    not used yet.

    Args:
        request: The user's options.
        data: The data, which is read when it is first needed.
        counter: Counts the passes that workers of a plain ``torch`` DataLoader begin, in memory that they share.
    """

    def __init__(self, request: RunRequest, data: Data, counter: SharedPassCounter) -> None:
        self.request = request
        self._labels = _Labels()
        self._data = data
        self._counter = counter
        self._loaded: tuple[SavedPosition, OnMismatch] | None = None
        self._settings = request.settings
        self._initial_nodes: int | None = None
        self._read_by: tuple[int | None, bool] = request.batch_size, False
        self._run: Run | None = None  # as long as no pass has begun, only remembered for the next question
        self._brought: Mapping[str, Any] | None = None
        """In a copy: the fields of its original's run, without the data."""
        self._has_begun = self._has_reported_changes = False
        self._latest_uneven: str | None = None
        """The latest warning that batches are not whole."""
        self._ahead = OrderAhead()
        self._next = Cursor(0, 0)
        self._latest: EpochStart | None = None
        self._yielded: Cursor | None = None
        self.moves = 0
        """Number of times that the position was set, also by passes that began: state of earlier positions is stale."""

    @property
    def reader(self) -> str:
        """Name of the reader in messages, where there are several: like "train loader 'text'"."""
        return self._labels.reader

    @property
    def settings(self) -> OrderSettings:
        """The current settings: as requested, as saved, or with the defaults that the first pass filled in."""
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
        catalog, growth = self._data.catalog, NO_GROWTH
        if self._brought is not None:
            growth = self._brought["growth"]
        elif self._loaded is not None:
            saved, _ = self._loaded
            growth = growth_since(saved.fingerprint, saved.cursor, catalog, self.request.followed)
        return self.request.resolved_weights(catalog.head(growth.shards_in(self._epoch)), self.settings, growth)

    @property
    def _epoch(self) -> int:
        """Return the latest epoch that was begun, or that of a loaded position."""
        composed: Mapping[int, BatchGeometry] = {}
        if self._run is not None:
            composed = self._run.composed
        elif self._brought is not None:
            composed = self._brought["composed"]
        return max(composed, default=0 if self._loaded is None else self._loaded[0].cursor.epoch)

    def continues(self, other: RunState) -> bool:
        """Return whether this is the same order of the same data; streams that are followed may have grown."""
        if self.request.of_order() != other.request.of_order():
            return False
        mine, theirs = self._data.catalog, other._data.catalog
        return mine.stream_names == theirs.stream_names and all(
            now.begins_like(then) if stream in self.request.followed else now.data_digest == then.data_digest
            for stream, (now, then) in enumerate(zip(mine.indexes, theirs.indexes, strict=True))
        )

    def load(self, saved: SavedPosition, on_mismatch: OnMismatch) -> None:
        """Continue from a saved position. Whether it belongs to this data is checked when the data is next read."""
        if not is_one_of(on_mismatch, get_args(OnMismatch)):
            raise ConfigError(
                f"on_mismatch must be one of {', '.join(get_args(OnMismatch))}, but got {short_repr(on_mismatch)}",
                option="on_mismatch",
            )
        option = self.request.settings.num_canonical_nodes
        if option not in (None, 0, saved.num_canonical_nodes):
            prefix = f"{self.reader}: " if self.reader else ""
            words = "%snum_canonical_nodes=%s gives way to the saved %d"
            _log.warning(words, prefix, option, saved.num_canonical_nodes)
        self._loaded, self._initial_nodes = (saved, on_mismatch), saved.initial_physical_nodes
        changes = () if saved.fingerprint is None else saved.fingerprint.weights_set
        self.request = replace(self.request, weights_set=changes)
        self._settings, self._run, self._brought = self.request.resumed(saved), None, None
        self._has_begun = self._has_reported_changes = False
        self.seek(saved.cursor)

    def set_weights(
        self, weights: Mapping[str, float], cursor: Cursor, world: World, from_step: int | None = None
    ) -> WeightChange:
        """Set the weights of the mixture steps that begin at or after a cursor, in this epoch and in later ones.

        Args:
            weights: Weights of the streams that are read from there on, by name; only ratios count.
            cursor: The position; nothing after it has been read.
            world: Nodes and ranks.
            from_step: The first of these steps, if not the next one.

        Returns:
            The weights, with the mixture step from which on they hold.

        Raises:
            ConfigError: There is no mixture with phases, a stream is unknown, a weight is invalid, the step has begun
                or is beyond the epoch, or a stream would be read more often than it may.
        """
        run = self.on(world)
        mixture, names = run.order.of_epoch(cursor.epoch).mixture, run.order.catalog.stream_names
        if mixture is None:
            raise ConfigError(
                "weights can be set in a run with a schedule, or with options of mixing",
                hint="set mixing.longest_step: they take effect at borders of mixture steps",
                option="mixing",
            )
        mix = _checked_mix(weights, names)
        stops = run.epoch(cursor).sequence.part_stops()
        step = int(np.searchsorted(np.concatenate([[0], stops[:-1]]), cursor.sample_in_epoch, side="left"))
        if from_step is not None:
            if not step <= from_step < len(stops):
                steps = f"epoch {cursor.epoch} has steps 0 to {len(stops) - 1}"
                now = f"{steps}, and the next one to begin is {step}" if step < len(stops) else f"{steps}, all begun"
                raise ConfigError(
                    f"set_weights got from_step={from_step}, and {now}",
                    hint="name a step of the epoch that has not begun, or leave from_step out for the next one",
                    option="from_step",
                )
            step = from_step
        at = (cursor.epoch, step) if step < len(stops) else (cursor.epoch + 1, 0)
        change = WeightChange(epoch=at[0], step=at[1], mix=mix)
        kept = tuple(known for known in self.request.weights_set if (known.epoch, known.step) < at)
        request = replace(self.request, weights_set=(*kept, change))
        changed = replace(run, order=resolved_order(request, run.settings, self._data.catalog, run.order.growth))
        changed.check_schedule(cursor)
        self.request, self._run = request, changed
        self._ahead.close()
        return change

    def as_begun(self, run: Run) -> Run:
        """Return a run without the weights that it has set."""
        if not self.request.weights_set:
            return run
        request = replace(self.request, weights_set=())
        return replace(run, order=resolved_order(request, run.settings, self._data.catalog, run.order.growth))

    def read_by(self, batch_size: int, drop_last: bool) -> None:
        """Set how a loader reads, for questions before its first pass."""
        self._read_by = batch_size, drop_last
        self._run = self._run and self._run.on(replace(self._run.machines, batch_size=batch_size, drop_last=drop_last))

    def set_labels(self, reader: str | None = None, checkpoint: str | None = None) -> None:
        """Set the names of the reader and of the loaded checkpoint in messages; None leaves them unchanged."""
        reader = self.reader if reader is None else reader
        self._labels = _Labels(reader, self._labels.checkpoint if checkpoint is None else checkpoint)
        self._run = self._run and replace(self._run, reader=reader)

    def on(self, world: World, batch_size: int | None = None, drop_last: bool | None = None) -> Run:
        """Return the run as read by these machines. The index is read at the first call.

        Args:
            world: Nodes and ranks, replication divided out.
            batch_size: Samples per batch on each rank; None for what is known.
            drop_last: Whether a last batch that is not full is left out; None for what is known.

        Raises:
            StateMismatchError: A position was loaded that belongs to other data or another order.
        """
        run = self._run
        # The number of nodes fixes the order when the first pass begins, and not at an earlier question.
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
        """Continue with this run, which has begun, or counts batches from a position of the trainer."""
        self._run, self._settings, self._initial_nodes = run, run.settings, run.initial_nodes

    def next_cursor(self) -> Cursor:
        """Return where the next pass begins."""
        return self._next.passes_later(self._counter.passes_counted())

    def seek(self, cursor: Cursor) -> None:
        """Let the next pass begin at ``cursor``. A pass under way continues, and no longer counts."""
        self._next = cursor
        self._counter.reset(cursor)
        self._latest = self._yielded = None
        self.moves += 1

    def began(self) -> Cursor:
        """Return where the pass under way began, or where the next one begins if there is none."""
        passes = self._counter.passes_counted()
        if passes:
            return self._next.passes_later(passes - 1)
        return self._next if self._latest is None else self._latest.cursor

    def note_yielded(self, start: EpochStart, end: Cursor) -> None:
        """Note that a loader has yielded a pass up to ``end``; ignored if another pass has begun since."""
        if start is self._latest:
            self._yielded = end

    def yielded(self) -> Cursor | None:
        """Return up to where a loader has yielded the pass under way; None without a loader or without such a pass."""
        return None if self._counter.passes_counted() else self._yielded

    def counts_in_workers(self) -> bool:
        """Return whether workers of a plain DataLoader have begun passes since the position was set."""
        return bool(self._counter.passes_counted())

    def begin(self, world: World, batch_size: int, drop_last: bool = False) -> EpochStart:
        """Begin the next pass, and return where; the pass after it reads the next epoch.

        Raises:
            ConfigError: The schedule needs a stream that was removed, or was cut in an earlier epoch.
        """
        self._data.prepare()
        start = self._begin_at(self.next_cursor(), world, batch_size, drop_last)
        self.seek(start.cursor.passes_later(1))
        self._latest = start
        return start

    def begin_in_worker(self, worker: int, world: World, batch_size: int) -> EpochStart:
        """Begin the next pass in a worker of a plain DataLoader, which has no loader of ours to coordinate it."""
        return self._begin_at(self._counter.count_pass(worker), world, batch_size, drop_last=False)

    def is_first_in_workers(self, worker: int) -> bool:
        """Return whether the pass that a worker of a plain DataLoader has just begun is the first of all."""
        return worker == 0 and self._counter.passes_counted() == 1

    def _begin_at(self, cursor: Cursor, world: World, batch_size: int, drop_last: bool) -> EpochStart:
        """Begin a pass at ``cursor``, or where it leads to, and log what the user must know."""
        run = self.on(world, batch_size, drop_last)
        # Not the cursor: skipped positions have moved that, and were not read.
        read_up_to = None if self._has_begun or self._loaded is None else self._loaded[0].cursor
        late = [] if read_up_to is None else run.skipped_too_late(read_up_to)
        if late:
            words = "%sskip: batches %s have been read already, so nothing is left out for them"
            _log.warning(words, run.message_prefix, ", ".join(map(str, late)))
        cursor = self.normalise(run, cursor)
        run.check_schedule(cursor)
        run.order.source.check_epoch(cursor.epoch)  # here, before threads and workers request it
        for why in run.why_uneven(cursor):
            if why != self._latest_uneven:  # paused workers begin the rest of an epoch each time
                _log.warning("%s", why)
            self._latest_uneven = why
        self._has_begun = True
        self.keep(run.at(cursor))
        return run.epoch(cursor).pass_start(world)

    def normalise(self, run: Run, cursor: Cursor) -> Cursor:
        """Return :meth:`Run.normalise`, and warn where the data has shrunk so that the cursor lies beyond its end."""
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
        catalog = self._data.catalog
        if self._brought is not None:
            return run_again(self.request, catalog, self._settings, self._brought)
        if self._loaded is None:
            return new_run(self.request, catalog, machines, self._initial_nodes, self.reader)
        saved, on_mismatch = self._loaded
        resumed = resume(saved, self.request, catalog, machines, on_mismatch, *self._labels)
        for note in () if self._has_reported_changes else resumed.notes():
            _log.warning("%s", note)
        for note in () if self._has_reported_changes or world.rank else resumed.growth:
            _log.warning("%s", note)
        self._has_reported_changes = True
        return resumed.run

    def epoch_of(self, start: EpochStart) -> Epoch:
        """Return the epoch of a pass that was begun here, or in the process that has started this one."""
        settings = settings_of_pass(self.request, start)
        self._settings = settings
        if self._run is None and self._brought is not None:
            # Kept: a schedule with cuts takes long to compute.
            self._run = run_again(self.request, self._data.catalog, settings, self._brought)
        known = None if self._run is None else self._run.order
        if known is None or known.settings != settings or known.growth != start.growth:
            known = order_of_pass(self.request, self._data.catalog, start)
        return Epoch.of_pass(known, start)

    def prepare_after(self, start: EpochStart) -> None:
        """Start drawing the order of the epoch after a pass in the background."""
        epoch = start.cursor.epoch + 1
        order = self.epoch_of(start).order.of_epoch(epoch)
        if order.source.can_draw(1, 0):  # its streams may have been removed
            self.prepare(order.source.shuffled(epoch, 0))

    def prepare(self, draw: Shuffled) -> None:
        """Start drawing an order in the background."""
        self._ahead.prepare(draw)

    def close(self) -> None:
        """Discard orders that were drawn ahead."""
        self._ahead.close()

    def __getstate__(self) -> dict[str, Any]:
        # A process that is spawned reads the index itself.
        has_begun = self._run is not None and self._run.settings == self._settings
        brought = self._run.without_data() if self._run is not None and has_begun else self._brought
        return {**self.__dict__, "_run": None, "_brought": brought}


def drawn_sequence(epoch: Epoch, will_follow: Callable[[Shuffled], None] = lambda _: None) -> Batched:
    """Return the sample ids of an epoch by position; a large order is drawn once per node, and mapped.

    Args:
        epoch: The epoch.
        will_follow: Called with what has to be drawn next, where an epoch is not drawn as a whole.
    """
    number = epoch.cursor.epoch
    return epoch.order.of_epoch(number).drawn(epoch.composed, number, shared_order, will_follow)
