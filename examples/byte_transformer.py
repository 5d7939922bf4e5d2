"""A small transformer that predicts the next byte: the model of most configurations, not a program."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


class ByteTransformer(LightningModule):
    """Next-byte prediction on batches {"tokens": uint8 of shape (batch, context + 1)}.

    Without dropout, two runs of one seed that read the same samples in the same order have the same losses.

    Args:
        context: Bytes before the predicted one that the model sees.
        width: Size of a token's vector.
        depth: Number of layers.
        heads: Attention heads per layer.
        learning_rate: Learning rate for batches of 8 samples.
        batch_size: Samples per batch; the learning rate grows with its square root.
    """

    def __init__(
        self,
        context: int = 128,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        learning_rate: float = 3e-3,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate * (batch_size / 8) ** 0.5
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, 256) for tokens of shape (batch, length)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.embedding(tokens) + self.position[:length]
        logits: Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy in nats per byte."""
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the same for validation data."""
        self.log("val_loss", self._loss(batch), prog_bar=True, batch_size=len(batch["tokens"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam; a configuration may set another one under ``optimizer:``."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"].long()
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
