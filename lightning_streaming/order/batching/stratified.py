"""Every global batch from all streams, in proportion to their weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.batching.composed import Composed
from lightning_streaming.order.batching.rows import check_positions, places_by_stream
from lightning_streaming.order.batching.sequence import EpochFacts
from lightning_streaming.order.batching.stream_entries import entries_per_stream


class Stratified(Composed):
    """Each global batch holds every stream's share of it, stream by stream; the shortest stream ends the epoch.

    Args:
        facts: The epoch.

    Raises:
        ConfigError: A stream's share of a global batch is less than one sample, or it cannot fill it once.
    """

    def __init__(self, facts: EpochFacts) -> None:
        super().__init__(facts)
        self._row_size = facts.geometry.global_batch_size
        self._shares = shares_of_batch(np.asarray(facts.shape.weights.proportion), self._row_size)
        self._stops = np.cumsum(self._shares)
        self._streams = entries_per_stream(facts, num_nodes=1)
        rows: list[int] = [
            len(entries) // share for entries, share in zip(self._streams, self._shares.tolist(), strict=True)
        ]
        self._rows = min(rows)
        if not self._rows:
            stream = rows.index(0)
            raise ConfigError(
                f"stream {stream} draws {self._streams[stream].sequence.num_samples} samples, too few for its share of "
                f"{self._shares[stream]} in a global batch of {self._row_size}; draw more or lower the batch size"
            )

    def __len__(self) -> int:
        """Positions of the epoch: whole global batches."""
        return self._rows * self._row_size

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See :class:`~lightning_streaming.order.batching.sequence.EpochSequence`."""
        check_positions(positions, len(self))
        rows = positions // self._row_size
        columns = positions - rows * self._row_size
        streams = np.searchsorted(self._stops, columns, side="right")
        shares = self._shares[streams]
        entries = rows * shares + columns - (self._stops[streams] - shares)
        return places_by_stream(streams, entries, lambda stream, ours: self._streams[stream].places(ours))


def shares_of_batch(proportions: NDArray[np.float64], batch_size: int) -> NDArray[np.int64]:
    """Samples of each stream in a global batch: its proportion rounded down, and one more for the largest remainders.

    Of equal remainders those of the last streams come first, as in the reference where it is defined.

    Args:
        proportions: Share of each stream; sums to 1.
        batch_size: Samples in a global batch.

    Raises:
        ConfigError: A stream would get none.
    """
    shares = (proportions * batch_size).astype(np.int64)
    missing = batch_size - int(shares.sum())
    if missing:
        remainders = batch_size * proportions - shares
        shares[np.argsort(remainders, kind="stable")[::-1][:missing]] += 1
    if shares.min() < 1:
        stream = int(shares.argmin())
        raise ConfigError(
            f"stream {stream} has a share of {proportions[stream]:.2g}, less than one sample of a global batch of "
            f"{batch_size}; raise its weight or the batch size, or use batching_method='random'"
        )
    return shares
