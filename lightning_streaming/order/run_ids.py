"""Runs of consecutive ids, written out: what shards, spans and repeats of them are before anything is shuffled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
