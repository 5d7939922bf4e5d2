"""Shuffle shards, then samples within each shard."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.shuffle.spans import epoch_parts, joined_spans
from lightning_streaming.order.shuffle.task import ShuffleTask


def py1s(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """Each canonical node reads its spans in random order, each span's samples in random order."""
    generator = task.epoch_generator()
    # All at once, since small streams have far more canonical nodes than spans.
    joined_spans(epoch_parts(task, generator)).write_shuffled(out, generator)
