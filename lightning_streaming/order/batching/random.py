"""Every sample may share a batch with every other."""

from __future__ import annotations

from lightning_streaming.order.batching.sequence import EpochFacts, EpochSequence
from lightning_streaming.order.sequence import CanonicalSequence


def random(facts: EpochFacts) -> EpochSequence:
    """All streams together, shuffled as one and read canonical node by canonical node in turn.

    Raises:
        ConfigError: The canonical nodes do not fit the nodes, or the samples are too few for them.
    """
    return CanonicalSequence(
        num_samples=facts.shape.epoch_size,
        num_canonical_nodes=facts.num_canonical_nodes,
        num_nodes=facts.geometry.num_nodes,
    )
