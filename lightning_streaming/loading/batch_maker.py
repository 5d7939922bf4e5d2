"""Where samples become a batch, in the process that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_streaming.formats.plain_rows import PlainRows
from lightning_streaming.loading.meter import Meter
from lightning_streaming.loading.parcels import Sender


class BatchMaker:
    """A collate function, and what its reader must know of it.

    Where it is torch's ``default_collate``, and nobody else looks at the samples, the reader may leave them as the
    bytes of plain rows. All at once they then become the batch that ``default_collate`` would make of them one by one.

    Args:
        collate: The loader's own; None where batches are made by somebody else.
        meter: Is told of each batch. Pickled together with the dataset, for a worker, this stays one with its reader's.
        takes_rows: Whether samples may be rows.
        sender: Takes batches to the loader; None to hand them out as they are.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any] | None,
        meter: Meter,
        *,
        takes_rows: bool = False,
        sender: Sender | None = None,
    ) -> None:
        self.meter = meter
        self.takes_rows = takes_rows
        self._collate = collate
        self._sender = sender
        self._rows: PlainRows | None = None

    def begin_pass(self, rows: PlainRows | None) -> None:
        """In the process that reads: say how the samples of the pass lie in their bytes; None if they are decoded."""
        self._rows = rows
        if self._sender is not None:
            self._sender.begin_pass()

    def __call__(self, samples: list[Any]) -> Any:
        if self._rows is not None:
            batch: Any = {name: torch.from_numpy(values) for name, values in self._rows.columns_of(samples).items()}
        else:
            assert self._collate is not None, "who makes batches elsewhere does not call this"
            batch = self._collate(samples)
        self.meter.end_batch()
        return batch if self._sender is None else self._sender.send(batch)
