"""Runs of consecutive numbers: finding the run that holds a place, and writing runs out."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FEWEST_BUCKETS = 1024
"""A guide this small costs nothing, and makes few runs as quick to tell apart as many of equal size."""


class RunLookup:
    """Tells which of many runs that follow each other holds a place.

    Run ``k`` covers ``[stops[k - 1], stops[k])``, and the first one begins at 0; an empty run holds no place. A guide
    says for each bucket of places in which run the bucket begins. As buckets are smaller than the average run, one
    step from there is mostly enough, and what it leaves open is searched for. For example runs that stop at 4, 5 and
    12, in buckets of 4 places, have the guide 0, 1, 2; place 6 begins its way in run 1 and steps to run 2.

    Args:
        stops: Where each run ends (exclusive), rising.
    """

    def __init__(self, stops: NDArray[np.int64]) -> None:
        self.stops = stops
        total = int(stops[-1]) if len(stops) else 0
        wanted = max(2 * len(stops), _FEWEST_BUCKETS)
        self._bucket_bits = max((total // wanted).bit_length() - 1, 0)
        self._guide = _guide(stops, total, self._bucket_bits)
        self._stop_view, self._guide_view = self.stops.data, self._guide.data  # views give single numbers sooner

    def __reduce__(self) -> tuple[type[RunLookup], tuple[NDArray[np.int64]]]:
        return RunLookup, (self.stops,)  # views cannot be sent to another process

    def __len__(self) -> int:
        """Places in all runs."""
        return int(self.stops[-1]) if len(self.stops) else 0

    def find(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The run that holds each place.

        Args:
            places: In one dimension and any order, each in ``[0, len(self))``.

        Returns:
            Runs, counted from 0, of the same shape.
        """
        runs = self._guide.take(places >> self._bucket_bits).astype(np.int64)
        runs += places >= self.stops.take(runs)
        left_open = np.flatnonzero(places >= self.stops.take(runs))
        if left_open.size:
            runs[left_open] = np.searchsorted(self.stops, places[left_open], side="right")
        return runs

    def find_one(self, place: int) -> tuple[int, int]:
        """The run that holds a place, and where in the run that is.

        Args:
            place: In ``[0, len(self))``.
        """
        stops, run = self._stop_view, self._guide_view[place >> self._bucket_bits]
        if place >= stops[run]:
            run = bisect_right(stops, place, run + 1)
        return run, place - (stops[run - 1] if run else 0)


def _guide(stops: NDArray[np.int64], total: int, bucket_bits: int) -> NDArray[np.int32]:
    """The run in which each bucket begins: as many runs as end at or before the bucket's first place."""
    num_buckets = -(-total >> bucket_bits)
    first_bucket_after = -(-stops >> bucket_bits)
    ends = np.bincount(first_bucket_after, minlength=num_buckets)[:num_buckets]
    return np.cumsum(ends, dtype=np.int32)


_CHUNK = 1 << 18
"""Ids written at once: what numpy needs besides the output stays within the processor's cache."""


def write_runs(firsts: NDArray[np.int64], sizes: NDArray[np.int64], out: NDArray[np.integer[Any]]) -> None:
    """Fill ``out`` with the ids of runs ``[first, first + size)``, one run after another.

    For example firsts 7 and 2 of sizes 3 and 2 give 7 8 9 2 3.

    Args:
        firsts: Where each run begins.
        sizes: How long each run is; may be 0.
        out: Of length ``sizes.sum()``.
    """
    stops = np.cumsum(sizes)
    id_minus_place = firsts - (stops - sizes)
    if len(out) <= _CHUNK:
        out[:] = np.arange(len(out)) + np.repeat(id_minus_place, sizes)
        return
    for start in range(0, len(out), _CHUNK):
        stop = min(start + _CHUNK, len(out))
        first, last = np.searchsorted(stops, (start, stop - 1), side="right").tolist()
        here = slice(first, last + 1)
        sizes_here = np.diff(np.minimum(stops[here], stop), prepend=start)
        out[start:stop] = np.arange(start, stop) + np.repeat(id_minus_place[here], sizes_here)
