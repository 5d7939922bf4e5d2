"""One run of the harness's model on several processes; each rank writes which samples its steps were on.

As a program it is started once for each rank, by Lightning or by ``torchrun``, with settings as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_streaming.world import World
from tests.helpers import ids, make_loader
from tests.trainer.harness import Recorder, Run, SaveThenStop


class Report(Callback):
    """Writes ``rank0.json``, ``rank1.json``, ... in the process of each rank, whoever started it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Recorder)
        report = {
            "seen": pl_module.seen_here,
            "steps": pl_module.steps_per_epoch,
            "batches": trainer.num_training_batches,
        }
        (self.directory / f"rank{trainer.global_rank}.json").write_text(json.dumps(report))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """What a rank is to do."""

    data: str
    report: str
    """Directory for the ranks' reports."""
    strategy: str
    devices: int = 2
    batch_size: int = 2
    workers: int = 0
    ckpt_path: str | None = None
    stop_at: tuple[str, int, str] | None = None
    """Hook, call, and where to save a checkpoint then."""
    alone: str | None = None
    """Data that each rank also reads without a trainer: before and after the ranks are connected."""
    trainer: dict[str, Any] = field(default_factory=dict)

    def fit(self) -> None:
        """Train, be it to the end or until stopped."""
        directory = Path(self.report)
        directory.mkdir(exist_ok=True)
        callbacks: list[Callback] = [Report(directory)]
        if self.stop_at:
            hook, call, path = self.stop_at
            callbacks.append(SaveThenStop(hook, call, Path(path)))
        run = Run(data=Path(self.data), directory=directory, batch_size=self.batch_size, workers=self.workers)
        run.fit(
            ckpt_path=Path(self.ckpt_path) if self.ckpt_path else None,
            callbacks=callbacks,
            devices=self.devices,
            strategy=self.strategy,
            **self.trainer,
        )

    def read_alone(self) -> None:
        """Read an epoch from what the environment says, and one from what torch.distributed says."""
        read = [ids(make_loader(self.alone, batch_size=2))]
        dist.init_process_group("gloo")
        read.append(ids(make_loader(self.alone, batch_size=2)))
        (Path(self.report) / f"alone{World.detect().rank}.json").write_text(json.dumps(read))

    def reports(self) -> list[dict[str, Any]]:
        """What each rank has reported."""
        return [json.loads((Path(self.report) / f"rank{rank}.json").read_text()) for rank in range(self.devices)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    asked = RankRun(**json.loads(sys.argv[1]))
    if asked.alone:
        Path(asked.report).mkdir(exist_ok=True)
        asked.read_alone()
    asked.fit()
