"""What order knows about the data: how many samples each shard has, and how many an epoch draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.weights import ResolvedWeights


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DatasetShape:
    """All that order knows about the data."""

    shard_sizes: tuple[NDArray[np.int64], ...]
    """Samples in each shard, per stream."""
    weights: ResolvedWeights
    """Samples per epoch of each stream."""

    def __post_init__(self) -> None:
        if len(self.shard_sizes) != len(self.weights.choose):
            raise ConfigError(
                f"each stream needs one weight, but got {len(self.shard_sizes)} streams and "
                f"{len(self.weights.choose)} weights"
            )
        for stream, sizes in enumerate(self.shard_sizes):
            if sizes.size == 0 or sizes.min() < 0 or sizes.sum() < 1:
                raise ConfigError(f"stream {stream} has no samples; remove it")

    @property
    def num_samples(self) -> int:
        """Samples in all streams; sample ids are below it."""
        return sum(int(sizes.sum()) for sizes in self.shard_sizes)

    @property
    def epoch_size(self) -> int:
        """Samples that an epoch draws."""
        return self.weights.epoch_size
