"""Runs of a real Trainer that remember which samples the weights have seen, to compare resumed runs with whole ones.

Resumes at every step of a run, for any arrangement of train loaders, and compares with the uninterrupted run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_streaming import (
    MDSWriter,
    Stream,
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    StreamingStateCallback,
)
from lightning_streaming.trainer.datamodule import Stage
from lightning_streaming.trainer.lightning_internals import named_loaders, streaming_loaders
from lightning_streaming.world import World
from tests.tiers import some

TRAIN_SAMPLES = {"a": 17, "b": 12}
VAL_SAMPLES = 6
BATCH_SIZE = 4
EPOCHS = 3


def write_data(root: Path) -> Path:
    """Two training streams whose ids do not overlap, and a validation set, in shards of a few samples."""
    for number, (name, samples) in enumerate([*TRAIN_SAMPLES.items(), ("val", VAL_SAMPLES)]):
        with MDSWriter(out=str(root / name), columns={"id": "int"}, size_limit=200) as writer:
            for index in range(samples):
                writer.write({"id": 1000 * number + index})
    return root


class Stopped(Exception):
    """Ends a run the way a crash would, after a checkpoint was written."""


def _do_nothing(_name: str, _module: LightningModule) -> None:
    """The hook of a model that is to go on."""


@dataclass
class Diary:
    """What Lightning made of the epochs' lengths in all runs that share it: a run and those that go on from it."""

    batches: set[tuple[int, int, bool]] = field(default_factory=set)
    """Epoch, number, and whether it was the epoch's last, of each batch that was trained."""
    validations: set[tuple[int, int]] = field(default_factory=set)
    """Epoch and optimizer steps done when a validation began."""
    estimates: set[int] = field(default_factory=set)
    """Optimizer steps of the whole run, as Lightning told a schedule."""


