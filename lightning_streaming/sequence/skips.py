"""Skipped batches: the step of an epoch's order that leaves positions out, and where these positions are.

Positions are those of the whole epoch. The remaining entries are numbered separately: with positions 2 and 3 skipped,
entry 3 is position 5. So a saved position means the same with and without skipped positions.

Users name ranges of a run's global batches. These are counted over the whole run, from 0, and keep their numbers when
others are skipped. So the number of a batch is the step at which it is trained, without accumulation, plus the batches
skipped before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.sequence.base import SampleSequence, digest_of
from lightning_streaming.sequence.partition import Partition

EpochPosition = tuple[int, int]
"""Epoch, and position in its sequence."""
SkippedRange = tuple[EpochPosition, EpochPosition]
"""From a position up to a later one, exclusive, possibly of another epoch."""

_ENDLESS = 2**62
"""Beyond every sequence."""
_MOST_COUNTED = 256
"""Epochs that are counted individually where they differ; all later ones are assumed to be as long as the next."""


@dataclass(frozen=True)
class SkippedPositions:
    """Runs of one epoch's positions that are skipped.

    Args:
        runs: ``(start, stop)`` in order, none empty, and none touching the next; stop is exclusive, and may lie beyond
            the sequence.
    """

    runs: tuple[tuple[int, int], ...] = ()

    def kept_before(self, position: int) -> int:
        """Return how many positions before this one are kept."""
        return position - sum(min(position, stop) - start for start, stop in self.runs if start < position)

    def positions(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of kept entries, of the same shape; undefined for entries beyond the sequence."""
        if not self.runs:
            return entries
        closed, skipped = self._shifts
        shifted: NDArray[np.int64] = entries + skipped[np.searchsorted(closed, entries, side="right")]
        return shifted

    def position_after(self, entries: int) -> int:
        """Return the position after so many entries: right after the last, before a skipped run."""
        return int(self.positions(np.asarray([entries - 1]))[0]) + 1 if entries else 0

    @cached_property
    def _shifts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The entry after each run, and the positions skipped before and between them: one more of these."""
        starts, stops = np.asarray(self.runs, np.int64).T
        skipped = np.cumsum(stops - starts)
        return starts - np.r_[0, skipped[:-1]], np.r_[0, skipped]


NOTHING_SKIPPED = SkippedPositions()


@dataclass(frozen=True, slots=True, eq=False)
class Skipped(SampleSequence):
    """A sequence without some of its positions.

    Args:
        inner: A sequence whose entries are positions, as those of the batching step are.
        skipped: The positions that are left out.
    """

    inner: SampleSequence
    skipped: SkippedPositions

    def __len__(self) -> int:
        """Return how many positions are kept."""
        return self.skipped.kept_before(len(self.inner))

    def ids(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids of kept positions."""
        return self.inner.ids(self.skipped.positions(entries))

    @property
    def digest(self) -> str:
        """See :class:`~lightning_streaming.sequence.base.SampleSequence`."""
        return digest_of(self.skipped.runs, self.inner.digest) if self.skipped.runs else self.inner.digest

    def positions(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of kept entries."""
        return self.skipped.positions(entries)

    def entries_before(self, position: int) -> int:
        """Return how many positions before this one are kept."""
        return self.skipped.kept_before(position)

    @property
    def end(self) -> int:
        """The position after all positions, skipped ones included."""
        return len(self.inner)


def joined_ranges(ranges: Iterable[SkippedRange]) -> list[SkippedRange]:
    """Return the ranges in order, with those that overlap or touch merged, and without empty ones."""
    joined: list[SkippedRange] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def skipped_in_epoch(ranges: Iterable[SkippedRange], epoch: int) -> SkippedPositions:
    """Return the positions of one epoch that ranges skip."""
    runs = [
        (start if first == epoch else 0, stop if last == epoch else _ENDLESS)
        for (first, start), (last, stop) in joined_ranges(ranges)
        if first <= epoch <= last
    ]
    return SkippedPositions(tuple(run for run in runs if run[0] < run[1]))


def first_epoch_not_skipped(ranges: Iterable[SkippedRange], epoch: int) -> int:
    """Return the first epoch, from this one on, that is not skipped as a whole."""
    for start, (last, _) in joined_ranges(ranges):
        if start <= (epoch, 0) and epoch < last:
            epoch = last
    return epoch


_RANGE = re.compile(r"\s*(\d{1,15})\s*(?:-\s*(\d{1,15})\s*)?", re.ASCII)


class BatchRange(NamedTuple):
    """Global batches of a run, both ends included."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.last > self.first else str(self.first)


def parse_batch_ranges(items: Iterable[int | str], field: str) -> tuple[BatchRange, ...]:
    """Read ranges like "12000-12100", and batches like "12000" or 12000.

    Args:
        items: The user's ranges and batches.
        field: Name of the option in messages.

    Returns:
        The ranges in order.

    Raises:
        ConfigError: A range has another form, ends before it begins, or overlaps another.
    """
    if isinstance(items, str | bytes | bytearray | Mapping) or not isinstance(items, Iterable):
        raise ConfigError(
            f'{field} must be a list of global batches like ["12000-12100", "15000"], but got {short_repr(items)}',
            option=field,
        )
    ranges = sorted(_parse(item, field) for item in items)
    for before, after in pairwise(ranges):
        if after.first <= before.last:
            raise ConfigError(f"{field} has ranges that overlap, {before} and {after}", hint="merge them", option=field)
    return tuple(ranges)


def _parse(item: int | str, field: str) -> BatchRange:
    match = _RANGE.fullmatch(str(item)) if isinstance(item, int | str) and not isinstance(item, bool) else None
    if match is None:
        raise ConfigError(
            f'{field} has ranges of global batches like "12000-12100" or "15000", but got {short_repr(item)}',
            option=field,
        )
    batches = BatchRange(int(match[1]), int(match[2] or match[1]))
    if batches.last < batches.first:
        raise ConfigError(
            f"{field} has {item!r}, which ends before it begins",
            hint=f"write {batches.last}-{batches.first}",
            option=field,
        )
    return batches


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainProgress:
    """The progress of training, from which batches are counted."""

    steps: int = 0
    """Global batches that were trained before ``place``."""
    place: EpochPosition = (0, 0)
    """The position of training."""
    steps_in_epoch: int = 0
    """Global batches that were trained in the epoch of ``place``."""
    limit: int | float = 1.0
    """The most batches of an epoch that are trained: a number, or a fraction of them."""

    def limited(self, batches: int) -> int:
        """Return how many of an epoch's batches are trained: at least one, if it has any."""
        limit = self.limit if isinstance(self.limit, int) else int(batches * self.limit)
        return min(batches, max(limit, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPartitions:
    """Division of the epochs of a run, from their first position and with nothing skipped."""

    now: Partition
    """The epoch from which batches are counted."""
    later: Partition
    """All later epochs."""
    drop_last: bool
    of_epoch: Callable[[int], Partition] | None = None
    """Each later epoch, where they differ."""


def locate_batch_ranges(
    ranges: Sequence[BatchRange],
    known: Mapping[BatchRange, SkippedRange],
    progress: TrainProgress,
    partitions: EpochPartitions,
) -> dict[BatchRange, SkippedRange]:
    """Return the positions of the samples of ranges.

    Args:
        ranges: Ranges to locate; none overlaps another, or a known one.
        known: Ranges that were located before; batches are read without their samples.
        progress: The progress from which batches are counted. Earlier batches become an empty range at its position.
        partitions: Division of the epochs.
    """
    locator = _BatchLocator(known, progress, partitions)
    return {batches: (locator.begin(batches.first), locator.end(batches.last)) for batches in ranges}


class _BatchLocator:
    """Finds the position of a batch by its number, counting from the progress of training without skipped ranges."""

    def __init__(
        self, known: Mapping[BatchRange, SkippedRange], progress: TrainProgress, partitions: EpochPartitions
    ) -> None:
        self._known, self._progress, self._partitions = known, progress, partitions
        last_skipped = max((last for _, (last, _) in known.values()), default=0)
        self._last_counted = (
            last_skipped if partitions.of_epoch is None else max(last_skipped, progress.place[0] + _MOST_COUNTED)
        )
        self._counts: dict[int, int] = {}
        passed = sum(len(batches) for batches, (_, stop) in known.items() if stop <= progress.place)
        self._ahead = [batches for batches, (_, stop) in known.items() if stop > progress.place]
        self._number = progress.steps + passed

    def begin(self, number: int) -> EpochPosition:
        """Return the position at which a batch begins."""
        if number < self._number:
            return self._progress.place
        epoch, entry = self._locate(number)
        sequence = self._partition(epoch).sequence
        return (epoch, int(sequence.positions(np.asarray(entry)))) if entry < len(sequence) else (epoch + 1, 0)

    def end(self, number: int) -> EpochPosition:
        """Return the position at which a batch ends; that of an epoch's last batch is the beginning of the next."""
        if number < self._number:
            return self._progress.place
        epoch, entry = self._locate(number)
        sequence, after = self._partition(epoch).sequence, entry + self._batch_size
        return (epoch, int(sequence.positions_after(np.asarray(after)))) if after < len(sequence) else (epoch + 1, 0)

    def _locate(self, number: int) -> EpochPosition:
        """Return the epoch of a batch, and its first entry among those that are kept there."""
        steps = number - self._number - sum(len(batches) for batches in self._ahead if batches.last < number)
        epoch, position = self._progress.place
        left = self._left()
        if steps < left:
            return epoch, self._partition(epoch).sequence.entries_before(position) + steps * self._batch_size
        steps -= left
        epoch += 1
        while epoch <= self._last_counted and steps >= (here := self._batches(epoch)):
            steps -= here
            epoch += 1
        epochs, batch = divmod(steps, max(self._batches(epoch), 1))
        return epoch + epochs, batch * self._batch_size

    def _left(self) -> int:
        """Return the batches that are trained from the current position to the end of its epoch."""
        epoch, position = self._progress.place
        whole = self._partition(epoch)
        rest = replace(whole, start=min(position, whole.sequence.end))
        left = rest.num_batches(self._partitions.drop_last)
        limited = self._progress.limited(whole.num_batches(self._partitions.drop_last))
        if isinstance(self._progress.limit, int):
            return min(left, max(limited - self._progress.steps_in_epoch, 0))
        entries = limited * self._batch_size - whole.sequence.entries_before(position)
        return min(left, max(-(-entries // self._batch_size), 0))

    @property
    def _batch_size(self) -> int:
        return self._partitions.later.geometry.global_batch_size

    def _batches(self, epoch: int) -> int:
        known = self._counts.get(epoch)
        if known is None:
            known = self._progress.limited(self._partition(epoch).num_batches(self._partitions.drop_last))
            self._counts[epoch] = known
        return known

    def _partition(self, epoch: int) -> Partition:
        partitions = self._partitions
        if epoch == self._progress.place[0]:
            partition = partitions.now
        else:
            partition = partitions.later if partitions.of_epoch is None else partitions.of_epoch(epoch)
        skipped = skipped_in_epoch(self._known.values(), epoch)
        return replace(partition, sequence=Skipped(partition.sequence, skipped))
