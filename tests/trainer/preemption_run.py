"""A run on one or several processes that waits in a training step until told to go on, to be sent signals there."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_streaming.trainer.preemption import PreemptionCheckpoint
from tests.reading.processes import wait_until
from tests.trainer.harness import EPOCHS, Recorder, Run


class Pausing:
    """Hook of a model: waits in its ``call``-th training step, having written its process id."""

    def __init__(self, directory: Path, call: int) -> None:
        self.directory = directory
        self.calls_left = call

    def __call__(self, _name: str, model: LightningModule) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            partial = self.directory / f"pid{model.trainer.global_rank}.part"
            partial.write_text(str(os.getpid()))
            partial.rename(partial.with_suffix(""))
            assert wait_until((self.directory / "go").exists, seconds=60)


def main(settings: dict[str, Any]) -> None:
    """Train as ``settings`` say: data, report (a directory), devices, workers, pause_at, checkpoints, ckpt_path."""
    report = Path(settings["report"])
    report.mkdir(exist_ok=True)
    run = Run(data=Path(settings["data"]), directory=report, workers=settings["workers"], batch_size=2)
    model = Recorder(Pausing(report, settings["pause_at"]))
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=settings["devices"],
        strategy="ddp" if settings["devices"] > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PreemptionCheckpoint(settings["checkpoints"])],
    )
    try:
        trainer.fit(model, datamodule=run.datamodule(), ckpt_path=settings["ckpt_path"])
    finally:
        seen = {"seen": model.seen_here, "step": trainer.global_step}
        (report / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main(json.loads(sys.argv[1]))
