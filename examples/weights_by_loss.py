"""A callback that gives streams with a higher loss more weight; a callback for your own run, not a program."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class WeightsByLoss(Callback):
    """Sets the weights of the mixture by the loss of each stream, every so many steps.

    A weight is ``exp(loss / temperature)``, of the mean loss since the weights were set last. The model returns the
    loss of each sample from ``training_step``, as ``{"loss": ..., "losses": ..., "streams": ...}``: ``losses`` of shape
    (samples,), and the number of each sample's stream in ``names``. The run needs a schedule, or options of ``mixing``.

    Args:
        names: Names of the streams.
        every: Optimizer steps between two changes.
        temperature: A higher one changes the mixture less.
    """

    def __init__(self, names: list[str], every: int = 1000, temperature: float = 1.0) -> None:
        self.names, self.every, self.temperature = names, every, temperature
        self._sums = torch.zeros(2, len(names), dtype=torch.float64)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add up the losses of a batch, and set the weights if it is time."""
        losses, streams = outputs["losses"].detach().double().cpu(), outputs["streams"].cpu()
        self._sums[0].index_add_(0, streams, losses)
        self._sums[1].index_add_(0, streams, torch.ones_like(losses))
        if trainer.global_step == 0 or trainer.global_step % self.every:
            return
        # Weights must be the same on all ranks.
        sums = trainer.strategy.reduce(self._sums.to(pl_module.device), reduce_op="sum").cpu()
        means = sums[0] / sums[1].clamp(min=1)
        weights = torch.softmax(means / self.temperature, dim=0)
        loader: Any = trainer.train_dataloader
        loader.set_weights(dict(zip(self.names, weights.tolist(), strict=True)))
        self._sums.zero_()
