"""Groups of documents within a budget of tokens, in real runs of a trainer: resumed, validated on, and logged."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_streaming import (
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    StreamingMonitor,
)
from lightning_streaming.errors import ConfigError
from tests.forked_ranks import on_ranks
from tests.helpers import raises
from tests.trainer import test_packing
from tests.trainer.harness import EPOCHS, Diary, Run, Trigger, resume_twice, save_in
from tests.trainer.test_packing import LENGTHS, VAL_LENGTHS, WAYS, PackRecorder

pytestmark = test_packing.pytestmark
documents = test_packing.documents

BUDGET = {"column": "tokens", "tokens": 90, "window": 16, "buckets": 3}
Group = tuple[tuple[int, ...], ...]


def group_of(batch: Mapping[str, torch.Tensor]) -> list[Group]:
    """The only group of a batch: the tokens of each document, without what pads it."""
    sizes = batch["lengths"].tolist()
    return [tuple(tuple(row[:size]) for row, size in zip(batch["input_ids"].tolist(), sizes, strict=True))]


class GroupRecorder(PackRecorder):
    """Remembers groups in place of packs."""

    packs_of = staticmethod(group_of)


@dataclass(frozen=True, kw_only=True)
class GroupRun(Run):
    """A run on groups, on as many ranks as are connected."""

    def datamodule(self) -> StreamingDataModule:
        train = {"remote": str(self.data / "train"), "shuffle": True, "num_canonical_nodes": 2, "token_budget": BUDGET}
        return self.module(
            train=StreamingConfig(**{**train, **self.order}),
            val=StreamingConfig(remote=str(self.data / "val"), token_budget=BUDGET) if self.validate else None,
            num_workers=self.workers,
            persistent_workers=self.persistent,
        )

    def fit(self, **settings: Any) -> Any:
        count = dist.get_world_size() if dist.is_initialized() else 1
        strategy = DDPStrategy() if count > 1 else "auto"
        return Run.fit(self, **{"model": GroupRecorder, "devices": count, "strategy": strategy, **settings})


def groups_by_epoch(run: Run) -> list[list[Group]]:
    """What plain iteration gives, with no trainer."""
    dataset = StreamingDataset(
        remote=str(run.data / "train"), shuffle=True, shuffle_seed=9176, num_canonical_nodes=2, token_budget=BUDGET
    )
    loader = StreamingDataLoader(dataset)
    return [[group for batch in loader for group in group_of(batch)] for _ in range(EPOCHS)]


def test_epochs_have_as_many_steps_as_they_have_groups(documents: Path, tmp_path: Path) -> None:
    run = GroupRun(data=documents, directory=tmp_path)
    model, trainer = run.fit()
    expected = groups_by_epoch(run)
    assert len({len(groups) for groups in expected}) > 1
    assert model.seen == [(epoch, group) for epoch, groups in enumerate(expected) for group in groups]
    assert model.steps_per_epoch == {epoch: len(groups) for epoch, groups in enumerate(expected)}
    assert trainer.global_step == sum(map(len, expected))
    for groups in expected:
        assert sorted(map(len, chain(*groups))) == sorted(LENGTHS)
    for validated in model.validated:
        assert sorted(map(len, chain(*validated))) == sorted(VAL_LENGTHS)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "name", ["batch end", "epoch end", "exception, accumulation", "limit_train_batches as a share"]
)
def test_resuming_twice_shows_the_weights_the_same_groups(
    name: str, workers: int, documents: Path, tmp_path: Path
) -> None:
    trigger, settings = WAYS[name]
    run = GroupRun(data=documents, directory=tmp_path, trainer=settings, workers=workers)
    whole, whole_trainer = replace(run, diary=Diary()).fit()
    resumed, trainer = resume_twice(run, trigger)
    assert resumed.seen == whole.seen
    assert resumed.steps_per_epoch == whole.steps_per_epoch
    assert trainer.global_step == whole_trainer.global_step
    assert resumed.diary.batches == whole.diary.batches
    assert resumed.diary.estimates == whole.diary.estimates


def until_saved(run: GroupRun, trigger: Trigger, target: Path) -> Path:
    return trigger(run, None, target, 0)


def to_the_end(run: GroupRun, ckpt_path: Path) -> Any:
    return run.fit(ckpt_path=ckpt_path)[0].seen


def test_resuming_on_other_ranks(documents: Path, tmp_path: Path) -> None:
    run = GroupRun(data=documents, directory=tmp_path, validate=False)
    expected = groups_by_epoch(run)
    target = tmp_path / "saved.ckpt"
    begun = (until_saved, run, save_in("on_train_batch_end", 3, 3), target)
    saved = on_ranks(*begun, meeting=tmp_path / "ranks", count=2)[0]
    for seen in on_ranks(to_the_end, run, saved, meeting=tmp_path / "more", count=1):
        assert [[group for of, group in seen if of == epoch] for epoch in range(EPOCHS)] == expected


def test_the_monitor_logs_tokens_and_how_full_groups_are(documents: Path, tmp_path: Path) -> None:
    run = GroupRun(data=documents, directory=tmp_path, validate=False)
    logger = CSVLogger(tmp_path, name="", version="run")
    model, _ = run.fit(callbacks=[StreamingMonitor()], logger=logger, log_every_n_steps=1)
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["data/fill"]]
    sizes = [[len(one) for one in group] for _, group in model.seen]
    fills = [sum(of_group) / (len(of_group) * max(of_group)) for of_group in sizes]
    assert [float(row["data/fill"]) for row in rows] == pytest.approx(fills)
    assert [float(row["data/padding_share"]) for row in rows] == pytest.approx([1 - fill for fill in fills])
    assert all(float(row["data/tokens_per_s"]) > 0 for row in rows)


class PaddingModule(StreamingDataModule):
    """Makes batches by itself."""

    def collate(self, samples: list[Any]) -> Any:
        assert {len(sample) for sample in samples} == {1}
        return [len(sample["tokens"]) for sample in samples]


def test_a_data_module_collates_groups_and_takes_no_batch_size(documents: Path) -> None:
    data = StreamingConfig(remote=str(documents / "train"), token_budget=BUDGET)
    module = PaddingModule(train=data, val=data, batch_size=4, eval_batch_size=1)
    module.setup("fit")
    sizes = list(module.val_dataloader())
    assert sorted(chain(*sizes)) == sorted(LENGTHS)
    assert all(len(group) * max(group) <= 90 for group in sizes)
    with raises(ConfigError, "budget", "eval_batch_size"):
        module.train_dataloader()
