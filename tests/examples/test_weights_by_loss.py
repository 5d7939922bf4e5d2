"""The callback gives the stream with the higher loss more weight, and a resume reads the same without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from examples.weights_by_loss import WeightsByLoss
from lightning_streaming import StreamingStateCallback
from tests.helpers import make_loader
from tests.phased_data import FIRST_ID, SIZES, counted_by_stream, write_streams

NAMES = list(SIZES)


class LossOfStream(LightningModule):
    """A model whose loss is higher on the samples of "math"."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        """Return the loss of each sample too."""
        self.seen += batch["id"].tolist()
        streams = batch["id"] // 1000
        losses = torch.where(streams == FIRST_ID["math"] // 1000, 3.0, 1.0) + 0 * self.layer.weight.sum()
        return {"loss": losses.mean(), "losses": losses, "streams": streams}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(root: Path, directory: Path, *callbacks: Any, ckpt_path: str | None = None, steps: int) -> list[int]:
    """Train up to a step; return the ids that were read."""
    streams = {name: {"remote": str(root / name), "proportion": 1} for name in NAMES}
    loader = make_loader(streams=streams, mixing={"longest_step": 40}, epoch_size=800, num_canonical_nodes=4)
    model = LossOfStream()
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=directory,
        callbacks=[StreamingStateCallback(), *callbacks],
    )
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    trainer.save_checkpoint(directory / "last.ckpt")
    return model.seen


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_streams_of_higher_loss_get_more_weight(tmp_path: Path) -> None:
    root = write_streams(tmp_path)
    began = fit(root, tmp_path / "a", WeightsByLoss(NAMES, every=10), steps=60)
    first, later = counted_by_stream(began[:40]), counted_by_stream(began[80:])
    assert first["math"] < 15
    assert later["math"] / later.total() == pytest.approx(0.787, abs=0.02)  # exp(3) of exp(3) + 2 exp(1)
    resumed = fit(root, tmp_path / "a", ckpt_path=str(tmp_path / "a" / "last.ckpt"), steps=120)
    shares = counted_by_stream(resumed)
    assert shares["math"] / shares.total() == pytest.approx(0.787, abs=0.02)
