"""Packs in real runs of a trainer, whose epochs differ in how many they have: resumed, validated on, and logged."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_streaming import (
    MDSWriter,
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    StreamingMonitor,
)
from tests.forked_ranks import on_ranks
from tests.trainer.harness import (
    EPOCHS,
    Diary,
    Recorder,
    Run,
    Trigger,
    every_n_steps,
    exception_in_step,
    resume_twice,
    save_in,
    sigterm_in_step,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:The dirpath has changed",
    # Said of every first run that OnExceptionCheckpoint watches over.
    'ignore:.fit.ckpt_path="last". is set, but there is no last checkpoint',
    "ignore:`.fit.ckpt_path=None.` was called without a model",
    "ignore:.*use of fork.*:DeprecationWarning",
    "ignore:It is recommended to use .*sync_dist=True",
)

CAPACITY = 32
TRAIN = {"column": "tokens", "capacity": CAPACITY, "window": 6}
"""So small a window that how many packs an epoch has follows from its order."""
VAL = {"column": "tokens", "capacity": CAPACITY, "method": "concat"}
LENGTHS = [int(one) for one in np.random.default_rng(5).integers(5, 30, 40)]
VAL_LENGTHS = LENGTHS[:12]
PACKS = [24, 25, 24]
"""Of each epoch."""
VAL_PACKS = -(-sum(VAL_LENGTHS) // CAPACITY)
GLOBAL_BATCH = 2


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents whose tokens tell which they are of, and where in it."""
    root = tmp_path_factory.mktemp("documents")
    for name, lengths in (("train", LENGTHS), ("val", VAL_LENGTHS)):
        with MDSWriter(out=str(root / name), columns={"tokens": "ndarray:int32"}, size_limit=600) as writer:
            for number, length in enumerate(lengths):
                writer.write({"tokens": (1000 * (number + 1) + np.arange(length)).astype(np.int32)})
    return root


