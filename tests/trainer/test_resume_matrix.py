"""Every way a checkpoint comes about, resumed twice in a row: the weights see what an uninterrupted run shows them.

The same ways to save on one and two nodes in turn, of connected ranks: all together go on as one run.

``make test-all`` tries every way with every number of workers, with other batch sizes, and on one node of as many
ranks too; ``make test`` rotates through these.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_streaming import StreamingDataModule
from tests.forked_ranks import on_ranks
from tests.trainer.harness import (
    Diary,
    NodesOfOneRank,
    Recorder,
    Run,
    Trigger,
    every_n_steps,
    exception_in_step,
    resume_twice,
    save_in,
    sigterm_in_step,
    steps_limit,
    stop_at_train_end,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:You requested to overfit",
    "ignore:The dirpath has changed",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    # Said of every first run that OnExceptionCheckpoint watches over.
    "ignore:`.fit.ckpt_path=None.` was called without a model",
    'ignore:.fit.ckpt_path="last". is set, but there is no last checkpoint',
)

# An epoch is 29 samples: 8 batches, of which the last has one sample. Of the canonical nodes that resumes ask for, 20
# would make 10 of it, and 64 would make 16; those that were saved are used.
OTHER_CANONICAL_NODES = (20, 64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to save, and the run it happens in."""

    trigger: Trigger
    trainer: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)


NO_VALIDATION = {"validate": False}
IN_EVERY_WAY = {
    "every 3 steps": Case(trigger=every_n_steps(3, stop_after=4)),
    "every n steps, the last batch of an epoch": Case(trigger=every_n_steps(8, stop_after=9)),
    "every n steps, the last batch, no validation": Case(trigger=every_n_steps(8, stop_after=9), run=NO_VALIDATION),
    "batch end": Case(trigger=save_in("on_train_batch_end", 4, 3)),
    "last batch end": Case(trigger=save_in("on_train_batch_end", 8, 8)),
    "mid-epoch validation": Case(trigger=save_in("on_validation_end", 2, 3), trainer={"val_check_interval": 2}),
    "mid-epoch validation start": Case(trigger=save_in("on_validation_start", 1, 2), trainer={"val_check_interval": 3}),
    "validation at the epoch's end": Case(trigger=save_in("on_validation_end", 1, 1)),
    "validation at the epoch's end, max_steps": Case(
        trigger=save_in("on_validation_end", 1, 1), trainer={"max_steps": 24}
    ),
    "epoch end": Case(trigger=save_in("on_train_epoch_end", 1, 1)),
    "epoch end, no validation": Case(trigger=save_in("on_train_epoch_end", 1, 1), run=NO_VALIDATION),
    "epoch end, max_steps": Case(trigger=save_in("on_train_epoch_end", 1, 1), trainer={"max_steps": 24}),
    "epoch end, max_steps, no validation": Case(
        trigger=save_in("on_train_epoch_end", 1, 1), trainer={"max_steps": 24}, run=NO_VALIDATION
    ),
    "exception in a step": Case(trigger=exception_in_step(6, 5)),
    "exception in an epoch's first step": Case(trigger=exception_in_step(9, 8)),
    "exception after validation": Case(trigger=exception_in_step(5, 5), trainer={"val_check_interval": 4}),
    "SIGTERM": Case(trigger=sigterm_in_step(5, 6)),
    "SIGTERM in the last batch": Case(trigger=sigterm_in_step(8, 8)),
    "batch start": Case(trigger=save_in("on_train_batch_start", 4, 3)),
    "epoch start": Case(trigger=save_in("on_train_epoch_start", 2, 2)),
    "first epoch start": Case(trigger=save_in("on_train_epoch_start", 1, 1)),
    "train start": Case(trigger=save_in("on_train_start", 1, 1)),
    "train end, max_epochs raised": Case(trigger=stop_at_train_end),
    "max_steps in mid-epoch": Case(trigger=steps_limit(5, 13)),
    "max_steps at an epoch's end": Case(trigger=steps_limit(8, 16)),
    "accumulation, exception": Case(trigger=exception_in_step(7, 6), trainer={"accumulate_grad_batches": 4}),
    "accumulation, batch end": Case(
        trigger=save_in("on_train_batch_end", 5, 4), trainer={"accumulate_grad_batches": 3}
    ),
    "accumulation, validation": Case(
        trigger=save_in("on_validation_end", 2, 2), trainer={"accumulate_grad_batches": 3, "val_check_interval": 2}
    ),
    "accumulation, SIGTERM": Case(trigger=sigterm_in_step(6, 5), trainer={"accumulate_grad_batches": 4}),
    "limit_train_batches": Case(trigger=save_in("on_train_batch_end", 3, 4), trainer={"limit_train_batches": 5}),
    "limit_train_batches, last batch": Case(
        trigger=save_in("on_train_batch_end", 5, 5), trainer={"limit_train_batches": 5}
    ),
    "limit_train_batches as a share": Case(
        trigger=save_in("on_train_batch_end", 3, 4), trainer={"limit_train_batches": 0.7}
    ),
    "reloaded loaders, mid-epoch": Case(
        trigger=save_in("on_train_batch_end", 3, 8), trainer={"reload_dataloaders_every_n_epochs": 1}
    ),
    "reloaded loaders, epoch end": Case(
        trigger=save_in("on_train_epoch_end", 1, 1), trainer={"reload_dataloaders_every_n_epochs": 1}
    ),
    "validation by steps, mid-epoch": Case(
        trigger=save_in("on_train_batch_end", 5, 6), trainer={"check_val_every_n_epoch": None, "val_check_interval": 3}
    ),
    "validation by steps": Case(
        trigger=save_in("on_validation_end", 2, 1), trainer={"check_val_every_n_epoch": None, "val_check_interval": 3}
    ),
    "schedule from estimated_stepping_batches": Case(
        trigger=save_in("on_train_batch_end", 5, 6), run={"schedule_from_trainer": True}
    ),
    "overfit_batches": Case(trigger=save_in("on_train_batch_end", 2, 4), trainer={"overfit_batches": 3}),
    "stratified batches": Case(
        trigger=save_in("on_train_batch_end", 4, 3), run={"order": {"batching_method": "stratified"}}
    ),
    "batches of one stream, epoch end": Case(
        trigger=save_in("on_train_epoch_end", 1, 1), run={"order": {"batching_method": "per_stream"}}
    ),
    "batches of one stream per device": Case(
        trigger=save_in("on_validation_end", 2, 3),
        trainer={"val_check_interval": 2},
        run={"order": {"batching_method": "device_per_stream"}},
    ),
    "blockwise": Case(trigger=save_in("on_train_batch_end", 4, 3), run={"order": {"shuffle_algo": "blockwise"}}),
    "selected samples": Case(
        trigger=save_in("on_train_batch_end", 4, 3),
        run={"order": {"selection": {"where": "id % 5 <> 1", "fraction": ":90%"}}},
    ),
    "no shuffle": Case(trigger=save_in("on_train_batch_end", 4, 3), run={"shuffle": False}),
}


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, tuple[Recorder, Trainer]]:
    """Whole runs, by how they train: one is enough for all numbers of workers and all ways to save."""
    return {}


