"""A run under Lightning that replaces bad samples: configured in YAML, stopped, gone on with, and monitored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_streaming import (
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingMonitor,
    StreamingStateCallback,
)
from lightning_streaming.errors import BadSamplesError
from lightning_streaming.logs import read_bad_samples
from lightning_streaming.tools.commands import read_run_files
from tests.broken_data import BROKEN, SIZES, replacing, write_broken_json
from tests.tools.tuning.tuned import write_config
from tests.trainer.test_monitor import Model, fit, logged

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class _Seen(Model):
    """Remembers what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch["id"].tolist()
        return super().training_step(batch, batch_idx)


class _StopAfter(Callback):
    """Saves after some steps, and ends the run."""

    def __init__(self, steps: int, path: Path) -> None:
        self.steps, self.path = steps, path

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def _module(directory: Path, *, log: str = "bad", most: str = "50%") -> StreamingDataModule:
    train = StreamingConfig(remote=str(directory / "data"), bad_samples=replacing(directory / log, most))
    return StreamingDataModule(train=train, batch_size=4, num_workers=2)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("steps", [1, 5])
def test_a_run_that_goes_on_sees_what_one_that_was_not_stopped_sees(tmp_path: Path, steps: int) -> None:
    write_broken_json(tmp_path / "data")
    whole, first, rest = _Seen(), _Seen(), _Seen()
    fit(tmp_path / "whole", _module(tmp_path, log="other"), whole, max_epochs=2)
    path = tmp_path / "stopped.ckpt"
    callbacks = [StreamingStateCallback(), _StopAfter(steps, path)]
    fit(tmp_path / "first", _module(tmp_path), first, callbacks=callbacks, max_epochs=2)
    fit(tmp_path / "rest", _module(tmp_path), rest, ckpt_path=path, max_epochs=2)
    assert first.seen + rest.seen == whole.seen
    assert len(whole.seen) == 2 * sum(SIZES)
    assert not {*whole.seen} & {*BROKEN}
    assert {one.key.epoch for one in read_bad_samples(tmp_path / "bad")} == {0, 1}
    rows = logged(tmp_path / "whole")
    assert sum(row["data/bad_samples"] for row in rows) == 2 * len(BROKEN)


def test_too_many_end_the_fit(tmp_path: Path) -> None:
    write_broken_json(tmp_path / "data")
    with pytest.raises(BadSamplesError, match=r"bad_samples\.max=0\.1% allows 1"):
        fit(tmp_path, _module(tmp_path, most="0.1%"), callbacks=[StreamingMonitor(), StreamingStateCallback()])


def test_it_is_written_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # instantiate_classes, as Lightning calls it, too
    remote = str(write_broken_json(tmp_path / "data"))
    train = {"remote": remote, "bad_samples": {"action": "replace", "max": "0.5%", "log": str(tmp_path / "bad")}}
    config = write_config(tmp_path / "run.yaml", train)
    module = read_run_files([str(config)], {}).datamodule
    dataset = module.build_dataset("train", module.configs["train"])
    assert dataset.config()["bad_samples"]["max"] == "0.5%"
    assert dataset.config()["bad_samples"]["log"] == str(tmp_path / "bad")
    assert len(list(StreamingDataLoader(dataset, batch_size=31))) == 1
