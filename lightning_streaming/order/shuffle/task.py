"""What every shuffle algorithm is given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator, default_rng  # numpy itself leaves that to the first use, in every worker
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShuffleTask:
    """Samples in runs, and how to shuffle them."""

    units: NDArray[np.int64]
    """Sizes of the runs to keep together."""
    num_canonical_nodes: int
    """Slices to shuffle each by itself."""
    seed: int
    """The same for all epochs."""
    epoch: int
    """Counts from 0."""
    block_size: int
    """Samples to mix with each other, for algorithms that work in blocks; 0 where a stream's share of a block is none,
    which the other algorithms do not mind."""

    def __post_init__(self) -> None:
        if self.num_canonical_nodes < 1 or self.block_size < 0:
            raise ConfigError(
                f"shuffling needs at least one canonical node and a block size that is not negative, but got "
                f"{self.num_canonical_nodes} and {self.block_size}"
            )
        if self.seed < 0 or self.epoch < 0:
            raise ConfigError(f"seed and epoch must not be negative, but got {self.seed} and {self.epoch}")

    @property
    def num_samples(self) -> int:
        """Samples in all runs."""
        return int(self.units.sum())

    def run_generator(self) -> Generator:
        """A fresh generator that is the same in all epochs."""
        return default_rng(self.seed)

    def epoch_generator(self) -> Generator:
        """A fresh generator of this epoch."""
        return default_rng(self.seed + self.epoch)
