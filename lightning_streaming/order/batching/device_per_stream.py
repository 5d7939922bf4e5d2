"""Every batch of one rank from one stream."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.batching.composed import Composed
from lightning_streaming.order.batching.origins import RowOrigins, row_origins
from lightning_streaming.order.batching.rows import check_positions, places_by_stream
from lightning_streaming.order.batching.sequence import EpochFacts
from lightning_streaming.order.batching.stream_entries import entries_per_stream


class DevicePerStream(Composed):
    """Each node fills as many whole batches from each stream as it can; their order is random, node by node.

    The sequence takes one batch of each node in turn. A last round that does not give every rank a batch is left out;
    the reference deals it to some of the ranks.

    Args:
        facts: The epoch.

    Raises:
        ConfigError: A stream fills no batch on a node.
    """

    def __init__(self, facts: EpochFacts) -> None:
        super().__init__(facts)
        self._row_size = facts.geometry.batch_size
        self._num_nodes = facts.geometry.num_nodes
        self._slices_per_node = facts.num_canonical_nodes // self._num_nodes
        self._streams = entries_per_stream(facts, facts.num_canonical_nodes)
        self.rows_per_stream = [len(stream) // self._num_nodes // self._row_size for stream in self._streams]
        """Batches of each stream on each node."""
        if not all(self.rows_per_stream):
            stream = self.rows_per_stream.index(0)
            raise ConfigError(
                f"stream {stream} draws {self._streams[stream].sequence.num_samples} samples, too few for one batch of "
                f"{self._row_size} on each of {self._num_nodes} nodes; raise its weight, lower the batch size or "
                "leave it out"
            )

    def __len__(self) -> int:
        """Positions of the epoch: whole global batches."""
        ranks_per_node = self._facts.geometry.ranks_per_node
        return sum(self.rows_per_stream) // ranks_per_node * self._facts.geometry.global_batch_size

    def most_counted(self, num_ranks: int) -> int:
        """The most samples that a reader of the whole epoch counts: the reference's last round may be partial."""
        del num_ranks
        return len(self) + self._facts.geometry.global_batch_size

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`~lightning_streaming.order.batching.sequence.EpochSequence`."""
        check_positions(positions, len(self))
        return self.places_of_rows(positions)

    def places_of_rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Like :meth:`places`, also for the batches of a last round that is left out."""
        rows = positions // self._row_size
        rounds = rows // self._num_nodes
        nodes = rows - rounds * self._num_nodes
        columns = positions - rows * self._row_size
        streams, ordinals = np.empty_like(rows), np.empty_like(rows)
        for node in np.unique(nodes).tolist():
            ours = nodes == node
            streams[ours], ordinals[ours] = self._origins[node].find(rounds[ours])
        entries = ordinals * self._row_size + columns
        return places_by_stream(streams, self._entries_of_stream(nodes, entries), self._places_of_stream)

    def _entries_of_stream(self, nodes: NDArray[np.int64], entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Entries of a node as entries of the whole stream: its slices in turn, as many of each as it has ranks."""
        ranks = self._facts.geometry.ranks_per_node
        turns, ranks_of_node = np.divmod(entries, ranks)
        steps, slices = np.divmod(turns, self._slices_per_node)
        slices += nodes * self._slices_per_node
        return (steps * ranks + ranks_of_node) * self._facts.num_canonical_nodes + slices

    def _places_of_stream(self, stream: int, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._streams[stream].places(entries)

    @cached_property
    def _origins(self) -> list[RowOrigins]:
        """Of the rounds of each node."""
        return row_origins(self._facts, self.rows_per_stream, self._num_nodes)
