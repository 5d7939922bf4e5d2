"""Shuffle shards and samples, then let each sample drift, so that neighbouring shards mix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.shuffle.sorting import argsort_within
from lightning_streaming.order.shuffle.spans import Spans, epoch_parts, write_shuffled
from lightning_streaming.order.shuffle.task import ShuffleTask


def py1e(task: ShuffleTask) -> NDArray[np.int64]:
    """Order each canonical node as ``py1s`` does, then move every sample by a random distance.

    Samples of a span move up to half of what a block of about ``task.block_size`` samples is longer than the span, but
    never out of the canonical node, and are read in the order of where they arrive.

    Raises:
        ConfigError: There are fewer samples than canonical nodes, so one would have none.
    """
    generator = task.epoch_generator()
    order = np.empty(task.num_samples, np.int64)
    stop = 0
    for part in epoch_parts(task, generator):
        start, stop = stop, stop + part.num_samples
        if start == stop:
            raise ConfigError(
                f"py1e cannot give {task.num_samples} samples to {task.num_canonical_nodes} canonical nodes; "
                "use fewer canonical nodes or shuffle_algo='py1s'"
            )
        room = order[start:stop]
        write_shuffled(part, room, generator)
        room[:] = room[argsort_within(_drift(part, task.block_size, generator))]
    return order


def _drift(part: Spans, block_size: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Where each sample of a canonical node arrives, in ``[0, part.num_samples)``."""
    total = part.num_samples
    shortest, longest = int(0.75 * block_size), int(1.25 * block_size)
    arrivals = np.arange(total, dtype=np.float64)
    stop = 0
    for size in part.sizes.tolist():
        start, stop = stop, stop + size
        block = int(generator.integers(shortest, longest))
        reach = max((block - size) / 2, 0)
        earliest, latest = max(-reach, -start), min(reach, total - stop)
        arrivals[start:stop] += generator.uniform(earliest, latest, size)
    return arrivals
