"""Count what a planned run reads, epoch by epoch: samples and tokens of each stream and phase, repeats, fill, mixing.

Epochs are read in order, all ranks together. Of very long ones a part is counted: the beginning of each interval
between two *ticks*, which then stands for all of it; and of many epochs the first ones, the last of which then stands
for those that follow. :attr:`EpochReads.part` and :attr:`RunReads.rest` say how much was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.resume.state import Cursor
from lightning_streaming.sequence.partition import Partition
from lightning_streaming.sequence.quality import entropy_of_rows
from lightning_streaming.tools.runs.describe import EpochDescription, EpochRows
from lightning_streaming.tools.runs.training_run import EpochSteps, Rest, TracedRun

MOST_SAMPLES = 200_000_000
"""Samples that are counted, of all epochs together."""
_MOST_EPOCHS = 200
"""Epochs that are counted."""
_AT_ONCE = 1 << 19
"""Samples that are looked up together."""
_MOST_TALLIED = 1 << 27
"""Most samples of a run whose reads are counted sample by sample, in two bytes each."""
_TALLIED_AT_ONCE = 1 << 15
"""Reads that are counted together: fewer than two bytes can count, so that an overflow is detected."""
_MIXED_BATCHES = 64
"""Batches of an epoch whose mixing is measured."""
_TICKS = 200
"""Ticks of all epochs together, at least; each has four or more."""
FILL_BINS = 20
"""Ranges of how full packs are, from 0 to 1."""
Progress = Callable[[int], object]
"""Called with the number of samples that were counted or skipped."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedEpoch:
    """An epoch of the run, as far as it is read."""

    described: EpochDescription
    steps: EpochSteps
    """Steps of the batches that are read."""
    first_step: int
    """The trainer's step at its first batch."""

    @property
    def number(self) -> int:
        """Number of the epoch, from 0."""
        return self.described.read.cursor.epoch

    @property
    def partition(self) -> Partition:
        """Division among ranks and batches."""
        return self.described.partition

    @property
    def batches(self) -> int:
        """Batches of each rank that are read."""
        return self.steps.batches

    def step_of(self, batch: Any) -> Any:
        """Return the trainer's step in which a batch is read, counted from the first one that is read; or steps."""
        return self.first_step + self.steps.step_of(batch)

    def edges(self, epochs: int) -> NDArray[np.int64]:
        """Return the batches at its ticks, from 0 to all; of shape (ticks + 1,).

        Args:
            epochs: Epochs of the run.
        """
        ticks = min(max(4, _TICKS // max(1, epochs)), max(1, self.batches))
        return np.linspace(0, self.batches, ticks + 1).astype(np.int64)


def with_end(run: TracedRun, epochs: int | None, steps: int | None) -> tuple[TracedRun, str | None]:
    """Return the run with the end that is planned, and an assumption about that, if any.

    Args:
        run: The run with the end of its trainer.
        epochs: Number of epochs with batches to plan; None for those of the trainer.
        steps: Step to plan up to; None for that of the trainer.
    """
    stop_epoch = run.steps.stop_epoch if epochs is None else run.steps.after(epochs)
    max_steps, assumed = run.steps.max_steps if steps is None else steps, None
    if run.described.has_cut_phase:
        stop_epoch = 1
    if stop_epoch is None and max_steps is None:
        stop_epoch = run.steps.after(1)
        assumed = "the configuration sets neither max_epochs nor max_steps; one epoch is planned, see --epochs, --steps"
    return replace(run, steps=replace(run.steps, stop_epoch=stop_epoch, max_steps=max_steps)), assumed


def planned_epochs(run: TracedRun) -> Iterator[PlannedEpoch]:
    """Yield the epochs of a run that have batches, up to its end."""
    epoch, step, order = run.begins.epoch, run.steps.first_step, run.order
    while run.steps.has(epoch, step):
        if not run.steps.of_epoch(epoch).batches and epoch >= run.steps.first_epoch + len(run.steps.early):
            return  # no later epoch has any
        steps = run.steps.read_in(epoch, step)
        cursor = order.normalise(run.begins if epoch == run.begins.epoch else Cursor(epoch, 0))
        if steps.batches and cursor.epoch == epoch:
            described = replace(run.described, run=order.at(cursor)).epoch(cursor)
            yield PlannedEpoch(described=described, steps=steps, first_step=step)
        epoch, step = epoch + 1, step + len(steps)


class EpochReads:
    """What is read of an epoch; the arrays are exact if ``part`` is 1.

    Args:
        epoch: The epoch.
        edges: Batches at its ticks, of shape (ticks + 1,).
        tokens_of_sample: Tokens of a sample of each stream, if its samples have equally many and are not packed.
        rng: Draws samples to compare the mixing with.
    """

    def __init__(
        self,
        epoch: PlannedEpoch,
        edges: NDArray[np.int64],
        tokens_of_sample: NDArray[np.int64],
        rng: np.random.Generator,
    ) -> None:
        self._epoch, self._tokens_of_sample, self._rng = epoch, tokens_of_sample, rng
        self._phase_stops, self._part_stops = epoch.described.phase_stops, epoch.described.part_stops
        whole = min(epoch.partition.full_batches, epoch.batches)
        self._mixed = set(np.linspace(0, max(0, whole - 1), _MIXED_BATCHES).astype(int).tolist())
        ticks, phases = (len(edges) - 1, len(tokens_of_sample)), (len(self._phase_stops), len(tokens_of_sample))
        self.batches = epoch.batches
        self.part = 1.0
        """Share of the batches that was counted."""
        self.steps = np.where(edges > 0, epoch.step_of(edges - 1) + 1, epoch.first_step)
        """The trainer's step after the last batch before each tick and before the end, of shape (ticks + 1,)."""
        self.samples = np.zeros(ticks, np.int64)
        """Samples between each two ticks of each stream, of shape (ticks, streams)."""
        self.tokens = np.zeros(ticks, np.int64)
        """Their tokens; 0 where they are not known."""
        self.phase_samples = np.zeros(phases, np.int64)
        """Samples of each phase and stream, of shape (phases, streams); one phase without a schedule."""
        self.phase_tokens = np.zeros(phases, np.int64)
        self.fill = np.zeros(FILL_BINS, np.int64)
        """Packs in each of :data:`FILL_BINS` ranges of how full they are."""
        self.room = self.packed = 0
        """Tokens that the counted packs have room for, and that are in them."""
        self.mixing = list[tuple[float, float]]()
        """Entropy of the shards of some global batches, and of as many samples drawn at random of the same part."""

    def count_tick(
        self, tick: int, start: int, stop: int, counted: Callable[[NDArray[np.int64], NDArray[np.int64]], object]
    ) -> None:
        """Count the batches of a tick, or its first ones, which then stand for all of them.

        Args:
            tick: The tick.
            start: Its first batch.
            stop: End of its batches.
            counted: Called with sample ids that are read, and the batch of each.
        """
        end = stop if self.part == 1 else min(stop, start + max(1, round((stop - start) * self.part)))
        size = self._epoch.partition.geometry.global_batch_size * self._epoch.described.rows_per_entry
        each = max(1, _AT_ONCE // max(1, round(size)))
        numbers = (self.samples[tick], self.tokens[tick], self.phase_samples, self.phase_tokens)
        before = [array.copy() for array in numbers]
        for first in range(start, end, each):
            counted(*self._count(tick, first, min(first + each, end)))
        times = (stop - start) / (end - start)
        if times > 1:
            for array, old in zip(numbers, before, strict=True):
                array[...] = old + np.rint((array - old) * times).astype(np.int64)

    def _count(self, tick: int, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count some batches; return the sample ids that are read in them, and the batch of each."""
        described, streams = self._epoch.described, len(self._tokens_of_sample)
        entries, batches = _entries(self._epoch.partition, first, stop)
        rows = described.rows(entries)
        stream = described.run.streams_of(rows.ids)
        tokens, is_first = rows.tokens + self._tokens_of_sample[stream], rows.first_parts
        phase = np.searchsorted(self._phase_stops, entries[rows.entries], side="right")
        key, shape = phase * streams + stream, self.phase_samples.shape
        samples = np.bincount(key[is_first], minlength=self.phase_samples.size).reshape(shape)
        in_tokens = np.bincount(key, tokens, self.phase_samples.size).reshape(shape).astype(np.int64)
        self.phase_samples += samples
        self.phase_tokens += in_tokens
        self.samples[tick] += samples.sum(axis=0)
        self.tokens[tick] += in_tokens.sum(axis=0)
        if len(rows.rooms):
            filled = np.bincount(rows.entries, weights=rows.tokens)
            bins = np.minimum((filled / rows.rooms * FILL_BINS).astype(np.int64), FILL_BINS - 1)
            self.fill += np.bincount(bins, minlength=FILL_BINS)
            self.room, self.packed = self.room + int(rows.rooms.sum()), self.packed + int(filled.sum())
        for batch in sorted(self._mixed.intersection(range(first, stop))):
            self._measure_mixing(rows.ids[batches[rows.entries] == batch], entries[np.searchsorted(batches, batch)])
        return rows.ids[is_first], batches[rows.entries][is_first]

    def _measure_mixing(self, ids: NDArray[np.int64], position: Any) -> None:
        """Compare the shards of a batch, which begins at a position, with those of samples drawn at random."""
        described = self._epoch.described
        number = int(np.searchsorted(self._part_stops, position, side="right"))
        begin = int(self._part_stops[number - 1]) if number else 0
        drawn = np.sort(self._rng.integers(begin, int(self._part_stops[number]), len(ids)))
        random = described.rows(drawn).ids
        random = random if len(random) == len(ids) else self._rng.choice(random, len(ids))
        shards = [described.run.catalog.shard_of(some)[None] for some in (ids, random)]
        self.mixing.append((entropy_of_rows(shards[0]), entropy_of_rows(shards[1])))


class RunReads:
    """What is read of a run, counted epoch by epoch.

    Args:
        run: The run.
        tokens_of_sample: As for :class:`EpochReads`.
    """

    def __init__(self, run: TracedRun, tokens_of_sample: NDArray[np.int64]) -> None:
        catalog = run.catalog
        self._run, self._tokens_of_sample = run, tokens_of_sample
        self._samples_left = MOST_SAMPLES
        self._tally = None if catalog.num_samples > _MOST_TALLIED else Tally(catalog.num_samples)
        self._rng = np.random.default_rng(0)
        self.epochs = list[EpochReads]()
        """The epochs that were counted."""
        self.rest = Rest()
        """What follows, and is taken to be like the last of them."""
        self.first_repeats = dict[int, tuple[int, int]]()
        """Epoch and step in which a sample of a stream is first read again, by stream number, as far as counted."""
        self.most_reads = dict[int, int]()
        """Reads of the sample of a stream that is read most often, by stream number, as far as counted."""
        self.is_tallied = True
        """Whether each read of each sample was counted."""
        self.samples_before = np.zeros(len(catalog.stream_names), np.int64)
        """Samples of each stream that were read before the run resumes; of shape (streams,)."""

    def entries_before(self) -> int:
        """Return about how many samples, or packs, :meth:`count_before` counts."""
        return sum(entries for _, entries, _ in self._epochs_before())

    def count_before(self, progress: Progress = lambda _: None) -> None:
        """Count what was read before the run resumes, as repeats are those of the whole run.

        Earlier epochs are taken to have been read as this run would read them: checkpoints contain neither
        ``limit_train_batches`` nor ``drop_last`` or the geometry of finished epochs.
        """
        for epoch, entries, last in self._epochs_before():
            if not entries and not last:
                continue
            rows = entries * epoch.rows_per_entry
            if rows > self._samples_left:
                self._tally = None
            part = min(1.0, max(self._samples_left, _AT_ONCE) / max(1, rows))
            self._samples_left -= int(rows * part)
            step = max(1, round(_AT_ONCE / epoch.rows_per_entry))
            for start in range(0, entries, step):
                stop = min(start + step, entries)
                end = start + max(1, round((stop - start) * part))
                positions = epoch.partition.sequence.positions(np.arange(start, end))
                self._count_before(epoch.rows(positions), (stop - start) / (end - start))
                progress(stop - start)
            for batch in last:
                self._count_before(epoch.rows(_entries(epoch.partition, batch, batch + 1)[0]), 1)

    def _epochs_before(self) -> Iterator[tuple[EpochDescription, int, range]]:
        """Yield the epochs before the run resumes, the entries that were read of each, and its last uneven batches."""
        run, begins = self._run, self._run.begins
        for number in () if run.saved is None else range(begins.epoch + 1):
            epoch = run.described.epoch(Cursor(number, 0), run.skipped_before(number))
            partition = epoch.partition
            if number == begins.epoch:
                yield epoch, partition.sequence.entries_before(begins.sample_in_epoch), range(0)
                continue
            batches = partition.num_batches(run.order.machines.drop_last)
            batches = batches if run.order.counted is None else run.order.counted.limited(batches)
            full = min(batches, partition.full_batches)
            yield epoch, full * partition.geometry.global_batch_size, range(full, batches)

    def _count_before(self, rows: EpochRows, times: float) -> None:
        """Count rows that stand for so many times as much."""
        ids = rows.ids[rows.first_parts]
        if self._tally is not None:
            self._tally.add(ids)
        streams = np.bincount(self._run.described.streams_of(ids), minlength=len(self.samples_before))
        self.samples_before += np.rint(streams * times).astype(np.int64)

    def is_enough(self) -> bool:
        """Return whether as many samples or epochs were counted as is affordable."""
        return self._samples_left <= 0 or len(self.epochs) >= _MOST_EPOCHS

    def count(self, epoch: PlannedEpoch, edges: NDArray[np.int64], progress: Progress = lambda _: None) -> None:
        """Count an epoch.

        Args:
            epoch: The epoch.
            edges: Batches at its ticks, as for :class:`EpochReads`.
            progress: Called with the samples that are counted or skipped.
        """
        size = epoch.partition.geometry.global_batch_size
        rows = epoch.batches * size * epoch.described.rows_per_entry
        reads = EpochReads(epoch, edges, self._tokens_of_sample, self._rng)
        reads.part = min(1.0, max(self._samples_left, MOST_SAMPLES // 20) / max(1, rows))
        if reads.part < 1:
            self._tally = None
        self._samples_left -= int(rows * reads.part)
        for tick, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
            reads.count_tick(tick, start, stop, lambda ids, batches: self._tally_reads(epoch, ids, batches))
            progress((stop - start) * size)
        self.epochs.append(reads)

    def _tally_reads(self, epoch: PlannedEpoch, ids: NDArray[np.int64], batches: NDArray[np.int64]) -> None:
        """Count each sample, and note when the first of a stream is read again."""
        if self._tally is None:
            return
        self._tally.add(ids)
        if len(self.first_repeats) == len(self.samples_before):
            return
        reads = self._tally.reads[ids]
        repeated = np.flatnonzero(reads > 1)
        if not len(repeated):
            return
        order = repeated[np.argsort(ids[repeated], kind="stable")]
        # Of a sample read twice here the second time counts, unless it was read before.
        is_new = np.r_[True, ids[order][1:] != ids[order][:-1]]
        here = np.diff(np.r_[np.flatnonzero(is_new), len(order)])
        were_read = reads[order[is_new]] > here
        again = np.sort(order[~is_new | np.repeat(were_read, here)])
        streams = self._run.described.streams_of(ids[again])
        for stream, at in zip(*np.unique(streams, return_index=True), strict=True):
            step = epoch.step_of(int(batches[again[at]]))
            self.first_repeats.setdefault(int(stream), (epoch.number, step))

    def finish(self, last: PlannedEpoch) -> None:
        """Work out what follows the last epoch that was counted, and the most reads of each stream."""
        tally, catalog = self._tally, self._run.catalog
        self.rest = self._run.steps.rest(last.number + 1, last.first_step + len(last.steps))
        self.is_tallied = tally is not None and not tally.is_full
        if tally is None:
            self.first_repeats.clear()
            return
        for stream, (first, samples) in enumerate(zip(catalog.first_ids, catalog.samples_per_stream, strict=True)):
            self.most_reads[stream] = int(tally.reads[first : first + samples].max(initial=0))


class Tally:
    """Number of reads of each sample, up to the largest that two bytes hold.

    Args:
        samples: Number of samples.
    """

    def __init__(self, samples: int) -> None:
        self.reads = np.zeros(samples, np.uint16)
        """Reads of each sample."""
        self.is_full = False
        """Whether a sample was read as often as can be counted, or more often."""

    def add(self, ids: NDArray[np.int64]) -> None:
        """Count reads, of which a sample may have several."""
        most, once = np.iinfo(self.reads.dtype).max, self.reads.dtype.type(1)
        for start in range(0, len(ids), _TALLIED_AT_ONCE):
            some = ids[start : start + _TALLIED_AT_ONCE]
            before = self.reads[some]
            np.add.at(self.reads, some, once)  # with another type it takes a hundred times as long
            has_overflowed = self.reads[some] < before
            if has_overflowed.any():
                self.reads[some[has_overflowed]] = most
                self.is_full = True


def _entries(partition: Partition, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions that all ranks read in some global batches, batch after batch, and the batch of each."""
    geometry, full = partition.geometry, partition.full_batches
    size, last = geometry.global_batch_size, min(stop, full)
    whole = np.arange(first * size, last * size)
    positions = [partition.sequence.positions(partition.entries_before + whole)] if len(whole) else []
    batches = [np.repeat(np.arange(first, last), size)] if len(whole) else []
    for batch in range(max(first, full), stop):
        ranks = ((node, rank) for node in range(geometry.num_nodes) for rank in range(geometry.ranks_per_node))
        uneven = np.concatenate([partition.batch(batch, node, rank) for node, rank in ranks])
        positions.append(uneven)
        batches.append(np.full(len(uneven), batch))
    return np.concatenate(positions), np.concatenate(batches)
