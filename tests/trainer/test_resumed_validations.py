"""A resumed run finishes the validations of an uninterrupted one: each once, whole, with the same metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint

from lightning_streaming import StreamingStateCallback
from tests.trainer.harness import Reader, Stopped, counters, evaluating, streaming, trainer_for

pytestmark = pytest.mark.filterwarnings(
    "ignore:The dirpath has changed",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:`.fit.ckpt_path=None.` was called without a model",
    'ignore:.fit.ckpt_path="last". is set, but there is no last checkpoint',
)

HOOKS = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_batch_end",
    "on_train_epoch_end",
)


class Model(Reader):
    """Logs metrics of the validated ids and of the weights."""

    def __init__(self, loaders: Callable[[], Any], evaluated: Callable[[], Any]) -> None:
        super().__init__(loaders, evaluated)
        torch.nn.init.ones_(self.layer.weight)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.pending.append([self.trainer.current_epoch, batch["id"].tolist()])
        return self.layer.weight.square().sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.hook("validation_step", self)
        ids = batch["id"].double()
        self.log("id", ids.mean(), batch_size=len(ids), add_dataloader_idx=True)
        self.log("weight", self.layer.weight.square().sum().double(), batch_size=len(ids), add_dataloader_idx=True)


class Validations(Callback):
    """Records each finished validation of a run and of the runs that it resumed: place, samples, metrics."""

    def __init__(self) -> None:
        self.ended: list[Any] = []
        self.ids: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"ended": list(self.ended)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ended = list(state_dict["ended"])

    def on_validation_start(self, *_: Any) -> None:
        self.ids = []

    def on_validation_batch_end(self, _t: Any, _m: Any, _o: Any, batch: Any, _i: int, dataloader_idx: int = 0) -> None:
        self.ids.append([dataloader_idx, batch["id"].tolist()])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
            self.ended.append(
                [trainer.current_epoch, trainer.fit_loop.batch_idx, trainer.global_step, self.ids, metrics]
            )


class SaveInHooks(Callback):
    """Saves a checkpoint at every call of :data:`HOOKS`, also in the sanity check, and lets the run continue."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.saved: list[Path] = []
        for hook in HOOKS:
            setattr(self, hook, self._saving_in(hook))

    def _saving_in(self, hook: str) -> Callable[..., None]:
        def save(trainer: Trainer, *_: Any, **__: Any) -> None:
            self.saved.append(self.directory / f"{len(self.saved):02d} {hook}.ckpt")
            trainer.save_checkpoint(self.saved[-1], weights_only=False)

        return save


def fit(
    data: Path,
    directory: Path,
    *callbacks: Callback,
    ckpt_path: Path | None = None,
    loaders: int = 1,
    batch_size: int = 4,
    shuffle: bool = False,
    hook: Callable[[str, LightningModule], None] | None = None,
    **settings: Any,
) -> tuple[list[Any], Model, Trainer]:
    """Train on 12 samples for two epochs; return the validations that have ended, the model and the trainer."""
    model = Model(
        lambda: streaming(data, "b", batch_size),
        lambda: [evaluating(data, name, shuffle=shuffle) for name in ("val", "a")[:loaders]][
            slice(None) if loaders > 1 else 0
        ],
    )
    model.hook = hook or model.hook
    validations = Validations()
    trainer = trainer_for(directory, StreamingStateCallback(), validations, *callbacks, **settings)
    try:
        trainer.fit(model, ckpt_path=ckpt_path, weights_only=True)
    except Stopped:
        trainer.should_stop = True
    return validations.ended, model, trainer


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "at the epoch's end": ({}, ("on_train_batch_end", "on_validation_batch_end", "on_validation_end")),
    "in mid-epoch": ({"val_check_interval": 2}, ("on_validation_start", "on_validation_epoch_end")),
    "by share": ({"val_check_interval": 0.34}, ("on_validation_epoch_start", "on_validation_batch_start")),
    "by steps": (
        {"check_val_every_n_epoch": None, "val_check_interval": 2},
        ("on_train_batch_end", "on_validation_batch_end", "on_validation_end"),
    ),
    "every other epoch": ({"check_val_every_n_epoch": 2}, ("on_train_batch_end", "on_train_epoch_end")),
    "limited": ({"limit_val_batches": 1, "val_check_interval": 3}, ("on_validation_batch_end", "on_train_epoch_end")),
    "limited and shuffled": (
        {"limit_val_batches": 1, "val_check_interval": 1, "shuffle": True, "loaders": 2},
        ("on_validation_batch_end", "on_train_batch_end"),
    ),
    "several loaders": (
        {"loaders": 2, "val_check_interval": 1},
        ("on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end"),
    ),
    "accumulation": (
        {"accumulate_grad_batches": 2, "val_check_interval": 1},
        ("on_train_batch_end", "on_validation_batch_end", "on_validation_end"),
    ),
    "accumulation over an epoch": (
        {"accumulate_grad_batches": 4, "val_check_interval": 2},
        ("on_validation_start", "on_validation_end"),
    ),
    "max_steps": ({"max_epochs": -1, "max_steps": 6, "val_check_interval": 3}, ("on_train_batch_end",)),
    "no sanity check": ({"num_sanity_val_steps": 0, "val_check_interval": 1}, ("on_validation_batch_end",)),
}
"""Settings of a run, and the hooks that its checkpoints are saved in."""


