"""Where ours spends the time of an epoch."""

from __future__ import annotations

import cProfile
import pstats

from benchmarks.reading.case import Case
from benchmarks.reading.systems import ours

LINES = 20


def show_hot_spots(case: Case) -> None:
    """Print the functions that take most of an epoch without workers, after one that warms up."""
    ours.write(case)
    loader = ours.loader(case)
    for _ in loader:
        pass
    profile = cProfile.Profile()
    with profile:
        for _ in loader:
            pass
    loader.close()
    print(f"one epoch of {case.samples:,} samples, {case.kind.what(case.size)}, in batches of {case.batch_size}")
    pstats.Stats(profile).sort_stats("tottime").print_stats(LINES)
