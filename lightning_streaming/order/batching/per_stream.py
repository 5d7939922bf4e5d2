"""Every global batch from one stream."""

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


class PerStream(Composed):
    """Each stream fills as many whole global batches as it can; their order is random.

    Args:
        facts: The epoch.

    Raises:
        ConfigError: A stream fills no global batch.
    """

    def __init__(self, facts: EpochFacts) -> None:
        super().__init__(facts)
        self._streams = entries_per_stream(facts, facts.geometry.num_nodes)
        self._row_size = facts.geometry.global_batch_size
        self._rows_per_stream = [len(stream) // self._row_size for stream in self._streams]
        if not all(self._rows_per_stream):
            stream = self._rows_per_stream.index(0)
            raise ConfigError(
                f"stream {stream} draws {self._streams[stream].sequence.num_samples} samples, too few for one global "
                f"batch of {self._row_size}; raise its weight, lower the batch size or leave it out"
            )

    def __len__(self) -> int:
        """Positions of the epoch: whole global batches."""
        return sum(self._rows_per_stream) * self._row_size

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`~lightning_streaming.order.batching.sequence.EpochSequence`."""
        check_positions(positions, len(self))
        rows = positions // self._row_size
        streams, ordinals = self._origins.find(rows)
        entries = positions + (ordinals - rows) * self._row_size
        return places_by_stream(streams, entries, lambda stream, ours: self._streams[stream].places(ours))

    @cached_property
    def _origins(self) -> RowOrigins:
        (origins,) = row_origins(self._facts, self._rows_per_stream, num_nodes=1)
        return origins
