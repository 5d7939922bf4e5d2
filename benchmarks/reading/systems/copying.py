"""The limit of this machine: the same rows copied, at random, out of an array in memory into new memory.

Rows of arrays and numbers are gathered by one ``numpy.take`` a batch; of blobs, whose batches are lists, each is copied
into bytes of its own. The order of an epoch is drawn before it, and not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.reading.case import Case
from benchmarks.reading.works import rows

Rows = NDArray[np.uint8]


def write(case: Case) -> None:
    """Store the samples as the rows of an array."""
    folder = case.folder("copying")
    folder.mkdir(parents=True)
    np.save(folder / "rows.npy", rows(case.kind, case.samples, case.size))


def dataset(case: Case) -> Rows:
    """The bytes of each row, shape (samples, bytes of a sample), in memory."""
    matrix: Rows = np.load(case.folder("copying") / "rows.npy").view(np.uint8).reshape(case.samples, -1)
    return matrix


def gather(matrix: Rows, places: NDArray[np.intp]) -> Rows:
    """These rows, in a new array."""
    gathered: Rows = np.take(matrix, places, axis=0)
    return gathered


def copy_each(matrix: Rows, places: NDArray[np.intp]) -> list[bytes]:
    """These rows, each in new bytes."""
    return [matrix[place].tobytes() for place in places.tolist()]


class Copies:
    """Batches of copies, in an order drawn once."""

    def __init__(self, case: Case) -> None:
        order = np.random.default_rng(0).permutation(case.samples)
        self.batches = [order[first : first + case.batch_size] for first in range(0, case.samples, case.batch_size)]
        is_blobs = set(case.kind.columns(case.size).values()) == {"bytes"}
        self.copy = partial(copy_each if is_blobs else gather, dataset(case))

    def __iter__(self) -> Iterator[Any]:
        return map(self.copy, self.batches)


def loader(case: Case) -> Copies:
    """Batches of the rows."""
    return Copies(case)
