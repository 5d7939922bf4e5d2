"""Division of a sequence among nodes, ranks and batches.

The places of an order are cut into ``C`` slices, the canonical nodes. :class:`CanonicalSequence` reads the first place
of each slice, then the second of each, and so on. So the samples of a global batch do not depend on the machines, as
long as ``C`` is a multiple of ``P``, the number of nodes. All of this is arithmetic: no array is as long as an epoch.

A global batch is a run of ``P * R * B`` entries of a sequence, for ``P`` nodes of ``R`` ranks with ``B`` samples each.
A :data:`Layout` assigns these entries to ranks, and a :class:`Partition` divides a whole epoch.

A run may resume in the middle of an epoch on other machines. Batching methods that compose batches then keep the
geometry that the epoch began with (:func:`epoch_geometry`): the sequence stays the same, and is divided among the new
ranks in runs of their global batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.sequence.base import SampleSequence, check_entries
from lightning_streaming.sequence.settings import ResolvedOrder

LARGEST_BATCH = 2**31 - 1
"""Most samples of a global batch, so that positions fit 64 bits with every number of steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGeometry:
    """Nodes, ranks and batch size that global batches are made for."""

    num_nodes: int
    """Nodes, replication divided out, P."""
    ranks_per_node: int
    """Ranks on each node, R."""
    batch_size: int
    """Samples in a batch of one rank, B."""

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.ranks_per_node, self.batch_size) < 1:
            raise ConfigError(
                f"nodes, ranks per node and batch size must be positive, but got {self.num_nodes}, "
                f"{self.ranks_per_node} and {self.batch_size}",
                option="batch_size",
            )
        if self.global_batch_size > LARGEST_BATCH:
            raise ConfigError(
                f"a global batch has at most {LARGEST_BATCH:,} samples, but {self.num_ranks} ranks with batch size "
                f"{self.batch_size} have {self.global_batch_size:,}",
                hint="choose a smaller batch size",
                option="batch_size",
            )

    @property
    def facts(self) -> dict[str, int]:
        """Its values under the keys that saved states and digests contain."""
        return {
            "num_nodes": self.num_nodes,
            "ranks_per_node": self.ranks_per_node,
            "batch_size": self.batch_size,
        }

    @property
    def num_ranks(self) -> int:
        """Ranks over all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks read in one step."""
        return self.num_ranks * self.batch_size


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


