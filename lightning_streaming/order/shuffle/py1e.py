"""Shuffle shards and samples, then let each sample drift, so that neighbouring shards mix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.shuffle.arrivals import order_by_arrival
from lightning_streaming.order.shuffle.blocks import block_bounds
from lightning_streaming.order.shuffle.drift import arrivals_in_windows
from lightning_streaming.order.shuffle.spans import epoch_parts, in_rooms
from lightning_streaming.order.shuffle.task import ShuffleTask


def py1e(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """Order each canonical node as ``py1s`` does, then move every sample by a random distance.

    Samples of a span move up to half of what a block of about ``task.block_size`` samples is longer than the span, but
    never out of the canonical node, and are read in the order of where they arrive; those that arrive at the same
    place, in the order that they had. The reference refuses fewer samples than canonical nodes.

    Raises:
        ConfigError: The block size is 0.
    """
    block = block_bounds("py1e", task.block_size, least=1)
    generator = task.epoch_generator()
    for part, room in in_rooms(epoch_parts(task, generator), out):
        part.write_shuffled(room, generator)
        windows = arrivals_in_windows(part.sizes, block, generator)
        order_by_arrival(room, windows, reach=min(block[1] / 2, len(room)))
