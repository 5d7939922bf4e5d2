"""The elastic example with weights that depend on the step of each sample, and with stops that a test controls.

``python -m tests.trainer.elastic_run DIRECTORY``, also by ``torchrun``. The file ``DIRECTORY/stop`` has the step at
which each rank stops, and what it waits for: a writer of the pipe that is named by its process id, or a signal.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from examples.elastic import CountingModel, train


def report(line: str) -> None:
    """Write a line for the test."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class OrderedModel(CountingModel):
    """A model whose weights depend on the steps at which each sample was trained on: later steps add less."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_start(self) -> None:
        report(f"rank {self.global_rank} of {self.trainer.world_size} from step {self.global_step}")


class Stop(Callback):
    """Stops each rank at a step until the test has acted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.step, self.event = -1, ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, self.event = (self.directory / "stop").read_text().split()
        self.step = int(step)

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step != self.step:
            return
        os.mkfifo(pipe := self.directory / str(os.getpid()))
        received, notify = os.pipe()
        os.set_blocking(notify, False)
        signal.set_wakeup_fd(notify)
        report(f"stopped at step {self.step}, process {os.getpid()}")
        if self.event == "signal":
            os.read(received, 1)
        else:
            pipe.read_text()


def main(directory: Path) -> None:
    """Train to the end; rank 0 then saves the weights."""
    model = OrderedModel()
    train(directory, model, [Stop(directory)])
    if model.global_rank == 0:
        torch.save(model.weights.detach(), directory / "weights.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
