"""Evaluations by a real Trainer, with a metric that shows any change in the order or number of its samples."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_streaming import KeyedBatch, SampleKeys, StreamingConfig, StreamingDataModule, gather_in_order


class Scorer(LightningModule):
    """A model whose metric is a mean of many digits: any other order, or one sample more, makes it another number."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[torch.Tensor] = []
        self.keys: list[SampleKeys] = []
        self.count = 0
        self.metric = ""

    def on_validation_epoch_start(self) -> None:
        self.scores, self.keys = [], []

    def validation_step(self, batch: KeyedBatch, batch_idx: int) -> None:
        # Division is exact in any batch, as functions that come in vectors of eight need not be.
        self.scores.append(1 / (batch.batch["id"].float() + 3))
        self.keys.append(batch.keys)

    def on_validation_epoch_end(self) -> None:
        scores = gather_in_order(self.scores, self.keys)
        self.count = len(scores)
        self.metric = float(scores.mean()).hex()
        self.log("score", scores.mean())


def evaluate(case: dict[str, Any], **trainer: Any) -> tuple[int, str, int]:
    """Validate as a case says: data, batch_size, and maybe workers, shuffle and limit.

    Returns:
        How many samples the metric is of, its digits, and the batches that this rank has seen.
    """
    model = Scorer()
    datamodule = StreamingDataModule(
        val=StreamingConfig(remote=case["data"], shuffle=case.get("shuffle", False)),
        batch_size=case["batch_size"],
        num_workers=case.get("workers", 0),
        with_keys=["val"],
        with_valid=["val"],
    )
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    limit = {"limit_val_batches": case["limit"]} if "limit" in case else {}
    Trainer(**{**settings, "devices": 1, **limit, **trainer}).validate(model, datamodule, verbose=False)
    return model.count, model.metric, len(model.keys)
