"""A callback that writes down what each step was trained on, and its loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class LossLog(Callback):
    """Appends a line to ``steps.jsonl`` after every step: its number, epoch, sample ids and loss.

    The file lies in the trainer's ``default_root_dir``. Each line is in the file before the next step begins, so the
    log is true to the last step even if the process is killed. For one process: ranks would mix their lines.
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
