"""Shuffle shards, then samples within blocks of fixed size. An old order, kept for runs that began with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.shuffle.blocks import require_block
from lightning_streaming.order.shuffle.items import shuffle_items
from lightning_streaming.order.shuffle.spans import epoch_parts, in_rooms
from lightning_streaming.order.shuffle.task import ShuffleTask


def py1b(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """Each canonical node reads its spans in random order, and mixes each ``task.block_size`` samples of them.

    Raises:
        ConfigError: The block size is 0.
    """
    require_block("py1b", task.block_size, least=1)
    generator = task.epoch_generator()
    for part, room in in_rooms(epoch_parts(task, generator), out):
        part.write(room)
        for start in range(0, len(room), task.block_size):
            shuffle_items(room[start : start + task.block_size], generator)
