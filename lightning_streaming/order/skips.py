"""Ranges of a run's global batches to skip, as a user writes them, and where their samples are.

Batches are counted over the whole run, from 0, and keep their numbers when others are skipped. So the number of a batch
is the step at which it is trained, without accumulation, and the batches skipped before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.partition import (
    EpochPosition,
    Partition,
    SkippedPositions,
    SkippedRange,
    skipped_in_epoch,
)

_FORM = re.compile(r"\s*(\d{1,15})\s*(?:-\s*(\d{1,15})\s*)?", re.ASCII)


class BatchRange(NamedTuple):
    """Global batches of a run, both ends included."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.last > self.first else str(self.first)


def parse_batch_ranges(asked: Iterable[int | str], field: str) -> tuple[BatchRange, ...]:
    """Read ranges like "12000-12100", and batches like "12000" or 12000.

    Args:
        asked: What the user wrote.
        field: What messages call it.

    Returns:
        The ranges in order.

    Raises:
        ConfigError: One is not written so, ends before it begins, or overlaps another.
    """
    if isinstance(asked, str) or not isinstance(asked, Iterable):
        raise ConfigError(f'{field} must be a list of global batches like ["12000-12100", "15000"], but got {asked!r}')
    ranges = sorted(_parse(one, field) for one in asked)
    for before, after in pairwise(ranges):
        if after.first <= before.last:
            raise ConfigError(f"{field} has ranges that overlap, {before} and {after}; make one of them")
    return tuple(ranges)


def _parse(one: int | str, field: str) -> BatchRange:
    form = _FORM.fullmatch(str(one)) if isinstance(one, int | str) and not isinstance(one, bool) else None
    if form is None:
        raise ConfigError(f'{field} has ranges of global batches like "12000-12100" or "15000", but got {one!r}')
    found = BatchRange(int(form[1]), int(form[2] or form[1]))
    if found.last < found.first:
        raise ConfigError(f"{field} has {one!r}, which ends before it begins; write {found.last}-{found.first}")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainProgress:
    """How far training is: what batches are counted from, and how many of them an epoch has."""

    steps: int = 0
    """Global batches that were trained before ``place``."""
    place: EpochPosition = (0, 0)
    """Where training is."""
    steps_in_epoch: int = 0
    """Those of them that were trained in the epoch of ``place``."""
    limit: int | float = 1.0
    """The most batches of an epoch that are trained: so many, or this part of them."""

    def limited(self, batches: int) -> int:
        """How many of an epoch's batches are trained: at least one, if it has any."""
        limit = self.limit if isinstance(self.limit, int) else int(batches * self.limit)
        return min(batches, max(limit, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPartitions:
    """How the epochs of a run are divided, from their first position and with nothing skipped."""

    now: Partition
    """The one under way where batches are counted from."""
    later: Partition
    """All after it."""
    drop_last: bool


def locate_batch_ranges(
    ranges: Sequence[BatchRange],
    known: Mapping[BatchRange, SkippedRange],
    progress: TrainProgress,
    partitions: EpochPartitions,
) -> dict[BatchRange, SkippedRange]:
    """Where the samples of some ranges are.

    Args:
        ranges: To be placed; none overlaps another, or a known one.
        known: Ranges that were placed before; batches are read without their samples.
        progress: What batches are counted from. What lies before is an empty range at that position.
        partitions: How epochs are divided.
    """
    locator = _BatchLocator(known, progress, partitions)
    return {one: (locator.begin(one.first), locator.end(one.last)) for one in ranges}


class _BatchLocator:
    """Goes from where batches are counted to the batch of a number, over what is known to be skipped."""

    def __init__(
        self, known: Mapping[BatchRange, SkippedRange], progress: TrainProgress, partitions: EpochPartitions
    ) -> None:
        self._known, self._progress, self._partitions = known, progress, partitions
        self._last_skipped_epoch = max((last for _, (last, _) in known.values()), default=0)
        passed = sum(len(one) for one, (_, stop) in known.items() if stop <= progress.place)
        self._ahead = [one for one, (_, stop) in known.items() if stop > progress.place]
        self._number = progress.steps + passed

    def begin(self, number: int) -> EpochPosition:
        """Where a batch begins."""
        if number < self._number:
            return self._progress.place
        epoch, entry = self._locate(number)
        kept = self._partition(epoch).kept
        return (epoch, int(self._skipped(epoch).position_after(entry + 1)) - 1) if entry < kept else (epoch + 1, 0)

    def end(self, number: int) -> EpochPosition:
        """Where a batch ends; the last of an epoch, at the beginning of the next."""
        if number < self._number:
            return self._progress.place
        epoch, entry = self._locate(number)
        partition = self._partition(epoch)
        after = entry + partition.global_batch_size
        return (epoch, self._skipped(epoch).position_after(after)) if after < partition.kept else (epoch + 1, 0)

    def _locate(self, number: int) -> EpochPosition:
        """The epoch of a batch, and its first entry among those that are kept there."""
        steps = number - self._number - sum(len(one) for one in self._ahead if one.last < number)
        epoch, position = self._progress.place
        left, size = self._left(), self._partitions.later.global_batch_size
        if steps < left:
            return epoch, self._skipped(epoch).kept_before(position) + steps * size
        steps -= left
        epoch += 1
        while epoch <= self._last_skipped_epoch and steps >= (here := self._batches(epoch)):
            steps -= here
            epoch += 1
        epochs, batch = divmod(steps, max(self._batches(epoch), 1))
        return epoch + epochs, batch * size

    def _left(self) -> int:
        """Batches that are trained from the place to the end of its epoch."""
        epoch, position = self._progress.place
        whole = self._partition(epoch)
        left = replace(whole, start=min(position, whole.length)).num_batches(self._partitions.drop_last)
        limited = self._progress.limited(whole.num_batches(self._partitions.drop_last))
        if isinstance(self._progress.limit, int):
            return min(left, max(limited - self._progress.steps_in_epoch, 0))
        entries = limited * whole.global_batch_size - whole.skipped.kept_before(position)
        return min(left, max(-(-entries // whole.global_batch_size), 0))

    def _batches(self, epoch: int) -> int:
        return self._progress.limited(self._partition(epoch).num_batches(self._partitions.drop_last))

    def _partition(self, epoch: int) -> Partition:
        partition = self._partitions.now if epoch == self._progress.place[0] else self._partitions.later
        return replace(partition, skipped=self._skipped(epoch))

    def _skipped(self, epoch: int) -> SkippedPositions:
        return skipped_in_epoch(self._known.values(), epoch)
