"""``pause_workers`` of the data module: only one stage has workers at a time, and runs resume exactly."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule, Trainer

from lightning_streaming import StreamingDataModule
from lightning_streaming.errors import ConfigError
from lightning_streaming.trainer.lightning_internals import streaming_loaders
from tests.helpers import assert_error
from tests.trainer.harness import (
    Recorder,
    Run,
    Trigger,
    every_n_steps,
    exception_in_step,
    resume_twice,
    save_in,
    write_data,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The dirpath has changed",
    "ignore:.*there is no last checkpoint available",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
    "ignore:`.fit.ckpt_path=None.` was called without a model",
)


class Pausing(StreamingDataModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(pause_workers=True, **options)


class Processes(Callback):
    """Counts processes of workers in each step of each stage."""

    def __init__(self) -> None:
        self.of_train: list[int] = []
        self.of_val: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.of_train.append(len(multiprocessing.active_children()))

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if not trainer.sanity_checking:
            self.of_val.append(len(multiprocessing.active_children()))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def pausing(data: Path, directory: Path, **settings: Any) -> Run:
    trainer = {"val_check_interval": 3, "num_sanity_val_steps": 1}
    return Run(data=data, directory=directory, workers=2, trainer=trainer, **settings)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("persistent", [False, True])
def test_only_one_stage_has_workers_at_a_time(data: Path, tmp_path: Path, persistent: bool) -> None:
    run = pausing(data, tmp_path, persistent=persistent)
    both, alone = Processes(), Processes()
    whole, _ = run.fit(callbacks=[both], max_epochs=2)
    paused, _ = replace(run, module=Pausing).fit(callbacks=[alone], max_epochs=2)
    assert paused.seen == whole.seen
    assert max(both.of_val) == 4  # what the option is for
    assert max(alone.of_train) == max(alone.of_val) == 2  # fewer where a pass is at its end
    assert len(alone.of_val) == len(both.of_val) > 4
    assert multiprocessing.active_children() == []


TRIGGERS: dict[str, Trigger] = {
    "every n steps": every_n_steps(4, stop_after=5),
    "validation start": save_in("on_validation_start", 1, 2),
    "validation end": save_in("on_validation_end", 1, 2),
    "batch after a validation": save_in("on_train_batch_end", 4, 3),
    "exception after a validation": exception_in_step(5, 4),
}


@pytest.mark.rotate(3)
@pytest.mark.parametrize("name", TRIGGERS)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_run_that_pauses_workers_resumes_exactly(name: str, persistent: bool, data: Path, tmp_path: Path) -> None:
    run = pausing(data, tmp_path, persistent=persistent)
    whole, whole_trainer = replace(run, workers=0).fit()
    paused = replace(run, module=Pausing)
    resumed, trainer = resume_twice(paused, TRIGGERS[name])
    assert resumed.seen == whole.seen
    assert trainer.global_step == whole_trainer.global_step


def test_a_validation_alone_works(data: Path, tmp_path: Path) -> None:
    run = replace(pausing(data, tmp_path), module=Pausing)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False)
    trainer.validate(Recorder(), datamodule=run.datamodule(), verbose=False)
    assert multiprocessing.active_children() == []


class Foreign(LightningDataModule):
    """A data module that is not ours, with our loaders."""

    def __init__(self, ours: StreamingDataModule) -> None:
        super().__init__()
        self._ours = ours
        ours.setup("fit")

    def train_dataloader(self) -> Any:
        return self._ours.train_dataloader()

    def val_dataloader(self) -> Any:
        return self._ours.val_dataloader()


def without(module: StreamingDataModule) -> dict[str, Any]:
    foreign = Foreign(module)
    return {"train_dataloaders": foreign.train_dataloader(), "val_dataloaders": foreign.val_dataloader()}


def foreign(module: StreamingDataModule) -> dict[str, Any]:
    return {"datamodule": Foreign(module)}


def ours_without_pauses(module: StreamingDataModule) -> dict[str, Any]:
    return {"datamodule": module}


@pytest.mark.rotate(1)
@pytest.mark.parametrize("second", [without, foreign, ours_without_pauses], ids=lambda second: second.__name__)
def test_a_later_fit_of_a_trainer_pauses_only_if_its_own_data_module_does(
    second: Callable[[StreamingDataModule], dict[str, Any]], data: Path, tmp_path: Path
) -> None:
    run, processes = pausing(data, tmp_path), Processes()
    _, trainer = replace(run, module=Pausing).fit(callbacks=[processes], max_epochs=1)
    assert max(processes.of_val) == 2
    processes.of_val.clear()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Recorder(), **second(run.datamodule()))
    assert max(processes.of_val) == 4
    for loader in streaming_loaders(trainer).values():
        loader.close()


def test_the_option_is_checked() -> None:
    with assert_error(ConfigError, option="pause_workers"):
        StreamingDataModule(pause_workers="yes")  # type: ignore[arg-type]
