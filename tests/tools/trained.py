"""A planned run that a trainer really trains, on one rank and data in place: what each step reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import LightningModule, Trainer

from lightning_streaming import StreamingDataModule
from lightning_streaming.trainer.config import config_of


@dataclass(kw_only=True)
class Trained:
    """What a trainer has done."""

    steps: dict[int, list[int]] = field(default_factory=dict)
    """The ids that each step read, by the trainer's number of the step."""
    epochs: int = 0
    """Those that had a batch."""

    @property
    def ids(self) -> list[int]:
        """All that was read, in order."""
        return [one for ids in self.steps.values() for one in ids]


class _Notes(LightningModule):
    """A model that learns nothing, and notes what it was given in which step."""

    def __init__(self, found: Trained) -> None:
        super().__init__()
        self.layer, self.found, self.batches = torch.nn.Linear(1, 1), found, 0

    def training_step(self, batch: Mapping[str, Any], _: int) -> torch.Tensor:
        self.found.steps.setdefault(self.global_step, []).extend(batch["id"].tolist())
        self.batches += 1
        loss: torch.Tensor = self.layer(torch.zeros(1)).sum()
        return loss

    def on_train_epoch_end(self) -> None:
        self.found.epochs += bool(self.batches)
        self.batches = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(config: Path, *, ckpt: Path | None = None, save: Path | None = None, **changes: Any) -> Trained:
    """Train what a configuration says.

    Args:
        config: What ``write_config`` has written.
        ckpt: A checkpoint to go on from.
        save: Where to write one in the end.
        changes: Of the trainer's settings.
    """
    told = yaml.safe_load(config.read_text())
    data, found = dict(told["data"]["init_args"]), Trained()
    module = StreamingDataModule(train=config_of(data.pop("train")), **data)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=config.parent, **{**told["trainer"], **changes},
    )  # fmt: skip
    trainer.fit(_Notes(found), datamodule=module, ckpt_path=ckpt)
    if save is not None:
        trainer.save_checkpoint(save)
    return found
