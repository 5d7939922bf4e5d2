"""Elastic training with Lightning: nodes leave and return within one job of torchrun.

    python examples/elastic.py                  # one process, without torchrun
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:2 --nproc_per_node=1 --max-restarts=9 --rdzv-backend=c10d \
        --rdzv-endpoint=127.0.0.1:29400 --rdzv-id=1 --rdzv-conf=last_call_timeout=1 examples/elastic.py --out elastic

Start the second command in two terminals of one directory. End the one that was started last with `kill -9`, and its
process examples/elastic.py too: the other one continues alone. Start it again: both continue. Each start prints its
ranks and the step that it resumes from; each epoch how many samples it has trained on exactly once, by the weights.
Takes a minute on two cores, and half a minute more for each restart.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_streaming import MDSWriter, PreemptionCheckpoint, StreamingConfig, StreamingDataModule

SAMPLES, GLOBAL_BATCH, EPOCHS = 240, 8, 4
"""30 steps are an epoch, on any number of ranks."""


class NumberedSamples(StreamingDataModule):
    """A dataset that rank 0 writes, unless it exists.

    Args:
        out: Directory of the dataset.
        ranks: Ranks that share a global batch, so that steps are the same on any number of them.
    """

    prepare_data_per_node = False

    def __init__(self, out: Path, ranks: int) -> None:
        train = StreamingConfig(remote=str(out), shuffle=True)
        super().__init__(train=train, batch_size=GLOBAL_BATCH // ranks, num_workers=1)
        self.out = out

    def prepare_data(self) -> None:
        """Write the dataset."""
        if (self.out / "index.json").exists():
            return
        with MDSWriter(out=self.out, columns={"id": "int"}, size_limit="1kb") as writer:
            for sample in range(SAMPLES):
                writer.write({"id": sample})


class CountingModel(LightningModule):
    """A model with one weight per sample, which counts how often the sample was trained on.

    Args:
        pause: Seconds that each step takes, so that there is time to end a node.
    """

    def __init__(self, pause: float = 0) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(SAMPLES))
        self.pause = pause

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return a loss whose gradient is -1 for each sample of the global batch; DDP averages over ranks."""
        time.sleep(self.pause)
        return -self.weights[batch["id"]].sum() * self.trainer.world_size

    def configure_optimizers(self) -> Any:
        """Return an optimizer that adds 1 for each time that a sample is trained on."""
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_start(self) -> None:
        """Print the ranks and the step."""
        self.print(f"{self.trainer.world_size} ranks, from step {self.global_step}", flush=True)

    def on_train_epoch_end(self) -> None:
        """Print how many samples were trained on exactly once in each epoch."""
        once = int((self.weights == self.current_epoch + 1).sum())
        self.print(f"Epoch {self.current_epoch}: {once} of {SAMPLES} samples exactly once", flush=True)


def train(out: Path, model: LightningModule, callbacks: Sequence[Callback] = ()) -> None:
    """Train from the newest checkpoint, if there is one, on the ranks that torchrun has started."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    saved = out / "checkpoints"  # on storage that all nodes share
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy="ddp" if devices * nodes > 1 else "auto",
        max_epochs=EPOCHS,
        # torchrun sends SIGTERM when a node joins: saves the step. When a node is lost, up to 5 steps are repeated from
        # the last checkpoint.
        callbacks=[
            *callbacks,
            PreemptionCheckpoint(saved),
            ModelCheckpoint(saved, every_n_train_steps=5, save_last=True),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=NumberedSamples(out / "data", devices * nodes), ckpt_path="last")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/elastic"), help="default: %(default)s")
    parser.add_argument("--pause", type=float, default=0.4, help="seconds per step, default: %(default)s")
    arguments = parser.parse_args()
    train(arguments.out, CountingModel(arguments.pause))


if __name__ == "__main__":
    main()
