"""What one stream gives to an epoch, where streams are batched each by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.batching.sequence import EpochFacts
from lightning_streaming.order.deal import read_again
from lightning_streaming.order.sequence import CanonicalSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamEntries:
    """One stream's entries in reading order, a few repeated at the end so that all ranks have equally many."""

    sequence: CanonicalSequence
    """The stream's own sequence."""
    first_place: int
    """Where the stream begins in the order of all streams."""
    num_ranks: int
    """Ranks to be even for."""

    def __len__(self) -> int:
        """Entries, with the repeated ones."""
        return -(-len(self.sequence) // self.num_ranks) * self.num_ranks

    def places(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the order of all streams, for entries in ``[0, len(self))``."""
        steps = read_again(entries, len(self.sequence), self.sequence.num_nodes, self.num_ranks)
        return self.first_place + self.sequence.places(steps)


def entries_per_stream(facts: EpochFacts, num_nodes: int) -> list[StreamEntries]:
    """Each stream's entries.

    Args:
        facts: The epoch.
        num_nodes: Nodes to divide each stream among.

    Raises:
        ConfigError: A stream draws no sample, or too few.
    """
    entries, first_place = [], 0
    for stream, samples in enumerate(facts.shape.weights.choose):
        if not samples:
            raise ConfigError(
                f"stream {stream} draws no sample, so batching_method={facts.settings.batching_method!r} cannot fill "
                "a batch from it; raise its weight or leave it out"
            )
        sequence = CanonicalSequence(
            num_samples=samples, num_canonical_nodes=facts.num_canonical_nodes, num_nodes=num_nodes
        )
        num_ranks = num_nodes * facts.geometry.ranks_per_node
        entries.append(StreamEntries(sequence=sequence, first_place=first_place, num_ranks=num_ranks))
        first_place += samples
    return entries
