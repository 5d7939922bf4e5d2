"""Settings and data for tests of order, settled and weighted, and shuffles by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.settings import OrderSettings, SettledOrder
from lightning_streaming.order.shuffles import ShuffleTask, shuffle_into
from lightning_streaming.order.weights import DatasetShape, StreamWeight, resolve_weights

CANONICAL = 12


def make_shape(*streams: list[int], epoch_size: int | None = None, **said: Any) -> DatasetShape:
    """Streams of these shard sizes, all of the same weight."""
    sizes = tuple(np.asarray(stream, np.int64) for stream in streams)
    weights = resolve_weights(
        [StreamWeight(**said)] * len(sizes), [int(stream.sum()) for stream in sizes], epoch_size, seed=0
    )
    return DatasetShape(shard_sizes=sizes, weights=weights)


def make_settings(**said: Any) -> SettledOrder:
    """Shuffled, in 12 canonical nodes, unless said otherwise."""
    return OrderSettings(**{"shuffle": True, "num_canonical_nodes": CANONICAL, **said}).settled(1)


def shuffle_map(
    algo: str, units: NDArray[np.int64], num_canonical_nodes: int, seed: int, epoch: int, block_size: int
) -> NDArray[np.int64]:
    """What a shuffle makes of runs of these sizes."""
    task = ShuffleTask(
        units=units, num_canonical_nodes=num_canonical_nodes, seed=seed, epoch=epoch, block_size=block_size
    )
    permutation = np.empty(task.num_samples, np.int64)
    shuffle_into(algo, task, permutation)
    return permutation
