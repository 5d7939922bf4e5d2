"""What every batching method gives: the order in which an epoch's places are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.layout import BatchGeometry
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shape import DatasetShape


class EpochSequence(Protocol):
    """The place of an epoch's order that is read at each position."""

    @property
    def num_samples(self) -> int:
        """Places of the order."""

    def __len__(self) -> int:
        """Positions of the epoch."""

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of the order in ``[0, num_samples)``, for positions in ``[0, len(self))`` of any shape.

        Raises:
            SampleIndexError: A position lies outside the epoch.
        """

    @property
    def read_once(self) -> int:
        """Position from which on nothing is read that has not been read before, on any number of nodes."""

    def most_counted(self, num_ranks: int) -> int:
        """The most samples that a reader of the whole epoch counts, over all ranks, with those read twice."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochFacts:
    """All that a batching method is given."""

    settings: OrderSettings
    """Settled; see :meth:`OrderSettings.settled`."""
    shape: DatasetShape
    """The data."""
    geometry: BatchGeometry
    """What the epoch's global batches are made for."""
    epoch: int
    """Counts from 0."""

    @property
    def num_canonical_nodes(self) -> int:
        """Slices of the order."""
        assert self.settings.num_canonical_nodes, "settle the settings first"
        return self.settings.num_canonical_nodes

    @property
    def batch_seed(self) -> int:
        """Decides which batch comes from which stream."""
        return self.settings.shuffle_seed + (self.epoch if self.settings.redraws_shards else 0)


Batching = Callable[[EpochFacts], EpochSequence]
"""A batching method."""
