"""Where the batches of a pass end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_streaming.loading.cursor import Cursor
from lightning_streaming.order.deal import Deal

_AT_ONCE = 1024
"""Batches whose ends are worked out together: a step should wait for no arithmetic."""


def ends_of_batches(deal: Deal, start: Cursor, drop_last: bool) -> Iterator[Cursor]:
    """Where each batch of a pass ends; the last one, at the beginning of the next epoch."""
    batches = deal.num_batches(drop_last)
    for first in range(1, batches, _AT_ONCE):
        for position in deal.positions_after(np.arange(first, min(first + _AT_ONCE, batches))).tolist():
            yield Cursor(start.epoch, position)
    if batches:
        yield start.passes_later(1)
