"""The plan of one epoch: which sample is read at which position, without reading the positions before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.draw import Order
from lightning_streaming.order.sequence import CanonicalSequence, canonical_sequence
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shape import DatasetShape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochPlan:
    """The sample at each position of one epoch, at random access."""

    sequence: CanonicalSequence
    """Where in ``order`` each position reads."""
    order: Order | None
    """What :func:`~lightning_streaming.order.draw.draw_order` made, maybe memory-mapped; None for the identity."""

    def __post_init__(self) -> None:
        if self.order is not None and len(self.order) != self.sequence.num_samples:
            raise ConfigError(
                f"an epoch of {self.sequence.num_samples} samples needs an order of that length, but got "
                f"{len(self.order)}"
            )

    def __len__(self) -> int:
        """Positions of the epoch; a little more than its samples where they do not divide evenly."""
        return len(self.sequence)

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at these positions.

        Args:
            positions: Of any shape, each in ``[0, len(self))``.

        Returns:
            Sample ids of the same shape.

        Raises:
            SampleIndexError: A position lies outside the epoch.
        """
        canonical = self.sequence.canonical_positions(positions)
        return canonical if self.order is None else self.order[canonical].astype(np.int64, copy=False)

    def ids_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Sample ids at positions ``[start, stop)``."""
        return self.ids(np.arange(start, stop))


def plan_epoch(
    settings: OrderSettings,
    shape: DatasetShape,
    num_nodes: int,
    order: Order | None,
    initial_num_nodes: int | None = None,
) -> EpochPlan:
    """Plan an epoch whose order has been drawn.

    Args:
        settings: Settled; see :meth:`OrderSettings.settled`.
        shape: The data.
        num_nodes: Nodes to deal to, replication divided out.
        order: What :func:`~lightning_streaming.order.draw.draw_order` gave for the same settings and data.
        initial_num_nodes: Nodes that the run began with; None for a run that begins now.

    Raises:
        UnsupportedError: The run cannot go on on this number of nodes yet.
        ConfigError: The canonical nodes do not fit the nodes, or ``order`` is not of this epoch.
    """
    assert settings.num_canonical_nodes, "settle the settings first"
    sequence = canonical_sequence(
        settings.partition_algo, shape.epoch_size, settings.num_canonical_nodes, num_nodes, initial_num_nodes
    )
    return EpochPlan(sequence=sequence, order=order)