class FixedLayout(Protocol):
    """Layout that is the same for all global batches."""

    def entries(self, geometry: BatchGeometry, node: int, rank_of_node: int) -> NDArray[np.int64]:
        """Return the entries of a global batch that one rank reads.

        Args:
            geometry: Geometry of the batch.
            node: Node in ``[0, geometry.num_nodes)``.
            rank_of_node: Rank in ``[0, geometry.ranks_per_node)``.

        Returns:
            Entries counted from the first of the batch, each in [0, P * R * B), of shape (batch_size,).
        """


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Layout that deals entries to the nodes in turn, and within each node to its ranks in turn.

    So a node that has whole canonical nodes reads only these.
    """

    def entries(self, geometry: BatchGeometry, node: int, rank_of_node: int) -> NDArray[np.int64]:
        """See :class:`FixedLayout`. For 2 nodes of 1 rank and batches of 3: node 0 reads 0 2 4."""
        return np.arange(geometry.batch_size) * geometry.num_ranks + rank_of_node * geometry.num_nodes + node


INTERLEAVED = Interleaved()


@dataclass(frozen=True, slots=True)
class Contiguous:
    """Layout that gives whole batches to the ranks of the first node, then to those of the second, and so on."""

    def entries(self, geometry: BatchGeometry, node: int, rank_of_node: int) -> NDArray[np.int64]:
        """See :class:`FixedLayout`. For 2 nodes of 1 rank and batches of 3: node 0 reads 0 1 2."""
        rank = node * geometry.ranks_per_node + rank_of_node
        return np.arange(rank * geometry.batch_size, (rank + 1) * geometry.batch_size)


@dataclass(frozen=True, slots=True)
class Regrouped:
    """Layout that deals entries to the nodes that the run began with, concatenates their batches and cuts them again.

    This is how the reference resumes if canonical nodes do not fit the nodes. With the same ranks per node, the global
    batch must be a multiple of all ranks at the beginning.
    """

    initial_num_nodes: int

    def entries(self, geometry: BatchGeometry, node: int, rank_of_node: int) -> NDArray[np.int64]:
        """See :class:`FixedLayout`. For 2 nodes regrouped to 3, each of 1 rank with batches of 2: 0 2 | 4 1 | 3 5."""
        nodes, ranks = self.initial_num_nodes, geometry.ranks_per_node
        batch_size = geometry.global_batch_size // (nodes * ranks)
        blocks = Contiguous().entries(geometry, node, rank_of_node)
        initial_ranks, samples = np.divmod(blocks, batch_size)
        initial_nodes, ranks_of_nodes = np.divmod(initial_ranks, ranks)
        return (samples * ranks + ranks_of_nodes) * nodes + initial_nodes


@dataclass(frozen=True, slots=True)
class Gathered:
    """Layout that concatenates the shares of the nodes that the run began with, and cuts them into equal runs.

    Unlike :class:`Regrouped`, it works for any global batch, and a node reads the shards of few shares: of its part of
    them, and one or two more. Some shares have one sample more than others; which ones changes from batch to batch, and
    with it where runs are cut.
    """

    shares: int
    """Number of shares; the sequence reads each in turn."""

    def entries_of(
        self, geometry: BatchGeometry, node: int, rank_of_node: int, firsts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the entries of some global batches that one rank reads.

        For batches of 1 of 5 nodes, with shares 0 1 2 3 0: 0 | 4 | 1 | 2 | 3.

        Args:
            geometry: Geometry of the batches.
            node: Node in ``[0, geometry.num_nodes)``.
            rank_of_node: Rank in ``[0, geometry.ranks_per_node)``.
            firsts: Position of the first entry of each global batch, of shape (batches, 1).

        Returns:
            Entries counted from the first of their batch, each in [0, P * R * B), of shape (batches, batch_size).
        """
        shares, ranks = self.shares, geometry.ranks_per_node
        # Of all entries, share after share, the node has a run, of which its ranks have every entry in turn.
        places = node * ranks * geometry.batch_size + np.arange(geometry.batch_size) * ranks + rank_of_node
        size, longer = divmod(geometry.global_batch_size, shares)
        first = firsts % shares
        # The longer shares are those from the first on; past the last one come those from share 0 on.
        wrapped = np.maximum(first + longer - shares, 0)
        zeros = np.zeros_like(first)
        begins = np.hstack([zeros, wrapped, first, np.minimum(first + longer, shares)])
        sizes = np.hstack([zeros + size + 1, zeros + size, zeros + size + 1, zeros + size])
        before = np.cumsum(np.diff(begins, append=shares) * sizes, axis=1)
        kinds = (places[:, np.newaxis] >= before[:, np.newaxis, :-1]).sum(axis=2)
        own_sizes = np.take_along_axis(sizes, kinds, axis=1)
        since = places - np.take_along_axis(np.hstack([zeros, before[:, :-1]]), kinds, axis=1)
        own_shares, rounds = np.divmod(since, own_sizes)
        own_shares += np.take_along_axis(begins, kinds, axis=1)
        entries: NDArray[np.int64] = (own_shares - first) % shares + rounds * shares
        return entries


