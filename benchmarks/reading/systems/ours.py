"""Ours, with default settings."""

from __future__ import annotations

from benchmarks.reading.case import Case
from benchmarks.reading.works import samples
from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset


def write(case: Case) -> None:
    """Store the samples in MDS."""
    with MDSWriter(out=str(case.folder("ours")), columns=case.kind.columns(case.size)) as writer:
        for sample in samples(case.kind, case.samples, case.size):
            writer.write(sample)


def dataset(case: Case) -> StreamingDataset:
    """Shuffled, and transformed as the user wants."""
    return StreamingDataset(remote=str(case.folder("ours")), shuffle=True, transform=case.kind.transform)


def loader(case: Case) -> StreamingDataLoader:
    """The dataset's batches."""
    return StreamingDataLoader(dataset(case), case.batch_size, **case.worker_options())