def uninterrupted_run(case: Case, run: Run, known: dict[str, tuple[Recorder, Trainer]]) -> tuple[Recorder, Trainer]:
    key = repr((case.trainer, case.run))
    if key not in known:
        known[key] = replace(run, diary=Diary()).fit()
    return known[key]


@pytest.fixture(scope="module")
def uninterrupted_on_ranks() -> dict[str, Any]:
    """What whole runs on several ranks have seen, by how they train and on how many."""
    return {}


WORKERS = (
    pytest.param(0, False, id="no workers"),
    pytest.param(2, False, id="2 workers"),
    pytest.param(2, True, id="2 persistent"),
)


@pytest.mark.rotate(16)
@pytest.mark.parametrize(("workers", "persistent"), WORKERS)
@pytest.mark.parametrize("name", IN_EVERY_WAY)
def test_resuming_twice_shows_the_weights_the_same(
    name: str,
    workers: int,
    persistent: bool,
    data: Path,
    uninterrupted: dict[str, tuple[Recorder, Trainer]],
    tmp_path: Path,
) -> None:
    case = IN_EVERY_WAY[name]
    run = Run(data=data, directory=tmp_path, trainer=case.trainer, **case.run)
    whole, whole_trainer = uninterrupted_run(case, run, uninterrupted)
    run = replace(run, workers=workers, persistent=persistent)
    resumed, resumed_trainer = resume_twice(run, case.trigger, *map(run.asking_for, OTHER_CANONICAL_NODES))
    assert resumed.seen == whole.seen
    assert resumed.steps_per_epoch == whole.steps_per_epoch
    assert resumed_trainer.global_step == whole_trainer.global_step
    assert resumed_trainer.current_epoch == whole_trainer.current_epoch
    assert resumed_trainer.fit_loop.total_batch_idx == whole_trainer.fit_loop.total_batch_idx
    loops = [trainer.fit_loop.epoch_loop for trainer in (resumed_trainer, whole_trainer)]
    assert loops[0]._batches_that_stepped == loops[1]._batches_that_stepped, "the loggers' step drifted"
    schedules = [
        [config.scheduler.last_epoch for config in one.lr_scheduler_configs] for one in (resumed_trainer, whole_trainer)
    ]
    assert schedules[0] == schedules[1]
    assert resumed_trainer.num_training_batches == whole_trainer.num_training_batches
    assert resumed.diary.batches == whole.diary.batches
    assert resumed.diary.estimates == whole.diary.estimates
    assert resumed.diary.validations == whole.diary.validations