Layout = FixedLayout | Gathered
"""Assignment of the entries of a global batch to ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Division of the rest of a sequence among nodes, ranks and batches.

    Global batch ``t`` is the ``t``-th run of ``global_batch_size`` entries from ``start`` on, divided by ``layout``.
    The remaining entries that fill no global batch are dealt in turn, and a few entries are read a second time, so that
    all ranks have the same number of batches and samples.
    """

    sequence: SampleSequence
    """Sequence to divide."""
    start: int = 0
    """Position where it starts, in ``[0, sequence.end]``."""
    geometry: BatchGeometry
    """The machines that read it, replication divided out."""
    layout: Layout = INTERLEAVED
    """Assignment of the entries of a global batch to ranks."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.sequence.end:
            raise ConfigError(
                f"a partition must start in [0, {self.sequence.end}], but got {self.start}", option="start"
            )

    @property
    def entries_before(self) -> int:
        """Number of entries before the start."""
        return self.sequence.entries_before(self.start)

    @property
    def remaining(self) -> int:
        """Entries to divide."""
        return len(self.sequence) - self.entries_before

    @property
    def full_batches(self) -> int:
        """Number of global batches without repeated entries."""
        return self.remaining // self.geometry.global_batch_size

    def samples_per_rank(self) -> int:
        """Return the entries that each rank reads, repeats included."""
        return -(-self.remaining // self.geometry.num_ranks)

    def num_batches(self, drop_last: bool = False) -> int:
        """Return the batches of each rank, the same for all; 0 if all has been read.

        Args:
            drop_last: Leave out a last batch that is not full.
        """
        batch_size = self.geometry.batch_size
        return (self.samples_per_rank() + (0 if drop_last else batch_size - 1)) // batch_size

    def position_after(self, t: int) -> int:
        """Return the position after ``t`` global batches."""
        return int(self.positions_after(np.asarray([t]))[0]) if t else self.start

    def positions_after(self, ts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions after several ``t``, none of them 0."""
        return self.sequence.positions_after(self.entries_before + ts * self.geometry.global_batch_size)

    def batch(self, t: int, node: int, rank_of_node: int) -> NDArray[np.int64]:
        """Return the positions that one rank reads in batch ``t``; fewer in the last batch, none beyond."""
        positions: NDArray[np.int64] = self.batches(np.asarray([t], np.int64), node, rank_of_node)[0]
        return positions[positions >= 0]

    def batches(self, ts: NDArray[np.int64], node: int, rank_of_node: int) -> NDArray[np.int64]:
        """Return the positions that one rank reads in several batches.

        Args:
            ts: Global batches, counted from ``start``, in any order.
            node: Node in ``[0, geometry.num_nodes)``.
            rank_of_node: Rank in ``[0, geometry.ranks_per_node)``.

        Returns:
            Positions of shape (len(ts), batch_size); -1 after the end.

        Raises:
            ConfigError: There is no such rank, or a batch is negative.
        """
        machines, size = self.geometry, self.geometry.global_batch_size
        if not (0 <= node < machines.num_nodes and 0 <= rank_of_node < machines.ranks_per_node):
            raise ConfigError(
                f"there is no rank {rank_of_node} of node {node} among {machines.num_nodes} nodes of "
                f"{machines.ranks_per_node}",
                option="rank",
            )
        if ts.size and ts.min() < 0:
            raise ConfigError(f"batches count from 0, but got {ts.min()}", option="batches")
        at_end = ts >= self.full_batches
        if not at_end.any():
            return self.sequence.positions(self._entries_of_full(ts, node, rank_of_node))
        # Batches at the end are dealt in turn, and may reach beyond it.
        entries = np.empty((len(ts), machines.batch_size), np.int64)
        entries[~at_end] = self._entries_of_full(ts[~at_end], node, rank_of_node)
        steps = (ts[at_end] * size)[:, np.newaxis] + INTERLEAVED.entries(machines, node, rank_of_node)
        entries[at_end] = read_again(steps, self.remaining, machines, self.entries_before)
        return np.where(entries < 0, -1, self.sequence.positions(entries))

    def _entries_of_full(self, ts: NDArray[np.int64], node: int, rank_of_node: int) -> NDArray[np.int64]:
        """Return the entries of full batches that one rank reads, of shape (len(ts), batch_size)."""
        firsts = (self.entries_before + ts * self.geometry.global_batch_size)[:, np.newaxis]
        if isinstance(self.layout, Gathered):
            lie_at = self.sequence.positions(firsts)
            return firsts + self.layout.entries_of(self.geometry, node, rank_of_node, lie_at)
        return firsts + self.layout.entries(self.geometry, node, rank_of_node)

    def are_first(self, ts: NDArray[np.int64], node: int, rank_of_node: int) -> NDArray[np.bool_]:
        """Return which positions of :meth:`batches` are neither repeated to keep the ranks even, nor -1."""
        steps = ts[:, np.newaxis] * self.geometry.global_batch_size
        in_turn = steps + INTERLEAVED.entries(self.geometry, node, rank_of_node) < self.remaining
        are_first: NDArray[np.bool_] = in_turn | (ts < self.full_batches)[:, np.newaxis]
        return are_first


