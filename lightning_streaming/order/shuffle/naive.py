"""Shuffle everything with everything: best mixing, worst locality."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.shuffle.task import ShuffleTask


def naive(task: ShuffleTask) -> NDArray[np.int64]:
    """One permutation of all samples; shards, blocks and canonical nodes play no part."""
    return task.epoch_generator().permutation(task.num_samples)
