"""Subclasses of a dataset that make samples in a way of their own: whoever hands out samples hands out theirs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_streaming import StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import ConfigError
from lightning_streaming.logs import read_sample_log
from tests.helpers import assert_resumes_at_every_step, ids, write_dataset
from tests.reading.processes import wait_until
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SAMPLES = 29
ORDER: dict[str, Any] = {"batch_size": 4, "shuffle": True, "shuffle_block_size": 16}


class Tokenizer:
    """What a subclass keeps, and its workers need."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "token": sample["id"] + self.offset}


class ByItem(StreamingDataset):
    """Overrides ``__getitem__``; takes names that a dataset has had for itself."""

    def __init__(self, *, tokenizer: Tokenizer | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.tokenizer = tokenizer or Tokenizer(100)
        self.transform = self.tokenizer
        self.config = {"offset": self.tokenizer.offset}  # type: ignore[assignment,method-assign]
        self.epochs, self.catalog, self.labels = 3, "a catalog", ["a"]

    def __getitem__(self, idx: Any) -> Any:
        return self.transform(super().__getitem__(idx))


class ByGetItem(StreamingDataset):
    """Overrides ``get_item``, with the default that MosaicML Streaming has."""

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        return Tokenizer(100)(super().get_item(sample_id, retry))


class Inherited(ByItem):
    """Overrides what it inherits."""

    def __getitem__(self, idx: Any) -> Any:
        sample = super().__getitem__(idx)
        return {**sample, "token": sample["token"] + 0}


class Tokenizing:
    """Knows no dataset."""

    def __getitem__(self, idx: Any) -> Any:
        return Tokenizer(100)(super().__getitem__(idx))  # type: ignore[misc]


class Mixed(Tokenizing, StreamingDataset):
    """Inherits from two sides."""


class WithOthers(StreamingDataset):
    """Looks at other samples too: by negative id, by numpy's integers."""

    def __getitem__(self, idx: Any) -> Any:
        idx %= self.size
        sample, same = super().__getitem__(idx - self.size), super().__getitem__(np.int64(idx))
        assert sample == same == self.get_item(idx)
        assert super().__getitem__(idx - 1)["id"] == (idx - 1) % self.size
        return Tokenizer(100)(sample)


KINDS = [ByItem, ByGetItem, Inherited, Mixed, WithOthers]
each_kind = pytest.mark.parametrize("kind", KINDS)


class Pairs(StreamingDataset):
    """Gives what is no dict: numbers, text, and an augmentation that draws from the global generators."""

    def __getitem__(self, idx: Any) -> tuple[int, str, float]:
        sample = super().__getitem__(idx)
        return sample["id"], f"text {sample['id']}", random.random() + np.random.rand()  # noqa: NPY002


class Untouched(StreamingDataset):
    """Overrides, and changes nothing."""

    def __getitem__(self, idx: Any) -> Any:
        return super().__getitem__(idx)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a", SAMPLES)


def _order(root: Path, epochs: int = 1) -> list[list[int]]:
    loader = StreamingDataLoader(StreamingDataset(remote=str(root), **ORDER))
    return [batch for _ in range(epochs) for batch in ids(loader)]


def _seen(batches: Any) -> list[list[int]]:
    """Ids of the batches, each of whose samples has been through the subclass once."""
    found = []
    for batch in batches:
        assert (batch["token"] - batch["id"]).tolist() == [100] * len(batch["id"])
        found.append(batch["id"].tolist())
    return found


@each_kind
def test_iterating_hands_out_what_the_subclass_makes(root: Path, kind: type[StreamingDataset]) -> None:
    dataset = kind(remote=str(root), **ORDER)
    made = list(dataset)
    assert [sample["id"] for sample in made] == [one for batch in _order(root) for one in batch]
    assert [sample["token"] for sample in made] == [sample["id"] + 100 for sample in made]
    assert dataset[3] == dataset[3 - SAMPLES] == {"id": 3, "token": 103}


@pytest.mark.rotate(2)
@each_kind
@pytest.mark.parametrize("workers", [0, 2])
def test_so_does_a_loader(root: Path, kind: type[StreamingDataset], workers: int) -> None:
    with closing(StreamingDataLoader(kind(remote=str(root), **ORDER), num_workers=workers)) as loader:
        assert _seen(loader) + _seen(loader) == _order(root, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_so_does_a_plain_loader_of_torch(root: Path, workers: int) -> None:
    loader: DataLoader[Any] = DataLoader(ByItem(remote=str(root), **ORDER), batch_size=4, num_workers=workers)
    assert _seen(loader) == _order(root)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_a_subclass_keeps_reaches_workers_however_they_start(root: Path, method: str) -> None:
    dataset = ByItem(tokenizer=Tokenizer(7), remote=str(root), **ORDER)
    with closing(StreamingDataLoader(dataset, num_workers=1, multiprocessing_context=method)) as loader:
        batches = list(loader)
    assert [batch["id"].tolist() for batch in batches] == _order(root)
    assert all((batch["token"] - batch["id"] == 7).all() for batch in batches)


@pytest.mark.rotate
@pytest.mark.parametrize("kind", [ByItem, ByGetItem])
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_is_exact_at_every_step(root: Path, kind: type[StreamingDataset], workers: int) -> None:
    def make() -> StreamingDataLoader:
        return StreamingDataLoader(kind(remote=str(root), **ORDER), num_workers=workers)

    assert_resumes_at_every_step(make, epochs=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_need_not_be_dicts_and_are_augmented_the_same_again(root: Path, tmp_path: Path, workers: int) -> None:
    dataset = Pairs(remote=str(root), seed_global_rng=True, debug={"sample_log": tmp_path}, **ORDER)
    random.seed(3)
    state = random.getstate()
    with closing(StreamingDataLoader(dataset, num_workers=workers, return_keys=True, collate_fn=list)) as loader:
        batches = list(loader)
    assert random.getstate() == state
    made = [one for samples, _ in batches for one in samples]
    assert [number for number, _, _ in made] == [one for batch in _order(root) for one in batch]
    assert len({drawn for *_, drawn in made}) == SAMPLES
    keys = [key for _, keys in batches for key in keys]
    assert [dataset.restore_sample(key) for key in keys] == made
    assert random.getstate() == state
    logged = [line.key for path in tmp_path.glob("*.jsonl") for line in read_sample_log(path)]
    assert sorted(key.position for key in logged) == list(range(SAMPLES))
    assert {key: dataset.restore_sample(key) for key in logged} == dict(zip(keys, made, strict=True))
    plain = next(iter(StreamingDataLoader(Pairs(remote=str(root), **ORDER))))
    assert [kind.__class__ for kind in plain] == [torch.Tensor, tuple, torch.Tensor]


def _augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"id": sample["id"], "keyed": rng.random(), "global": random.random()}


@pytest.mark.parametrize("seeded", [False, True])
def test_a_transform_applies_once_with_the_randomness_that_it_has_without_the_subclass(
    root: Path, seeded: bool
) -> None:
    settings: dict[str, Any] = {"remote": str(root), "transform": _augment, "seed_global_rng": seeded, **ORDER}
    plain, overriding = StreamingDataset(**settings), Untouched(**settings)
    wanted = ["id", "keyed", "global"] if seeded else ["id", "keyed"]
    read = [[{name: sample[name] for name in wanted} for sample in one] for one in (plain, overriding)]
    assert read[0] == read[1]
    loader = StreamingDataLoader(overriding, return_keys=True, collate_fn=list)
    for samples, keys in loader:
        for sample, key in zip(samples, keys, strict=True):
            assert plain.restore_sample(key)["keyed"] == overriding.restore_sample(key)["keyed"] == sample["keyed"]


class SetBefore(StreamingDataset):
    """Sets its transform before the dataset is made, as classes do that keep their arguments first."""

    def __init__(self, transform: Any, **settings: Any) -> None:
        self.transform = transform
        super().__init__(**settings)


class AppliedBySetBefore(SetBefore):
    def __getitem__(self, idx: Any) -> Any:
        sample = super().__getitem__(idx)
        return sample if self.transform is None else self.transform(sample)


@pytest.mark.parametrize("kind", [SetBefore, AppliedBySetBefore])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_that_was_set_before_the_dataset_was_made_is_not_lost(
    root: Path, kind: type[SetBefore], workers: int
) -> None:
    made = kind(Tokenizer(7), remote=str(root), batch_size=29)
    assert made[3] == {"id": 3, "token": 10}
    (batch,) = StreamingDataLoader(made, num_workers=workers)
    assert batch["token"].tolist() == [number + 7 for number in range(SAMPLES)]
    assert kind(None, remote=str(root))[3] == {"id": 3}


@pytest.mark.parametrize("kind", [StreamingDataset, Untouched])
def test_by_id_a_transform_applies_too_and_draws_by_the_id_alone(root: Path, kind: type[StreamingDataset]) -> None:
    dataset = kind(remote=str(root), transform=_augment, seed_global_rng=True, **ORDER)
    state = random.getstate()
    assert dataset[3] == dataset[3 - SAMPLES] == dataset[np.int64(3)] == dataset[[3]][0] == dataset[3:4][0]
    assert len({sample["keyed"] for sample in dataset[:]}) == SAMPLES
    list(dataset)
    assert dataset[3] == kind(remote=str(root), transform=_augment, seed_global_rng=True)[3]
    assert random.getstate() == state
    assert dataset.get_item(3) == {"id": 3}
    unshuffled = kind(remote=str(root), transform=_augment, seed_global_rng=True, batch_size=4)
    assert list(unshuffled) == unshuffled[:]


class Endless(StreamingDataset):
    """Asks for lists in the middle of being asked for a list."""

    def __getitem__(self, idx: Any) -> Any:
        return super().__getitem__([idx, idx])


def test_asking_for_a_list_within_getitem_is_told_of(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"Endless.__getitem__ reads a list or slice.* one sample at a time"):
        Endless(remote=str(root))[0]


def test_slices_and_lists_go_through_the_subclass(root: Path) -> None:
    dataset = ByGetItem(remote=str(root))
    assert dataset[2:4] == dataset[[2, 3]] == dataset[np.array([2, 3])]
    assert dataset[2:4] == [{"id": 2, "token": 102}, {"id": 3, "token": 103}]


@pytest.mark.parametrize("limited", [False, True])
def test_shards_are_fetched_once_and_ahead_and_held_meanwhile(
    http_store: HttpStore, tmp_path: Path, limited: bool
) -> None:
    write_dataset(http_store.root, 60)
    limit = 4300 if limited else None
    settings: dict[str, Any] = {"remote": http_store.url, "local": str(tmp_path), "cache_limit": limit}
    neighbour = StreamingDataset(**settings)

    class Lingering(StreamingDataset):
        def __getitem__(self, idx: Any) -> Any:
            if idx == 1:  # the reader stands still, and the next shard comes all the same
                assert wait_until(lambda: "shard.00001.mds" in http_store.requests())
            assert not neighbour.evict_shard(idx // 5)
            assert super().__getitem__(idx) == super().__getitem__(idx)
            assert not neighbour.evict_shard(idx // 5)
            return super().__getitem__(idx)

    dataset = Lingering(**settings, batch_size=5, predownload=10)
    assert [sample["id"] for sample in dataset] == list(range(60))
    fetched = [name for name in http_store.requests() if name.endswith(".mds")]
    assert len(fetched) == len(set(fetched)) == 12
    dataset.close()


class Longer(StreamingDataset):
    """Says that it has another length and size than it has."""

    def __len__(self) -> int:
        return 3

    @property
    def size(self) -> int:
        return 3


def test_another_length_of_a_subclass_changes_neither_epoch_nor_place(root: Path) -> None:
    loader = StreamingDataLoader(Longer(remote=str(root), **ORDER))
    assert len(loader) == 8
    assert ids(loader) == _order(root)
    assert len(loader.dataset[:]) == 3
    plain: DataLoader[Any] = DataLoader(Longer(remote=str(root), **ORDER), batch_size=None)
    assert len(list(plain)) == SAMPLES


class Packing(StreamingDataset):
    """Makes one sample of two, as generators over text do."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        samples = super().__iter__()
        for first in samples:
            yield torch.tensor([first["id"], next(samples, first)["id"]])


class OnItsOwn(StreamingDataset):
    """Goes through the samples in an order that nobody else knows."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for number in range(self.size):
            yield self[number]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iter_that_makes_other_samples_is_for_the_loader_of_torch(root: Path, workers: int) -> None:
    packed: DataLoader[Any] = DataLoader(Packing(remote=str(root), **ORDER), batch_size=3, num_workers=workers)
    assert sum(len(batch) for batch in packed) == 15
    loader = StreamingDataLoader(Packing(remote=str(root), **ORDER), num_workers=workers)
    with (
        closing(loader),
        pytest.raises(ConfigError, match=r"fewer batches than its epoch; .* is for torch's"),
    ):
        list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iter_whose_samples_are_not_the_epochs_is_refused_before_the_first_batch(root: Path, workers: int) -> None:
    loader = StreamingDataLoader(OnItsOwn(remote=str(root), **ORDER), num_workers=workers)
    with closing(loader), pytest.raises(ConfigError, match=r"OnItsOwn.__iter__ .* override __getitem__ instead"):
        next(iter(loader))
