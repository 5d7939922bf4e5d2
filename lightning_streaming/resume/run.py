"""A run as a value: it gives a position in the data its meaning.

Run          an order on given machines, with the epochs under way: where an epoch ends, what follows, what is saved
Epoch        one epoch of a run, from a cursor: its sequence, and which rank reads which part of it
resume       the run that continues from a saved position

Nothing here reads a file, logs, or changes, apart from cached answers; the caller that begins a pass keeps the run that
:meth:`Run.at` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from textwrap import indent
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_streaming.errors import ConfigError, StateError, StateMismatchError
from lightning_streaming.escaping import Lines
from lightning_streaming.resume.appended_data import Growth, growth_since
from lightning_streaming.resume.mismatch import Difference, format_differences, mismatch_message, phase_hints
from lightning_streaming.resume.run_order import RunOrder, RunRequest, order_of, resolved_order
from lightning_streaming.resume.saved_fields import DAMAGED
from lightning_streaming.resume.saved_fingerprint import SavedStream
from lightning_streaming.resume.state import Cursor, EpochStart, SavedPosition
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.batching import Batched
from lightning_streaming.sequence.partition import BatchGeometry, Partition, epoch_geometry, rank_layout
from lightning_streaming.sequence.settings import OrderSettings, ResolvedOrder
from lightning_streaming.sequence.skips import (
    NOTHING_SKIPPED,
    BatchRange,
    EpochPartitions,
    Skipped,
    SkippedPositions,
    SkippedRange,
    TrainProgress,
    first_epoch_not_skipped,
    locate_batch_ranges,
    skipped_in_epoch,
)
from lightning_streaming.world import World

OnMismatch = Literal["error", "warn"]
"""How to handle a saved position whose data or order settings have changed since: refuse it, or warn and continue."""
_ALWAYS_ALLOWED = 2**16
"""Canonical nodes that an epoch may have for any number of samples: these take seconds at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Epoch:
    """One epoch of a run, from a cursor."""

    order: RunOrder
    """The order of the run; that of the epoch is ``order.of_epoch(cursor.epoch)``."""
    cursor: Cursor
    """The position where it begins or continues."""
    composed: BatchGeometry
    """The geometry that its batches are composed for; another one than ``machines`` after a resume in the epoch."""
    machines: BatchGeometry
    """The nodes and ranks that read it, and their batch size."""
    skipped: SkippedPositions = NOTHING_SKIPPED
    """Positions that it leaves out."""

    @classmethod
    def of_pass(cls, order: RunOrder, start: EpochStart) -> Epoch:
        """Return the epoch of a pass that another process has begun."""
        world = start.world
        machines = BatchGeometry(
            num_nodes=world.num_nodes, ranks_per_node=world.ranks_per_node, batch_size=start.batch_size
        )
        return cls(order=order, cursor=start.cursor, composed=start.geometry, machines=machines, skipped=start.skipped)

    def pass_start(self, world: World) -> EpochStart:
        """Return the facts that another process needs to read its part."""
        settings = self.order.settings
        return EpochStart(
            cursor=self.cursor,
            world=world,
            batch_size=self.machines.batch_size,
            geometry=self.composed,
            shuffle_seed=settings.shuffle_seed,
            num_canonical_nodes=settings.num_canonical_nodes,
            shuffle_block_size=settings.shuffle_block_size,
            skipped=self.skipped,
            growth=self.order.growth,
        )

    @property
    def sequence(self) -> Batched:
        """Return the sequence of the whole epoch, to count with, like :meth:`RunOrder.sequence`."""
        epoch = self.cursor.epoch
        return self.order.of_epoch(epoch).sequence(self.composed, epoch)

    @cached_property
    def partition(self) -> Partition:
        """Return how the rest of the epoch is divided among ranks and batches."""
        return self._partition(self.cursor.sample_in_epoch)

    @property
    def whole(self) -> Partition:
        """Return how the whole epoch is divided among ranks and batches."""
        return self._partition(0)

    def _partition(self, start: int) -> Partition:
        return Partition(
            sequence=Skipped(self.sequence, self.skipped) if self.skipped.runs else self.sequence,
            start=start,
            geometry=self.machines,
            layout=rank_layout(self.order.settings, self.machines, self.composed),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """The machines that read, and their batches; replicated ranks count once."""

    num_nodes: int
    ranks_per_node: int
    batch_size: int | None = None
    """Samples per batch on each rank; None until it is known."""
    drop_last: bool = False
    """True if a last batch that is not full is left out."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks over all nodes."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """All facts that the meaning of a cursor depends on."""

    order: RunOrder
    machines: Machines
    skip: tuple[BatchRange, ...]
    """Global batches to leave out."""
    initial_nodes: int
    """Nodes of the run's first start."""
    resumed_from_nodes: int | None = None
    """The saved number of these nodes in a resumed run, which may continue with the sequence for these nodes."""
    composed: Mapping[int, BatchGeometry] = field(default_factory=dict)
    """The geometry that the batches of each epoch under way are composed for; it does not change within the epoch."""
    placed: Mapping[BatchRange, SkippedRange] = field(default_factory=dict)
    """The positions of ranges to skip that no longer change."""
    located: Mapping[BatchRange, SkippedRange] | None = None
    """The positions of all ranges, for these machines and this count of batches."""
    counted: TrainProgress | None = None
    """The position from which a trainer counts batches."""
    may_end_early: bool = False
    """True if the data may have shrunk, so that a cursor may be beyond its end."""
    reader: str = ""
    """Name of the reader in messages, where there are several, like "train loader 'text'"."""
    missing: Mapping[str, SavedStream] = field(default_factory=dict)
    """With a schedule: streams that were read and are missing now, as they were saved; they may be added again."""

    @property
    def settings(self) -> ResolvedOrder:
        """The settings of the order."""
        return self.order.settings

    @property
    def message_prefix(self) -> str:
        """The prefix of messages."""
        return f"{self.reader}: " if self.reader else ""

    def epoch(self, cursor: Cursor) -> Epoch:
        """Return the epoch of a cursor, from there."""
        return Epoch(
            order=self.order,
            cursor=cursor,
            composed=self._composed(cursor),
            machines=self._geometry(),
            skipped=self.skipped(cursor.epoch),
        )

    def can_read(self, epoch: int) -> bool:
        """Return whether limits of a mixture allow an epoch to be read; if not, its beginning raises."""
        return self.order.of_epoch(epoch).source.has_epoch(epoch)

    def entries_of(self, epoch: int) -> int:
        """Return the samples, or packs, that a whole epoch reads."""
        return len(self._sequence(Cursor(epoch, 0)))

    def unskipped(self, cursor: Cursor) -> Partition:
        """Return the division of the whole epoch of a cursor if nothing is skipped."""
        return Epoch(order=self.order, cursor=cursor, composed=self._composed(cursor), machines=self._geometry()).whole

    def batches_left(self, cursor: Cursor) -> int:
        """Return the batches from a cursor to the end of its epoch, on each rank."""
        return self.epoch(cursor).partition.num_batches(self.machines.drop_last)

    def batches_in_epoch(self, cursor: Cursor) -> int:
        """Return the batches of the whole epoch of a cursor, on each rank, without those that are skipped."""
        # Of the cursor, and not of the epoch's start: an epoch under way keeps the batches composed on other machines.
        return self.epoch(cursor).whole.num_batches(self.machines.drop_last)

    def samples_before(self, cursor: Cursor) -> int:
        """Return the samples of its epoch that are read before a cursor, over all ranks."""
        return self._kept(cursor).entries_before(cursor.sample_in_epoch)

    def normalise(self, cursor: Cursor) -> Cursor:
        """Return the same position, with the end of an epoch written as the beginning of the next that has batches.

        An epoch that cannot be read, as limits of a mixture are reached, is an error only when it is read.

        Raises:
            StateError: The position is beyond the epoch's end, and the data may not have changed.
        """
        if not self.can_read(cursor.epoch):
            return cursor
        sequence, kept = self._sequence(cursor), self._kept(cursor)
        consumed = kept.end if self._ends_early(cursor) else cursor.sample_in_epoch
        position = sequence.resume_position(consumed, self.machines.num_ranks, self.message_prefix)
        if kept.entries_before(position) < len(kept) and self._has_batches(cursor.epoch):
            return Cursor(cursor.epoch, position)
        epoch = first_epoch_not_skipped(self.skipped_ranges.values(), cursor.epoch + 1)
        while self.can_read(epoch) and not self._has_batches(epoch):
            epoch = first_epoch_not_skipped(self.skipped_ranges.values(), epoch + 1)
        return Cursor(epoch, 0)

    def advance(self, cursor: Cursor, samples: int) -> Cursor:
        """Return the cursor after reading some samples from a cursor, counted over all ranks.

        Samples that are read twice to keep the ranks even do not count. For example 8 ranks that begin at 1 of 53
        samples read 56, up to 57; no state of a whole pass counts so many.
        """
        if samples == 0:
            return cursor
        kept = self._kept(cursor)
        entries = kept.entries_before(cursor.sample_in_epoch) + samples
        too_many = entries - len(kept)
        repeats = too_many if too_many >= self.machines.num_ranks else 0
        return Cursor(cursor.epoch, int(kept.positions_after(np.asarray(entries))) + repeats)

    def saved(self, cursor: Cursor) -> SavedPosition:
        """Return a cursor with all facts that its meaning depends on."""
        keeps_batches = self.order.is_composed and cursor.sample_in_epoch
        order = self.order.of_epoch(cursor.epoch)
        fingerprint = order.fingerprint(order.phases_begun(cursor, self._composed(cursor)) if order.plan else 0)
        return SavedPosition(
            cursor=cursor,
            shuffle_seed=self.settings.shuffle_seed,
            num_canonical_nodes=self.settings.num_canonical_nodes,
            initial_physical_nodes=self.initial_nodes,
            geometry=self._composed(cursor) if keeps_batches else None,
            fingerprint=fingerprint.saved_with(self.missing),
            skipped={str(batches): span for batches, span in self.skipped_ranges.items()},
            streams=fingerprint.stream_list,
        )

    def differences(self, saved: SavedPosition) -> list[Difference]:
        """Return the changes of data and order since a saved position; of phases, only those that had begun there."""
        if saved.fingerprint is None:
            return []
        order = self.order.of_epoch(saved.cursor.epoch)
        plan = order.plan
        # By the saved schedule, not the cursor: the position may have been moved since, across borders of phases.
        known = list(saved.fingerprint.schedule or ())
        begun = 0 if plan is None else len(plan.phases) if saved.cursor.epoch else plan.num_begun(known)
        changes = order.fingerprint(begun).differences(saved.fingerprint, saved.streams)
        if plan is not None and begun and not saved.cursor.epoch:
            last, stop = plan.phases[begun - 1], plan.planned_stops[begun - 1]
            if last.cut is not None and last.cut < saved.cursor.sample_in_epoch <= stop:
                changes.append(Difference(f"schedule.{last.name}.ended_at", "'absent'", repr(last.cut)))
        return changes

    def growth_in_passes(self, cursor: Cursor) -> Growth:
        """Return the growth where, with a schedule, the next pass of each followed stream reads all shards."""
        mixture, names = self.order.mixture, self.order.catalog.stream_names
        if mixture is None:
            return self.order.growth
        begun = self._sequence(cursor).parts_begun(cursor.sample_in_epoch)
        drawn = mixture.drawn_until(cursor.epoch, begun)
        return self.order.growth.in_passes(
            {
                stream: mixture.passes(names[stream]).next_beginning(drawn.get(names[stream], 0))
                for stream in self.order.growth.followed
            }
        )

    def phase(self, cursor: Cursor) -> str | None:
        """Return the name of the phase that is read at a cursor; None without a schedule."""
        order = self.order.of_epoch(cursor.epoch)
        if order.plan is None:
            return None
        ended, phases = order.phases_ended(cursor, self._composed(cursor)), order.plan.phases
        return phases[min(ended, len(phases) - 1)].name

    def check_schedule(self, cursor: Cursor) -> None:
        """Check that the schedule can be read from a cursor, if there is one.

        Raises:
            ConfigError: A stream is missing, or would be read more often than it may.
        """
        order = self.order.of_epoch(cursor.epoch)
        plan = order.plan
        if plan is None:
            return
        # To keep ranks even, the last ranks may repeat samples up to that far before the end.
        most = max(len(self._sequence(cursor)) - 2 * self.machines.num_ranks, 0)
        needed = Cursor(cursor.epoch, min(cursor.sample_in_epoch, most))
        cuts = [number for number, phase in enumerate(plan.phases) if phase.cut is not None]
        first = min([order.phases_ended(needed, self._composed(cursor)), *cuts])
        order.check_schedule(first)

    def on(self, machines: Machines) -> Run:
        """Return the same run on other machines."""
        return self if machines == self.machines else replace(self, machines=machines, located=None)

    def at(self, cursor: Cursor) -> Run:
        """Return the run whose epoch of ``cursor``, a normalised one, is under way."""
        # A caller that uses batches later than they are yielded may still be in the epoch before.
        before = {epoch: geometry for epoch, geometry in self.composed.items() if epoch == cursor.epoch - 1}
        composed = {**before, cursor.epoch: self._composed(cursor)}
        return replace(self, composed=composed, located=self.skipped_ranges)

    def counted_from(self, counted: TrainProgress) -> Run:
        """Return the run with batches counted as a trainer does; once it has begun, positions of ranges stay."""
        has_begun = self.counted is not None and counted.steps
        return replace(self, counted=counted, placed=self.skipped_ranges if has_begun else self.placed, located=None)

    def without_data(self) -> dict[str, Any]:
        """Return the fields except the order, for another process, which restores that with :func:`run_again`."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "order"}
        return {**own, "growth": self.order.growth}

    @cached_property
    def skipped_ranges(self) -> Mapping[BatchRange, SkippedRange]:
        """Return the positions of every range; while the batch size is unknown, of those in ``placed`` only.

        A range is located with the global batch of the run that first had it in ``skip``. A saved position holds its
        location, so that a run with other ranks or batch sizes leaves out the same samples.
        """
        new = [batches for batches in self.skip if batches not in self.placed]
        if not new or self.machines.batch_size is None:
            return self.placed
        if self.located is not None:
            return self.located
        counted = self.counted or TrainProgress()
        now = Cursor(*counted.place)
        partitions = EpochPartitions(
            now=self.unskipped(now),
            later=self.unskipped(Cursor(now.epoch + 1, 0)),
            drop_last=self.machines.drop_last,
            of_epoch=(lambda epoch: self.unskipped(Cursor(epoch, 0))) if self.order.differs_by_epoch else None,
        )
        located = locate_batch_ranges(new, self.placed, counted, partitions)
        return {batches: self.placed.get(batches) or located[batches] for batches in self.skip}

    def skipped(self, epoch: int) -> SkippedPositions:
        """Return the positions of an epoch that are skipped."""
        return skipped_in_epoch(self.skipped_ranges.values(), epoch) if self.skip else NOTHING_SKIPPED

    def skipped_too_late(self, cursor: Cursor) -> list[BatchRange]:
        """Return new ranges that were read before the run was at ``cursor``."""
        ranges = self.skipped_ranges.items()
        return [batches for batches, (_, end) in ranges if batches not in self.placed and end <= cursor]

    def why_moved(self, cursor: Cursor) -> Iterator[str]:
        """Yield a sentence if the data has shrunk, so that a cursor is beyond its epoch's end."""
        if self._ends_early(cursor):
            read, size = cursor.sample_in_epoch, self._sequence(cursor).num_samples
            yield f"epoch {cursor.epoch} has ended: {read} of its samples were read, and it has {size} now"

    def why_uneven(self, cursor: Cursor) -> Iterator[str]:
        """Yield a sentence if an epoch's global batches were composed for other machines, and are divided now."""
        composed, mine = self._composed(cursor), self._geometry().global_batch_size
        if self.order.is_composed and composed.global_batch_size != mine:
            yield (
                f"{self.message_prefix}epoch {cursor.epoch} continues with global batches of "
                f"{composed.global_batch_size} samples, composed for {composed.num_nodes} nodes of "
                f"{composed.ranks_per_node} ranks; read in steps of {mine}, these are not whole until the next epoch"
            )

    def _ends_early(self, cursor: Cursor) -> bool:
        return self.may_end_early and cursor.sample_in_epoch > self._sequence(cursor).most_counted(
            self.machines.num_ranks
        )

    def _has_batches(self, epoch: int) -> bool:
        """Return whether an epoch has a batch that is not skipped."""
        skipped = self.skipped(epoch)
        if not skipped.runs:
            return True
        return self.epoch(Cursor(epoch, 0)).partition.num_batches(self.machines.drop_last) > 0

    def _sequence(self, cursor: Cursor) -> Batched:
        geometry = self._composed(cursor)
        try:
            return self.order.of_epoch(cursor.epoch).sequence(geometry, cursor.epoch)
        except ConfigError as error:
            if geometry is not self.composed.get(cursor.epoch) or self.may_end_early:
                raise
            # The order is the saved one, and its batches were composed for these machines when it was saved.
            raise StateError(
                f"{self.message_prefix}'batch_geometry' of the saved position does not fit the batches of this order: "
                f"{error.words}",
                hint=DAMAGED,
            ) from error

    def _kept(self, cursor: Cursor) -> Skipped:
        """Return the epoch of a cursor without skipped positions."""
        return Skipped(self._sequence(cursor), self.skipped(cursor.epoch))

    def _composed(self, cursor: Cursor) -> BatchGeometry:
        """Return the geometry that the batches of a cursor's epoch are made for."""
        if cursor.sample_in_epoch and cursor.epoch in self.composed:
            return self.composed[cursor.epoch]
        return epoch_geometry(self.settings, self._geometry(), self.resumed_from_nodes)

    def _geometry(self) -> BatchGeometry:
        machines, batch_size = self.machines, self.machines.batch_size
        if batch_size is None:
            if self.order.is_composed:
                raise ConfigError(
                    f"batching_method={self.settings.batching_method!r} composes batches of a known size",
                    hint="pass batch_size= to the dataset, or iterate through a StreamingDataLoader that has one",
                    option="batch_size",
                )
            batch_size = 1  # the sequence is the same for all
        return BatchGeometry(
            num_nodes=machines.num_nodes, ranks_per_node=machines.ranks_per_node, batch_size=batch_size
        )


class Resumed(NamedTuple):
    """A run that continues from a saved position."""

    run: Run
    differences: Sequence[Difference]
    """Changes of data and order since."""
    growth: Sequence[str] = ()
    """Notes on appended data."""

    def notes(self) -> Iterator[str]:
        """Yield warnings for the user."""
        if self.differences:
            changed = indent(format_differences(self.differences), "  ")
            yield Lines(f"{self.run.message_prefix}resuming although data or order have changed:\n{changed}")


def new_run(
    request: RunRequest, catalog: Catalog, machines: Machines, initial_nodes: int | None = None, reader: str = ""
) -> Run:
    """Return a run from its beginning.

    Args:
        request: The user's options.
        catalog: The data.
        machines: The machines that read it.
        initial_nodes: Nodes of an earlier first start; they determine the number of canonical nodes.
        reader: Name of the reader in messages, where there are several.

    Raises:
        ConfigError: The weights, or the canonical nodes, do not fit this data.
    """
    initial_nodes = initial_nodes or machines.num_nodes
    order = resolved_order(request, request.settings.resolved(initial_nodes), catalog)
    _check_canonical_nodes(order, ConfigError, "num_canonical_nodes is", "set it lower")
    order.check_schedule()
    return Run(order=order, machines=machines, skip=request.skip, initial_nodes=initial_nodes, reader=reader)


def resume(
    saved: SavedPosition,
    request: RunRequest,
    catalog: Catalog,
    machines: Machines,
    on_mismatch: OnMismatch = "error",
    reader: str = "",
    checkpoint: str = "CHECKPOINT",
) -> Resumed:
    """Return the run that continues from a saved position, with its seed and canonical nodes.

    Args:
        saved: The position to continue from.
        request: The user's current options. Ranges to skip keep their saved positions.
        catalog: The current data.
        machines: The current machines.
        on_mismatch: How to handle changes of data or order.
        reader: Name of the reader in messages, where there are several.
        checkpoint: Name of the file of the saved position in messages.

    Raises:
        ConfigError: The weights do not fit this data.
        StateError: The saved position has more canonical nodes than this data can have.
        StateMismatchError: It belongs to other data or another order.
    """
    prefix = f"{reader}: " if reader else ""
    initial_nodes = saved.initial_physical_nodes or machines.num_nodes
    growth, settings = growth_since(saved.fingerprint, saved.cursor, catalog, request.followed), request.resumed(saved)
    notes = [f"{prefix}{note}" for note in growth.notes(catalog, has_schedule=request.has_phases)]
    composed = {} if saved.geometry is None else {saved.cursor.epoch: saved.geometry}
    then = None  # the order over the data that was read, where it has grown
    if growth.shards:
        then = order_of(request, settings.resolved(initial_nodes), catalog.head(dict(growth.shards)), growth)
        before = Run(
            order=then,
            machines=machines,
            skip=(),
            initial_nodes=initial_nodes,
            resumed_from_nodes=saved.initial_physical_nodes,
            composed=composed,
        )
        growth = before.growth_in_passes(saved.cursor)
    order = resolved_order(request, settings.resolved(initial_nodes), catalog, growth)
    if saved.num_canonical_nodes == request.settings.num_canonical_nodes:
        _check_canonical_nodes(order, ConfigError, "num_canonical_nodes is", "set it lower")
    what = f"{prefix}'num_canonical_nodes' of the saved position is"
    hint = "it is of other data, or was edited: resume from another checkpoint"
    _check_canonical_nodes(order, StateError, what, hint)
    read = {} if order.plan is None or saved.fingerprint is None else saved.fingerprint.streams
    run = Run(
        order=order,
        machines=machines,
        skip=request.skip,
        initial_nodes=initial_nodes,
        resumed_from_nodes=saved.initial_physical_nodes,
        composed=composed,
        placed={batches: saved.skipped[str(batches)] for batches in request.skip if str(batches) in saved.skipped},
        may_end_early=on_mismatch == "warn",
        reader=reader,
        missing={
            name: stream
            for name, stream in read.items()
            if order.plan is not None and name in order.plan.streams and name not in order.catalog.stream_names
        },
    )
    changes = replace(run, order=then or order).differences(saved)
    if changes and on_mismatch == "error":
        are_together = saved.fingerprint is not None and saved.fingerprint.all_streams is not None
        hints = phase_hints(changes, saved.cursor, request.phases, checkpoint)
        raise StateMismatchError(
            message=prefix + mismatch_message(changes, are_together=are_together, phase_hints=hints)
        )
    run.check_schedule(saved.cursor)
    return Resumed(run, changes, notes)


def run_again(request: RunRequest, catalog: Catalog, settings: OrderSettings, brought: Mapping[str, Any]) -> Run:
    """Return a run that another process has begun.

    Args:
        request: The user's options there.
        catalog: The data.
        settings: The settings of that run.
        brought: The result of its :meth:`Run.without_data`.
    """
    assert isinstance(settings, ResolvedOrder), "as of every run"
    own = dict(brought)
    return Run(order=resolved_order(request, settings, catalog, own.pop("growth")), **own)


def settings_of_pass(request: RunRequest, start: EpochStart) -> ResolvedOrder:
    """Return the settings of a pass that another process has begun."""
    seeded = replace(request.settings, shuffle_seed=start.shuffle_seed)
    return seeded.resolved_as(start.num_canonical_nodes, start.shuffle_block_size)


def order_of_pass(request: RunRequest, catalog: Catalog, start: EpochStart) -> RunOrder:
    """Return the order of a pass that another process has begun."""
    return resolved_order(request, settings_of_pass(request, start), catalog, start.growth)


def _check_canonical_nodes(order: RunOrder, error: type[ConfigError] | type[StateError], what: str, hint: str) -> None:
    """Check that there are not many more canonical nodes than samples."""
    nodes, size = order.settings.num_canonical_nodes, order.weights.epoch_size
    most = max(_ALWAYS_ALLOWED, size)
    if nodes > most:
        raise error(f"{what} {nodes}, and an epoch of {size} samples has {most} at most; {hint}")
