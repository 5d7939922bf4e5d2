"""Sharded and asynchronous checkpoints: the saved position is that of the moment of the call, on any later world."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard

from lightning_streaming import StreamingConfig, StreamingDataLoader, StreamingDataModule, StreamingDataset
from tests.forked_ranks import on_ranks
from tests.helpers import write_dataset
from tests.trainer.harness import SaveThenStop, Stopped, trainer_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized"),
    # What Lightning and torch use of torch's own.
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SAMPLES = 32
GLOBAL_BATCH = 4
EPOCHS = 3


class ShardedTable(LightningModule):
    """A weight for each sample, sharded over the ranks; each step adds 1 to the weights of its samples."""

    def configure_model(self) -> None:
        self.table = torch.nn.Embedding(SAMPLES, 1)
        torch.nn.init.zeros_(self.table.weight)
        if dist.is_initialized():
            assert self.device_mesh is not None
            fully_shard(self.table, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.table(batch["id"]).sum()
        return -loss * self.trainer.world_size  # gradients are averaged over the ranks

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data"), SAMPLES, size_limit=120)


def train(
    data: Path,
    checkpoint: Path,
    stop: tuple[str, int] | None,
    *,
    is_sharded: bool = True,
    plugins: list[Any] | None = None,
    directory: Path | None = None,
) -> list[float]:
    """Train from the checkpoint, if it exists, to the end or until it is saved; return the weights of all samples."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    module = StreamingDataModule(
        train=StreamingConfig(remote=str(data), shuffle=True), batch_size=GLOBAL_BATCH // ranks
    )
    callbacks: list[Any] = [] if stop is None else [SaveThenStop(*stop, checkpoint)]
    if directory is not None:
        callbacks = [ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)]
    trainer = trainer_for(
        checkpoint.parent,
        *callbacks,
        max_epochs=EPOCHS,
        devices=ranks,
        strategy=ModelParallelStrategy(ranks, 1, save_distributed_checkpoint=is_sharded) if ranks > 1 else "auto",
        plugins=plugins,
    )
    model = ShardedTable()
    with suppress(Stopped):
        trainer.fit(model, datamodule=module, ckpt_path=checkpoint if checkpoint.exists() else None)
    weights: Any = model.table.weight
    whole = weights.full_tensor() if ranks > 1 else weights
    return [float(value) for value in whole.detach().flatten()]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Weights at the end of an uninterrupted run."""
    return train(data, tmp_path_factory.mktemp("whole") / "none.ckpt", None)


STOPS = {"mid-epoch": ("on_train_batch_end", 11), "epoch end": ("on_train_epoch_end", 2)}


@pytest.mark.rotate(3)
@pytest.mark.parametrize("position", STOPS)
@pytest.mark.parametrize(
    ("is_sharded", "before", "after"), [(True, 2, 2), (True, 2, 4), (True, 4, 2), (False, 2, 1), (False, 2, 4)]
)
def test_fsdp2_resumes_exactly(
    position: str, is_sharded: bool, before: int, after: int, data: Path, whole: list[float], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "saved.ckpt"

    def on(ranks: int, stop: tuple[str, int] | None) -> list[float]:
        if ranks == 1:
            return train(data, checkpoint, stop)
        fit = partial(train, is_sharded=is_sharded)
        weights: list[float] = on_ranks(fit, data, checkpoint, stop, meeting=tmp_path / "ranks", count=ranks)[0]
        return weights

    on(before, STOPS[position])
    assert checkpoint.is_dir() == is_sharded
    assert on(after, None) == whole


class DistributedAsyncIO(CheckpointIO):
    """Writes whole Lightning checkpoints by ``dcp.async_save``, in the background."""

    def __init__(self) -> None:
        self.under_way: list[Any] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.under_way.append(async_save(checkpoint, checkpoint_id=str(path), no_dist=True))

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        loaded: dict[str, Any] = _load_state_dict_from_keys(checkpoint_id=str(path))
        for optimizer in loaded["optimizer_states"]:  # keys become texts in a distributed checkpoint
            optimizer["state"] = {int(number): state for number, state in optimizer["state"].items()}
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Nothing: every checkpoint stays."""

    def teardown(self) -> None:
        for future in self.under_way:
            future.result()


@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, DistributedAsyncIO])
def test_a_checkpoint_written_in_the_background_has_the_position_of_its_step(
    plugin: type[CheckpointIO], data: Path, whole: list[float], tmp_path: Path
) -> None:
    assert train(data, tmp_path / "none.ckpt", None, plugins=[plugin()], directory=tmp_path) == whole
    for step in (1, 8, 11, 23):
        loaded = [] if plugin is AsyncCheckpointIO else [plugin()]
        assert train(data, tmp_path / f"step={step}.ckpt", None, plugins=loaded) == whole


def _save_while_reading(data: Path, saved: Path) -> tuple[list[int], list[int]]:
    """Save by ``dcp.async_save`` after 3 batches and read on; return what is read after the save, and after a load."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()

    def new_loader() -> StreamingDataLoader:
        dataset = StreamingDataset(remote=str(data), shuffle=True)
        return StreamingDataLoader(dataset, batch_size=2)

    loader = new_loader()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = {"loader": loader.state_dict(), "model": {"weight": torch.arange(4.0)}}
    future: Any = async_save(state, checkpoint_id=str(saved))
    after = [sample for batch in batches for sample in batch["id"].tolist()]
    future.result()
    fabric.barrier()
    loaded = _load_state_dict_from_keys(checkpoint_id=str(saved))
    resumed = new_loader()
    resumed.load_state_dict(loaded["loader"])
    return after, [sample for batch in resumed for sample in batch["id"].tolist()]


def test_fabric_saves_a_loader_by_dcp_async_save_and_reads_on(data: Path, tmp_path: Path) -> None:
    for after, resumed in on_ranks(_save_while_reading, data, tmp_path / "saved", meeting=tmp_path / "ranks"):
        assert len(after) == (SAMPLES - 3 * GLOBAL_BATCH) // 2
        assert resumed == after
