"""When a worker needs each shard for the last time in a pass, so that it can let go of it right then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

_MOST_SAMPLES = 2 * 10**8
"""Above this the plan is not read ahead to its end: shards then go by when they were used."""
_FEW_SAMPLES = 2**16
"""So few samples are looked through at once, before the first is read."""


class LastUses:
    """The last use of each shard, found by going through a worker's plan once, beside reading.

    Args:
        shards_in_order: Gives the shard of each sample, in order of reading, as arrays one after another.
        num_samples: About how many samples there are.
        num_shards: Shards of the dataset.
    """

    def __init__(
        self, shards_in_order: Callable[[], Iterator[NDArray[np.int64]]], num_samples: int, num_shards: int
    ) -> None:
        self._last: NDArray[np.int64] | None = None
        self._closed = False
        if num_samples <= _FEW_SAMPLES:
            self._find(shards_in_order, num_shards)
        elif num_samples <= _MOST_SAMPLES:
            threading.Thread(
                target=self._find, args=(shards_in_order, num_shards), name="last-uses", daemon=True
            ).start()

    def among(self, shards: NDArray[np.int64], first_sample: int) -> NDArray[np.bool_]:
        """Which of some consecutive samples are the last of their shards; none as long as that is not known.

        Args:
            shards: The shard of each sample, of shape (samples,).
            first_sample: How many samples were read before them.
        """
        if self._last is None:
            return np.zeros(len(shards), np.bool_)
        is_last: NDArray[np.bool_] = self._last[shards] == np.arange(first_sample, first_sample + len(shards))
        return is_last

    def close(self) -> None:
        """Stop looking."""
        self._closed = True

    def _find(self, shards_in_order: Callable[[], Iterator[NDArray[np.int64]]], num_shards: int) -> None:
        last = np.full(num_shards, -1, np.int64)
        samples_before = 0
        for shards in shards_in_order():
            if self._closed:
                return
            # Where a shard is named more than once, numpy keeps the last.
            last[shards] = np.arange(samples_before, samples_before + len(shards))
            samples_before += len(shards)
        self._last = last
