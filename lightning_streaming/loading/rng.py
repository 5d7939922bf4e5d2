"""Randomness keyed by the sample, not carried from one sample to the next.

The generator of a sample is a function of seed, epoch and position. So augmentation is the same after any resume, with
any number of workers or ranks, and for one sample made again alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_TRANSFORM_KEY = 0x7472616E  # keeps these streams apart from those that shuffle, which are keyed by seed + epoch
_WORKER_KEY = 0x776F726B


def rng_for(seed: int, epoch: int, position: int) -> np.random.Generator:
    """The random generator of one sample.

    Args:
        seed: The dataset's shuffle seed.
        epoch: Epoch the sample is read in.
        position: The sample's place in the epoch's global sequence.
    """
    return np.random.default_rng([_TRANSFORM_KEY, seed, epoch, position])


def rng_of_worker(seed: int, epoch: int, position: int, rank: int, worker: int) -> np.random.Generator:
    """The random generator that a worker process begins with: no two workers of a run draw the same numbers.

    Args:
        seed: The dataset's shuffle seed.
        epoch: Epoch of the pass that it is started for.
        position: Where in the epoch's global sequence that pass begins.
        rank: Among the ranks that read different samples.
        worker: Among the workers of that rank.
    """
    return np.random.default_rng([_WORKER_KEY, seed, epoch, position, rank, worker])


def seed_global_generators(rng: np.random.Generator) -> None:
    """Seed ``random``, ``numpy.random`` and torch's CPU generator from ``rng``, for transforms that use those."""
    first, second, third = (int(word) for word in rng.integers(0, 2**32, size=3))
    random.seed(first)
    np.random.seed(second)  # noqa: NPY002  the legacy generator is what such transforms draw from
    torch.default_generator.manual_seed(third)


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Leave those generators as they were: this process may be the one that trains."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])
