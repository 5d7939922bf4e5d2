"""A Trainer stops in a phase, and goes on with another future: the weights see each sample in its turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import ConfigError, StateMismatchError
from tests.schedules import Phase, schedule
from tests.tools.running import edit_state
from tests.trainer.harness import Run, SaveThenStop, write_data

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

FIRST = Phase(name="first", end=16, mix={"a": 3, "b": 1})
RAMP = Phase(name="ramp", end=40, mix={"a": [1, 0.5], "b": [0, 1]}, steps=3)
LAST = Phase(name="last", mix={"b": 1})
OTHER = Phase(name="other", mix={"a": 1, "b": 1})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def run_of(data: Path, directory: Path, *phases: Phase, workers: int = 0) -> Run:
    order: dict[str, Any] = {"schedule": schedule(list(phases)), "epoch_size": 56, "num_canonical_nodes": 4}
    return Run(data=data, directory=directory, order=order, workers=workers, trainer={"max_epochs": 2})


@pytest.mark.rotate(1)
@pytest.mark.parametrize("stop", [2, 4, 7, 13])
def test_it_goes_on_with_another_future(data: Path, tmp_path: Path, stop: int) -> None:
    saved = tmp_path / "saved.ckpt"
    began = run_of(data, tmp_path, FIRST, RAMP, LAST)
    stopped, _ = began.fit(callbacks=[SaveThenStop("on_train_batch_end", stop, saved)])
    changed = run_of(data, tmp_path, FIRST, RAMP, OTHER, workers=1)
    if stop == 13:  # the last phase has begun
        with pytest.raises(StateMismatchError, match=r"schedule\.last.*(\n.*)*state branch .*/saved\.ckpt` prints"):
            changed.fit(ckpt_path=saved)
        changed = began
    onward, trainer = changed.fit(ckpt_path=saved)
    uncut, _ = replace(changed, directory=tmp_path / "uncut", workers=0).fit()
    assert len(stopped.seen) == 4 * stop
    assert onward.seen == uncut.seen
    assert (len(onward.seen), trainer.global_step) == (112, 28)


def test_a_finished_run_is_extended_by_a_phase(data: Path, tmp_path: Path) -> None:
    short = replace(run_of(data, tmp_path, FIRST, replace(RAMP, end=40)), trainer={"max_epochs": 1})
    short.order["epoch_size"] = 40
    _, finished = short.fit()
    saved = tmp_path / "finished.ckpt"
    finished.save_checkpoint(saved)
    longer = replace(run_of(data, tmp_path, FIRST, RAMP, LAST), trainer={"max_epochs": 1})
    with pytest.raises(StateMismatchError, match=r"schedule\.last"):
        longer.fit(ckpt_path=saved)
    edit_state("set", saved, "--epoch", 0, "--sample", 40)
    onward, trainer = longer.fit(ckpt_path=saved)
    whole, _ = replace(longer, directory=tmp_path / "whole").fit()
    assert onward.seen[-16:] == whole.seen[-16:]
    assert (len(onward.seen), len(whole.seen), trainer.global_step) == (56, 56, 14)


@pytest.mark.parametrize(
    ("limits", "is_refused"),
    [
        ({"max_epochs": 2}, True),
        ({"max_epochs": 2, "max_steps": 15}, True),
        ({"max_epochs": -1, "max_steps": 14}, False),
        ({"max_epochs": 2, "max_steps": 8, "accumulate_grad_batches": 2}, True),
        ({"max_epochs": 2, "max_steps": 7, "accumulate_grad_batches": 2}, False),
        ({"max_epochs": 1}, False),
    ],
)
def test_a_cut_is_refused_when_the_run_starts_if_it_would_be_read_again(
    data: Path, tmp_path: Path, limits: dict[str, Any], is_refused: bool
) -> None:
    cut = replace(run_of(data, tmp_path, FIRST, replace(RAMP, ended_at=24), LAST), trainer={"num_sanity_val_steps": 0})
    if is_refused:
        trained: list[str] = []
        with pytest.raises(ConfigError, match=r"schedule\.ramp\.ended_at=24.*max_epochs=1"):
            cut.fit(hook=lambda name, _: trained.append(name), **limits)
        assert not trained
        return
    _, trainer = cut.fit(**limits)
    assert trainer.global_step == 14 // limits.get("accumulate_grad_batches", 1)


def test_a_cut_that_is_resumed_is_refused_before_it_trains(data: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    run_of(data, tmp_path, FIRST, RAMP, LAST).fit(callbacks=[SaveThenStop("on_train_batch_end", 6, saved)])
    cut = run_of(data, tmp_path, FIRST, replace(RAMP, ended_at=24), LAST)
    with pytest.raises(ConfigError, match="max_epochs=1"):
        cut.fit(ckpt_path=saved)
    _, trainer = cut.fit(ckpt_path=saved, max_epochs=1)
    assert trainer.global_step == 14
