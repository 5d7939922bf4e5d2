"""Places of a run that are left out, and what is left of an epoch's sequence without them.

Positions stay those of the whole sequence. What is kept is numbered for itself: without positions 2 and 3, entry 3 is
position 5. So a saved position means the same with gaps and without.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Place = tuple[int, int]
"""Epoch, and position in its sequence."""
Stretch = tuple[Place, Place]
"""From a place up to, and without, a later one; maybe of another epoch."""

_ENDLESS = 2**62
"""Beyond every sequence."""


@dataclass(frozen=True)
class Gaps:
    """Runs of one epoch's positions that are left out.

    Args:
        runs: ``(start, stop)`` in order, none empty, and none touching the next; stop is exclusive, and may lie beyond
            the sequence.
    """

    runs: tuple[tuple[int, int], ...] = ()

    def kept_before(self, position: int) -> int:
        """Positions before this one that are kept."""
        return position - sum(min(position, stop) - start for start, stop in self.runs if start < position)

    def positions(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of kept entries, of the same shape. Those of entries that no sequence has are not told."""
        if not self.runs:
            return entries
        closed, left_out = self._shifts
        shifted: NDArray[np.int64] = entries + left_out[np.searchsorted(closed, entries, side="right")]
        return shifted

    def position_after(self, entries: int) -> int:
        """Where a reader stands who has read so many entries: right after the last, and before a gap that follows."""
        return int(self.positions(np.asarray([entries - 1]))[0]) + 1 if entries else 0

    @cached_property
    def _shifts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Entries at which each run was closed, and how many positions were left out before: one more of these."""
        starts, stops = np.asarray(self.runs, np.int64).T
        left_out = np.cumsum(stops - starts)
        return starts - np.r_[0, left_out[:-1]], np.r_[0, left_out]


NO_GAPS = Gaps()


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same stretches in order, those that overlap or touch made one, empty ones left out."""
    found: list[Stretch] = []
    for start, stop in sorted(stretches):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def gaps_in(stretches: Iterable[Stretch], epoch: int) -> Gaps:
    """What some stretches leave out of one epoch."""
    runs = [
        (start if first == epoch else 0, stop if last == epoch else _ENDLESS)
        for (first, start), (last, stop) in merged(stretches)
        if first <= epoch <= last
    ]
    return Gaps(tuple(run for run in runs if run[0] < run[1]))


def epoch_not_left_out(stretches: Iterable[Stretch], epoch: int) -> int:
    """The first epoch from this one on of which not everything is left out."""
    for start, (last, _) in merged(stretches):
        if start <= (epoch, 0) and epoch < last:
            epoch = last
    return epoch
