"""A run on a mixture that changes, with a log of what each step is trained on: a trainer in processes of its own.

As a program it is given its settings as JSON; Lightning starts it once more for each other rank. At ``pause_after`` it
writes a line and waits to be killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.every_nth import EveryNth as EveryNth  # a configuration may name it, where it is imported
from lightning_streaming import KeyedBatch, StreamingDataModule
from lightning_streaming.trainer.config import config_of

PAUSED = "paused"


class Line(LightningModule):
    """Trains on nothing in particular; each rank appends what its steps were on to a file of its own."""

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
    """Says that a step is done, and does no more."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.is_global_zero:
            sys.stdout.write(f"{PAUSED}\n")
            sys.stdout.flush()
            signal.pause()


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
    pause_after: int | None = None
    """The step after which it waits to be killed."""

    def fit(self) -> None:
        """Train to the end, or until killed."""
        directory = Path(self.directory)
        directory.mkdir(exist_ok=True)
        data = StreamingDataModule(
            train=config_of(self.train), batch_size=self.batch_size, num_workers=self.workers, return_keys=["train"]
        )
        saving = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        trainer = Trainer(
            accelerator="cpu",
            devices=self.devices,
            strategy="ddp" if self.devices > 1 else "auto",
            max_epochs=1,
            logger=False,
            callbacks=[saving] + ([] if self.pause_after is None else [Pause(self.pause_after)]),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Line(directory), datamodule=data, ckpt_path=self.ckpt_path)

    def start(self) -> subprocess.Popen[str]:
        """Train in a process, or several; they are one group."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.phased_run", json.dumps(asdict(self))],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def run_and_kill(self) -> None:
        """Train up to the pause; then end every process of it by ``SIGKILL``."""
        with self.start() as running:
            assert running.stdout is not None
            is_paused = any(line.strip() == PAUSED for line in iter(running.stdout.readline, ""))
            assert is_paused, "it ended before"
            os.killpg(running.pid, signal.SIGKILL)

    def run_to_end(self) -> None:
        """Train to the end."""
        with self.start() as running:
            try:
                running.communicate(timeout=120)
            except BaseException:
                os.killpg(running.pid, signal.SIGKILL)
                raise
        assert running.returncode == 0

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
                one = json.loads(line)
                if last_step is None or one["step"] <= last_step:
                    steps.setdefault(one["step"], []).extend(tuple(read) for read in one["read"])
        return [sorted(steps[step]) for step in sorted(steps)]

    def read_up_to(self, checkpoint: Path) -> list[list[tuple[int, int, int]]]:
        """The same of the steps that a checkpoint's weights have seen."""
        return self.read_by(self._step_of(checkpoint))


def flat(steps: Sequence[Sequence[tuple[int, int, int]]]) -> list[tuple[int, int, int]]:
    """The samples of some steps, one after another."""
    return [read for step in steps for read in step]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    PhasedRun(**json.loads(sys.argv[1])).fit()
