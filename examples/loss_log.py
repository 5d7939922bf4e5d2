"""A callback that logs ids and loss of each step; configs/demo.yaml and configs/resume.yaml use it, not a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class LossLog(Callback):
    """Appends a line to ``steps.jsonl`` after every step: its number, epoch, sample ids and loss.

    The file is in the trainer's ``default_root_dir``. Each line is written before the next step starts, so the log is
    complete to the last step even if the process is killed. For one process only: ranks would mix their lines.
    """

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write a line."""
        line = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "ids": batch["id"].tolist(),
            "loss": float(outputs["loss"]),
        }
        path = Path(trainer.default_root_dir) / "steps.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as log:
            log.write(json.dumps(line) + "\n")
