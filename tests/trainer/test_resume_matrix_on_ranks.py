"""The same ways to save on one and two nodes in turn, of connected ranks: all together go on as one run.

Some ways are tried on one node of as many ranks too; all of them, which takes minutes, with
LIGHTNING_STREAMING_ALL_RANKS=1.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from tests.trainer.harness import Recorder, Run, Trigger, write_data
from tests.trainer.ranks import on_ranks
from tests.trainer.test_resume_matrix import IN_EVERY_WAY, OTHER_CANONICAL_NODES

GLOBAL_BATCH = 4
FULL_BATCHES = {"epoch_size": 32}  # 8 of them, of 29 samples: as many as the cases count on, and none padded
NODES_IN_TURN = ((2, 1, 2), (1, 2, 1))
RANKS_IN_TURN = ((2, 1, 2), (1, 2, 1), (2, 2, 2))
OF_ONE_TOPOLOGY = ("batches of one stream, epoch end", "batches of one stream per device")
"""Batches that are composed for as many ranks as read them, so other ranks compose other ones in later epochs."""


def cases() -> list[Any]:
    """Names of cases, with the ranks of three runs, and whether each is a node by itself."""
    on_nodes = [(name, counts, True) for name, counts in zip(IN_EVERY_WAY, cycle(NODES_IN_TURN))]
    on_ranks = [(name, counts, False) for name, counts in zip(list(IN_EVERY_WAY)[::5], cycle(RANKS_IN_TURN))]
    if os.environ.get("LIGHTNING_STREAMING_ALL_RANKS"):
        on_ranks = [(name, counts, False) for name in IN_EVERY_WAY for counts in RANKS_IN_TURN]
    named = [*on_nodes, *on_ranks]
    return list(
        dict.fromkeys((name, (2, 2, 2) if name in OF_ONE_TOPOLOGY else counts, nodes) for name, counts, nodes in named)
    )


class RecorderOfAll(Recorder):
    """Remembers the samples of all ranks, step by step."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.hook("training_step", self)
        found: list[list[int]] = [[]] * self.trainer.world_size
        if self.trainer.world_size > 1:
            dist.all_gather_object(found, batch["id"].tolist())
        else:
            found = [batch["id"].tolist()]
        self.pending.append((self.trainer.current_epoch, sorted(chain.from_iterable(found))))
        return self.loss(batch)


class RunOfAll(Run):
    """A run on as many ranks as there are processes connected."""

    def fit(self, **settings: Any) -> Any:
        count = dist.get_world_size() if dist.is_initialized() else 1
        ranked = replace(self, batch_size=GLOBAL_BATCH // count)
        strategy = DDPStrategy() if count > 1 else "auto"
        return Run.fit(ranked, **settings, model=RecorderOfAll, devices=count, strategy=strategy)


def until_saved(run: RunOfAll, trigger: Trigger, ckpt_path: Path | None, target: Path, attempt: int) -> Path:
    return trigger(run, ckpt_path, target, attempt)


def to_the_end(run: RunOfAll, ckpt_path: Path | None) -> tuple[Any, Any]:
    model, _ = run.fit(ckpt_path=ckpt_path)
    return model.seen, model.steps_per_epoch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.filterwarnings(
    "ignore:You requested to overfit",
    "ignore:The dirpath has changed",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:`.fit.ckpt_path=None.` was called without a model",
    'ignore:.fit.ckpt_path="last". is set, but there is no last checkpoint',
    "ignore:.*use of fork.*:DeprecationWarning",
    "ignore:It is recommended to use .*sync_dist=True",
)
@pytest.mark.parametrize(("name", "counts", "are_nodes"), cases())
def test_resuming_twice_shows_all_ranks_together_the_same(
    name: str, counts: tuple[int, int, int], are_nodes: bool, data: Path, tmp_path: Path
) -> None:
    case = IN_EVERY_WAY[name]
    settings = {**case.run, "order": {**case.run.get("order", {}), **FULL_BATCHES}}
    run = RunOfAll(data=data, directory=tmp_path, trainer=case.trainer, nodes_of_one_rank=are_nodes, **settings)
    runs = [run, *map(run.asking_for, OTHER_CANONICAL_NODES)]

    def call(do: Any, attempt: int, *args: Any) -> Any:
        return on_ranks(do, runs[attempt], *args, meeting=tmp_path / "ranks", count=counts[attempt])[0]

    whole = call(to_the_end, 0, None)
    ckpt_path = None
    for attempt in range(2):
        target = tmp_path / f"saved{attempt}.ckpt"
        ckpt_path = call(until_saved, attempt, case.trigger, ckpt_path, target, attempt)
    assert call(to_the_end, 2, ckpt_path) == whole
