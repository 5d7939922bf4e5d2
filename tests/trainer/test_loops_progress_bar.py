"""What the progress bars show in an epoch that goes on in its middle."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from lightning_streaming import StreamingStateCallback
from tests.trainer.everywhere import Reader, evaluating, streaming, trainer_for
from tests.trainer.harness import SaveThenStop, Stopped, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


class Watch(Callback):
    """Notes what the bar of training says: batches done, of how many, in which epoch."""

    def __init__(self) -> None:
        self.shown: list[tuple[float, float | None, str]] = []
        self.begun_at: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        bar = trainer.progress_bar_callback
        if isinstance(bar, TQDMProgressBar):
            shown = bar.train_progress_bar
            self.shown.append((shown.n, shown.total, shown.desc.rstrip(": ")))
            self.begun_at.append(shown.initial)
        else:
            assert isinstance(bar, RichProgressBar)
            task = bar.train_progress_bar
            self.shown.append((task.completed, task.total, task.description.removesuffix("/1 ")))


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_total_is_known_in_the_resumed_epoch(bar: Any, leave: bool, data: Path, tmp_path: Path) -> None:
    shown = _resumed_after("on_train_batch_end", 3, bar(leave=leave), data, tmp_path).shown
    done = [4, 5, 5, 1, 2, 3, 4, 5, 5]  # the last of each epoch is looked at twice
    assert shown == [(n, 5, "Epoch 0") for n in done[:3]] + [(n, 5, "Epoch 1") for n in done[3:]]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_an_epoch_that_only_had_to_be_closed_is_shown_as_done(bar: Any, data: Path, tmp_path: Path) -> None:
    shown = _resumed_after("on_validation_end", 1, bar(), data, tmp_path).shown
    assert shown[:2] == [(5, 5, "Epoch 0"), (1, 5, "Epoch 1")]


def test_the_speed_counts_this_run_only(data: Path, tmp_path: Path) -> None:
    watch = _resumed_after("on_train_batch_end", 3, TQDMProgressBar(), data, tmp_path)
    assert watch.begun_at == [3, 3, 3, 0, 0, 0, 0, 0, 0]


def _resumed_after(hook: str, call: int, bar: ProgressBar, data: Path, directory: Path) -> Watch:
    def new() -> Reader:
        return Reader(lambda: streaming(data), lambda: evaluating(data))

    saver, watch = SaveThenStop(hook, call, directory / "saved.ckpt"), Watch()
    with suppress(Stopped):
        trainer_for(directory, StreamingStateCallback(), saver).fit(new())
    trainer = trainer_for(directory, bar, StreamingStateCallback(), watch, enable_progress_bar=True)
    trainer.fit(new(), ckpt_path=saver.path)
    return watch
