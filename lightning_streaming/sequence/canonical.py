"""Sequence that interleaves canonical nodes.

Samples lie in an order, cut into ``C`` slices, the canonical nodes. The sequence reads the first sample of each slice,
then the second of each, and so on. A :class:`~lightning_streaming.sequence.partition.Partition` divides it into global
batches. So what the model sees, and in which order, does not change with the machines as long as ``C`` is a multiple of
``P``, the number of nodes. All this is arithmetic: nothing here is as long as an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.base import check_entries


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalSequence:
    """Order in which places are read: canonical nodes in turn."""

    num_samples: int
    """Places of the order, S."""
    num_canonical_nodes: int
    """Slices of them, C."""
    num_nodes: int
    """Nodes, P; a multiple or a divisor of C."""

    def __post_init__(self) -> None:
        samples, canonical, nodes = self.num_samples, self.num_canonical_nodes, self.num_nodes
        if min(samples, canonical, nodes) < 1:
            raise ConfigError(
                f"an epoch needs samples, canonical nodes and nodes, but got {samples}, {canonical} and {nodes}",
                option="num_canonical_nodes",
            )
        if not fits(canonical, nodes):
            raise ConfigError(
                f"num_canonical_nodes={canonical} must be a multiple or a divisor of the {nodes} nodes",
                hint=f"set it to a multiple of {nodes}",
                option="num_canonical_nodes",
            )

    def __len__(self) -> int:
        """Return the entries of the sequence: every sample, and a few twice so that slices and nodes are even."""
        return self.num_canonical_nodes * self._row_size

    @property
    def _slice_size(self) -> int:
        """Samples of the largest slice; the others have one less."""
        return -(-self.num_samples // self.num_canonical_nodes)

    @property
    def _nodes_per_slice(self) -> int:
        """Nodes that share one slice; 1 if each node has whole slices."""
        return max(self.num_nodes // self.num_canonical_nodes, 1)

    @property
    def _padding(self) -> int:
        """Entries that each slice repeats so that its nodes have the same number."""
        return -self._slice_size % self._nodes_per_slice

    @property
    def _padding_lag(self) -> int:
        """Distance in its slice from a repeated entry back to its first read."""
        return self._nodes_per_slice + self._padding - 1

    @property
    def _row_size(self) -> int:
        """Entries of each slice, repeated ones included."""
        return self._slice_size + self._padding

    @property
    def _is_scarce(self) -> bool:
        """True if there are fewer samples than slices, so that they are repeated in turn."""
        if self.num_samples == self.num_canonical_nodes:
            return self.num_canonical_nodes < self.num_nodes
        return self.num_samples < self.num_canonical_nodes

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of the order that the sequence reads.

        Args:
            positions: Positions in the sequence, of any shape, each in ``[0, len(self))``.

        Returns:
            Places in ``[0, num_samples)``, of the same shape.

        Raises:
            SampleIndexError: A position lies outside the sequence.
        """
        check_entries(positions, len(self))
        if self.num_canonical_nodes == 1 and not self._is_scarce and not self._padding:
            return positions
        steps = positions // self.num_canonical_nodes
        slices = positions - steps * self.num_canonical_nodes
        if self._is_scarce:
            return (slices * self._row_size + steps) % self.num_samples
        if self._padding:
            # If the slice is shorter than the lag, it is repeated from its beginning.
            reaches = self._padding_lag <= self._slice_size
            again = steps - self._padding_lag if reaches else steps % self._slice_size
            steps = np.where(steps < self._slice_size, steps, again)
        places = slices * self.num_samples // self.num_canonical_nodes
        places += steps
        if self.num_samples % self.num_canonical_nodes:
            # A slice with one sample less repeats its last one.
            np.minimum(places, (slices + 1) * self.num_samples // self.num_canonical_nodes - 1, out=places)
        return places

    @property
    def read_once(self) -> int:
        """Position from which on only repeats are read, on any number of nodes."""
        return self.num_canonical_nodes * self._slice_size

    def most_counted(self, num_ranks: int) -> int:
        """Return the most samples that a reader of the whole epoch counts over all ranks, repeats included.

        Args:
            num_ranks: Ranks that read the sequence.
        """
        whole_rounds = -(-len(self) // num_ranks) * num_ranks
        # The reference may count up to one sample per rank beyond its samples.
        return max(whole_rounds, self.num_samples + num_ranks - self.num_samples % num_ranks)

    def are_repeats(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each position repeats a place; False for -1."""
        slices = self.num_canonical_nodes
        if self.num_samples <= slices:  # each slice has one sample or none
            _, first_positions = np.unique(self.places(np.arange(len(self))), return_index=True)
            return ~np.isin(positions, first_positions) & (positions >= 0)
        are_repeats: NDArray[np.bool_] = positions >= self.read_once
        # In the last round before, a slice with one sample less reads the one of the round before again.
        last_round = ~are_repeats & (positions >= self.read_once - slices)
        ours = positions[last_round]
        are_repeats[last_round] = self.places(ours) == self.places(ours - slices)
        return are_repeats


def fits(num_canonical_nodes: int, num_nodes: int) -> bool:
    """Return whether one of the two numbers divides the other, so that nodes have equal work."""
    return num_canonical_nodes % num_nodes == 0 or num_nodes % num_canonical_nodes == 0
