"""Keys: 64 random bits that say which permutation is meant."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def drawn_keys(generator: np.random.Generator, count: int) -> NDArray[np.uint64]:
    """Draw keys, each of 64 random bits."""
    return generator.integers(2**64, size=count, dtype=np.uint64)


def numbered_keys(keys: NDArray[np.uint64], numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A key of its own for every number, from one key for all of them; nothing is stored.

    This is the generator SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014),
    started at the key and asked for the output of that number.

    Args:
        keys: In one dimension; neighbours share them or not.
        numbers: From 0 on, of the same shape.
    """
    state: NDArray[np.uint64] = numbers.astype(np.uint64) + np.uint64(1)
    state *= _STEP
    state += keys
    state ^= state >> np.uint64(30)
    state *= _FIRST_FACTOR
    state ^= state >> np.uint64(27)
    state *= _SECOND_FACTOR
    state ^= state >> np.uint64(31)
    return state
