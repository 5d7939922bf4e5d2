"""FSDP and device meshes without a GPU: checkpoints hold the place, ranks that share a batch read the same samples."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_streaming import StreamingConfig, StreamingDataModule, StreamingDataset
from lightning_streaming.errors import ConfigError
from lightning_streaming.trainer.datamodule import Stage, readers_of
from lightning_streaming.world import World
from tests.forked_ranks import on_ranks
from tests.trainer.harness import EPOCHS, TRAIN_SAMPLES, Run, write_data
from tests.trainer.ranks import AdamRecorder, RankedRun, Trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True"),
    # What Lightning and torch use of torch's own, on its way out.
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class OnCPU(FSDPStrategy):
    """Lightning's strategy, which asks for GPUs, without one: torch must be told, and must copy what it saves."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._state_dict_type == "sharded":
            return super().lightning_module_state_dict()
        assert isinstance(self.model, FullyShardedDataParallel)
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, config):
            return dict(self.model.state_dict())


def sharded() -> OnCPU:
    return OnCPU(state_dict_type="sharded")


def full() -> OnCPU:
    return OnCPU(state_dict_type="full")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(data=write_data(tmp_path / "data"), directory=tmp_path, batch_size=2)


def joined(runs: list[list[Trained]], rank: int) -> list[tuple[int, int]]:
    return [seen for trained in runs for seen in trained[rank].seen]


@pytest.mark.parametrize(
    "kinds", [(full, full, full), (sharded, full, sharded)], ids=["full", "sharded and full in turn"]
)
def test_three_resumes_are_one_run(kinds: tuple[Any, ...], run: Run, tmp_path: Path) -> None:
    def launch(kind: Any) -> RankedRun:
        return RankedRun(run=run, strategy=kind, meeting=tmp_path / "ranks", model=AdamRecorder)

    whole = launch(full).fit()
    ckpt_path, runs = None, []
    for number, kind in enumerate(kinds):
        target = tmp_path / f"{number}.ckpt"
        # 3, 5 and 4 batches: in the middle of epoch 0, at its end, in the middle of epoch 1
        runs.append(launch(kind).fit(ckpt_path, stop_at=("on_train_batch_end", (3, 5, 4)[number], target)))
        assert target.is_dir() == (kind is sharded)
        ckpt_path = target
    runs.append(launch(kinds[-1]).fit(ckpt_path))
    for rank in (0, 1):
        assert joined(runs, rank) == whole[rank].seen
        assert runs[-1][rank].steps == whole[rank].steps == dict.fromkeys(range(EPOCHS), 8)


def test_full_checkpoint_of_two_ranks_goes_on_on_one(run: Run, tmp_path: Path) -> None:
    ckpt_path = tmp_path / "full.ckpt"
    ranks = RankedRun(run=run, strategy=full, meeting=tmp_path / "ranks", model=AdamRecorder)
    before = ranks.fit(stop_at=("on_train_batch_end", 3, ckpt_path))
    model, _ = run.fit(ckpt_path=ckpt_path, model=AdamRecorder, max_epochs=1)
    read = [sample for rank in before for sample in rank.of_epoch(0)]
    left = [sample for _, sample in model.seen_here]
    assert len(read) == 3 * 2 * 2
    assert len(read) + len(left) == len({*read, *left}) == sum(TRAIN_SAMPLES.values())


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


@pytest.mark.nightly
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


@pytest.mark.rotate(1)
@pytest.mark.parametrize("replication", [1, 4])
def test_replication_by_hand_overrides_the_mesh(replication: int, run: Run, tmp_path: Path) -> None:
    by_hand = replace(run, order={"replication": replication})
    ranks = RankedRun(run=by_hand, strategy=mesh_of_2_by_2, meeting=tmp_path / "ranks", count=4).fit(max_epochs=1)
    assert {rank.replication for rank in ranks} == {replication}
    assert len({tuple(rank.of_epoch(0)) for rank in ranks}) == 4 // replication


class _OtherMesh(ModelParallelStrategy):
    """A mesh of dimensions in another order, or of other names, than Lightning makes them."""

    names: tuple[str, ...]

    def setup_environment(self) -> None:
        super().setup_environment()
        self._device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=self.names)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh


