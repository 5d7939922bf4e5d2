"""The runs whose checkpoints are beside this file, made of public names alone: later releases go on with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_streaming import (
    Stream,
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    StreamingStateCallback,
)

SAMPLES = {"a": 60, "b": 40}
EPOCHS = 3
Seen = list[list[Any]]


class Stopped(Exception):
    """Ends a run where it has saved."""


class SaveAndStop(Callback):
    """Saves after so many batches, and ends the run there."""

    def __init__(self, path: Path, batches: int) -> None:
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)
            raise Stopped


class Notes(LightningModule):
    """Notes epoch and ids of each batch that it is trained on; of several loaders, the ids of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: Seen = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batches = batch if isinstance(batch, (list, tuple)) else [batch]
        ids = [one["id"].tolist() if isinstance(one, dict) else one.tolist() for one in batches]
        self.seen.append([self.trainer.current_epoch, *ids])
        loss: torch.Tensor = self.layer(torch.ones(1, 1)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Several(StreamingDataModule):
    """Two streaming loaders and an ordinary one, in a list."""

    def __init__(self, data: Path) -> None:
        super().__init__(StreamingConfig(remote=str(data / "a")))
        self.data = data

    def train_dataloader(self) -> Any:
        def loader(name: str, batch_size: int) -> StreamingDataLoader:
            return StreamingDataLoader(StreamingDataset(remote=str(self.data / name), shuffle=True), batch_size)

        return [loader("a", 4), loader("b", 3), DataLoader(torch.arange(15), batch_size=1)]  # type: ignore[arg-type]


def _one(data: Path, batch_size: int, workers: int, **settings: Any) -> StreamingDataModule:
    train = StreamingConfig(remote=str(data / "a"), shuffle=True, **settings)
    return StreamingDataModule(train, batch_size=batch_size, num_workers=workers)


def _mixture(data: Path, batch_size: int, workers: int, **settings: Any) -> StreamingDataModule:
    streams = {name: Stream(remote=str(data / name), proportion=part) for name, part in {"a": 0.7, "b": 0.3}.items()}
    train = StreamingConfig(streams=streams, shuffle=True, **{"shuffle_algo": "blockwise", **settings})
    return StreamingDataModule(train, batch_size=batch_size, num_workers=workers)


MODULES: dict[str, Callable[[Path, int, int], StreamingDataModule]] = {
    "single": _one,
    "mixture": _mixture,
    "stratified": lambda *args: _mixture(*args, shuffle_algo="py1e", batching_method="stratified"),
    "skipped": lambda *args: _one(*args, skip=["4-5", "9"]),
    "several": lambda data, *_: Several(data),
}
MADE_WITH: dict[str, tuple[int, int, int]] = {
    "single": (4, 0, 7),
    "mixture": (4, 2, 34),
    "stratified": (4, 0, 33),
    "skipped": (4, 1, 6),
    "several": (4, 0, 19),
}
"""Batch size, workers, and after how many batches it was saved."""


def fit(
    kind: str, data: Path, directory: Path, batch_size: int, workers: int, *callbacks: Callback, ckpt_path: Any = None
) -> Seen:
    """Train to the end, or until stopped; gives what was trained on, batch by batch."""
    model = Notes()
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=[*([StreamingStateCallback()] if kind == "several" else []), *callbacks],
    )
    with suppress(Stopped):
        trainer.fit(model, datamodule=MODULES[kind](data, batch_size, workers), ckpt_path=ckpt_path)
    return model.seen


def loader_of(data: Path, batch_size: int = 4, workers: int = 0) -> StreamingDataLoader:
    """A loader without a trainer, over both streams."""
    streams = {name: Stream(remote=str(data / name)) for name in SAMPLES}
    return StreamingDataLoader(StreamingDataset(streams=streams, shuffle=True), batch_size, num_workers=workers)


def read(loader: Any, batches: int | None = None) -> Seen:
    """Read on, to the end of the last epoch or so many batches."""
    seen: Seen = []
    while (epoch := loader.dataset.next_epoch) < EPOCHS:
        for batch in loader:
            seen.append([epoch, batch["id"].tolist()])
            if len(seen) == batches:
                return seen
    return seen


def accelerated(data: Path, folder: Path, *, save_after: int | None = None, resume: bool = False) -> Seen:
    """The same loader in Accelerate's hands, which saves and loads its state."""
    accelerator = Accelerator(cpu=True)
    try:
        loader = accelerator.prepare(loader_of(data))
        if resume:
            accelerator.load_state(str(folder))
        seen = read(loader, save_after)
        if save_after is not None:
            accelerator.save_state(str(folder))
        return seen
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def ids(seen: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Epoch and id of each sample of one loader, without regard to batches."""
    return [[epoch, one] for epoch, batch in seen for one in batch]
