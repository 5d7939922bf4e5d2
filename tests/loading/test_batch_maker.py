"""Batches of untouched samples, which may be made of rows: they must be those that torch's collate makes of samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.mds import MDSReader

PLAIN = {"id": "int", "label": "uint8", "share": "float32", "tokens": "ndarray:uint16:5", "box": "ndarray:float64:2,2"}
SAMPLES = 53


def sample_of(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "label": np.uint8(number % 7),
        "share": np.float32(number / 3),
        "tokens": np.arange(number, number + 5, dtype=np.uint16),
        "box": np.full((2, 2), number / 7),
        "text": str(number),
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path / "plain", PLAIN)


def write(root: Path, columns: dict[str, str]) -> Path:
    with MDSWriter(out=str(root), columns=columns, size_limit=900) as writer:
        for number in range(SAMPLES):
            writer.write(sample_of(number))
    return root


@pytest.fixture
def rows_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by each row that this process reads."""
    taken: list[int] = []
    take = MDSReader.row

    def counted(reader: MDSReader, index: int) -> bytes:
        taken.append(index)
        return take(reader, index)

    monkeypatch.setattr(MDSReader, "row", counted)
    return taken


class Identity:
    """A transform that changes nothing, for which samples must be decoded."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


def batches(dataset: StreamingDataset, workers: int = 0, **settings: Any) -> list[Any]:
    loader = StreamingDataLoader(dataset, batch_size=8, num_workers=workers, **settings)
    try:
        return list(loader)
    finally:
        loader.close()


def same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    def equal(one: Any, other: Any) -> bool:
        if not isinstance(one, torch.Tensor):
            return bool(one == other)
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)

    pairs = list(zip(left, right, strict=True))
    return all(list(one) == list(other) and all(equal(one[name], other[name]) for name in one) for one, other in pairs)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_make_the_batches_that_samples_make(root: Path, workers: int) -> None:
    quick = batches(StreamingDataset(remote=str(root), shuffle=True), workers)
    one_by_one = batches(StreamingDataset(remote=str(root), shuffle=True, transform=Identity()), workers)
    assert same(quick, one_by_one)
    assert [len(batch["id"]) for batch in quick] == [8] * 6 + [5]


def test_plain_samples_are_taken_as_rows(root: Path, rows_taken: list[int]) -> None:
    batches(StreamingDataset(remote=str(root)))
    assert len(rows_taken) == SAMPLES


def test_streams_of_the_same_columns_are_taken_as_rows(root: Path, tmp_path: Path, rows_taken: list[int]) -> None:
    from lightning_streaming import Stream

    streams = {"a": Stream(remote=str(root)), "b": Stream(remote=str(write(tmp_path / "b", PLAIN)))}
    assert sum(len(batch["id"]) for batch in batches(StreamingDataset(streams=streams))) == 2 * SAMPLES
    assert len(rows_taken) == 2 * SAMPLES


class Doubling(StreamingDataset):
    """A dataset of a user's, which looks at what it hands out."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for sample in super().__iter__():
            yield {"double": 2 * sample["id"]}


def test_whoever_looks_at_samples_gets_samples(root: Path, tmp_path: Path, rows_taken: list[int]) -> None:
    numbers = list(range(SAMPLES))
    plain = StreamingDataset(remote=str(root))
    seen = [int(one) for batch in batches(plain, collate_fn=lambda some: [one["id"] for one in some]) for one in batch]
    assert seen == numbers
    seen = [number for batch in batches(Doubling(remote=str(root))) for number in batch["double"].tolist()]
    assert seen == [2 * number for number in numbers]
    columns = batches(StreamingDataset(remote=str(root), columns=["id"]))
    assert all(list(batch) == ["id"] for batch in columns)
    assert [sample["id"] for sample in StreamingDataset(remote=str(root), batch_size=8)] == numbers
    mixed = write(tmp_path / "text", {"id": "int", "text": "str"})
    assert batches(StreamingDataset(remote=str(mixed)))[0]["text"] == [str(number) for number in range(8)]
    assert rows_taken == []


def test_the_default_written_out_is_the_default(root: Path, rows_taken: list[int]) -> None:
    batches(StreamingDataset(remote=str(root)), collate_fn=default_collate)
    assert len(rows_taken) == SAMPLES


class Twice(StreamingDataset):
    """A dataset of a user's, which hands out more than its share."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for sample in super().__iter__():
            yield sample
            yield sample


class LookingAhead(StreamingDataset):
    """A dataset of a user's, which reads some samples before it hands out the first."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        ahead = []
        for sample in super().__iter__():
            ahead.append(sample)
            if len(ahead) > 4:
                yield ahead.pop(0)
        yield from ahead


@pytest.mark.parametrize("workers", [0, 1])
def test_whoever_hands_out_more_than_a_share_is_told(root: Path, workers: int) -> None:
    with pytest.raises(ConfigError, match="the pass has more batches than its epoch"):
        batches(Twice(remote=str(root)), workers)


def test_whoever_looks_ahead_loses_nothing(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"id": "int"}) as writer:
        for number in range(2 * 8192 + 100):  # more than a window of samples
            writer.write({"id": number})
    read = [number for batch in batches(LookingAhead(remote=str(tmp_path))) for number in batch["id"].tolist()]
    assert read == list(range(2 * 8192 + 100))


def test_rows_keep_the_cache_limit(tmp_path: Path) -> None:
    remote, local = tmp_path / "remote", tmp_path / "local"
    with MDSWriter(out=str(remote), columns={"id": "ndarray:int64:100"}, size_limit=16000) as writer:
        for number in range(600):
            writer.write({"id": np.full(100, number)})
    dataset = StreamingDataset(remote=str(remote), local=str(local), shuffle=True, cache_limit="90kb")
    read = sorted(number for batch in batches(dataset) for number in batch["id"][:, 0].tolist())
    assert read == list(range(600))
    assert sum(path.stat().st_size for path in local.rglob("*") if path.is_file()) <= 90 << 10
