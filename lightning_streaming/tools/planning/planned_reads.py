"""Count what a planned run reads, epoch by epoch: samples and tokens of each stream and phase, repeats, fill, mixing.

Epochs are gone through as a reader would, all ranks together. Of very long ones a part is counted: of each interval
between two *ticks* its beginning, which then stands for all of it; and of many epochs the first ones, the last of which
then stands for those that follow. :attr:`EpochReads.part` and :attr:`RunReads.rest` say how much was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.reading.passes import drawn_sequence, passes_of
from lightning_streaming.resume.run import Epoch
from lightning_streaming.resume.state import Cursor
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.batchings import Batched
from lightning_streaming.sequence.packing.packed import PackedEpoch, Rows, rows_of, rows_per_entry
from lightning_streaming.sequence.partition import Partition
from lightning_streaming.sequence.phased import Phased
from lightning_streaming.sequence.quality import entropy_of_rows
from lightning_streaming.tools.runs.training_run import EpochSteps, TracedRun

_TICKS = 200
"""Of all epochs together, at least; each has four or more."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedEpoch:
    """An epoch of the run, as far as it is read."""

    number: int
    read: Epoch
    sequence: Batched
    """Its ids by position."""
    steps: EpochSteps
    """Of its batches that are read."""
    first_step: int
    """The trainer's step at its first batch."""
    is_last: bool
    """Whether the run ends in it."""

    @property
    def partition(self) -> Partition:
        """How it is divided among ranks and batches."""
        return self.read.partition

    @property
    def batches(self) -> int:
        """Batches of each rank that are read."""
        return self.steps.batches

    @property
    def stop_step(self) -> int:
        """The trainer's step after it."""
        return self.first_step + len(self.steps)

    def step_of(self, batch: Any) -> Any:
        """The trainer's step in which a batch is read, counted from the first that is read of the epoch; or steps."""
        return self.first_step + self.steps.step_of(batch)

    def edges(self, epochs: int) -> NDArray[np.int64]:
        """Batches at its ticks, from 0 to all; of shape (ticks + 1,).

        Args:
            epochs: Of the run, if somebody knows.
        """
        ticks = min(max(4, _TICKS // max(1, epochs)), max(1, self.batches))
        return np.linspace(0, self.batches, ticks + 1).astype(np.int64)


class Rest(NamedTuple):
    """What is left of a run after an epoch."""

    epochs: int = 0
    """Those that have batches."""
    batches: int = 0
    steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """Where a run ends; what comes first counts."""

    stop_epoch: int | None
    """The epoch before which it ends."""
    max_steps: int | None
    assumed: str | None = None
    """What nobody said."""

    def cut(self, of_epoch: EpochSteps, step: int) -> EpochSteps:
        """What is read of an epoch that begins at a step: maybe less, as the run ends.

        Args:
            of_epoch: All of it.
            step: The trainer's step at its first batch.
        """
        left = len(of_epoch) if self.max_steps is None else max(0, self.max_steps - step)
        if left >= len(of_epoch):
            return of_epoch
        return replace(of_epoch, batches=of_epoch.batches_of(left - 1).stop if left else 0)

    def ends_before(self, epoch: int, step: int) -> bool:
        """Whether the run has ended where an epoch would begin at a step."""
        is_end = self.stop_epoch is not None and epoch >= self.stop_epoch
        return is_end or (self.max_steps is not None and step >= self.max_steps)

    def rest(self, run: TracedRun, epoch: int, step: int) -> Rest:
        """What is left of a run from the beginning of an epoch on.

        Epochs of packs are as long as they are once they are packed; from here on all are taken to be like the first.

        Args:
            run: The run.
            epoch: Which one; not the one in which the run goes on from a checkpoint.
            step: The trainer's step at its first batch.
        """
        found = Rest()
        while epoch < run.steps.first_epoch + len(run.steps.early) and not self.ends_before(epoch, step):
            steps = self.cut(run.steps.of_epoch(epoch), step)
            found = Rest(found.epochs + bool(steps.batches), found.batches + steps.batches, found.steps + len(steps))
            epoch, step = epoch + 1, step + len(steps)
        each = run.steps.of_epoch(epoch)
        if self.ends_before(epoch, step) or not len(each):
            return found
        whole = [] if self.stop_epoch is None else [self.stop_epoch - epoch]
        whole += [] if self.max_steps is None else [(self.max_steps - step) // len(each)]
        epochs = min(whole)
        step += epochs * len(each)
        last = EpochSteps(done=0, batches=0, accumulate=1) if self.ends_before(epoch + epochs, step) else each
        last = self.cut(last, step)
        return Rest(
            found.epochs + epochs + bool(last.batches),
            found.batches + epochs * each.batches + last.batches,
            found.steps + epochs * len(each) + len(last),
        )

    def of_run(self, run: TracedRun) -> Rest:
        """All that a run reads."""
        epoch, step = run.begins.epoch, run.steps.first_step
        if self.ends_before(epoch, step):
            return Rest()
        first = self.cut(run.steps.of_epoch(epoch), step)
        rest = self.rest(run, epoch + 1, step + len(first))
        return Rest(rest.epochs + bool(first.batches), rest.batches + first.batches, rest.steps + len(first))


def extent_of(run: TracedRun, epochs: int | None, steps: int | None) -> RunEnd:
    """Where the run ends that is planned.

    Args:
        run: As its trainer is configured.
        epochs: How many epochs to plan that have batches; None for what the trainer says.
        steps: Up to which step to plan; None for what the trainer says.
    """
    stop_epoch = run.steps.stop_epoch if epochs is None else run.steps.after(epochs)
    max_steps = run.steps.max_steps if steps is None else steps
    mixture = run.order.order.mixture
    if mixture is not None and mixture.is_cut:
        stop_epoch = 1
    if stop_epoch is not None or max_steps is not None:
        return RunEnd(stop_epoch=stop_epoch, max_steps=max_steps)
    told = "the configuration says neither max_epochs nor max_steps; one epoch is planned, see --epochs and --steps"
    return RunEnd(stop_epoch=run.steps.after(1), max_steps=None, assumed=told)


def epochs_of(run: TracedRun, extent: RunEnd) -> Iterator[PlannedEpoch]:
    """The epochs of the run that have batches, one after another; each is drawn when its turn comes.

    Args:
        run: The run.
        extent: Where it ends.
    """
    epoch, step, order = run.begins.epoch, run.steps.first_step, run.order
    while not extent.ends_before(epoch, step):
        whole = run.steps.of_epoch(epoch)
        if not whole.batches and epoch >= run.steps.first_epoch + len(run.steps.early):
            return  # nor has any after it
        steps = extent.cut(whole, step)
        cursor = order.normalise(run.begins if epoch == run.begins.epoch else Cursor(epoch, 0))
        if steps.batches and cursor.epoch == epoch:
            read = order.at(cursor).epoch(cursor)
            yield PlannedEpoch(
                number=epoch,
                read=read,
                sequence=drawn_sequence(read),
                steps=steps,
                first_step=step,
                is_last=extent.ends_before(epoch + 1, step + len(steps)),
            )
        epoch, step = epoch + 1, step + len(steps)


MOST_SAMPLES = 200_000_000
"""Samples that are looked at, of all epochs together."""
_MOST_EPOCHS = 200
"""Epochs that are looked at."""
_AT_ONCE = 1 << 19
"""Samples that are looked up together."""
_MOST_TALLIED = 1 << 27
"""Samples of all streams of which each is counted, in two bytes."""
_TALLIED_AT_ONCE = 1 << 15
"""Reads that are counted together: fewer than a count has room for, so that none passes its end unseen."""
_MIXED_BATCHES = 64
"""Batches of an epoch whose mixing is measured."""
FILL_BINS = 20
"""Ranges of how full packs are, from 0 to 1."""
Told = Callable[[int], object]
"""Is told of samples that were gone through."""


@dataclass(kw_only=True, slots=True, eq=False)
class EpochReads:
    """What is read of an epoch; arrays of whole numbers, exact where ``part`` is 1."""

    number: int
    batches: int
    steps: NDArray[np.int64]
    """The trainer's step after the last batch before each tick and before the end, of shape (ticks + 1,)."""
    samples: NDArray[np.int64]
    """Between each two ticks of each stream, of shape (ticks, streams)."""
    tokens: NDArray[np.int64]
    """The same of tokens; 0 where they are not known."""
    phase_samples: NDArray[np.int64]
    """Of each phase and stream, of shape (phases, streams); one phase where there are none."""
    phase_tokens: NDArray[np.int64]
    fill: NDArray[np.int64]
    """Packs in each of :data:`FILL_BINS` ranges of how full they are."""
    room: int = 0
    """Tokens that the packs looked at have room for."""
    packed: int = 0
    """Tokens that are in them."""
    part: float = 1.0
    """Which part was looked at."""
    mixing: list[tuple[float, float]] = field(default_factory=list)
    """Entropy of the shards of some global batches, and of as many samples drawn at random of the same stretch."""


@dataclass(kw_only=True, slots=True, eq=False)
class RunReads:
    """What is read of a run."""

    epochs: list[EpochReads]
    """Those that were looked at."""
    rest: Rest = field(default_factory=Rest)
    """What follows, and is taken to be like the last of them."""
    first_repeats: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of streams by place: epoch and step in which one of its samples is first read again, as far as was looked."""
    most_reads: dict[int, int] = field(default_factory=dict)
    """How often the sample of a stream is read that is read most often, as far as was looked."""
    is_tallied: bool = True
    """Whether each read of each sample was counted."""
    samples_before: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of each stream, what was read before the run goes on; of shape (streams,)."""


class Reads:
    """Goes through the epochs of a run.

    Args:
        run: The run.
        tokens_of_sample: Of each stream the tokens of a sample, where all have equally many and they are not packed.
    """

    def __init__(self, run: TracedRun, tokens_of_sample: NDArray[np.int64]) -> None:
        catalog = passes_of(run.loader.dataset).catalog
        self._run, self._catalog, self._tokens = run, catalog, tokens_of_sample
        self.found = RunReads(epochs=[])
        self.samples_left = MOST_SAMPLES
        self._tally = None if catalog.num_samples > _MOST_TALLIED else Tally(catalog.num_samples)
        self._rng = np.random.default_rng(0)
        self.found.samples_before = np.zeros(len(catalog.stream_names), np.int64)

    def look_back(self, told: Told = lambda _: None) -> None:
        """Count what was read before the place at which the run goes on: repeats are those of the whole run.

        Epochs before that are taken to have been read as this run would read them: of ``limit_train_batches``,
        ``drop_last`` and machines no checkpoint tells.

        Args:
            told: Told of samples that are looked at, or passed over.
        """
        for before in self._before():
            self._look_back_at(before, told)

    def samples_before(self) -> int:
        """About how many samples :meth:`look_back` tells of."""
        return sum(before.entries for before in self._before())

    def _before(self) -> Iterator[_Before]:
        """What was read of each epoch before the run goes on from a checkpoint."""
        if self._run.saved is not None:
            yield from map(self._before_in, range(self._run.begins.epoch + 1))

    def _before_in(self, number: int) -> _Before:
        run, begins = self._run, self._run.begins
        read = replace(run.order.epoch(Cursor(number, 0)), skipped=run.skipped_before(number))
        partition = read.partition
        if number == begins.epoch:
            return _Before(read, partition.sequence.entries_before(begins.sample_in_epoch), range(0))
        batches = partition.num_batches(run.order.machines.drop_last)
        batches = batches if run.order.counted is None else run.order.counted.limited(batches)
        full = min(batches, partition.full_batches)
        return _Before(read, full * partition.geometry.global_batch_size, range(full, batches))

    def _look_back_at(self, before: _Before, told: Told) -> None:
        partition, entries = before.read.partition, before.entries
        if not entries and not before.last:
            return
        sequence = drawn_sequence(before.read)
        rows = entries * rows_per_entry(sequence)
        if rows > self.samples_left:
            self._tally = None
        part = min(1.0, max(self.samples_left, _AT_ONCE) / max(1, rows))
        self.samples_left -= int(rows * part)
        step = max(1, round(_AT_ONCE / rows_per_entry(sequence)))
        for start in range(0, entries, step):
            stop = min(start + step, entries)
            seen = start + max(1, round((stop - start) * part))
            positions = partition.sequence.positions(np.arange(start, seen))
            self._count_before(sequence, positions, (stop - start) / (seen - start))
            told(stop - start)
        for batch in before.last:
            self._count_before(sequence, _entries(partition, batch, batch + 1)[0], 1)

    def _count_before(self, sequence: Batched, positions: NDArray[np.int64], times: float) -> None:
        """Count what was read at some positions; it stands for so many times as much."""
        rows = rows_of(sequence, positions)
        ids = rows.ids if rows.pieces is None else rows.ids[rows.pieces.starts == 0]
        if self._tally is not None:
            self._tally.add(ids)
        firsts = np.asarray(self._catalog.first_ids)
        found = np.bincount(np.searchsorted(firsts, ids, side="right") - 1, minlength=len(firsts))
        self.found.samples_before += np.rint(found * times).astype(np.int64)

    def is_enough(self) -> bool:
        """Whether as much was looked at as is affordable."""
        return self.samples_left <= 0 or len(self.found.epochs) >= _MOST_EPOCHS

    def look_at(self, epoch: PlannedEpoch, num_epochs: int, told: Told = lambda _: None) -> EpochReads:
        """Look at an epoch.

        Args:
            epoch: Which one.
            num_epochs: Of the run, if somebody knows.
            told: Told of samples that are looked at, or passed over.
        """
        edges, size = epoch.edges(num_epochs), epoch.partition.geometry.global_batch_size
        rows = epoch.batches * size * rows_per_entry(epoch.sequence)
        part = min(1.0, max(self.samples_left, MOST_SAMPLES // 20) / max(1, rows))
        if part < 1:
            self._tally = None
        self.samples_left -= int(rows * part)
        look = _EpochLook(epoch, self._catalog, self._tokens, edges, self._run.order.order.plan is not None, self._rng)
        for number, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
            seen = stop if part == 1 else min(stop, start + max(1, round((stop - start) * part)))
            each = max(1, _AT_ONCE // max(1, round(size * rows_per_entry(epoch.sequence))))
            before = look.numbers(number)
            for first in range(start, seen, each):
                ids, batches = look.at(number, first, min(first + each, seen))
                self._count(epoch, ids, batches)
            look.stand_for(number, before, (stop - start) / (seen - start))
            told((stop - start) * size)
        look.reads.part = part
        self.found.epochs.append(look.reads)
        return look.reads

    def _count(self, epoch: PlannedEpoch, ids: NDArray[np.int64], batches: NDArray[np.int64]) -> None:
        """Count each sample, and note when the first of a stream comes again."""
        tally = self._tally
        if tally is None:
            return
        firsts = np.asarray(self._catalog.first_ids)
        tally.add(ids)
        if len(self.found.first_repeats) == len(firsts):
            return
        reads = tally.reads[ids]
        places = np.flatnonzero(reads > 1)
        if not len(places):
            return
        order = places[np.argsort(ids[places], kind="stable")]
        # Of one sample read twice here the second time counts, unless it was read before.
        is_new = np.r_[True, ids[order][1:] != ids[order][:-1]]
        here = np.diff(np.r_[np.flatnonzero(is_new), len(order)])
        were_read = reads[order[is_new]] > here
        again = np.sort(order[~is_new | np.repeat(were_read, here)])
        streams = np.searchsorted(firsts, ids[again], side="right") - 1
        for stream, at in zip(*np.unique(streams, return_index=True), strict=True):
            step = epoch.step_of(int(batches[again[at]]))
            self.found.first_repeats.setdefault(int(stream), (epoch.number, step))

    def finish(self, run: TracedRun, extent: RunEnd, last: PlannedEpoch) -> RunReads:
        """What was found.

        Args:
            run: The run.
            extent: Where it ends.
            last: The last epoch that was looked at.
        """
        found, tally, catalog = self.found, self._tally, self._catalog
        found.rest = extent.rest(run, last.number + 1, last.stop_step)
        found.is_tallied = tally is not None and not tally.is_full
        if tally is None:
            found.first_repeats.clear()
            return found
        for stream, (first, samples) in enumerate(zip(catalog.first_ids, catalog.samples_per_stream, strict=True)):
            found.most_reads[stream] = int(tally.reads[first : first + samples].max(initial=0))
        return found


@dataclass(frozen=True, slots=True)
class _Before:
    """What was read of an epoch before the run goes on."""

    read: Epoch
    entries: int
    """Its first ones."""
    last: range
    """Batches after them that are not full, of an epoch that was read to its end."""


class Tally:
    """How often each sample was read, up to a number that two bytes hold.

    Args:
        samples: How many there are.
    """

    def __init__(self, samples: int) -> None:
        self.reads = np.zeros(samples, np.uint16)
        """Of each sample."""
        self.is_full = False
        """Whether some sample was read as often as can be counted, or more often."""

    def add(self, ids: NDArray[np.int64]) -> None:
        """Count reads, of which a sample may have several."""
        most, one = np.iinfo(self.reads.dtype).max, self.reads.dtype.type(1)
        for start in range(0, len(ids), _TALLIED_AT_ONCE):
            some = ids[start : start + _TALLIED_AT_ONCE]
            before = self.reads[some]
            np.add.at(self.reads, some, one)  # of another type it takes a hundred times as long
            is_past = self.reads[some] < before
            if is_past.any():
                self.reads[some[is_past]] = most
                self.is_full = True


class _EpochLook:
    """An epoch that is being looked at."""

    def __init__(
        self,
        epoch: PlannedEpoch,
        catalog: Catalog,
        tokens: NDArray[np.int64],
        edges: NDArray[np.int64],
        has_phases: bool,
        rng: np.random.Generator,
    ) -> None:
        self._epoch, self._catalog, self._tokens, self._rng = epoch, catalog, tokens, rng
        order = epoch.read.order.of_epoch(epoch.number)
        self._stops = order.phase_stops(epoch.read.composed, epoch.number) if has_phases else _END
        self._stretches = _stretches(epoch.sequence)
        self._settings = None if order.packer is None else order.packer.pack.settings()
        whole = min(epoch.partition.full_batches, epoch.batches)
        self._mixed = set(np.linspace(0, max(0, whole - 1), _MIXED_BATCHES).astype(int).tolist())
        shape, phases = (len(edges) - 1, len(tokens)), (len(self._stops), len(tokens))
        self.reads = EpochReads(
            number=epoch.number,
            batches=epoch.batches,
            steps=np.where(edges > 0, epoch.step_of(edges - 1) + 1, epoch.first_step),
            samples=np.zeros(shape, np.int64),
            tokens=np.zeros(shape, np.int64),
            phase_samples=np.zeros(phases, np.int64),
            phase_tokens=np.zeros(phases, np.int64),
            fill=np.zeros(FILL_BINS, np.int64),
        )

    def numbers(self, tick: int) -> list[NDArray[np.int64]]:
        """Copies of what is counted that stands for more where only a part is looked at."""
        of = self.reads
        return [one.copy() for one in (of.samples[tick], of.tokens[tick], of.phase_samples, of.phase_tokens)]

    def stand_for(self, tick: int, before: list[NDArray[np.int64]], times: float) -> None:
        """Let what was counted since stand for so many times as much."""
        if times == 1:
            return
        of = self.reads
        now = (of.samples[tick], of.tokens[tick], of.phase_samples, of.phase_tokens)
        for one, then in zip(now, before, strict=True):
            one[...] = then + np.rint((one - then) * times).astype(np.int64)

    def at(self, tick: int, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count some batches; gives the sample ids that are read in them, and the batch of each."""
        epoch, streams = self._epoch, len(self._tokens)
        entries, batches = _entries(epoch.partition, first, stop)
        rows = rows_of(epoch.sequence, entries)
        of_rows = batches if rows.pieces is None else batches[rows.pieces.packs]
        stream = np.searchsorted(np.asarray(self._catalog.first_ids), rows.ids, side="right") - 1
        tokens = self._tokens[stream] if rows.pieces is None else rows.pieces.lengths
        positions = entries if rows.pieces is None else entries[rows.pieces.packs]
        phase = np.searchsorted(self._stops, positions, side="right")
        begins = np.ones(len(rows.ids), np.bool_) if rows.pieces is None else rows.pieces.starts == 0
        key = phase * streams + stream
        shape = self.reads.phase_samples.shape
        samples = np.bincount(key[begins], minlength=shape[0] * streams).reshape(shape)
        in_tokens = np.bincount(key, weights=tokens, minlength=shape[0] * streams).reshape(shape).astype(np.int64)
        self.reads.phase_samples += samples
        self.reads.phase_tokens += in_tokens
        self.reads.samples[tick] += samples.sum(axis=0)
        self.reads.tokens[tick] += in_tokens.sum(axis=0)
        self._fill(rows)
        self._mix(rows, of_rows, entries, batches, range(first, stop))
        return rows.ids[begins], of_rows[begins]

    def _fill(self, rows: Rows) -> None:
        if rows.pieces is None or self._settings is None:
            return
        rooms = rows.pieces.rooms(self._settings)
        tokens = np.bincount(rows.pieces.packs, weights=rows.pieces.lengths)
        bins = np.minimum((tokens / rooms * FILL_BINS).astype(np.int64), FILL_BINS - 1)
        self.reads.fill += np.bincount(bins, minlength=FILL_BINS)
        self.reads.room += int(rooms.sum())
        self.reads.packed += int(tokens.sum())

    def _mix(
        self,
        rows: Rows,
        of_rows: NDArray[np.int64],
        entries: NDArray[np.int64],
        batches: NDArray[np.int64],
        looked_at: range,
    ) -> None:
        """Measure the mixing of those of some batches that were chosen for it."""
        for batch in sorted(self._mixed.intersection(looked_at)):
            ids = rows.ids[of_rows == batch]
            at = int(entries[np.searchsorted(batches, batch)])
            number = int(np.searchsorted(self._stretches, at, side="right"))
            begin = int(self._stretches[number - 1]) if number else 0
            drawn = self._rng.integers(begin, int(self._stretches[number]), len(ids))
            random = rows_of(self._epoch.sequence, np.sort(drawn)).ids
            random = random if len(random) == len(ids) else self._rng.choice(random, len(ids))
            labels = [self._catalog.shard_of(some)[None] for some in (ids, random)]
            self.reads.mixing.append((entropy_of_rows(labels[0]), entropy_of_rows(labels[1])))


_END = np.array([np.iinfo(np.int64).max])


def _stretches(sequence: Batched) -> NDArray[np.int64]:
    """Where parts of an epoch end that are shuffled each by itself."""
    if isinstance(sequence, PackedEpoch):
        return sequence.part_stops()
    if isinstance(sequence, Phased):
        return sequence.step_stops()
    return np.array([len(sequence)])


def _entries(partition: Partition, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions that all ranks read in some global batches, those of each batch together; and the batch of each."""
    size, full = partition.geometry.global_batch_size, partition.full_batches
    whole = np.arange(first * size, min(stop, full) * size)
    positions = [partition.sequence.positions(partition.entries_before + whole)] if len(whole) else []
    batches = [np.repeat(np.arange(first, min(stop, full)), size)] if len(whole) else []
    for batch in range(max(first, full), stop):
        machines = partition.geometry
        ranks = ((node, rank) for node in range(machines.num_nodes) for rank in range(machines.ranks_per_node))
        found = np.concatenate([partition.batch(batch, node, rank) for node, rank in ranks])
        positions.append(found)
        batches.append(np.full(len(found), batch))
    return np.concatenate(positions), np.concatenate(batches)
