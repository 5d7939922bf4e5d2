"""Which entries of a global batch each rank gets.

A global batch is a run of ``P * R * B`` entries of a sequence, for ``P`` nodes of ``R`` ranks with ``B`` samples each.
What it holds is the sequence's matter; here it is divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGeometry:
    """Nodes, ranks and batch size that global batches are made for."""

    num_nodes: int
    """Nodes, replication divided out, P."""
    ranks_per_node: int
    """Ranks on each node, R."""
    batch_size: int
    """Samples in a batch of one rank, B."""

    @property
    def num_ranks(self) -> int:
        """Ranks over all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks read in one step."""
        return self.num_ranks * self.batch_size


class Layout(Protocol):
    """A way to divide a global batch."""

    def entries(self, geometry: BatchGeometry, node: int, rank_of_node: int) -> NDArray[np.int64]:
        """The ``batch_size`` entries of a global batch that one rank reads, in order, each in [0, P * R * B)."""


@dataclass(frozen=True, slots=True)
class InTurn:
    """One entry after another to the nodes in turn, and within each node to its ranks in turn.

    So a node that has canonical nodes of its own reads those alone.
    """

    def entries(self, geometry: BatchGeometry, node: int, rank_of_node: int) -> NDArray[np.int64]:
        """See :class:`Layout`. For 2 nodes of 1 rank and batches of 3: node 0 reads 0 2 4."""
        return np.arange(geometry.batch_size) * geometry.num_ranks + rank_of_node * geometry.num_nodes + node


IN_TURN = InTurn()


@dataclass(frozen=True, slots=True)
class InBlocks:
    """A whole batch after another, to the ranks of the first node, then to those of the second, and so on."""

    def entries(self, geometry: BatchGeometry, node: int, rank_of_node: int) -> NDArray[np.int64]:
        """See :class:`Layout`. For 2 nodes of 1 rank and batches of 3: node 0 reads 0 1 2."""
        rank = node * geometry.ranks_per_node + rank_of_node
        return np.arange(rank * geometry.batch_size, (rank + 1) * geometry.batch_size)


@dataclass(frozen=True, slots=True)
class Regrouped:
    """In turn to the nodes that the run began with; their batches, one after another, are then cut anew.

    This is how the reference goes on where canonical nodes do not fit the nodes. With the same ranks per node, the
    global batch must be a multiple of all ranks at the beginning.
    """

    initial_num_nodes: int

    def entries(self, geometry: BatchGeometry, node: int, rank_of_node: int) -> NDArray[np.int64]:
        """See :class:`Layout`. For 2 nodes regrouped to 3, each of 1 rank with batches of 2: 0 2 | 4 1 | 3 5."""
        nodes, ranks = self.initial_num_nodes, geometry.ranks_per_node
        batch_size = geometry.global_batch_size // (nodes * ranks)
        blocks = InBlocks().entries(geometry, node, rank_of_node)
        initial_ranks, samples = np.divmod(blocks, batch_size)
        initial_nodes, ranks_of_nodes = np.divmod(initial_ranks, ranks)
        return (samples * ranks + ranks_of_nodes) * nodes + initial_nodes
