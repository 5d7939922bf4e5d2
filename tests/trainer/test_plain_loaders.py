"""Loaders of torch's own in a Trainer without our callback: warned of where training would not go on exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_streaming import StreamingDataLoader, StreamingDataset
from tests.helpers import raises
from tests.trainer.harness import Reader, ordinary, streaming, trainer_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


def plain(data: Path, workers: int = 0, context: str | None = None) -> DataLoader[Any]:
    dataset = StreamingDataset(remote=str(data / "a"), batch_size=4)
    return DataLoader(dataset, batch_size=4, num_workers=workers, multiprocessing_context=context)


class Around(IterableDataset[Any]):
    def __init__(self, source: StreamingDataset) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


@pytest.mark.nightly
@pytest.mark.parametrize(("workers", "context"), [(0, None), (1, "spawn")])
def test_training_from_a_loader_of_torch_is_warned_of_at_once(
    workers: int, context: str | None, data: Path, tmp_path: Path
) -> None:
    loader = plain(data, workers, context)
    with pytest.warns(UserWarning, match="Lightning trains from a torch DataLoader .* StreamingDataLoader"):
        trainer_for(tmp_path, max_epochs=1).fit(Reader(lambda: loader))


def test_a_worker_that_is_forked_warns_itself(data: Path, tmp_path: Path) -> None:
    with raises(UserWarning, "Lightning trains from a torch DataLoader"):  # here, warnings are errors
        trainer_for(tmp_path, max_epochs=1).fit(Reader(lambda: plain(data, 2)))


def test_a_dataset_around_ours_is_warned_of_too(data: Path, tmp_path: Path) -> None:
    around = Around(StreamingDataset(remote=str(data / "a"), batch_size=4))
    with pytest.warns(UserWarning, match="Lightning trains from a torch DataLoader"):
        trainer_for(tmp_path, max_epochs=1).fit(Reader(lambda: DataLoader(around, batch_size=4)))


class ReadsInAHook(Reader):
    """Reads something else while it trains."""

    def on_train_epoch_start(self) -> None:
        self.also = [batch["id"].tolist() for batch in self.beside]

    beside: Any


def test_evaluation_hooks_and_our_own_loader_are_not_warned_of(data: Path, tmp_path: Path) -> None:
    model = ReadsInAHook(lambda: StreamingDataLoader(StreamingDataset(remote=str(data / "a")), batch_size=4))
    model.beside = plain(data)
    trainer_for(tmp_path, max_epochs=1).fit(model)
    evaluated = Reader(lambda: ordinary(3), lambda: plain(data))
    trainer = trainer_for(tmp_path, max_epochs=1)
    trainer.fit(evaluated)
    trainer.validate(evaluated)
    trainer.predict(evaluated)
    assert len(evaluated.evaluated) > 20
    assert torch.is_tensor(next(iter(streaming(data)))["id"])
