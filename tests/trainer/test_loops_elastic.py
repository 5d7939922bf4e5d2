"""Resumed with another batch size, at every step and with every batching method: the samples go on where they were."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingStateCallback
from tests.trainer.everywhere import Reader, SaveAtEveryStep, streaming, trainer_for
from tests.trainer.harness import BATCH_SIZE, Recorder, Run, with_trainer, write_data

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:You're resuming from")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def of_epoch(model: Recorder, epoch: int) -> list[int]:
    return [sample for seen_in, sample in model.seen if seen_in == epoch]


@pytest.mark.parametrize("batch_size", [3, 8])
@pytest.mark.parametrize("method", ["random", "stratified", "per_stream", "device_per_stream"])
def test_another_batch_size_at_every_step(method: str, batch_size: int, data: Path, tmp_path: Path) -> None:
    run = Run(data=data, directory=tmp_path, validate=False, order={"batching_method": method})
    run = with_trainer(run, max_epochs=2)
    saver, other = SaveAtEveryStep(tmp_path), replace(run, batch_size=batch_size)
    whole, _ = run.fit(callbacks=[saver])
    whole_of_other, trainer_of_other = other.fit()
    steps = whole.steps_per_epoch[0]
    samples = len(of_epoch(whole, 0))
    for step, path in enumerate(saver.saved[:steps], start=1):
        resumed, trainer = other.fit(ckpt_path=path)
        assert of_epoch(resumed, 0) == of_epoch(whole, 0), path.name
        assert of_epoch(resumed, 1) == of_epoch(whole_of_other, 1), path.name
        left = max(0, samples - step * BATCH_SIZE)
        steps_of_other = whole_of_other.steps_per_epoch[1]
        assert resumed.steps_per_epoch == {0: step + ceil(left / batch_size), 1: steps_of_other}, path.name
        assert trainer.current_epoch == 2
        assert trainer.num_training_batches == trainer_of_other.num_training_batches


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        # 12 of 29 samples are read in 3 steps: 17 are left, in 6 batches of 3.
        ({"accumulate_grad_batches": 2}, {0: 3 + 3, 1: 5}),
        # A number of batches is one of any batches.
        ({"limit_train_batches": 5}, {0: 3 + 2, 1: 5}),
        # 7 batches of 3 are 21 samples.
        ({"limit_train_batches": 0.7}, {0: 3 + 3, 1: 7}),
    ],
    ids=["accumulating", "limited", "limited to a share"],
)
def test_another_batch_size_within_limits(
    settings: dict[str, Any], steps: dict[int, int], data: Path, tmp_path: Path
) -> None:
    run = Run(data=data, directory=tmp_path, validate=False)
    saver = SaveAtEveryStep(tmp_path)
    run.fit(callbacks=[saver], max_epochs=1)
    resumed, _ = replace(run, batch_size=3).fit(ckpt_path=saver.saved[2], max_epochs=2, **settings)
    assert resumed.steps_per_epoch == steps


@pytest.mark.parametrize("step", [1, 2, 4])
def test_another_batch_size_of_several_loaders(step: int, data: Path, tmp_path: Path) -> None:
    def fit(batch_size: int, *callbacks: Any, **settings: Any) -> Reader:
        model = Reader(lambda: {"x": streaming(data, "a", batch_size), "y": streaming(data, "b", batch_size)})
        trainer_for(tmp_path, StreamingStateCallback(), *callbacks, max_epochs=1).fit(model, **settings)
        return model

    whole = fit(4, SaveAtEveryStep(tmp_path))
    resumed = fit(3, ckpt_path=tmp_path / f"{step}.ckpt", weights_only=True)
    assert _ids(resumed, "x") == _ids(whole, "x")
    # The short loader is cycled, so it is read for as many steps as the long one: other batches, the same order.
    longer = fit(1)
    passes = len(_ids(whole, "y")), len(_ids(resumed, "y"))
    assert _ids(resumed, "y")[:12] == _ids(longer, "y")[:12]
    assert min(passes) > 12


def _ids(model: Reader, name: str) -> list[int]:
    return [one for _, _, *loaders in model.seen for loader, ids in loaders if loader == name for one in ids]


def test_what_changed_is_said(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, saver = Run(data=data, directory=tmp_path, validate=False), SaveAtEveryStep(tmp_path)
    run.fit(callbacks=[saver], max_epochs=1)
    with caplog.at_level(logging.INFO):
        replace(run, batch_size=5).fit(ckpt_path=saver.saved[2], max_epochs=1)
    assert "Resumed 'train' at epoch 0, sample 12 (step 3, " in caplog.text
    assert (
        "The global batch of 'train' was 4 samples and is 5 now: 4 batches are left of epoch 0, and a whole one has 6."
        in caplog.text
    )
    caplog.clear()
    run.fit(ckpt_path=saver.saved[2], max_epochs=1)
    assert "The global batch" not in caplog.text