class _TensorParallelFirst(_OtherMesh):
    """Neighbours read different samples."""

    names = ("tensor_parallel", "data_parallel")


class _PipelineFirst(_OtherMesh):
    """As torch's own trainers name them."""

    names = ("pp", "dp_shard")


class _NamelessToUs(_OtherMesh):
    names = ("batch", "tensor_parallel")


@pytest.mark.nightly
def test_ranks_that_share_need_not_follow_each_other(run: Run, tmp_path: Path) -> None:
    apart = RankedRun(run=run, strategy=_TensorParallelFirst, meeting=tmp_path / "apart", count=4, model=SplitRecorder)
    whole = apart.fit()
    for number, rank in enumerate(whole):
        assert (rank.world, rank.replication) == (World(ranks_per_node=2, rank=number % 2), None)
        assert rank.steps == dict.fromkeys(range(EPOCHS), 8)
        assert rank.seen == whole[number % 2].seen
    for epoch in range(EPOCHS):
        assert len({*whole[0].of_epoch(epoch), *whole[1].of_epoch(epoch)}) == ALL_SAMPLES
    ckpt_path = tmp_path / "saved.ckpt"
    begun = apart.fit(stop_at=("on_train_batch_end", 3, ckpt_path))
    assert [rank.seen for rank in begun] == [rank.seen[: 3 * 2] for rank in whole]
    in_a_row = replace(apart, strategy=mesh_of_2_by_2)
    for going_on, readers in ((apart, (0, 1, 0, 1)), (in_a_row, (0, 0, 1, 1))):
        rest = going_on.fit(ckpt_path, max_epochs=2)
        for rank, reader in zip(rest, readers, strict=True):
            assert rank.seen == whole[reader].seen[3 * 2 : len(rank.seen) + 3 * 2]
            assert len(rank.of_epoch(1)) == len(whole[0].of_epoch(1))


def test_dimensions_may_have_the_names_of_torchs_own_trainers(run: Run, tmp_path: Path) -> None:
    ranks = RankedRun(run=run, strategy=_PipelineFirst, meeting=tmp_path / "ranks", count=4).fit(max_epochs=1)
    assert [rank.world for rank in ranks] == [World(ranks_per_node=2, rank=number % 2) for number in range(4)]
    for number, rank in enumerate(ranks):
        assert rank.seen == ranks[number % 2].seen
    assert len({*ranks[0].of_epoch(0), *ranks[1].of_epoch(0)}) == ALL_SAMPLES


def test_replication_by_hand_overrides_a_mesh_of_any_order(run: Run, tmp_path: Path) -> None:
    by_hand = replace(run, order={"replication": 4})
    ranks = RankedRun(run=by_hand, strategy=_TensorParallelFirst, meeting=tmp_path / "ranks", count=4)
    for number, rank in enumerate(ranks.fit(max_epochs=1)):
        assert (rank.world, rank.replication) == (World(ranks_per_node=4, rank=number), 4)
        assert sorted(rank.of_epoch(0)) == sorted({*rank.of_epoch(0)})
        assert len(rank.of_epoch(0)) == ALL_SAMPLES


