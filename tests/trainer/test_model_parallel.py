"""Device meshes: ranks that share the work on one batch read the same samples, as the strategy's mesh has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_streaming.errors import ConfigError
from lightning_streaming.trainer.datamodule import replication_of
from lightning_streaming.world import World
from tests.trainer.harness import EPOCHS, TRAIN_SAMPLES, Run, write_data
from tests.trainer.ranks import AdamRecorder, RankedRun, on_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ALL_SAMPLES = sum(TRAIN_SAMPLES.values())


def mesh_of_2_by_2() -> Strategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)


def one_group_of_2() -> Strategy:
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)


class SplitRecorder(AdamRecorder):
    """A model that is split over both dimensions of the mesh."""

    def configure_model(self) -> None:
        linear = torch.nn.Linear(1, 2)
        self.layer = torch.nn.Sequential(linear, torch.nn.Softplus())  # type: ignore[assignment]  # as good as a Linear
        assert self.device_mesh is not None
        parallelize_module(linear, self.device_mesh["tensor_parallel"], ColwiseParallel())
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(data=write_data(tmp_path / "data"), directory=tmp_path, batch_size=2)


def test_tensor_parallel_ranks_read_the_same_and_go_on_in_other_groups(run: Run, tmp_path: Path) -> None:
    groups = RankedRun(run=run, strategy=mesh_of_2_by_2, meeting=tmp_path / "four", count=4, model=SplitRecorder)
    whole = groups.fit()
    for number, rank in enumerate(whole):
        assert (rank.world, rank.replication) == (World(ranks_per_node=4, rank=number), 2)
        assert rank.steps == dict.fromkeys(range(EPOCHS), 8)
        assert rank.seen == whole[number - number % 2].seen
    for epoch in range(EPOCHS):
        assert len({*whole[0].of_epoch(epoch), *whole[2].of_epoch(epoch)}) == ALL_SAMPLES
    ckpt_path, again = tmp_path / "saved.ckpt", tmp_path / "again.ckpt"
    begun = groups.fit(stop_at=("on_train_batch_end", 3, ckpt_path))
    assert [rank.seen for rank in begun] == [rank.seen[: 3 * 2] for rank in whole]
    same = groups.fit(ckpt_path, stop_at=("on_train_batch_end", 2, again))
    assert [rank.seen for rank in same] == [rank.seen[3 * 2 : 5 * 2] for rank in whole]
    fewer = RankedRun(run=run, strategy=one_group_of_2, meeting=tmp_path / "two", model=SplitRecorder).fit(
        again, max_epochs=1
    )
    assert fewer[0].seen == fewer[1].seen
    read = {*begun[0].of_epoch(0), *begun[2].of_epoch(0), *same[0].of_epoch(0), *same[2].of_epoch(0)}
    assert len(read) == 5 * 2 * 2
    assert sorted(fewer[0].of_epoch(0)) == sorted({*whole[0].of_epoch(0), *whole[2].of_epoch(0)} - read)


@pytest.mark.parametrize("replication", [1, 4])
def test_replication_by_hand_overrides_the_mesh(replication: int, run: Run, tmp_path: Path) -> None:
    by_hand = replace(run, order={"replication": replication})
    ranks = RankedRun(run=by_hand, strategy=mesh_of_2_by_2, meeting=tmp_path / "ranks", count=4).fit(max_epochs=1)
    assert {rank.replication for rank in ranks} == {replication}
    assert len({tuple(rank.of_epoch(0)) for rank in ranks}) == 4 // replication


class _TensorParallelFirst(ModelParallelStrategy):
    """A mesh whose neighbours read different samples."""

    def setup_environment(self) -> None:
        super().setup_environment()
        names = ("tensor_parallel", "data_parallel")
        self._device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def _replication() -> int | str | None:
    trainer = Trainer(accelerator="cpu", devices=4, strategy=_TensorParallelFirst(), logger=False)
    trainer.strategy.connect(SplitRecorder())
    trainer.strategy.setup_environment()
    try:
        return replication_of(trainer)
    except ConfigError as error:
        return str(error)


def test_groups_that_do_not_follow_each_other_are_refused(tmp_path: Path) -> None:
    said = on_ranks(_replication, meeting=tmp_path / "ranks", count=4)
    assert "rank 1 of 4 read as reader 1 of 2, but ranks that read the same samples must follow" in said[1]
    assert "rank 2 of 4 read as reader 0 of 2" in said[2]
