"""Where samples become a batch, in the process that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_streaming.formats.plain_rows import PlainRows
from lightning_streaming.loading.meter import Meter


class BatchMaker:
    """A collate function, and what its reader must know of it.

    Where it is torch's ``default_collate``, and nobody else looks at the samples, the reader may leave them as the
    bytes of plain rows. All at once they then become the batch that ``default_collate`` would make of them one by one.

    Args:
        collate: The loader's own; None where batches are made by somebody else.
        meter: Is told of each batch. Pickled together with the dataset, for a worker, this stays one with its reader's.
        takes_rows: Whether samples may be rows.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None, meter: Meter, *, takes_rows: bool) -> None:
        self.meter = meter
        self.takes_rows = takes_rows
        self.rows: PlainRows | None = None
        """How the samples of this pass lie in their bytes, as their reader says; None if they are decoded ones."""
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        if self.rows is not None:
            batch: Any = {name: torch.from_numpy(values) for name, values in self.rows.columns_of(samples).items()}
        else:
            assert self._collate is not None, "who makes batches elsewhere does not call this"
            batch = self._collate(samples)
        self.meter.end_batch()
        return batch
