"""What a user would otherwise write: a map-style Dataset over one numpy memmap, and torch's DataLoader."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from benchmarks.reading.case import Case
from benchmarks.reading.works import Sample, rows


class Rows(Dataset[Sample]):
    """Samples of rows in a file."""

    def __init__(self, case: Case) -> None:
        self.rows = np.load(case.folder("plain") / "rows.npy", mmap_mode="r")
        self.column = next(iter(case.kind.columns(case.size)))
        self.is_bytes = case.kind.columns(case.size)[self.column] == "bytes"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Sample:
        row = self.rows[place]
        if row.dtype.names:
            return {name: row[name] for name in row.dtype.names}
        return {self.column: row.tobytes() if self.is_bytes else np.array(row)}


def write(case: Case) -> None:
    """Store the samples as the rows of an array."""
    folder = case.folder("plain")
    folder.mkdir(parents=True)
    np.save(folder / "rows.npy", rows(case.kind, case.samples, case.size))


def dataset(case: Case) -> Rows:
    """The rows."""
    return Rows(case)


def loader(case: Case) -> DataLoader[Any]:
    """Random batches."""
    return DataLoader(Rows(case), case.batch_size, shuffle=True, **case.worker_options())
