"""A run on a mixture that changes, with a log of what each step is trained on: a trainer in separate processes.

Its processes are forked from the test, which has imported everything: an interpreter that imports Lightning takes six
seconds. At ``pause_after`` the run reports to the test and waits to be killed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.every_nth import EveryNth as EveryNth  # a configuration may name it, where it is imported
from lightning_streaming import KeyedBatch, StreamingDataModule
from lightning_streaming.trainer.config import config_of
from tests.forked_ranks import on_ranks

_CONTEXT = multiprocessing.get_context("fork")


class Line(LightningModule):
    """Trains on nothing in particular; each rank appends what its steps were on to a separate file."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self._log = log

    def training_step(self, batch: KeyedBatch, batch_idx: int) -> torch.Tensor:
        ids = batch.batch["id"].tolist()
        read = [[key.epoch, key.position, sample] for key, sample in zip(batch.keys, ids, strict=True)]
        with (self._log / f"rank{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.global_step + 1, "read": read}) + "\n")
        predicted: torch.Tensor = self.layer(batch.batch["id"].float().unsqueeze(1) / 1000)
        return predicted.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Pause(Callback):
    """Reports that a step is done, and trains no further."""

    def __init__(self, step: int | None, paused: Connection) -> None:
        self.step = step
        self.paused = paused

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.is_global_zero:
            self.paused.send(self.step)
            signal.pause()


class SetWeights(Callback):
    """Sets weights of the mixture after some steps."""

    def __init__(self, weights: Mapping[int, Mapping[str, float]]) -> None:
        self.weights = weights

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if (weights := self.weights.get(trainer.global_step)) is not None:
            loader: Any = trainer.train_dataloader
            loader.set_weights(weights)


@dataclass(frozen=True, kw_only=True)
class PhasedRun:
    """A run, or a part of one: what a process that is killed has left to the next."""

    directory: str
    """For its checkpoints and logs."""
    train: Mapping[str, Any]
    """The data, as a configuration has it."""
    batch_size: int
    devices: int = 1
    workers: int = 0
    ckpt_path: str | None = None
    weights: Mapping[int, Mapping[str, float]] | None = None
    """Weights of the mixture that it sets, by step."""
    pause_after: int | None = None
    """The step after which it waits to be killed."""

    def fit(self, paused: Connection | None = None) -> None:
        """Train to the end, or until killed.

        Args:
            paused: Where a run that is to pause reports that it does.
        """
        directory = Path(self.directory)
        directory.mkdir(exist_ok=True)
        data = StreamingDataModule(
            train=config_of(self.train), batch_size=self.batch_size, num_workers=self.workers, return_keys=["train"]
        )
        saving = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        callbacks: list[Callback] = [saving, SetWeights(self.weights or {})]
        if self.pause_after is not None and paused is not None:
            callbacks.append(Pause(self.pause_after, paused))
        trainer = Trainer(
            accelerator="cpu",
            devices=self.devices,
            strategy="ddp" if self.devices > 1 else "auto",
            max_epochs=1,
            logger=False,
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Line(directory), datamodule=data, ckpt_path=self.ckpt_path)

    def run_and_kill(self) -> None:
        """Train up to the pause; then end every process of the run by ``SIGKILL``."""
        leader, paused = self._start()
        try:
            assert paused.poll(100), "the run does not reach its pause"
            assert paused.recv() == self.pause_after
        except EOFError:
            raise AssertionError("the run ended before its pause") from None
        finally:
            self._kill(leader, paused)

    def run_to_end(self) -> None:
        """Train to the end."""
        leader, paused = self._start()
        try:
            leader.join(100)
            assert leader.exitcode == 0
        finally:
            self._kill(leader, paused)

    def _start(self) -> tuple[ForkProcess, Connection]:
        """Start a process for the run, or several; they are one group."""
        paused, pause = _CONTEXT.Pipe(duplex=False)
        leader = _CONTEXT.Process(target=self._lead, args=(pause,))
        leader.start()
        pause.close()  # the run has the other end, which closes when it ends
        return leader, paused

    def _kill(self, leader: ForkProcess, paused: Connection) -> None:
        assert leader.pid is not None
        if leader.exitcode is None:
            os.killpg(leader.pid, signal.SIGKILL)
            leader.join()
        paused.close()

    def _lead(self, pause: Connection) -> None:
        os.setsid()
        torch.set_num_threads(1)  # the parent's pool of threads is not here
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        if self.devices == 1:
            self.fit(pause)
        else:
            on_ranks(self.fit, pause, meeting=Path(self.directory) / "ranks", count=self.devices)

    def newest_checkpoint(self) -> Path:
        """The last that was saved."""
        return max(Path(self.directory).glob("step=*.ckpt"), key=self._step_of)

    def _step_of(self, checkpoint: Path) -> int:
        return int(checkpoint.stem.partition("=")[2])

    def read_by(self, last_step: int | None = None) -> list[list[tuple[int, int, int]]]:
        """Epoch, position and id of the samples of each step, over all ranks and in order of positions.

        Args:
            last_step: Steps after it are of weights that were lost; None for all.
        """
        steps: dict[int, list[tuple[int, int, int]]] = {}
        for log in Path(self.directory).glob("rank*.jsonl"):
            for line in log.read_text().splitlines():
                entry = json.loads(line)
                if last_step is None or entry["step"] <= last_step:
                    steps.setdefault(entry["step"], []).extend(tuple(read) for read in entry["read"])
        return [sorted(steps[step]) for step in sorted(steps)]

    def read_up_to(self, checkpoint: Path) -> list[list[tuple[int, int, int]]]:
        """The same of the steps that a checkpoint's weights have seen."""
        return self.read_by(self._step_of(checkpoint))


def flat(steps: Sequence[Sequence[tuple[int, int, int]]]) -> list[tuple[int, int, int]]:
    """The samples of some steps, one after another."""
    return [read for step in steps for read in step]
