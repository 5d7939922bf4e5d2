"""One sequence from many canonical nodes, and its dealing to nodes, ranks and batches.

An epoch's samples lie in a canonical order, cut into ``C`` slices, the canonical nodes. The *sequence* reads the first
sample of each slice, then the second of each, and so on. A *deal* hands it out: a global batch is the next
``P * R * B`` entries, on ``P`` nodes of ``R`` ranks with ``B`` samples a batch. So what the model sees, and in which
order, does not change with the machines as long as ``C`` is a multiple of ``P``.

Both are arithmetic: nothing here is as long as an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, SampleIndexError, StateError, UnsupportedError


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalSequence:
    """The order in which the canonical positions of an epoch are read."""

    num_samples: int
    """Canonical positions, S."""
    num_canonical_nodes: int
    """Slices of them, C."""
    num_nodes: int
    """Nodes to deal to, P; a multiple or a divisor of C."""

    def __post_init__(self) -> None:
        samples, canonical, nodes = self.num_samples, self.num_canonical_nodes, self.num_nodes
        if min(samples, canonical, nodes) < 1:
            raise ConfigError(
                f"an epoch needs samples, canonical nodes and nodes, but got {samples}, {canonical} and {nodes}"
            )
        if not _fits(canonical, nodes):
            raise ConfigError(
                f"num_canonical_nodes={canonical} must be a multiple or a divisor of the {nodes} nodes; "
                f"set it to a multiple of {nodes}"
            )
        if not self._is_scarce and self._padding and self._slice_size < self._padding_lag:
            raise ConfigError(
                f"{samples} samples in {canonical} canonical nodes are too few for {nodes} nodes; "
                f"set num_canonical_nodes to a multiple of {nodes}"
            )

    def __len__(self) -> int:
        """Entries of the sequence: every sample, and a few twice so that all slices and nodes have equally many."""
        return self.num_canonical_nodes * self._row_size

    @property
    def _slice_size(self) -> int:
        """Samples of the largest slice; the others have one less."""
        return -(-self.num_samples // self.num_canonical_nodes)

    @property
    def _nodes_per_slice(self) -> int:
        """Nodes that share one slice; 1 where each node has whole ones."""
        return max(self.num_nodes // self.num_canonical_nodes, 1)

    @property
    def _padding(self) -> int:
        """Entries that each slice repeats so that its nodes have equally many."""
        return -self._slice_size % self._nodes_per_slice

    @property
    def _padding_lag(self) -> int:
        """How far back in its slice a repeated entry was read first."""
        return self._nodes_per_slice + self._padding - 1

    @property
    def _row_size(self) -> int:
        """Entries of each slice, repeated ones included."""
        return self._slice_size + self._padding

    @property
    def _is_scarce(self) -> bool:
        """Whether samples are too few to give each slice its own, so that they are repeated in turn."""
        if self.num_samples == self.num_canonical_nodes:
            return self.num_canonical_nodes < self.num_nodes
        return self.num_samples < self.num_canonical_nodes

    def canonical_positions(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which canonical positions the sequence reads.

        Args:
            positions: Positions in the sequence, of any shape, each in ``[0, len(self))``.

        Returns:
            Canonical positions in ``[0, num_samples)``, of the same shape.

        Raises:
            SampleIndexError: A position lies outside the sequence.
        """
        if positions.size and not (positions.min() >= 0 and positions.max() < len(self)):
            raise SampleIndexError(
                f"positions must be in [0, {len(self)}), but range from {positions.min()} to {positions.max()}"
            )
        steps, slices = np.divmod(positions, self.num_canonical_nodes)
        if self._is_scarce:
            return (slices * self._row_size + steps) % self.num_samples
        if self._padding:
            steps = np.where(steps < self._slice_size, steps, steps - self._padding_lag)
        firsts = slices * self.num_samples // self.num_canonical_nodes
        stops = (slices + 1) * self.num_samples // self.num_canonical_nodes
        # A slice with one sample less repeats its last one.
        canonical: NDArray[np.int64] = np.minimum(firsts + steps, stops - 1)
        return canonical

    def resume_position(self, consumed: int, num_ranks: int) -> int:
        """Where to go on after ``consumed`` samples, counted over all ranks with what they read twice to stay even.

        Args:
            consumed: Samples as a saved state of the reference counts them, replication divided out.
            num_ranks: Ranks to deal to.

        Returns:
            A position in ``[0, len(self)]``; the end where all has been read.

        Raises:
            StateError: More was consumed than any epoch of this size has.
        """
        whole_rounds = -(-len(self) // num_ranks) * num_ranks
        most = max(whole_rounds, self.num_samples + num_ranks - self.num_samples % num_ranks)
        if not 0 <= consumed <= most:
            raise StateError(
                f"{consumed} samples were consumed of an epoch that has {self.num_samples}, or {most} with repeats; "
                "the state belongs to other data or another epoch size"
            )
        return min(consumed, len(self))


def canonical_sequence(
    partition_algo: str, num_samples: int, num_canonical_nodes: int, num_nodes: int, initial_num_nodes: int | None
) -> CanonicalSequence:
    """The sequence that a partition algorithm reads.

    ``relaxed`` is ``orig`` wherever the canonical nodes fit the nodes. Where they do not, it goes on with the sequence
    of the nodes that the run began with.

    Args:
        partition_algo: ``orig`` or ``relaxed``.
        num_samples: Samples in the epoch.
        num_canonical_nodes: Slices of the epoch.
        num_nodes: Nodes to deal to.
        initial_num_nodes: Nodes that the run began with; None for a run that begins now.

    Raises:
        UnsupportedError: ``relaxed`` would have to differ from ``orig``.
        ConfigError: The canonical nodes do not fit the nodes, or the samples are too few for them.
    """
    if partition_algo == "relaxed" and initial_num_nodes is not None and not _fits(num_canonical_nodes, num_nodes):
        raise UnsupportedError(
            f"a run that began on {initial_num_nodes} nodes with {num_canonical_nodes} canonical nodes cannot go on "
            f"on {num_nodes} nodes yet; use a number of nodes that divides {num_canonical_nodes}"
        )
    return CanonicalSequence(num_samples=num_samples, num_canonical_nodes=num_canonical_nodes, num_nodes=num_nodes)


def _fits(num_canonical_nodes: int, num_nodes: int) -> bool:
    return num_canonical_nodes % num_nodes == 0 or num_nodes % num_canonical_nodes == 0
