"""Resumes at every step of a run, for any arrangement of train loaders, and compares with the uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_streaming import StreamingDataLoader, StreamingDataset, StreamingStateCallback
from lightning_streaming.trainer.fit_loop import named_loaders
from tests.trainer.harness import Recorder

ORDINARY = 90_000
"""Ids of ordinary loaders are from here on; these begin again on a resume, so they are not compared."""


def streaming(data: Path, name: str = "a", batch_size: int = 4) -> StreamingDataLoader:
    """A shuffled loader of one of the harness's streams: "a" has 5 batches of 4, "b" has 3."""
    dataset = StreamingDataset(remote=str(data / name), shuffle=True, shuffle_block_size=16)
    return StreamingDataLoader(dataset, batch_size=batch_size)


def evaluating(data: Path, name: str = "val") -> StreamingDataLoader:
    """A loader that reads every sample from the start each time."""
    return StreamingDataLoader(StreamingDataset(remote=str(data / name)), batch_size=4, repeat_epoch=True)


class Ids(Dataset[dict[str, int]]):
    """What an ordinary loader reads, one sample a batch."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": ORDINARY + index}


class Endless(IterableDataset[dict[str, int]]):
    """Has no length, which makes Lightning fetch one batch ahead of the step from every loader."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(1000):
            yield {"id": ORDINARY + number}


def ordinary(batches: int | None) -> DataLoader[Any]:
    """A loader of torch's own; None: of no known length."""
    return DataLoader(Endless() if batches is None else Ids(batches))


class Reader(Recorder):
    """Notes of each step its epoch, its number, and which ids came from which loader; and what it was evaluated on."""

    def __init__(self, loaders: Callable[[], Any], evaluated: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.train_dataloader = loaders  # type: ignore[method-assign]
        if evaluated is not None:
            self.val_dataloader = self.test_dataloader = self.predict_dataloader = evaluated  # type: ignore[method-assign]
        self.evaluated: list[int] = []
        self.validated_after: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.hook("training_step", self)
        step: list[Any] = [self.trainer.current_epoch, batch_idx]
        for name, ids in named_loaders(batch):
            is_compared = ids is not None and int(ids[0]) < ORDINARY
            step.append([name.removesuffix(".id"), ids.tolist() if is_compared else None])
        self.pending.append(step)
        return self.layer.weight.square().sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated += batch["id"].tolist()

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated += batch["id"].tolist()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch["id"]

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated_after.append(self.trainer.global_step)


class SaveAtEveryStep(Callback):
    """Saves after each training step, as ``1.ckpt``, ``2.ckpt``, ..."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.saved: list[Path] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.saved.append(self.directory / f"{len(self.saved) + 1}.ckpt")
        trainer.save_checkpoint(self.saved[-1], weights_only=False)


def trainer_for(directory: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    """A quiet trainer of two epochs."""
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(one, Checkpoint) for one in callbacks),
        "default_root_dir": directory,
        "callbacks": list(callbacks),
    }
    return Trainer(**{**defaults, **settings})


def counters(trainer: Trainer) -> dict[str, int]:
    """Where a trainer stands, and what its loggers were told."""
    return {
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "batches over all epochs": trainer.fit_loop.total_batch_idx,
        "loggers' step": trainer.fit_loop.epoch_loop._batches_that_stepped,
    }


def check_resume_at_every_step(new_model: Callable[[], Reader], directory: Path, **settings: Any) -> Reader:
    """Train, resume from after every step of that, and compare; gives the model that was trained in one go."""

    def fit(ckpt_path: Path | None, *callbacks: Callback) -> tuple[Reader, Trainer]:
        model, trainer = new_model(), trainer_for(directory, StreamingStateCallback(), *callbacks, **settings)
        trainer.fit(model, ckpt_path=ckpt_path, weights_only=True)
        return model, trainer

    saver = SaveAtEveryStep(directory)
    whole, whole_trainer = fit(None, saver)
    assert len(saver.saved) > 2
    for path in saver.saved:
        resumed, trainer = fit(path)
        assert resumed.seen == whole.seen, path.name
        assert resumed.steps_per_epoch == whole.steps_per_epoch, path.name
        assert counters(trainer) == counters(whole_trainer), path.name
    return whole
