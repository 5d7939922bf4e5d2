"""Runs of consecutive numbers: the run that holds a place, and arrays of all numbers in runs."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FEWEST_BUCKETS = 1024
"""A table of this size costs nothing, and makes lookups in few runs as fast as in many of equal size."""


class RunLookup:
    """Lookup of the run that holds a place, among many consecutive runs.

    Run ``k`` covers ``[stops[k - 1], stops[k])``, and the first one begins at 0; an empty run holds no place. A table
    has for each bucket of places the run in which the bucket begins. As buckets are smaller than the average run, one
    step from there is mostly enough; other places are searched for. For example runs that stop at 4, 5 and 12, in
    buckets of 4 places, have the table 0, 1, 2; the search for place 6 begins in run 1 and steps to run 2.

    Args:
        stops: End of each run (exclusive), ascending.
    """

    def __init__(self, stops: NDArray[np.int64]) -> None:
        self.stops = stops
        total = int(stops[-1]) if len(stops) else 0
        wanted = max(2 * len(stops), _FEWEST_BUCKETS)
        self._bucket_bits = max((total // wanted).bit_length() - 1, 0)
        # The run in which a bucket begins: the number of runs that end at or before the bucket's first place.
        first_bucket_after = -(-stops >> self._bucket_bits)
        num_buckets = -(-total >> self._bucket_bits)
        ends = np.bincount(first_bucket_after, minlength=num_buckets)[:num_buckets]
        self._table = np.cumsum(ends, dtype=np.int32)
        self._stop_view, self._table_view = self.stops.data, self._table.data  # faster for single numbers

    def __reduce__(self) -> tuple[type[RunLookup], tuple[NDArray[np.int64]]]:
        return RunLookup, (self.stops,)  # views cannot be sent to another process

    def __len__(self) -> int:
        """Return the number of places in all runs."""
        return int(self.stops[-1]) if len(self.stops) else 0

    def find(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the run that holds each place.

        Args:
            places: Places in ``[0, len(self))``, in one dimension and any order.

        Returns:
            Runs, counted from 0, of the same shape.
        """
        runs = self._table.take(places >> self._bucket_bits).astype(np.int64)
        runs += places >= self.stops.take(runs)
        beyond = np.flatnonzero(places >= self.stops.take(runs))
        if beyond.size:
            runs[beyond] = np.searchsorted(self.stops, places[beyond], side="right")
        return runs

    def find_single(self, place: int) -> tuple[int, int]:
        """Return the run that holds a place, and the offset of the place in the run.

        Args:
            place: A place in ``[0, len(self))``.
        """
        stops, run = self._stop_view, self._table_view[place >> self._bucket_bits]
        if place >= stops[run]:
            run = bisect_right(stops, place, run + 1)
        return run, place - (stops[run - 1] if run else 0)


_CHUNK = 1 << 18
"""Ids written at once, so that temporary arrays of numpy stay within the processor's cache."""


def write_runs(firsts: NDArray[np.int64], sizes: NDArray[np.int64], out: NDArray[np.integer[Any]]) -> None:
    """Fill ``out`` with the ids of runs ``[first, first + size)``, one run after another.

    For example firsts 7 and 2 of sizes 3 and 2 give 7 8 9 2 3.

    Args:
        firsts: The first id of each run.
        sizes: The length of each run; may be 0.
        out: An array of length ``sizes.sum()``.
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
