"""A run as a value: the meaning of a position in the data, and all questions about it.

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
from lightning_streaming.resume.saved_fingerprint import SavedStream
from lightning_streaming.resume.state import Cursor, EpochStart, SavedPosition
from lightning_streaming.saved_fields import DAMAGED
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
"""What to do about a saved position whose data or order settings have changed since: refuse it, or say so and go on."""
_ALWAYS_FINE = 2**16
"""Canonical nodes that an epoch may have however few its samples: this many take seconds at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Epoch:
    """One epoch of a run, from a cursor."""

    order: RunOrder
    """Of the run; its own is ``order.of_epoch(cursor.epoch)``."""
    cursor: Cursor
    """Where it goes on."""
    composed: BatchGeometry
    """What its batches are made for; not the machines at hand, where these changed in the middle of the epoch."""
    machines: BatchGeometry
    """Who reads it, in batches of which size."""
    skipped: SkippedPositions = NOTHING_SKIPPED
    """What it leaves out."""

    @classmethod
    def of_pass(cls, order: RunOrder, start: EpochStart) -> Epoch:
        """Return the epoch of a pass that another process has begun."""
        world = start.world
        machines = BatchGeometry(
            num_nodes=world.num_nodes, ranks_per_node=world.ranks_per_node, batch_size=start.batch_size
        )
        return cls(order=order, cursor=start.cursor, composed=start.geometry, machines=machines, skipped=start.skipped)

    def pass_start(self, world: World) -> EpochStart:
        """Return the facts that another process needs to read its share."""
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
    """Samples per batch on each rank; None as long as nobody has said."""
    drop_last: bool = False
    """Whether a last batch that is not full is left out."""

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
    """The same of a run that was resumed, which may go on with what these would read."""
    composed: Mapping[int, BatchGeometry] = field(default_factory=dict)
    """What the batches of epochs under way are made for, by epoch: once one has begun, that stays what it was."""
    placed: Mapping[BatchRange, SkippedRange] = field(default_factory=dict)
    """Where the samples of some ranges to skip are, for good."""
    located: Mapping[BatchRange, SkippedRange] | None = None
    """The same of all ranges, for these machines and this count of batches."""
    counted: TrainProgress | None = None
    """Where a trainer counts batches from."""
    may_end_early: bool = False
    """Whether the data may be smaller than it was, and a cursor beyond its end."""
    reader: str = ""
    """What messages call whoever reads it, where there are several: like "train loader 'text'"."""
    gone: Mapping[str, SavedStream] = field(default_factory=dict)
    """Of phases: streams that they have read and that are not there now, as they were saved; they may come back."""

    @property
    def settings(self) -> ResolvedOrder:
        """Return how epochs are ordered."""
        return self.order.settings

    @property
    def message_prefix(self) -> str:
        """Return the prefix of messages."""
        return f"{self.reader}: " if self.reader else ""

    # What follows from a cursor.

    def epoch(self, cursor: Cursor) -> Epoch:
        """Return the epoch of a cursor, from there."""
        return Epoch(
            order=self.order,
            cursor=cursor,
            composed=self._composed(cursor),
            machines=self._geometry(),
            skipped=self.skipped(cursor.epoch),
        )

    def entries_of(self, epoch: int) -> int:
        """Return the samples, or packs, that a whole epoch reads."""
        return len(self._sequence(Cursor(epoch, 0)))

    def unskipped(self, cursor: Cursor) -> Partition:
        """Return how the whole epoch of a cursor is divided if nothing is skipped."""
        return Epoch(order=self.order, cursor=cursor, composed=self._composed(cursor), machines=self._geometry()).whole

    def batches_left(self, cursor: Cursor) -> int:
        """Return the batches from a cursor to the end of its epoch, on each rank."""
        return self.epoch(cursor).partition.num_batches(self.machines.drop_last)

    def batches_in_epoch(self, cursor: Cursor) -> int:
        """Return the batches of the whole epoch of a cursor, on each rank, without those that are skipped."""
        # From the cursor on, and not anew: an epoch under way keeps the batches that it was composed of elsewhere.
        return self.epoch(cursor).whole.num_batches(self.machines.drop_last)

    def samples_before(self, cursor: Cursor) -> int:
        """Return the samples of its epoch, over all ranks, that are read before a cursor."""
        return self._kept(cursor).entries_before(cursor.sample_in_epoch)

    def normalise(self, cursor: Cursor) -> Cursor:
        """Return the same position, with the end of an epoch written as the beginning of the next that has batches.

        Raises:
            StateError: The position is beyond the epoch's end, and the data may not have changed.
        """
        sequence, kept = self._sequence(cursor), self._kept(cursor)
        consumed = kept.end if self._ends_early(cursor) else cursor.sample_in_epoch
        position = sequence.resume_position(consumed, self.machines.num_ranks, self.message_prefix)
        if kept.entries_before(position) < len(kept) and self._has_batches(cursor.epoch):
            return Cursor(cursor.epoch, position)
        epoch = first_epoch_not_skipped(self.skipped_ranges.values(), cursor.epoch + 1)
        while not self._has_batches(epoch):
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
        fingerprint = self.order.of_epoch(cursor.epoch).fingerprint(self._phases_begun(cursor))
        return SavedPosition(
            cursor=cursor,
            shuffle_seed=self.settings.shuffle_seed,
            num_canonical_nodes=self.settings.num_canonical_nodes,
            initial_physical_nodes=self.initial_nodes,
            geometry=self._composed(cursor) if keeps_batches else None,
            fingerprint=fingerprint.saved_with(self.gone),
            skipped={str(one): span for one, span in self.skipped_ranges.items()},
            streams=fingerprint.stream_list,
        )

    def differences(self, saved: SavedPosition) -> list[Difference]:
        """Return the changes of data and order since a saved position; of phases, those that had begun there."""
        if saved.fingerprint is None:
            return []
        order = self.order.of_epoch(saved.cursor.epoch)
        plan = order.plan
        # As the state tells, not as its cursor does: the place may have been moved since, over borders of phases.
        known = list(saved.fingerprint.schedule or ())
        begun = 0 if plan is None else len(plan.phases) if saved.cursor.epoch else plan.num_begun(known)
        found = order.fingerprint(begun).differences(saved.fingerprint, saved.streams)
        if plan is not None and begun and not saved.cursor.epoch:
            last, stop = plan.phases[begun - 1], plan.planned_stops[begun - 1]
            if last.cut is not None and last.cut < saved.cursor.sample_in_epoch <= stop:
                found.append(Difference(f"schedule.{last.name}.ended_at", "'absent'", repr(last.cut)))
        return found

    def _phases_begun(self, cursor: Cursor) -> int:
        order = self.order.of_epoch(cursor.epoch)
        return order.phases_begun(cursor, self._composed(cursor)) if order.plan else 0

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
        return order.phase(cursor, self._composed(cursor)) if order.plan else None

    def check_phases(self, cursor: Cursor) -> None:
        """Check that phases can be read from a cursor.

        Raises:
            ConfigError: A stream is missing, or would be read more often than it may.
        """
        order = self.order.of_epoch(cursor.epoch)
        plan = order.plan
        if plan is None:
            return
        # To keep ranks even, the last of them may read again what lies that far before the end.
        most = max(len(self._sequence(cursor)) - 2 * self.machines.num_ranks, 0)
        needed = Cursor(cursor.epoch, min(cursor.sample_in_epoch, most))
        cuts = [number for number, phase in enumerate(plan.phases) if phase.cut is not None]
        first = min([order.phases_ended(needed, self._composed(cursor)), *cuts])
        order.check_phases(first)

    # The same run elsewhere, or later.

    def on(self, machines: Machines) -> Run:
        """Return the same run on other machines."""
        return self if machines == self.machines else replace(self, machines=machines, located=None)

    def at(self, cursor: Cursor) -> Run:
        """Return the run whose epoch of ``cursor``, a normalised one, is under way."""
        # Whoever consumes batches later than they are handed out may still stand in the epoch before.
        before = {epoch: geometry for epoch, geometry in self.composed.items() if epoch == cursor.epoch - 1}
        composed = {**before, cursor.epoch: self._composed(cursor)}
        return replace(self, composed=composed, located=self.skipped_ranges)

    def counted_from(self, counted: TrainProgress) -> Run:
        """Return the run with batches counted as a trainer does. Ranges located for a trainer that has begun stay."""
        has_begun = self.counted is not None and counted.steps
        return replace(self, counted=counted, placed=self.skipped_ranges if has_begun else self.placed, located=None)

    def without_data(self) -> dict[str, Any]:
        """Return the run without its order, for another process, which restores that with :func:`run_again`."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "order"}
        return {**own, "growth": self.order.growth}

    # What is skipped.

    @cached_property
    def skipped_ranges(self) -> Mapping[BatchRange, SkippedRange]:
        """Return the positions of every range; while the batch size is unknown, of those in ``placed`` only.

        A range is located with the global batch of the run that first had it in ``skip``. A saved position holds its
        location, so that a run with other ranks or batch sizes leaves out the same samples.
        """
        new = [one for one in self.skip if one not in self.placed]
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
        found = locate_batch_ranges(new, self.placed, counted, partitions)
        return {one: self.placed.get(one) or found[one] for one in self.skip}

    def skipped(self, epoch: int) -> SkippedPositions:
        """Return the positions of an epoch that are skipped."""
        return skipped_in_epoch(self.skipped_ranges.values(), epoch) if self.skip else NOTHING_SKIPPED

    def skipped_too_late(self, cursor: Cursor) -> list[BatchRange]:
        """Return new ranges that a run has read before it came to ``cursor``."""
        return [one for one, (_, end) in self.skipped_ranges.items() if one not in self.placed and end <= cursor]

    # What there is to say.

    def why_moved(self, cursor: Cursor) -> Iterator[str]:
        """Yield a sentence if the data has shrunk, so that a cursor is beyond its epoch's end."""
        if self._ends_early(cursor):
            read, size = cursor.sample_in_epoch, self._sequence(cursor).num_samples
            yield f"epoch {cursor.epoch} has ended: {read} of its samples were read, and it has {size} now"

    def why_uneven(self, cursor: Cursor) -> Iterator[str]:
        """Yield a sentence if an epoch's global batches were composed for other machines, and are not read as such."""
        composed, mine = self._composed(cursor), self._geometry().global_batch_size
        if self.order.is_composed and composed.global_batch_size != mine:
            yield (
                f"{self.message_prefix}epoch {cursor.epoch} goes on with global batches of "
                f"{composed.global_batch_size} samples, made for {composed.num_nodes} nodes of "
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
            # The order is the saved one, and its batches were made for these machines when it was saved.
            raise StateError(
                f"{self.message_prefix}'batch_geometry' of the saved position is of no batches of this order: "
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
                    f"batching_method={self.settings.batching_method!r} makes batches of a known size",
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
    """What has changed of data and order since."""
    growth: Sequence[str] = ()
    """What to tell of data that was appended to."""

    def notes(self) -> Iterator[str]:
        """Yield warnings for the user."""
        if self.differences:
            changed = indent(format_differences(self.differences), "  ")
            yield Lines(f"{self.run.message_prefix}resuming although data or order have changed:\n{changed}")


def new_run(
    asked: RunRequest, catalog: Catalog, machines: Machines, initial_nodes: int | None = None, reader: str = ""
) -> Run:
    """Return a run from its beginning.

    Args:
        asked: What the user asked for.
        catalog: The data.
        machines: Who reads it.
        initial_nodes: Nodes of the first start, if that was before; they decide how many canonical nodes there are.
        reader: What messages call it, where there are several.

    Raises:
        ConfigError: The weights, or the canonical nodes asked for, cannot be of this data.
    """
    initial_nodes = initial_nodes or machines.num_nodes
    order = resolved_order(asked, asked.settings.resolved(initial_nodes), catalog)
    _check_canonical_nodes(order, ConfigError, "num_canonical_nodes is", "ask for fewer")
    order.check_phases()
    return Run(order=order, machines=machines, skip=asked.skip, initial_nodes=initial_nodes, reader=reader)


def resume(
    saved: SavedPosition,
    asked: RunRequest,
    catalog: Catalog,
    machines: Machines,
    on_mismatch: OnMismatch = "error",
    reader: str = "",
    checkpoint: str = "CHECKPOINT",
) -> Resumed:
    """Return the run that continues from a saved position, with its seed and canonical nodes.

    Args:
        saved: Where it goes on.
        asked: What the user asks for now. Ranges to skip that were placed before stay there.
        catalog: The data as it is now.
        machines: Who reads it now.
        on_mismatch: What to do if data or order have changed.
        reader: What messages call it, where there are several.
        checkpoint: Where the saved position was read from, as messages call it.

    Raises:
        ConfigError: The weights cannot be of this data.
        StateError: The saved position has more canonical nodes than this data can have.
        StateMismatchError: It belongs to other data or another order.
    """
    told = f"{reader}: " if reader else ""
    initial_nodes = saved.initial_physical_nodes or machines.num_nodes
    growth, settings = growth_since(saved.fingerprint, saved.cursor, catalog, asked.followed), asked.resumed(saved)
    notes = [f"{told}{note}" for note in growth.notes(catalog, has_phases=bool(asked.phases))]
    composed = {} if saved.geometry is None else {saved.cursor.epoch: saved.geometry}
    then = None  # as it was read, where the data has grown
    if growth.shards:
        then = order_of(asked, settings.resolved(initial_nodes), catalog.head(dict(growth.shards)), growth)
        before = Run(
            order=then,
            machines=machines,
            skip=(),
            initial_nodes=initial_nodes,
            resumed_from_nodes=saved.initial_physical_nodes,
            composed=composed,
        )
        growth = before.growth_in_passes(saved.cursor)
    order = resolved_order(asked, settings.resolved(initial_nodes), catalog, growth)
    if saved.num_canonical_nodes == asked.settings.num_canonical_nodes:
        _check_canonical_nodes(order, ConfigError, "num_canonical_nodes is", "ask for fewer")
    what = f"{told}'num_canonical_nodes' of the saved position is"
    _check_canonical_nodes(order, StateError, what, "it is of other data, or was edited: go on from another checkpoint")
    run = Run(
        order=order,
        machines=machines,
        skip=asked.skip,
        initial_nodes=initial_nodes,
        resumed_from_nodes=saved.initial_physical_nodes,
        composed=composed,
        placed={one: saved.skipped[str(one)] for one in asked.skip if str(one) in saved.skipped},
        may_end_early=on_mismatch == "warn",
        reader=reader,
        gone=_gone(saved, order),
    )
    found = replace(run, order=then or order).differences(saved)
    if found and on_mismatch == "error":
        are_together = saved.fingerprint is not None and saved.fingerprint.all_streams is not None
        hints = phase_hints(found, saved.cursor, asked.phases, checkpoint)
        raise StateMismatchError(message=told + mismatch_message(found, are_together=are_together, phase_hints=hints))
    run.check_phases(saved.cursor)
    return Resumed(run, found, notes)


def _gone(saved: SavedPosition, order: RunOrder) -> dict[str, SavedStream]:
    """Return the streams that its phases have read, and that are missing now."""
    if order.plan is None or saved.fingerprint is None:
        return {}
    read = {name: one for name, one in saved.fingerprint.streams.items() if name in order.plan.streams}
    return {name: one for name, one in read.items() if name not in order.catalog.stream_names}


def run_again(asked: RunRequest, catalog: Catalog, settings: OrderSettings, brought: Mapping[str, Any]) -> Run:
    """Return a run that another process has begun.

    Args:
        asked: What the user asked for there.
        catalog: The data.
        settings: Those of that run.
        brought: What its :meth:`Run.without_data` gave.
    """
    assert isinstance(settings, ResolvedOrder), "as of every run"
    of_run = dict(brought)
    return Run(order=resolved_order(asked, settings, catalog, of_run.pop("growth")), **of_run)


def settings_of_pass(asked: RunRequest, start: EpochStart) -> ResolvedOrder:
    """Return the settings of a pass that another process has begun."""
    seeded = replace(asked.settings, shuffle_seed=start.shuffle_seed)
    return seeded.resolved_as(start.num_canonical_nodes, start.shuffle_block_size)


def order_of_pass(asked: RunRequest, catalog: Catalog, start: EpochStart) -> RunOrder:
    """Return the order of a pass that another process has begun."""
    return resolved_order(asked, settings_of_pass(asked, start), catalog, start.growth)


def _check_canonical_nodes(
    order: RunOrder, error: type[ConfigError] | type[StateError], what: str, way_out: str
) -> None:
    """Check that there are not many more canonical nodes than samples."""
    nodes, size = order.settings.num_canonical_nodes, order.weights.epoch_size
    most = max(_ALWAYS_FINE, size)
    if nodes > most:
        raise error(f"{what} {nodes}, and an epoch of {size} samples has {most} at most; {way_out}")
