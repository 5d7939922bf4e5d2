"""Stopped early, at any batch and with gradients half accumulated: the epoch goes on where the weights stand."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

from lightning_streaming import StreamingStateCallback
from tests.trainer.harness import Reader, Recorder, evaluating, ordinary, streaming, trainer_for

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`",
    "ignore:You're resuming from a checkpoint",  # it means the loader without a length
    "ignore:Be aware that when using `ckpt_path`, callbacks",
)

BATCHES = 5
EPOCHS = 2


class StopAfter(Callback):
    """Asks the trainer to stop after so many batches, and saves in every hook that follows."""

    HOOKS = ("on_validation_end", "on_train_epoch_end", "on_train_end")

    def __init__(self, batches: int, directory: Path) -> None:
        self.batches = batches
        self.directory = directory
        self.saved: list[Path] = []
        for hook in self.HOOKS:
            setattr(self, hook, partial(self._save, self.directory / f"{hook}.ckpt"))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.batches -= 1
        trainer.should_stop = self.batches <= 0

    def _save(self, path: Path, trainer: Trainer, *_: Any) -> None:
        if self.batches <= 0:
            trainer.save_checkpoint(path, weights_only=False)
            self.saved.append(path)


def told(model: Recorder, trainer: Trainer) -> dict[str, Any]:
    return {
        "seen": model.seen,
        "steps": model.steps_per_epoch,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "loggers' step": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "batches": trainer.fit_loop.total_batch_idx,
    }


def assert_goes_on(new: Any, stop_after: int, directory: Path, **settings: Any) -> None:
    """Stop a run after so many batches, resume from all that was saved then, and compare with the whole run."""
    whole, whole_trainer = new(), trainer_for(directory, StreamingStateCallback(), **settings)
    whole_trainer.fit(whole)
    stop, last = StopAfter(stop_after, directory), ModelCheckpoint(directory, save_last=True)
    trainer_for(directory, StreamingStateCallback(), stop, last, **settings).fit(new())
    assert len(stop.saved) == len(stop.HOOKS)
    for path in [*stop.saved, Path(last.last_model_path)]:
        model, trainer = new(), trainer_for(directory, StreamingStateCallback(), **settings)
        trainer.fit(model, ckpt_path=path, weights_only=True)
        assert told(model, trainer) == told(whole, whole_trainer), path.name


# Before the first optimizer step, right at one, between two, and the same in the second epoch.
@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("accumulate", "stop_after", "is_limited_by_steps"),
    [
        *((1, stop_after, False) for stop_after in (1, 6)),
        *((2, stop_after, by_steps) for stop_after in (1, 2, 3, BATCHES + 1) for by_steps in (False, True)),
        *((3, stop_after, False) for stop_after in (2, 3, 4, BATCHES + 2, BATCHES + 3)),
        *((7, stop_after, by_steps) for stop_after in (4, BATCHES + 1) for by_steps in (False, True)),
    ],
)
def test_goes_on_in_the_epoch_that_was_stopped(
    accumulate: int, stop_after: int, is_limited_by_steps: bool, data: Path, tmp_path: Path
) -> None:
    steps = EPOCHS * -(-BATCHES // accumulate)
    limit = {"max_epochs": -1, "max_steps": steps} if is_limited_by_steps else {"max_epochs": EPOCHS}
    assert_goes_on(
        lambda: Reader(lambda: streaming(data), lambda: evaluating(data)),
        stop_after,
        tmp_path,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        **limit,
    )


@pytest.mark.rotate(2)
@pytest.mark.parametrize("stop_after", [1, 2, 4])
def test_goes_on_beside_a_loader_without_a_length(stop_after: int, data: Path, tmp_path: Path) -> None:
    def new() -> Reader:
        return Reader(lambda: {"x": streaming(data), "o": ordinary(None)}, lambda: evaluating(data))

    assert_goes_on(new, stop_after, tmp_path, accumulate_grad_batches=3, max_epochs=1, limit_train_batches=BATCHES)


@pytest.mark.parametrize(
    "stop",
    [
        Timer(timedelta(milliseconds=1)),
        EarlyStopping("val_loss", stopping_threshold=1e9, check_on_train_epoch_end=False),
    ],
    ids=["max_time", "EarlyStopping"],
)
def test_goes_on_after_what_stops_real_runs(stop: Callback, data: Path, tmp_path: Path) -> None:
    class Logs(Reader):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sleep(0.002)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", 1.0)

    def fit(*callbacks: Callback, **settings: Any) -> tuple[Reader, Trainer]:
        model = Logs(lambda: streaming(data), lambda: evaluating(data))
        trainer = trainer_for(
            tmp_path, StreamingStateCallback(), *callbacks, max_epochs=1, accumulate_grad_batches=4,
            val_check_interval=1, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(model, **settings)
        return model, trainer

    whole, _ = fit()
    last = ModelCheckpoint(tmp_path, save_last=True)
    stopped, trainer = fit(stop, last)
    assert trainer.fit_loop.total_batch_idx == 0, "stopped after the first batch"
    assert not stopped.seen
    resumed, _ = fit(ckpt_path=last.last_model_path)
    assert resumed.seen == whole.seen
    assert resumed.steps_per_epoch == {0: 2}


@pytest.mark.rotate(2)
@pytest.mark.parametrize("max_epochs", [1, 2])
@pytest.mark.parametrize("stop_after", [1, 3])
def test_one_trainer_fits_again_after_a_stop(stop_after: int, max_epochs: int, data: Path, tmp_path: Path) -> None:
    def new() -> Reader:
        return Reader(lambda: streaming(data), lambda: evaluating(data))

    settings = {"accumulate_grad_batches": 4, "max_epochs": max_epochs}
    whole, model = new(), new()
    trainer_for(tmp_path, StreamingStateCallback(), **settings).fit(whole)
    trainer = trainer_for(tmp_path, StreamingStateCallback(), StopAfter(stop_after, tmp_path), **settings)
    trainer.fit(model)
    trainer.callbacks.pop(1)  # type: ignore[attr-defined]  # set by Lightning
    model.pending = []
    trainer.fit(model)
    assert model.seen == whole.seen