class Recorder(LightningModule):
    """A tiny model whose checkpoint says which samples its weights have seen, in order, and under which epoch."""

    def __init__(self, hook: Callable[[str, LightningModule], None] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []  # epoch and id; subclasses note more
        self.seen_here: list[Any] = []
        self.steps_per_epoch: dict[int, int] = {}
        self.pending: list[Any] = []
        self.hook = hook or _do_nothing
        self.schedule_from_trainer = False
        self.diary = Diary()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.diary.batches.add((self.trainer.current_epoch, batch_idx, self.trainer.is_last_batch))

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.diary.validations.add((self.trainer.current_epoch, self.trainer.global_step))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.hook("training_step", self)
        ids = batch["id"].tolist()
        self.pending += [(self.trainer.current_epoch, sample) for sample in ids]
        return self.loss(batch)

    def configure_model(self) -> None:
        """Nothing to do; ModelParallelStrategy wants it to be there."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        predicted: torch.Tensor = self.layer(batch["id"].float().unsqueeze(1) / 1000)
        return predicted.square().mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.seen += self.pending
        self.seen_here += self.pending
        self.pending = []
        epoch = self.trainer.current_epoch
        self.steps_per_epoch[epoch] = self.steps_per_epoch.get(epoch, 0) + 1

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedules: list[Any] = [torch.optim.lr_scheduler.StepLR(optimizer, 1000) for _ in range(2)]
        if self.schedule_from_trainer:
            steps = int(self.trainer.estimated_stepping_batches)
            self.diary.estimates.add(steps)
            schedules[0] = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
        return [optimizer], [
            {"scheduler": schedules[0], "interval": "step"},
            {"scheduler": schedules[1], "interval": "epoch"},
        ]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = list(self.seen)
        checkpoint["steps_per_epoch"] = dict(self.steps_per_epoch)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = list(checkpoint["seen"])
        self.steps_per_epoch = dict(checkpoint["steps_per_epoch"])


HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
)


class SaveThenStop(Callback):
    """Saves a checkpoint at the n-th call of a hook in this run, and ends the run there."""

    def __init__(self, hook: str, call: int, path: Path) -> None:
        assert hook in HOOKS
        self.calls_left = call
        self.path = path
        setattr(self, hook, self._on_hook)

    def _on_hook(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.sanity_checking:
            return
        self.calls_left -= 1
        if self.calls_left == 0:
            trainer.save_checkpoint(self.path)
            raise Stopped


@dataclass(frozen=True, kw_only=True)
class Run:
    """How to train, and where to stop."""

    data: Path
    directory: Path
    workers: int = 0
    persistent: bool = False
    batch_size: int = BATCH_SIZE
    shuffle: bool = True
    shuffle_seed: int = 9176
    validate: bool = True
    schedule_from_trainer: bool = False
    plain_module: bool = False
    order: dict[str, Any] = field(default_factory=dict)
    """More order settings of the training data."""
    module: type[StreamingDataModule] = StreamingDataModule
    diary: Diary = field(default_factory=Diary)
    trainer: dict[str, Any] = field(default_factory=dict)

    def asking_for(self, canonical_nodes: int) -> Run:
        """The same run with other canonical nodes asked for, to go on from where this one has saved."""
        return replace(self, order={**self.order, "num_canonical_nodes": canonical_nodes})

    def datamodule(self) -> StreamingDataModule:
        return self.module(
            train=StreamingConfig(
                streams={name: Stream(remote=str(self.data / name)) for name in TRAIN_SAMPLES},
                shuffle=self.shuffle,
                shuffle_seed=self.shuffle_seed,
                shuffle_block_size=16,
                **self.order,
            ),
            val=StreamingConfig(remote=str(self.data / "val")) if self.validate else None,
            batch_size=self.batch_size,
            num_workers=self.workers,
            persistent_workers=self.persistent,
        )

    def fit(
        self,
        *,
        ckpt_path: Path | str | None = None,
        callbacks: list[Callback] | None = None,
        hook: Callable[[str, LightningModule], None] | None = None,
        model: type[Recorder] = Recorder,
        **trainer: Any,
    ) -> tuple[Recorder, Trainer]:
        """Train to the end, or until stopped; gives the model and the trainer as they then are."""
        recorder = model(hook)
        recorder.schedule_from_trainer, recorder.diary = self.schedule_from_trainer, self.diary
        settings: dict[str, Any] = {
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(isinstance(one, Checkpoint) for one in callbacks or []),
            "num_sanity_val_steps": 0,
            "default_root_dir": self.directory,
            "callbacks": callbacks,
        }
        lightning_trainer = Trainer(**{**settings, **self.trainer, **trainer})
        datamodule = self.datamodule()
        try:
            with suppress(Stopped, SIGTERMException):
                lightning_trainer.fit(recorder, datamodule=datamodule, ckpt_path=ckpt_path)
        finally:
            for loader in streaming_loaders(lightning_trainer).values():
                loader.close()  # else persistent workers live until somebody collects the trainer
        return recorder, lightning_trainer


class NodesOfOneRank(StreamingDataModule):
    """Each rank is a node by itself for the training data."""

    def build_dataset(self, stage: Stage, config: StreamingConfig) -> StreamingDataset:
        dataset = super().build_dataset(stage, config)
        if stage == "train":
            assert dataset.world is not None
            dataset.world = World(num_nodes=dataset.world.num_ranks, ranks_per_node=1, rank=dataset.world.rank)
        return dataset


def with_trainer(run: Run, **settings: Any) -> Run:
    return replace(run, trainer={**run.trainer, **settings})


Trigger = Callable[[Run, Path | None, Path, int], Path]
"""Runs, from a checkpoint if one is given, until it has saved one; the last number is the attempt, 0 or 1."""


def save_in(hook: str, first: int, second: int) -> Trigger:
    """Save at the ``first`` call of a hook in the first run, at the ``second`` in the resumed one."""

    def trigger(run: Run, ckpt_path: Path | None, target: Path, attempt: int) -> Path:
        call = (first, second)[attempt]
        run.fit(ckpt_path=ckpt_path, callbacks=[SaveThenStop(hook, call, target)])
        return target

    return trigger


def every_n_steps(n: int, stop_after: int) -> Trigger:
    """Let ModelCheckpoint save every n steps, and crash ``stop_after`` batches into the run."""

    def trigger(run: Run, ckpt_path: Path | None, target: Path, attempt: int) -> Path:
        calls = [0]

        def hook(_name: str, _module: LightningModule) -> None:
            calls[0] += 1
            if calls[0] > stop_after:
                raise Stopped

        saver = ModelCheckpoint(dirpath=target.parent / target.stem, every_n_train_steps=n, save_top_k=-1)
        run.fit(ckpt_path=ckpt_path, callbacks=[saver], hook=hook)
        return Path(saver.best_model_path)

    return trigger


def exception_in_step(first: int, second: int) -> Trigger:
    """Raise in the n-th training step of the run, with Lightning's OnExceptionCheckpoint there to save."""

    def trigger(run: Run, ckpt_path: Path | None, target: Path, attempt: int) -> Path:
        calls = [0]

        def hook(_name: str, _module: LightningModule) -> None:
            calls[0] += 1
            if calls[0] == (first, second)[attempt]:
                raise Stopped

        saver = OnExceptionCheckpoint(target.parent, filename=target.stem)
        run.fit(ckpt_path=ckpt_path, callbacks=[saver], hook=hook)
        return Path(saver.ckpt_path)

    return trigger


def sigterm_in_step(first: int, second: int) -> Trigger:
    """Send this process a real SIGTERM in the n-th training step of the run."""

    def trigger(run: Run, ckpt_path: Path | None, target: Path, attempt: int) -> Path:
        calls = [0]

        def hook(_name: str, _module: LightningModule) -> None:
            calls[0] += 1
            if calls[0] == (first, second)[attempt]:
                os.kill(os.getpid(), signal.SIGTERM)

        saver = OnExceptionCheckpoint(target.parent, filename=target.stem)
        run.fit(ckpt_path=ckpt_path, callbacks=[saver], hook=hook)
        return Path(saver.ckpt_path)

    return trigger


def steps_limit(first: int, second: int) -> Trigger:
    """Stop at ``max_steps``, and save when training has ended."""

    def trigger(run: Run, ckpt_path: Path | None, target: Path, attempt: int) -> Path:
        _, trainer = run.fit(ckpt_path=ckpt_path, max_steps=(first, second)[attempt])
        trainer.save_checkpoint(target)
        return target

    return trigger


def resume_twice(run: Run, trigger: Trigger, *others: Run) -> tuple[Recorder, Trainer]:
    """Train until the trigger saves, go on from there until it saves again, and from there to the end.

    Args:
        run: How to train.
        trigger: When to save and stop.
        *others: How to train after the first save and after the second, if otherwise.
    """
    resumed = others or (run, run)
    first = trigger(run, None, run.directory / "first.ckpt", 0)
    second = trigger(resumed[0], first, run.directory / "second.ckpt", 1)
    return resumed[1].fit(ckpt_path=second)


def stop_at_train_end(run: Run, ckpt_path: Path | None, target: Path, attempt: int) -> Path:
    """Train one epoch more than the run before, and save in ``on_train_end``."""
    run.fit(ckpt_path=ckpt_path, callbacks=[SaveThenStop("on_train_end", 1, target)], max_epochs=attempt + 1)
    return target


ORDINARY = 90_000
"""Ids of ordinary loaders are from here on; these begin again on a resume, so they are not compared."""


def streaming(data: Path, name: str = "a", batch_size: int = 4) -> StreamingDataLoader:
    """A shuffled loader of one of the harness's streams: "a" has 5 batches of 4, "b" has 3."""
    dataset = StreamingDataset(remote=str(data / name), shuffle=True, shuffle_block_size=16)
    return StreamingDataLoader(dataset, batch_size=batch_size)


def evaluating(data: Path, name: str = "val", *, shuffle: bool = False) -> StreamingDataLoader:
    """A loader that reads every sample from the start each time."""
    dataset = StreamingDataset(remote=str(data / name), shuffle=shuffle)
    return StreamingDataLoader(dataset, batch_size=4, fixed_epoch=True)


class Ids(Dataset[dict[str, int]]):
    """What an ordinary loader reads, one sample a batch."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": ORDINARY + index}


class Endless(IterableDataset[dict[str, int]]):
    """Has no length, which makes Lightning fetch one batch ahead of the step from every loader, if it has no limit."""

    def __init__(self, samples: int = 1000) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(self.samples):
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
    """Train, resume from after every step of that, and compare; gives the model that was trained in one go.

    ``make test`` resumes after three of the steps, which differ between cases.
    """

    def fit(ckpt_path: Path | None, *callbacks: Callback) -> tuple[Reader, Trainer]:
        model, trainer = new_model(), trainer_for(directory, StreamingStateCallback(), *callbacks, **settings)
        trainer.fit(model, ckpt_path=ckpt_path, weights_only=True)
        return model, trainer

    saver = SaveAtEveryStep(directory)
    whole, whole_trainer = fit(None, saver)
    assert len(saver.saved) > 2
    for path in some(saver.saved, 3):
        resumed, trainer = fit(path)
        assert resumed.seen == whole.seen, path.name
        assert resumed.steps_per_epoch == whole.steps_per_epoch, path.name
        assert counters(trainer) == counters(whole_trainer), path.name
    return whole
