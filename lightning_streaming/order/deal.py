"""How a sequence is dealt to nodes, ranks and batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.gaps import NO_GAPS, Gaps
from lightning_streaming.order.layout import IN_TURN, BatchGeometry, Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """How the rest of a sequence is dealt to nodes, ranks and batches.

    Global batch ``t`` is the ``t``-th run of ``global_batch_size`` entries from ``start`` on, divided by ``layout``;
    entries in a gap are passed over, as if the sequence did not have them. What is left at the end and fills no global
    batch is dealt in turn, and a few entries are read a second time, so that all ranks have equally many batches and
    samples.
    """

    length: int
    """Entries of the sequence."""
    start: int
    """Position where dealing starts, in ``[0, length]``."""
    num_nodes: int
    """Nodes to deal to, P."""
    ranks_per_node: int
    """Ranks on each node, R."""
    batch_size: int
    """Samples in a batch of one rank, B."""
    layout: Layout = IN_TURN
    """Which entries of a global batch each rank gets."""
    gaps: Gaps = NO_GAPS
    """Entries that nobody reads."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.length:
            raise ConfigError(f"dealing must start in [0, {self.length}], but got {self.start}")
        if min(self.num_nodes, self.ranks_per_node, self.batch_size) < 1:
            raise ConfigError(
                f"nodes, ranks per node and batch size must be positive, but got {self.num_nodes}, "
                f"{self.ranks_per_node} and {self.batch_size}"
            )

    @property
    def geometry(self) -> BatchGeometry:
        """What the batches are dealt to."""
        return BatchGeometry(num_nodes=self.num_nodes, ranks_per_node=self.ranks_per_node, batch_size=self.batch_size)

    @property
    def num_ranks(self) -> int:
        """Ranks over all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks read in one step."""
        return self.num_ranks * self.batch_size

    @property
    def kept(self) -> int:
        """Entries of the whole sequence that are not in a gap."""
        return self.gaps.kept_before(self.length)

    @property
    def remaining(self) -> int:
        """Entries to deal."""
        return self.kept - self.gaps.kept_before(self.start)

    def samples_per_rank(self) -> int:
        """Entries that each rank reads, the ones read twice included."""
        return -(-self.remaining // self.num_ranks)

    def num_batches(self, drop_last: bool = False) -> int:
        """Batches of each rank, the same for all; 0 where all has been read.

        Args:
            drop_last: Leave out a last batch that is not full.
        """
        return (self.samples_per_rank() + (0 if drop_last else self.batch_size - 1)) // self.batch_size

    def position_after(self, t: int) -> int:
        """Where another deal would start after ``t`` global batches of this one."""
        return int(self.positions_after(np.asarray([t]))[0]) if t else self.start

    def positions_after(self, ts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same for several ``t``, none of them 0: right after the last entry read, before a gap that follows."""
        entries = self.gaps.kept_before(self.start) + ts * self.global_batch_size
        return np.where(entries < self.kept, self.gaps.positions(entries - 1) + 1, self.length)

    def batch(self, t: int, node: int, rank_of_node: int) -> NDArray[np.int64]:
        """Positions that one rank reads in batch ``t``; fewer in the last batch, none beyond.

        Args:
            t: Counts global batches from ``start``.
            node: In ``[0, num_nodes)``.
            rank_of_node: In ``[0, ranks_per_node)``.

        Raises:
            ConfigError: There is no such rank, or ``t`` is negative.
        """
        positions: NDArray[np.int64] = self.batches(np.asarray([t], np.int64), node, rank_of_node)[0]
        return positions[positions >= 0]

    def batches(self, ts: NDArray[np.int64], node: int, rank_of_node: int) -> NDArray[np.int64]:
        """Positions that one rank reads in several batches.

        Args:
            ts: Global batches, counted from ``start``, in any order.
            node: In ``[0, num_nodes)``.
            rank_of_node: In ``[0, ranks_per_node)``.

        Returns:
            Positions of shape (len(ts), batch_size); -1 after the end.

        Raises:
            ConfigError: There is no such rank, or a batch is negative.
        """
        if not (0 <= node < self.num_nodes and 0 <= rank_of_node < self.ranks_per_node):
            raise ConfigError(
                f"there is no rank {rank_of_node} of node {node} among {self.num_nodes} nodes of {self.ranks_per_node}"
            )
        if ts.size and ts.min() < 0:
            raise ConfigError(f"batches count from 0, but got {ts.min()}")
        start = self.gaps.kept_before(self.start)
        firsts = (start + ts * self.global_batch_size)[:, np.newaxis]
        entries: NDArray[np.int64] = firsts + self.layout.entries(self.geometry, node, rank_of_node)
        full = self.remaining // self.global_batch_size
        if ts.size and ts.max() >= full:
            in_turn = IN_TURN.entries(self.geometry, node, rank_of_node)
            at_end = (ts[ts >= full] * self.global_batch_size)[:, np.newaxis] + in_turn
            entries[ts >= full] = read_again(at_end, self.remaining, self.num_nodes, self.num_ranks, start)
        return np.where(entries < 0, -1, self.gaps.positions(entries)) if self.gaps.runs else entries


def read_again(
    steps: NDArray[np.int64], length: int, num_nodes: int, num_ranks: int, start: int = 0
) -> NDArray[np.int64]:
    """The entries of steps: those past the last one are sent back to read some again, past every rank's end to -1.

    For example one node of 4 ranks reads 10 entries as 0 1 2 3 | 4 5 6 7 | 8 9 5 6, also if it starts at 8. Where the
    entries do not reach back that far, they are read again in turn: one node of 4 ranks reads 2 entries as 0 1 0 1.

    Args:
        steps: Entries counted from where dealing starts, dealt in turn; of any shape.
        length: Entries that there are from there on.
        num_nodes: Nodes that they are dealt to.
        num_ranks: Ranks on all these nodes.
        start: Entries before, which may be read again too, as by a run that read them itself.
    """
    past = steps >= length
    if not past.any():
        return start + steps
    dealt = -(-length // num_ranks) * num_ranks
    lag = num_ranks - num_nodes + dealt - length
    entries = start + steps
    repeated = entries - lag if lag <= start + length else entries % max(start + length, 1)
    return np.where(past, np.where(steps < dealt, repeated, -1), entries)
