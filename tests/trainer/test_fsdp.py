"""FSDP on two processes without a GPU: sharded and full checkpoints hold the place as any other does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

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
