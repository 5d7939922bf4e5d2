"""One run of the harness's model on several processes; each rank writes what its part of the weights' samples was."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from tests.trainer.harness import Recorder, Run, SaveThenStop


def main(settings: dict[str, Any]) -> None:
    """Train as ``settings`` say: fields of Run, devices, ckpt_path, stop_at (hook, call, path), report (directory)."""
    run = replace(
        Run(data=Path(settings["data"]), directory=Path(settings["report"])),
        batch_size=settings["batch_size"],
        workers=settings.get("workers", 0),
        trainer=settings.get("trainer", {}),
    )
    stop = settings.get("stop_at")
    callbacks: list[Callback] = [SaveThenStop(stop[0], stop[1], Path(stop[2]))] if stop else []
    if settings.get("save_every"):
        callbacks.append(ModelCheckpoint(run.directory, every_n_train_steps=settings["save_every"], save_last=True))
    ckpt_path = settings.get("ckpt_path")
    model, trainer = run.fit(
        ckpt_path=Path(ckpt_path) if ckpt_path else None,
        callbacks=callbacks,
        devices=settings["devices"],
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=settings["devices"])
        if settings.get("strategy") == "tensor_parallel"
        else settings.get("strategy", "auto"),
    )
    _report(model, Path(settings["report"]) / f"rank{trainer.global_rank}.json", trainer.num_training_batches)


def _report(model: Recorder, path: Path, batches: float) -> None:
    path.write_text(json.dumps({"seen": model.seen_here, "steps": model.steps_per_epoch, "batches": str(batches)}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main(json.loads(sys.argv[1]))
