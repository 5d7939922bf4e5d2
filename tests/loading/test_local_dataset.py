"""A directory as a map-style dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from lightning_streaming import LocalDataset
from lightning_streaming.errors import ObjectNotFoundError, SampleIndexError
from tests.helpers import ids, write_dataset


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_dataset(root / "train", 29)
    write_dataset(root / "packed", 29, compression="gz")
    return root


@pytest.fixture(params=["train", "packed"])
def dataset(root: Path, request: pytest.FixtureRequest) -> Iterator[LocalDataset]:
    made = LocalDataset(str(root), request.param)
    yield made
    made.close()


def test_it_has_samples_by_index(dataset: LocalDataset) -> None:
    assert (len(dataset), dataset.size, dataset.num_samples, len(dataset.shards)) == (29, 29, 29, 6)
    assert [sample["id"] for sample in dataset[:]] == list(range(29))
    assert dataset[-1] == dataset.get_item(28) == dataset[np.int64(28)] == {"id": 28}
    assert [sample["id"] for sample in dataset[[3, 1]]] == [3, 1]
    with pytest.raises(SampleIndexError):
        dataset[29]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torch_samples_from_it(dataset: LocalDataset, workers: int) -> None:
    assert not isinstance(dataset, IterableDataset)
    batches = ids(DataLoader(dataset, batch_size=8, num_workers=workers))
    assert [len(batch) for batch in batches] == [8, 8, 8, 5]
    assert [one for batch in batches for one in batch] == list(range(29))
    sampler = WeightedRandomSampler([0.0] * 28 + [1.0], 4)
    assert ids(DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers)) == [[28] * 4]


class Doubled(LocalDataset):
    def get_item(self, sample_id: int, retry: int = 1) -> dict[str, Any]:
        return {"id": 2 * super().get_item(sample_id, retry)["id"]}


def test_a_subclass_says_what_a_sample_is(root: Path) -> None:
    dataset = Doubled(root / "train")
    assert [sample["id"] for sample in dataset[5:8]] == [10, 12, 14]
    assert ids(DataLoader(dataset, batch_size=29)) == [list(range(0, 58, 2))]


def test_making_one_looks_at_nothing(tmp_path: Path) -> None:
    dataset = LocalDataset(tmp_path / "nothing")
    with pytest.raises(ObjectNotFoundError):
        len(dataset)
    assert not list(tmp_path.iterdir())
