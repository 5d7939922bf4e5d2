"""Where samples arrive that drift from their places: random numbers, in the reference's turn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_WINDOW = 1 << 18
"""Samples that drift together: few enough for the cache, enough for numpy to be fast."""


def arrivals_in_windows(
    sizes: NDArray[np.int64], block: tuple[int, int], generator: np.random.Generator
) -> Iterator[NDArray[np.float64]]:
    """Where the samples of a canonical node arrive, window after window.

    Args:
        sizes: Of its spans, in reading order.
        block: Between which lengths each span draws a block; its samples move by up to half of what that is longer.
        generator: Gives each span's block, followed at once by its samples' moves. That these are drawn in pieces
            changes none of them.

    Yields:
        Arrivals, in ``[0, sizes.sum())``.
    """
    window, filled, start = np.empty(_WINDOW), 0, 0
    for size, earliest, latest in _moves(sizes, block, generator):
        while size:
            step = min(size, _WINDOW - filled)
            window[filled : filled + step] = generator.uniform(earliest, latest, step)
            filled, size = filled + step, size - step
            if filled == _WINDOW:
                yield window + np.arange(start, start + filled)
                filled, start = 0, start + filled
    if filled:
        yield window[:filled] + np.arange(start, start + filled)


def _moves(
    sizes: NDArray[np.int64], block: tuple[int, int], generator: np.random.Generator
) -> Iterator[tuple[int, float, float]]:
    """Each span's size, and how far at most its samples move back (below 0) and ahead: never out of the whole."""
    total, stop = int(sizes.sum()), 0
    for size in sizes.tolist():
        start, stop = stop, stop + size
        reach = max((int(generator.integers(*block)) - size) / 2, 0)
        yield size, max(-reach, -start), min(reach, total - stop)
