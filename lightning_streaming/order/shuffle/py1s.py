"""Shuffle shards, then samples within each shard."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.shuffle.spans import epoch_parts, write_shuffled
from lightning_streaming.order.shuffle.task import ShuffleTask


def py1s(task: ShuffleTask) -> NDArray[np.int64]:
    """Each canonical node reads its spans in random order, each span's samples in random order."""
    generator = task.epoch_generator()
    order = np.empty(task.num_samples, np.int64)
    stop = 0
    for part in epoch_parts(task, generator):
        start, stop = stop, stop + part.num_samples
        write_shuffled(part, order[start:stop], generator)
    return order
