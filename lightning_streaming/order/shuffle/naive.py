"""Shuffle everything with everything: best mixing, worst locality."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.shuffle.items import shuffle_items
from lightning_streaming.order.shuffle.spans import unit_spans
from lightning_streaming.order.shuffle.task import ShuffleTask


def naive(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """One permutation of all samples; shards, blocks and canonical nodes play no part."""
    unit_spans(task).write(out)
    shuffle_items(out, task.epoch_generator())
