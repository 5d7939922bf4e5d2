"""What all sequences of composed batches share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.batching.sequence import EpochFacts


class Composed(ABC):
    """Batches composed of streams that are shuffled each by itself; what fills none is left out.

    Args:
        facts: The epoch.
    """

    def __init__(self, facts: EpochFacts) -> None:
        self._facts = facts

    @property
    def num_samples(self) -> int:
        """Places of the order."""
        return self._facts.shape.epoch_size

    @property
    def read_once(self) -> int:
        """The whole epoch: its repeats are not at its end."""
        return len(self)

    @abstractmethod
    def __len__(self) -> int:
        """Positions of the epoch: whole global batches."""

    @abstractmethod
    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`~lightning_streaming.order.batching.sequence.EpochSequence`."""

    def most_counted(self, num_ranks: int) -> int:
        """The most samples that a reader of the whole epoch counts."""
        return len(self) + -len(self) % num_ranks