class _EveryOtherRank(DDPStrategy):
    """Says itself who reads what, and has no mesh."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 2, "rank": self.global_rank % 2}


class _EveryTwoRanks(DDPStrategy):
    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 2, "rank": self.global_rank // 2}


def _readers(strategy: type[Strategy], machines: int = 1) -> tuple[World, int | None] | str:
    devices = 4 // machines
    node, rank_of_node = divmod(dist.get_rank(), devices)
    os.environ.update(LOCAL_RANK=str(rank_of_node), GROUP_RANK=str(node), LOCAL_WORLD_SIZE=str(devices))
    trainer = Trainer(accelerator="cpu", devices=devices, num_nodes=machines, strategy=strategy(), logger=False)
    trainer.strategy.connect(SplitRecorder())
    trainer.strategy.setup_environment()
    try:
        return readers_of(trainer)
    except ConfigError as error:
        return str(error)


class _ByOwnNames(StreamingDataModule):
    def build_dataset(self, stage: Stage, config: StreamingConfig) -> StreamingDataset:
        dataset = super().build_dataset(stage, config)
        assert isinstance(self.trainer, Trainer)
        assert isinstance(self.trainer.strategy, ModelParallelStrategy)
        dataset.world = World.from_mesh(self.trainer.strategy.device_mesh, readers=["batch"])
        return dataset


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_data_module_may_name_the_dimensions_itself(run: Run, tmp_path: Path) -> None:
    by_hand = replace(run, module=_ByOwnNames, order={"replication": 1}, validate=False)
    ranks = RankedRun(run=by_hand, strategy=_NamelessToUs, meeting=tmp_path / "ranks", count=4).fit(max_epochs=1)
    assert [rank.world.rank for rank in ranks] == [0, 0, 1, 1]
    assert ranks[0].seen == ranks[1].seen != ranks[2].seen == ranks[3].seen
    assert len({*ranks[0].of_epoch(0), *ranks[2].of_epoch(0)}) == ALL_SAMPLES


def test_on_several_machines_a_node_is_what_shares_readers_and_orders_of_ranks_in_a_row_stay(tmp_path: Path) -> None:
    said = on_ranks(_readers, _TensorParallelFirst, 2, meeting=tmp_path / "apart", count=4)
    assert said == [(World(ranks_per_node=2, rank=rank % 2), None) for rank in range(4)]  # each machine reads all
    said = on_ranks(_readers, mesh_of_2_by_2, 2, meeting=tmp_path / "row", count=4)
    assert said == [(World(num_nodes=2, ranks_per_node=2, rank=rank), 2) for rank in range(4)]


def test_a_mesh_that_does_not_say_who_reads_what_is_refused(tmp_path: Path) -> None:
    for said in on_ranks(_readers, _NamelessToUs, meeting=tmp_path / "ranks", count=4):
        assert "of _NamelessToUs has the dimensions 'batch', 'tensor_parallel', and none of" in said
        assert "data_parallel or dp_replicate or dp_shard" in said


def test_a_strategy_without_a_mesh_may_have_consecutive_ranks_share_and_no_others(tmp_path: Path) -> None:
    said = on_ranks(_readers, _EveryTwoRanks, meeting=tmp_path / "ranks", count=4)
    assert said == [(World(ranks_per_node=4, rank=rank), 2) for rank in range(4)]
    said = on_ranks(_readers, _EveryOtherRank, meeting=tmp_path / "others", count=4)
    assert "rank 1 of 4 read as reader 1 of 2, but without a device mesh ranks" in said[1]
    assert "rank 2 of 4 read as reader 0 of 2" in said[2]


class _FirstStageReads(StreamingDataModule):
    """All ranks are one reader, and only the first sees its samples."""

    def build_dataset(self, stage: Stage, config: StreamingConfig) -> StreamingDataset:
        dataset = super().build_dataset(stage, config)
        assert self.trainer is not None
        dataset.world = World(is_reader=self.trainer.global_rank == 0)
        return dataset


class _StageRecorder(AdamRecorder):
    """Takes a step on every batch, whether there are samples in it or not."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch:
            return super().training_step(batch, batch_idx)
        return 0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        if batch:
            super().validation_step(batch, batch_idx)


def test_a_rank_without_samples_takes_the_same_steps_and_goes_on_like_the_others(run: Run, tmp_path: Path) -> None:
    stages = replace(run, module=_FirstStageReads)
    ranks = RankedRun(run=stages, strategy=DDPStrategy, meeting=tmp_path / "ranks", model=_StageRecorder)
    reading, other = ranks.fit()
    assert len(reading.of_epoch(0)) == len({*reading.of_epoch(0)}) == ALL_SAMPLES
    assert other.seen == []
    assert (other.steps, other.batches) == (reading.steps, reading.batches)
    ckpt_path = tmp_path / "saved.ckpt"
    ranks.fit(stop_at=("on_train_batch_end", 17, ckpt_path))  # in the middle of epoch 1
    first, second = ranks.fit(ckpt_path)
    assert first.seen == reading.seen[-len(first.seen) :]
    assert (first.steps, second.steps, second.seen) == (reading.steps, reading.steps, [])