def batches_of(packs: int, size: int = GLOBAL_BATCH) -> int:
    return -(-packs // size)


def packs_of(batch: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    """The tokens of each pack, without what fills it up."""
    return [
        tuple(tokens[documents >= 0].tolist())
        for tokens, documents in zip(batch["input_ids"], batch["document_ids"], strict=True)
    ]


class PackRecorder(Recorder):
    """Remembers packs in place of samples, of all ranks in the order of the epoch, and what it was validated on."""

    packs_of: Callable[..., list[Any]] = staticmethod(packs_of)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.validated: list[list[tuple[int, ...]]] = []
        self.lengths: dict[int, int] = {}

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.hook("training_step", self)
        self.lengths[self.trainer.current_epoch] = int(self.trainer.num_training_batches)
        of_ranks: list[list[tuple[int, ...]]] = [self.packs_of(batch)] * self.trainer.world_size
        if self.trainer.world_size > 1:
            dist.all_gather_object(of_ranks, self.packs_of(batch))
        self.pending += [(self.trainer.current_epoch, pack) for pack in chain(*zip(*of_ranks, strict=True))]
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        self.diary.estimates.add(int(self.trainer.estimated_stepping_batches))
        return super().configure_optimizers()

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        predicted: torch.Tensor = self.layer(batch["input_ids"].float().unsqueeze(2) / 100_000)
        return predicted.square().mean()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.validated.append([])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.validated[-1] += self.packs_of(batch)
        self.log("val_loss", self.loss(batch), batch_size=len(batch["input_ids"]))


@dataclass(frozen=True, kw_only=True)
class PackRun(Run):
    """A run on packs, on as many ranks as are connected."""

    batch_size: int = GLOBAL_BATCH

    def datamodule(self) -> StreamingDataModule:
        train = {"remote": str(self.data / "train"), "shuffle": True, "num_canonical_nodes": 2, "packing": TRAIN}
        return self.module(
            train=StreamingConfig(**{**train, **self.order}),
            val=StreamingConfig(remote=str(self.data / "val"), packing=VAL) if self.validate else None,
            batch_size=self.batch_size,
            num_workers=self.workers,
            persistent_workers=self.persistent,
        )

    def fit(self, **settings: Any) -> Any:
        count = dist.get_world_size() if dist.is_initialized() else 1
        ranked = replace(self, batch_size=self.batch_size // count)
        strategy = DDPStrategy() if count > 1 else "auto"
        return Run.fit(ranked, **{"model": PackRecorder, "devices": count, "strategy": strategy, **settings})


def packs_by_epoch(run: Run) -> list[list[tuple[int, ...]]]:
    """What plain iteration gives, with no trainer and one pack after another."""
    dataset = StreamingDataset(
        remote=str(run.data / "train"), shuffle=True, shuffle_seed=9176, num_canonical_nodes=2, packing=TRAIN
    )
    loader = StreamingDataLoader(dataset, batch_size=1)
    return [[pack for batch in loader for pack in packs_of(batch)] for _ in range(EPOCHS)]


def test_epochs_have_as_many_steps_as_they_have_packs(documents: Path, tmp_path: Path) -> None:
    run = PackRun(data=documents, directory=tmp_path)
    model, trainer = run.fit()
    expected = packs_by_epoch(run)
    assert [len(packs) for packs in expected] == PACKS
    assert model.seen == [(epoch, pack) for epoch, packs in enumerate(expected) for pack in packs]
    steps = {epoch: batches_of(packs) for epoch, packs in enumerate(PACKS)}
    assert model.steps_per_epoch == model.lengths == steps
    assert model.diary.batches == {
        (epoch, batch, batch == count - 1) for epoch, count in steps.items() for batch in range(count)
    }
    assert trainer.global_step == trainer.fit_loop.total_batch_idx + 1 == sum(steps.values())
    assert model.diary.estimates == {EPOCHS * steps[0]}  # Lightning takes all epochs to be as long as the first
    assert model.diary.validations == {
        (0, steps[0]),
        (1, steps[0] + steps[1]),
        (2, sum(steps.values())),
    }


def test_each_validation_reads_all_packs(documents: Path, tmp_path: Path) -> None:
    run = PackRun(data=documents, directory=tmp_path)
    model, trainer = run.fit(val_check_interval=0.5)
    assert trainer.num_val_batches == [batches_of(VAL_PACKS)]
    assert len(model.validated) == 2 * EPOCHS
    for packs in model.validated:
        assert packs == model.validated[0]
        assert sorted(chain(*packs)) == [
            1000 * (number + 1) + place for number, size in enumerate(VAL_LENGTHS) for place in range(size)
        ]
    begun = [batches_of(packs) for packs in PACKS]
    ends = [sum(begun[:epoch]) for epoch in range(EPOCHS)]
    assert model.diary.validations == {
        (epoch, end + part) for epoch, end in enumerate(ends) for part in (begun[epoch] // 2, 2 * (begun[epoch] // 2))
    }


WAYS: dict[str, tuple[Trigger, dict[str, Any]]] = {
    "batch end": (save_in("on_train_batch_end", 6, 16), {}),
    "mid-epoch validation": (save_in("on_validation_end", 2, 2), {"val_check_interval": 5}),
    "epoch end": (save_in("on_train_epoch_end", 1, 1), {}),
    "every 5 steps": (every_n_steps(5, stop_after=17), {}),
    "exception, accumulation": (exception_in_step(20, 7), {"accumulate_grad_batches": 3}),
    "SIGTERM, accumulation": (sigterm_in_step(6, 15), {"accumulate_grad_batches": 2}),
    "limit_train_batches as a share": (save_in("on_train_batch_end", 3, 12), {"limit_train_batches": 0.7}),
    "reloaded loaders": (save_in("on_train_batch_end", 4, 14), {"reload_dataloaders_every_n_epochs": 1}),
}


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, tuple[PackRecorder, Trainer]]:
    """Whole runs, by how they train."""
    return {}


def whole_run(run: PackRun, known: dict[str, Any]) -> tuple[Any, Any]:
    key = repr(run.trainer)
    if key not in known:
        known[key] = replace(run, diary=Diary()).fit()
    return known[key]  # type: ignore[no-any-return]  # put there just now


@pytest.mark.rotate(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", WAYS)
def test_resuming_twice_shows_the_weights_the_same_packs(
    name: str, workers: int, documents: Path, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    trigger, settings = WAYS[name]
    run = PackRun(data=documents, directory=tmp_path, trainer=settings)
    whole, whole_trainer = whole_run(run, uninterrupted)
    run = replace(run, workers=workers)
    resumed, trainer = resume_twice(run, trigger, *map(run.asking_for, (20, 64)))
    assert resumed.seen == whole.seen
    assert resumed.steps_per_epoch == whole.steps_per_epoch
    assert trainer.global_step == whole_trainer.global_step
    assert trainer.num_training_batches == whole_trainer.num_training_batches
    assert trainer.fit_loop.total_batch_idx == whole_trainer.fit_loop.total_batch_idx
    assert resumed.diary.batches == whole.diary.batches
    assert resumed.diary.estimates == whole.diary.estimates


def test_a_schedule_of_so_many_steps_is_the_same_after_each_resume(documents: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 30, "max_epochs": -1}
    run = PackRun(data=documents, directory=tmp_path, trainer=settings, schedule_from_trainer=True)
    whole, whole_trainer = replace(run, diary=Diary()).fit()
    resumed, trainer = resume_twice(run, save_in("on_train_batch_end", 8, 9))
    assert resumed.seen == whole.seen
    assert resumed.diary.estimates == whole.diary.estimates == {30}
    rates = [one.lr_scheduler_configs[0].scheduler.get_last_lr() for one in (trainer, whole_trainer)]
    assert rates[0] == rates[1]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("name", [name for name in WAYS if "limit" not in name])
def test_resuming_with_other_batch_sizes_and_workers(
    name: str, documents: Path, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    trigger, settings = WAYS[name]
    run = PackRun(data=documents, directory=tmp_path, trainer=settings)
    whole, _ = whole_run(run, uninterrupted)
    resumed, trainer = resume_twice(run, trigger, replace(run, batch_size=3), replace(run, batch_size=5, workers=2))
    assert resumed.seen == whole.seen
    assert (trainer.current_epoch, trainer.num_training_batches) == (EPOCHS, batches_of(PACKS[-1], 5))
    assert {epoch for epoch, _, is_last in resumed.diary.batches if is_last} == set(range(EPOCHS))


def until_saved(run: PackRun, trigger: Trigger, ckpt_path: Path | None, target: Path, attempt: int) -> Path:
    return trigger(run, ckpt_path, target, attempt)


def to_the_end(run: PackRun, ckpt_path: Path | None) -> tuple[Any, Any, Any]:
    model, trainer = run.fit(ckpt_path=ckpt_path)
    return model.seen, model.steps_per_epoch, trainer.num_training_batches


ON_RANKS = {
    "batch end": (2, 1, 2),
    "epoch end": (1, 2, 1),
    "exception, accumulation": (1, 2, 2),
    "mid-epoch validation": (2, 2, 1),
}
"""On how many ranks each of three runs is that go on from one another."""


@pytest.mark.rotate(1)
@pytest.mark.parametrize(("name", "counts"), ON_RANKS.items())
def test_resuming_on_other_ranks(
    name: str, counts: tuple[int, int, int], documents: Path, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    """An epoch that does not come out even gives a rank a pack once more; what comes before is one rank's."""
    trigger, settings = WAYS[name]
    run = PackRun(data=documents, directory=tmp_path, trainer=settings)
    whole, whole_trainer = whole_run(run, uninterrupted)
    ckpt_path = None
    for attempt in range(2):
        target = tmp_path / f"saved{attempt}.ckpt"
        do = (until_saved, run, trigger, ckpt_path, target, attempt)
        ckpt_path = on_ranks(*do, meeting=tmp_path / "ranks", count=counts[attempt])[0]
    found = on_ranks(to_the_end, run, ckpt_path, meeting=tmp_path / "ranks", count=counts[2])
    for seen, steps, batches in found:
        for epoch, packs in enumerate(PACKS):
            of_epoch = [pack for of, pack in seen if of == epoch]
            assert of_epoch[:packs] == [pack for of, pack in whole.seen if of == epoch]
            assert len(of_epoch) - packs < max(counts)
        assert steps == whole.steps_per_epoch
        assert batches == whole_trainer.num_training_batches


def test_the_monitor_logs_tokens_and_how_full_packs_are(documents: Path, tmp_path: Path) -> None:
    run = PackRun(data=documents, directory=tmp_path, validate=False)
    logger = CSVLogger(tmp_path, name="", version="run")
    model, _ = run.fit(callbacks=[StreamingMonitor()], logger=logger, log_every_n_steps=1)
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["data/fill"]]
    assert len(rows) == sum(model.steps_per_epoch.values())
    fills = list[float]()
    for epoch, packs in enumerate(PACKS):
        sizes = [len(pack) for of, pack in model.seen if of == epoch]
        for first in range(0, packs, GLOBAL_BATCH):
            of_batch = sizes[first : first + GLOBAL_BATCH]
            fills.append(sum(of_batch) / (CAPACITY * len(of_batch)))
    assert [float(row["data/fill"]) for row in rows] == pytest.approx(fills)
    assert [float(row["data/padding_share"]) for row in rows] == pytest.approx([1 - fill for fill in fills])
    assert all(float(row["data/tokens_per_s"]) > 0 for row in rows)
    assert all(row["data/global_tokens_per_s"] == row["data/tokens_per_s"] for row in rows)