def read_again(steps: NDArray[np.int64], length: int, machines: BatchGeometry, start: int = 0) -> NDArray[np.int64]:
    """Return the entries of steps: steps past the last entry repeat earlier ones, steps past every rank's end are -1.

    For example one node of 4 ranks reads 10 entries as 0 1 2 3 | 4 5 6 7 | 8 9 5 6, also if it starts at 8. If there
    are too few entries before, they are repeated in turn: one node of 4 ranks reads 2 entries as 0 1 0 1.

    Args:
        steps: Entries counted from the start of the partition, dealt in turn; of any shape.
        length: Number of entries from the start on.
        machines: Nodes and ranks that they are dealt to.
        start: Number of entries before the start, which may be repeated too.
    """
    past = steps >= length
    if not past.any():
        return start + steps
    divided = length + -length % machines.num_ranks
    lag = machines.num_ranks - machines.num_nodes + divided - length
    entries = start + steps
    repeated = entries - lag if lag <= start + length else entries % max(start + length, 1)
    return np.where(past, np.where(steps < divided, repeated, -1), entries)


_BLOCK_METHODS = frozenset({"device_per_stream", "stratified"})
"""Batching methods that compose the batch of each rank, one after another."""


def epoch_geometry(settings: ResolvedOrder, current: BatchGeometry, initial_num_nodes: int | None) -> BatchGeometry:
    """Return the geometry for an epoch that begins now.

    This is the geometry of the current machines, if the canonical nodes fit them. If not, ``relaxed`` lets a run that
    began on other nodes continue with the sequence of these.

    Args:
        settings: Settings of the order.
        current: Current machines, replication divided out.
        initial_num_nodes: Nodes that the run began with; None for a new run.

    Raises:
        ConfigError: The canonical nodes do not fit the nodes, and the run did not begin on other nodes.
    """
    canonical, nodes = settings.num_canonical_nodes, current.num_nodes
    if settings.batching_method == "stratified":
        return current  # reads all canonical nodes in turn, on any number of nodes
    even = canonical % nodes == 0 if settings.batching_method == "device_per_stream" else fits(canonical, nodes)
    if even:
        return current
    if settings.partition_algo == "orig" or initial_num_nodes is None:
        kinds = "multiple" if settings.batching_method == "device_per_stream" else "multiple or a divisor"
        raise ConfigError(
            f"num_canonical_nodes={canonical} must be a {kinds} of the {nodes} nodes",
            hint=f"set it to a multiple of {nodes}",
            option="num_canonical_nodes",
        )
    initial_ranks = initial_num_nodes * current.ranks_per_node
    if settings.batching_method == "random" or (
        settings.batching_method == "per_stream" and current.global_batch_size % initial_ranks == 0
    ):
        return BatchGeometry(
            num_nodes=initial_num_nodes,
            ranks_per_node=current.ranks_per_node,
            batch_size=max(current.global_batch_size // initial_ranks, 1),
        )
    # One node fits any number of canonical nodes.
    return BatchGeometry(num_nodes=1, ranks_per_node=current.num_ranks, batch_size=current.batch_size)


def rank_layout(settings: ResolvedOrder, current: BatchGeometry, epoch: BatchGeometry) -> Layout:
    """Return the layout of global batches for the current machines.

    Args:
        settings: Settings of the order.
        current: Current machines, replication divided out.
        epoch: Geometry of the epoch's batches.
    """
    if settings.batching_method in _BLOCK_METHODS:
        return Contiguous()
    if fits(settings.num_canonical_nodes, current.num_nodes):
        return INTERLEAVED
    if current.global_batch_size % (epoch.num_nodes * current.ranks_per_node) == 0:
        return Regrouped(epoch.num_nodes)
    return Gathered(min(epoch.num_nodes, settings.num_canonical_nodes))
