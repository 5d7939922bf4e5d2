"""MosaicML Streaming, with default settings; a transform is a dataset's method ``__getitem__``, as its guide says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from benchmarks.reading.case import Case
from benchmarks.reading.works import samples


class Transformed(StreamingDataset):  # type: ignore[misc]  # its types are not known here
    """A dataset whose samples are transformed."""

    def __init__(self, case: Case, **options: Any) -> None:
        super().__init__(**options)
        assert case.kind.transform is not None
        self.transform = case.kind.transform

    def __getitem__(self, at: Any) -> Any:
        return self.transform(super().__getitem__(at))


def write(case: Case) -> None:
    """Store the samples in MDS."""
    with MDSWriter(out=str(case.folder("reference")), columns=case.kind.columns(case.size)) as writer:
        for sample in samples(case.kind, case.samples, case.size):
            writer.write(sample)


def dataset(case: Case) -> Any:
    """Shuffled, and transformed as the user wants."""
    options = {"local": str(case.folder("reference")), "shuffle": True, "batch_size": case.batch_size}
    return Transformed(case, **options) if case.kind.transform else StreamingDataset(**options)


def loader(case: Case) -> Iterable[Any]:
    """The dataset's batches."""
    batches: Iterable[Any] = StreamingDataLoader(dataset(case), batch_size=case.batch_size, **case.worker_options())
    return batches
