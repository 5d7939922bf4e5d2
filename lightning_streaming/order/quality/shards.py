"""Which shard a sample lies in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import SampleIndexError


def shards_of(ids: NDArray[np.int64], shard_sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which shard each sample lies in.

    Args:
        ids: Sample ids of any shape; a negative one stands for no sample.
        shard_sizes: Samples in each shard; ids count from 0 at the first.

    Returns:
        Shards of the same shape, counted from 0; -1 where there is no sample.

    Raises:
        SampleIndexError: An id lies beyond the last shard.
    """
    stops = np.cumsum(shard_sizes)
    num_samples = int(stops[-1]) if stops.size else 0
    if ids.size and ids.max() >= num_samples:
        raise SampleIndexError(f"sample ids must be below {num_samples}, but got {ids.max()}")
    shards = np.searchsorted(stops, ids, side="right")
    return np.where(ids < 0, -1, shards)