@pytest.mark.rotate(3)
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_any_hook_resumes_to_the_same_validations(name: str, data: Path, tmp_path: Path) -> None:
    settings, hooks = CASES[name]
    saver = SaveInHooks(tmp_path)
    whole, model, trainer = fit(data, tmp_path, saver, **settings)
    assert whole, "the run validates"
    for hook in hooks:
        saved = [path for path in saver.saved if hook in path.name]
        path = saved[len(saved) // 2]
        ended, resumed, resumed_trainer = fit(data, tmp_path, ckpt_path=path, **settings)
        assert ended == whole, path.name
        assert resumed.seen == model.seen, path.name
        assert counters(resumed_trainer) == counters(trainer), path.name


def test_a_checkpoint_of_the_sanity_check_validates_nothing_before_training(data: Path, tmp_path: Path) -> None:
    saver = SaveInHooks(tmp_path)
    whole, *_ = fit(data, tmp_path, saver)
    path = next(path for path in saver.saved if "on_validation_batch_end" in path.name)
    ended, *_ = fit(data, tmp_path, ckpt_path=path)
    assert ended == whole


@pytest.mark.parametrize(
    ("settings", "call"), [({}, 3), ({"val_check_interval": 2}, 2)], ids=["epoch's end", "mid-epoch"]
)
def test_callbacks_see_the_metric_of_a_whole_validation_after_an_exception(
    settings: dict[str, Any], call: int, data: Path, tmp_path: Path
) -> None:
    def watch() -> list[Any]:
        return [ModelCheckpoint(tmp_path, monitor="id", save_top_k=-1), EarlyStopping("id", patience=9)]

    def fail_in(calls: int) -> Callable[[str, LightningModule], None]:
        left = [calls]

        def hook(_name: str, _module: LightningModule) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Stopped

        return hook

    settings = {**settings, "num_sanity_val_steps": 0}
    expected = watch()
    whole, model, _ = fit(data, tmp_path, *expected, **settings)
    saver = OnExceptionCheckpoint(tmp_path / "1")
    fit(data, tmp_path, *watch(), saver, hook=fail_in(call), **settings)
    again = OnExceptionCheckpoint(tmp_path / "2")
    path = Path(saver.ckpt_path)
    fit(data, tmp_path, *watch(), again, ckpt_path=path, hook=fail_in(2), **settings)
    path = Path(again.ckpt_path)
    found = watch()
    ended, resumed, _ = fit(data, tmp_path, *found, ckpt_path=path, **settings)
    assert ended == whole
    assert resumed.seen == model.seen
    assert found[1].state_dict() == expected[1].state_dict()
    assert found[0].best_model_score == expected[0].best_model_score


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end"])
def test_a_validation_that_was_due_runs_with_another_interval_too(hook: str, data: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_sanity_val_steps": 0, "max_epochs": 1}
    saver = SaveInHooks(tmp_path)
    whole, *_ = fit(data, tmp_path, saver, val_check_interval=2, **settings)
    path = [path for path in saver.saved if hook in path.name][1]
    ended, *_ = fit(data, tmp_path, ckpt_path=path, batch_size=3, val_check_interval=4, **settings)
    assert [(step, ids) for _, _, step, ids, _ in ended] == [(2, whole[0][3]), (4, whole[0][3])]


class StopsAfter(Callback):
    """Ends the run after a step, in ``on_train_batch_end``: behind the callback that saves the position."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


def test_a_validation_that_another_callback_caused_runs_whole_after_a_resume(data: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_sanity_val_steps": 0, "max_epochs": 1}
    saver = SaveInHooks(tmp_path)
    whole, *_ = fit(data, tmp_path, StopsAfter(2), saver, **settings)
    path = next(path for path in saver.saved if "on_validation_batch_end" in path.name)
    ended, *_ = fit(data, tmp_path, ckpt_path=path, **settings)
    assert [one[2] for one in ended] == [2, 3]
    assert ended[0] == whole[0]


@pytest.mark.parametrize(
    ("batch_size", "steps", "validated"), [(1, 8, [7, 9, 11]), (2, 4, [3, 5])], ids=["same", "another"]
)
def test_validations_of_batches_that_are_trained_again_are_not_repeated(
    batch_size: int, steps: int, validated: list[int], data: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"num_sanity_val_steps": 0, "max_epochs": 1, "val_check_interval": 2}
    saver = SaveInHooks(tmp_path)
    fit(data, tmp_path, saver, batch_size=1, accumulate_grad_batches=4, **settings)
    # After 7 batches the weights have seen 4, and a validation ran after 6, of batches of 1.
    path = [path for path in saver.saved if "on_train_batch_end" in path.name][6]
    ended, model, _ = fit(data, tmp_path, ckpt_path=path, batch_size=batch_size, **settings)
    assert len(model.seen) == 4 + steps
    assert [index for _, index, *_ in ended] == [1, 3, 5, *validated]
