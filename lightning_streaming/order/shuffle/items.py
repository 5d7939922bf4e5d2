"""Shuffling in place, of ids of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_SMALLEST_BUFFER = 256
_LARGEST_BUFFER = 1 << 20
"""Items between which a detour over 8-byte integers is faster. With fewer the calls cost more than they save; with more
the cache decides, which holds more of small ones."""


def shuffle_items(items: NDArray[np.integer[Any]], generator: np.random.Generator) -> None:
    """``generator.shuffle(items)``, in one dimension, about a third faster for 4-byte ids.

    numpy has a faster way for 8-byte items, and uses the same random numbers whatever the item size.
    """
    if items.itemsize == 8 or not _SMALLEST_BUFFER <= len(items) <= _LARGEST_BUFFER:
        generator.shuffle(items)
        return
    buffer = items.astype(np.int64)
    generator.shuffle(buffer)
    items[:] = buffer
