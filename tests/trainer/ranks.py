"""Runs of the harness's model on several real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.strategies import Strategy

from lightning_streaming import StepLog
from lightning_streaming.world import World
from tests.forked_ranks import on_ranks
from tests.trainer.harness import Recorder, Run, SaveThenStop


class AdamRecorder(Recorder):
    """Sharded checkpoints want an optimizer that has a state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Trained(NamedTuple):
    """What a rank has to tell of its run."""

    seen: list[tuple[int, int]]
    """Epoch and sample, for each sample that this rank's steps of this run were on."""
    steps: dict[int, int]
    """Steps in each epoch, those before a resume included."""
    batches: int
    """Batches of a whole epoch."""
    world: World
    """Among how many this rank was told to read, and as which."""
    replication: int | None

    def of_epoch(self, epoch: int) -> list[int]:
        """This rank's samples of an epoch."""
        return [sample for of, sample in self.seen if of == epoch]


@dataclass(frozen=True, kw_only=True)
class RankedRun:
    """A run of the harness's model on several ranks."""

    run: Run
    strategy: Callable[[], Strategy]
    """Makes the strategy, on each rank."""
    meeting: Path
    count: int = 2
    model: type[Recorder] = Recorder

    def fit(
        self, ckpt_path: Path | None = None, stop_at: tuple[str, int, Path] | None = None, **trainer: Any
    ) -> list[Trained]:
        """Train to the end, or until stopped.

        Args:
            ckpt_path: A checkpoint to go on from.
            stop_at: Hook, call, and where to save a checkpoint then.
            **trainer: More of the trainer's settings.
        """
        return on_ranks(self._fit, ckpt_path, stop_at, trainer, meeting=self.meeting, count=self.count)

    def _fit(self, ckpt_path: Path | None, stop_at: tuple[str, int, Path] | None, settings: dict[str, Any]) -> Trained:
        model, trainer = self.run.fit(
            ckpt_path=ckpt_path,
            callbacks=[StepLog(self.run.directory / "steps"), *([SaveThenStop(*stop_at)] if stop_at else [])],
            model=self.model,
            devices=self.count,
            strategy=self.strategy(),
            **settings,
        )
        dataset = trainer.datamodule.datasets["train"]  # type: ignore[attr-defined]  # set by Lightning's connector
        batches = int(trainer.num_training_batches)
        return Trained(model.seen_here, model.steps_per_epoch, batches, dataset.world, dataset.replication)
