"""litdata, with default settings; dicts of arrays, numbers, texts and bytes are stored as they are.

Bytes come back as views, which torch collates number by number, for minutes; a transform makes bytes of them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter

from benchmarks.reading.case import Case
from benchmarks.reading.works import Sample, samples


def store(items: Iterable[Any], folder: Path, **options: Any) -> None:
    """Write with what ``litdata.optimize`` writes with, in chunks of its usual size."""
    folder.mkdir(parents=True)
    writer = BinaryWriter(str(folder), chunk_bytes="64MB", **options)
    for place, item in enumerate(items):
        writer[place] = item
    writer.done()
    writer.merge()


def as_bytes(sample: Sample) -> Sample:
    """The sample as it was written."""
    return {name: bytes(value) for name, value in sample.items()}


def batches(case: Case, folder: Path, **options: Any) -> Iterable[Any]:
    """Batches of a dataset that is shuffled, and transformed as the user wants."""
    transform = case.kind.transform or (as_bytes if "bytes" in case.kind.columns(case.size).values() else None)
    shuffled = StreamingDataset(str(folder), shuffle=True, transform=transform, **options)
    loader: Iterable[Any] = StreamingDataLoader(shuffled, batch_size=case.batch_size, **case.worker_options())
    return loader


def write(case: Case) -> None:
    """Store the samples."""
    store(samples(case.kind, case.samples, case.size), case.folder("litdata"))


def dataset(case: Case) -> Any:
    """Decodes one sample at a time, not 256 of which ``[i]`` hands out one; and does so some hundred times sooner."""
    return StreamingDataset(str(case.folder("litdata")), batch_decode=0)


def loader(case: Case) -> Iterable[Any]:
    """The dataset's batches."""
    return batches(case, case.folder("litdata"))
