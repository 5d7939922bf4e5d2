"""Shuffle algorithms by name, one file each.

A shuffle takes a :class:`ShuffleTask` and fills an array with a permutation: entry ``k`` is what is read at position
``k`` of the canonical order. Canonical node ``c`` of ``C`` owns positions ``[n * c // C, n * (c + 1) // C)``. The array
is the caller's, so that it can be a mapped file; its dtype holds every place, and the result does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.names import require_known
from lightning_streaming.order.shuffle.naive import naive
from lightning_streaming.order.shuffle.py1b import py1b
from lightning_streaming.order.shuffle.py1br import py1br
from lightning_streaming.order.shuffle.py1e import py1e
from lightning_streaming.order.shuffle.py1s import py1s
from lightning_streaming.order.shuffle.py2s import py2s
from lightning_streaming.order.shuffle.task import ShuffleTask

SHUFFLES: dict[str, Callable[[ShuffleTask, NDArray[np.integer[Any]]], None]] = {
    "naive": naive,
    "py1b": py1b,
    "py1br": py1br,
    "py1e": py1e,
    "py1s": py1s,
    "py2s": py2s,
}


def shuffle_into(algo: str, task: ShuffleTask, out: NDArray[np.integer[Any]]) -> None:
    """Fill ``out`` with a permutation of ``arange(task.num_samples)``.

    Args:
        algo: A name in :data:`SHUFFLES`.
        task: What to shuffle.
        out: One dimension, ``task.num_samples`` long, of a dtype that holds that number.

    Raises:
        ConfigError: The algorithm is unknown, or cannot work with this task.
    """
    require_known("shuffle_algo", algo, SHUFFLES)
    SHUFFLES[algo](task, out)
