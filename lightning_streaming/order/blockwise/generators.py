"""Random generators: one for each thing that is drawn, so that none disturbs another."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a generator is for; the numbers are part of every run in progress."""

    COUNTS = 0
    """How many samples each shard of one stream gives."""
    PARTS = 1
    """Which samples a shard gives that gives a part of them."""
    MIXING = 2
    """In which order shards and samples are read."""


def generator_for(purpose: Purpose, seed: int, epoch: int, first_id: int, stream: int = 0) -> np.random.Generator:
    """A fresh generator that no other purpose, epoch, group or stream has.

    Args:
        purpose: What it is for.
        seed: The run's.
        epoch: 0 for what stays the same in all epochs.
        first_id: Tells groups of streams that are drawn together from other groups.
        stream: Tells streams of a group from each other.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, epoch, first_id, stream)))
