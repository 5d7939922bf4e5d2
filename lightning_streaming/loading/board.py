"""What it took to make each batch, written by the worker that made it where the loader finds it.

Nothing travels with a batch, so it is all the same what collate and pinning make of one. Worker ``w`` makes batches
``w, w + workers, w + 2 * workers, ...`` of a pass, and writes what it measured of its n-th into its row ``n % depth``
before it sends the batch. A worker is never further ahead of the loader than torch lets it be, so that a few rows do.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class BatchMeasures(NamedTuple):
    """What it took to make one batch."""

    samples: int = 0
    sample_bytes: int = 0
    """Bytes of its samples as they are stored uncompressed."""
    download_ns: int = 0
    """Time for which their reader waited for files to be on this node, but for decompression."""
    decompress_ns: int = 0
    """Time for which it waited for files to be decompressed."""
    work_ns: int = 0
    """Time from the first sample to the collated batch, the two above included."""
    shards_opened: int = 0
    cache_hits: int = 0
    """Of those, how many were on this node when this process first wanted them."""
    fetched_bytes: int = 0
    """Bytes that this process fetched of the others, or had fetched ahead."""
    shards_open: int = 0
    """Shards that are mapped now."""


NUM_MEASURES = len(BatchMeasures._fields)


class Board:
    """Rows of whole numbers in memory that a loader shares with its workers; it has no name, and ends with them.

    Args:
        num_workers: Workers of the loader; with 0, the loader's own process is the only one that writes.
        prefetch_factor: Batches that each worker may be ahead.
        num_streams: Streams whose samples are counted.
    """

    def __init__(self, num_workers: int, prefetch_factor: int, num_streams: int) -> None:
        # One row more than are ahead: torch asks for the next batch before it hands one out.
        shape = max(1, num_workers), prefetch_factor + 2, NUM_MEASURES + num_streams
        words = torch.zeros(shape, dtype=torch.int64)
        if num_workers:
            words.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._use(words)

    def write(self, worker: int, batch: int, measures: BatchMeasures, per_stream: Sequence[int]) -> None:
        """In a worker: write what it measured of its n-th batch of the pass."""
        row = worker * self._depth + batch % self._depth
        self._row.pack_into(self._bytes, row * self._row.size, *measures, *per_stream)  # sooner than numpy would

    def read(self, batch: int) -> NDArray[np.int64]:
        """In the loader: the measures of a batch of the pass, then its samples per stream; to be copied at once."""
        round_of_workers, worker = divmod(batch, self.num_workers)
        row: NDArray[np.int64] = self._rows[worker, round_of_workers % self._depth]
        return row

    def __getstate__(self) -> torch.Tensor:
        return self._words  # an array would be copied

    def __setstate__(self, words: torch.Tensor) -> None:
        self._use(words)

    def _use(self, words: torch.Tensor) -> None:
        self._words = words
        self._rows: NDArray[Any] = words.numpy()
        self._bytes = self._rows.data.cast("B")
        self.num_workers, self._depth, width = words.shape
        self._row = struct.Struct(f"{width}q")
