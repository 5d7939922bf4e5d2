"""Loaders in Fabric's hands: set up, saved and loaded like models and optimizers, on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_streaming import World
from tests.forked_ranks import on_ranks
from tests.helpers import ids, make_loader, write_dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

Read = list[tuple[int, list[int]]]


@dataclass(frozen=True, kw_only=True)
class FabricRun:
    """A loop over batches that may save its state, or go on from one."""

    data: Path
    directory: Path
    ranks: int = 2
    batch_size: int = 2
    workers: int = 0
    use_distributed_sampler: bool = True
    """Fabric's default, which must leave a streaming loader as it is."""

    def read(self, ckpt_path: Path | None = None, stop_at: int | None = None, target: Path | None = None) -> list[Read]:
        """Each rank's batches with their epochs, to the end of epoch 1 or until stopped."""
        if self.ranks == 1:
            return [self._read(ckpt_path, stop_at, target)]
        return on_ranks(
            self._read, ckpt_path, stop_at, target, meeting=self.directory / f"of {self.ranks}", count=self.ranks
        )

    def _read(self, ckpt_path: Path | None, stop_at: int | None, target: Path | None) -> Read:
        fabric = Fabric(accelerator="cpu", devices=self.ranks, strategy=DDPStrategy() if self.ranks > 1 else "auto")
        fabric.launch()
        streaming = make_loader(self.data, batch_size=self.batch_size, workers=self.workers)
        loader: Any = fabric.setup_dataloaders(streaming, use_distributed_sampler=self.use_distributed_sampler)
        assert len(loader) == len(streaming) == -(-29 // (self.ranks * self.batch_size))
        state: dict[str, Any] = {"loader": loader, "steps": 0}
        if ckpt_path:
            fabric.load(ckpt_path, state)
        read: Read = []
        while (epoch := streaming.dataset.next_epoch) < 2:
            for batch in loader:
                read.append((epoch, batch["id"].tolist()))
                state["steps"] += 1
                if state["steps"] == stop_at:
                    fabric.save(target or "unused", state)
                    return read
        return read


def global_order(ranks: list[Read], epoch: int) -> list[int]:
    """The samples of an epoch in the order of the global sequence."""
    read: list[int] = []
    for step in zip(*([batch for of, batch in rank if of == epoch] for rank in ranks), strict=True):
        for row in zip(*step, strict=True):
            read += row
    return read


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", 29)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("stop_at", [5, 8, 11], ids=["mid-epoch", "end of an epoch", "next epoch"])
def test_saved_and_loaded_loader_goes_on_at_the_sample(stop_at: int, data: Path, tmp_path: Path) -> None:
    run = FabricRun(data=data, directory=tmp_path, workers=1)
    whole = FabricRun(data=data, directory=tmp_path, use_distributed_sampler=False).read()
    assert {len(rank) for rank in whole} == {2 * 8}
    before = run.read(stop_at=stop_at, target=tmp_path / "fabric.ckpt")
    assert torch.load(tmp_path / "fabric.ckpt", weights_only=True)["loader"]["version"] == 2
    after = run.read(tmp_path / "fabric.ckpt")
    assert [first + second for first, second in zip(before, after, strict=True)] == whole


def test_two_ranks_go_on_as_one_and_as_three(data: Path, tmp_path: Path) -> None:
    alone = FabricRun(data=data, directory=tmp_path, ranks=1).read()
    order = {epoch: [sample for of, batch in alone[0] if of == epoch for sample in batch] for epoch in (0, 1)}
    target = tmp_path / "fabric.ckpt"
    before = global_order(FabricRun(data=data, directory=tmp_path).read(stop_at=5, target=target), 0)
    assert before == order[0][: 5 * 4]
    for ranks, batch_size in ((1, 3), (3, 2)):
        after = FabricRun(data=data, directory=tmp_path, ranks=ranks, batch_size=batch_size).read(target)
        left = [[batch for epoch, batch in rank if epoch == 0] for rank in after]
        assert {sample for rank in left for batch in rank for sample in batch} == set(order[0][5 * 4 :])
        assert len({len(rank) for rank in left}) == 1


def _train_sharded(data: Path, directory: Path, by_mesh: bool) -> dict[str, Any]:
    """A mesh of 2 x 2, a sharded checkpoint after 3 batches, and what is read from there."""
    strategy = ModelParallelStrategy(_in_columns, data_parallel_size=2, tensor_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(2, 2))
    mesh: Any = strategy.device_mesh
    told: dict[str, Any] = {"replication": mesh["tensor_parallel"].size()}
    if by_mesh:
        told = {"world": World.from_mesh(mesh, readers=["data_parallel"])}
    loader = make_loader(data, batch_size=2, **told)
    batches: Any = iter(fabric.setup_dataloaders(loader))
    for _ in range(3):
        next(batches)
    fabric.save(directory / "sharded", {"model": model, "data": loader.state_dict()})
    again = make_loader(data, batch_size=2, **told)
    state: dict[str, Any] = {"model": model, "data": {}}
    fabric.load(directory / "sharded", state)
    again.load_state_dict(state["data"])
    return {"left": [batch["id"].tolist() for batch in batches], "read": ids(fabric.setup_dataloaders(again))}


def _in_columns(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    return parallelize_module(model, mesh["tensor_parallel"], ColwiseParallel())


@pytest.mark.rotate(1)
@pytest.mark.parametrize("by_mesh", [False, True])
def test_sharded_checkpoint_of_a_device_mesh_holds_the_state_as_plain_values(
    by_mesh: bool, data: Path, tmp_path: Path
) -> None:
    ranks = on_ranks(_train_sharded, data, tmp_path, by_mesh, meeting=tmp_path / "ranks", count=4)
    for rank, neighbour in zip(ranks[::2], ranks[1::2], strict=True):
        assert rank["left"] == rank["read"] == neighbour["left"] == neighbour["read"]
        assert len(rank["read"]) == 8 - 3
    assert ranks[0]["read"] != ranks[2]["read"]
