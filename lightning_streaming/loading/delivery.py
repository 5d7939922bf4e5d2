"""What a worker hands to its loader: some batches in a row, and what they took to make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Delivery(NamedTuple):
    """Batches that follow each other among those of one worker."""

    worker: int
    batches: Iterable[Any]
    measures: NDArray[np.int64]
    """What each took: of shape (batches, numbers), as :meth:`Meter.end_batches` gives them."""


@dataclass(frozen=True, slots=True)
class Table:
    """Batches of plain samples, all of one size. Each batch is a dict of tensors that are its own."""

    columns: dict[str, NDArray[Any]]
    """Arrays of shape (batches, samples, ...), by name."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # Not views of one tensor: writing into such would count as a change of all of them, which autograd refuses.
        tensors = (map(torch.from_numpy, values) for values in self.columns.values())
        return (dict(zip(self.columns, batch, strict=True)) for batch in zip(*tensors, strict=True))