BY_BATCHES = (
    "limit_train_batches",
    "limit_train_batches, last batch",
    "limit_train_batches as a share",
    "overfit_batches",
    "stratified batches",
    "batches of one stream, epoch end",
    "batches of one stream per device",
)
"""Where a number of batches, or what is in a batch, decides what is read: with other batches it is something else."""


@pytest.mark.rotate(6)
@pytest.mark.parametrize("name", IN_EVERY_WAY)
def test_resuming_twice_with_other_batch_sizes_shows_the_weights_the_same(
    name: str, data: Path, uninterrupted: dict[str, tuple[Recorder, Trainer]], tmp_path: Path
) -> None:
    case = IN_EVERY_WAY[name]
    run = Run(data=data, directory=tmp_path, trainer=case.trainer, **case.run)
    whole, whole_trainer = uninterrupted_run(case, run, uninterrupted)
    others = [
        replace(run.asking_for(canonical_nodes), batch_size=batch_size)
        for canonical_nodes, batch_size in zip(OTHER_CANONICAL_NODES, (3, 5), strict=True)
    ]
    resumed, trainer = resume_twice(run, case.trigger, *others)
    assert trainer.current_epoch == whole_trainer.current_epoch
    assert {epoch for epoch, _, is_last in resumed.diary.batches if is_last} == set(range(trainer.current_epoch))
    if name not in BY_BATCHES:
        assert resumed.seen == whole.seen
    elif name != "overfit_batches":
        assert len(set(resumed.seen)) == len(resumed.seen)


GLOBAL_BATCH = 4
FULL_BATCHES = {"epoch_size": 32}  # 8 of them, of 29 samples: as many as the cases count on, and none padded
NODES_IN_TURN = ((2, 1, 2), (1, 2, 1))
RANKS_IN_TURN = ((2, 1, 2), (1, 2, 1), (2, 2, 2))
OF_ONE_TOPOLOGY = ("batches of one stream, epoch end", "batches of one stream per device")
"""Batches that are composed for as many ranks as read them, so other ranks compose other ones in later epochs."""


def on_nodes_and_ranks() -> list[Any]:
    """Return names of cases, with the ranks of three runs, and whether each is a node by itself."""
    found: list[Any] = []
    for number, name in enumerate(IN_EVERY_WAY):
        if name in OF_ONE_TOPOLOGY:
            counts = {True: [(2, 2, 2)], False: [(2, 2, 2)]}
            daily = {True: (2, 2, 2), False: (2, 2, 2)}
        else:
            counts = {True: list(NODES_IN_TURN), False: list(RANKS_IN_TURN)}
            daily = {True: NODES_IN_TURN[number % 2], False: RANKS_IN_TURN[number // 6 % 3]}
        for nodes, all_counts in counts.items():
            # Every second way is tried with other batch sizes.
            is_daily = number % 3 == 1 if nodes else number % 6 == 3
            for of_runs in all_counts:
                marks = () if is_daily and of_runs == daily[nodes] else (pytest.mark.nightly,)
                where = f"{'-'.join(map(str, of_runs))} {'nodes' if nodes else 'ranks'}"
                found.append(pytest.param(name, of_runs, nodes, marks=marks, id=f"{name}, {where}"))
    return found


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


@pytest.mark.rotate(5)
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
@pytest.mark.parametrize(("name", "counts", "are_nodes"), on_nodes_and_ranks())
def test_resuming_twice_shows_all_ranks_together_the_same(
    name: str,
    counts: tuple[int, int, int],
    are_nodes: bool,
    data: Path,
    uninterrupted_on_ranks: dict[str, Any],
    tmp_path: Path,
) -> None:
    case = IN_EVERY_WAY[name]
    settings = {**case.run, "order": {**case.run.get("order", {}), **FULL_BATCHES}}
    module = NodesOfOneRank if are_nodes else StreamingDataModule
    run = RunOfAll(data=data, directory=tmp_path, trainer=case.trainer, module=module, **settings)
    runs = [run, *map(run.asking_for, OTHER_CANONICAL_NODES)]

    def call(do: Any, attempt: int, *args: Any) -> Any:
        return on_ranks(do, runs[attempt], *args, meeting=tmp_path / "ranks", count=counts[attempt])[0]

    key = repr((case.trainer, case.run, counts[0], are_nodes))
    if key not in uninterrupted_on_ranks:
        uninterrupted_on_ranks[key] = call(to_the_end, 0, None)
    ckpt_path = None
    for attempt in range(2):
        target = tmp_path / f"saved{attempt}.ckpt"
        ckpt_path = call(until_saved, attempt, case.trigger, ckpt_path, target, attempt)
    assert call(to_the_end, 2, ckpt_path) == uninterrupted_on_ranks[key]
