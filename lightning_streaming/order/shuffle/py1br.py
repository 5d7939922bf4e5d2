"""Shuffle shards, then samples within blocks of random size that begin at different places on each canonical node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.shuffle.blocks import block_bounds
from lightning_streaming.order.shuffle.items import shuffle_items
from lightning_streaming.order.shuffle.spans import epoch_parts, in_rooms
from lightning_streaming.order.shuffle.task import ShuffleTask


def py1br(task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """Each canonical node reads its spans in random order, and mixes about ``task.block_size`` samples of them.

    Raises:
        ConfigError: The block size is below 2.
    """
    shortest, longest = block_bounds("py1br", task.block_size, least=2)
    generator = task.epoch_generator()
    parts = epoch_parts(task, generator)
    staggers = generator.integers(0, shortest, size=len(parts)).tolist()
    for (part, room), stagger in zip(in_rooms(parts, out), staggers, strict=True):
        part.write(room)
        # All lengths of a canonical node are drawn before its first block is shuffled.
        for start, stop in list(_blocks(len(room), stagger, shortest, longest, generator)):
            shuffle_items(room[start:stop], generator)


def _blocks(
    num_samples: int, stagger: int, shortest: int, longest: int, generator: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """Stretches to shuffle, ``stagger`` samples before where blocks would lie from the start on.

    As in the reference the second begins before the first ends, and the last may end before the samples do. For example
    20 samples in blocks of 8 with a stagger of 3 are shuffled in [0, 5), [2, 10), [10, 18), and two stay in place.
    """
    place = 0
    while place < num_samples:
        length = int(generator.integers(shortest, longest))
        start, stop = max(place - stagger, 0), min(place + length - stagger, num_samples)
        yield start, stop
        place += stop - start
