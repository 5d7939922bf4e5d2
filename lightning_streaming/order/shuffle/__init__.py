"""Shuffle algorithms by name, one file each.

A shuffle takes a :class:`ShuffleTask` and gives a permutation: entry ``k`` is what is read at position ``k`` of the
canonical order. Canonical node ``c`` of ``C`` owns positions ``[n * c // C, n * (c + 1) // C)``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.names import require_served
from lightning_streaming.order.shuffle.naive import naive
from lightning_streaming.order.shuffle.py1e import py1e
from lightning_streaming.order.shuffle.py1s import py1s
from lightning_streaming.order.shuffle.task import ShuffleTask

SHUFFLES: dict[str, Callable[[ShuffleTask], NDArray[np.int64]]] = {
    "naive": naive,
    "py1e": py1e,
    "py1s": py1s,
}
SHUFFLES_LATER = ("blockwise", "py1b", "py1br", "py2s")


def shuffle_map(
    algo: str, units: NDArray[np.int64], num_canonical_nodes: int, seed: int, epoch: int, block_size: int
) -> NDArray[np.int64]:
    """Permute ``units.sum()`` samples that lie in runs of the given sizes.

    Args:
        algo: A name in :data:`SHUFFLES`.
        units: Sizes of the runs to keep together, in order; runs are shards or parts of them.
        num_canonical_nodes: Slices to shuffle each by itself.
        seed: The same for all epochs.
        epoch: Counts from 0.
        block_size: Samples to mix with each other, for algorithms that work in blocks.

    Returns:
        A permutation of ``arange(units.sum())``.

    Raises:
        UnsupportedError: The algorithm is known and not served yet.
        ConfigError: The algorithm is unknown, or cannot work with these arguments.
    """
    require_served("shuffle_algo", algo, SHUFFLES, SHUFFLES_LATER)
    task = ShuffleTask(
        units=units, num_canonical_nodes=num_canonical_nodes, seed=seed, epoch=epoch, block_size=block_size
    )
    return SHUFFLES[algo](task)
