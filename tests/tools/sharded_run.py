"""One run of a model whose parameters are sharded, on ranks of its own: it saves directories as FSDP does."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tests.trainer.harness import EPOCHS, Recorder, Run, SaveThenStop, Stopped


class Sharded(Recorder):
    """Its one layer is sharded, over one process."""

    def configure_model(self) -> None:
        """Shard it, once."""
        assert self.device_mesh is not None
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


def train(data: Path, checkpoint: Path, batches: int) -> list[tuple[int, int]]:
    """Train on from the checkpoint, or, if there is none, until so many batches are saved in it; gives what it saw."""
    model, run = Sharded(), Run(data=data, directory=checkpoint.parent, validate=False)
    resumes = checkpoint.exists()
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
        callbacks=None if resumes else [SaveThenStop("on_train_batch_end", batches, checkpoint)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=run.directory,
    )
    with suppress(Stopped):
        trainer.fit(model, datamodule=run.datamodule(), ckpt_path=checkpoint if resumes else None)
    return model.seen_here
