"""``lightning-streaming state`` on checkpoints of runs that skip batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tools.running import edit_state as edit
from tests.tools.running import run as command
from tests.trainer.harness import Recorder, Run, SaveThenStop

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
SKIP = ["1-2", "5", "11-12"]
"""Of 29 samples in batches of 4: 0-3, 12-19 and 24-28 are left of epoch 0, and 0-11 and 20-28 of epoch 1."""


@pytest.fixture(scope="module")
def a_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(data=data, directory=tmp_path_factory.mktemp("run"), order={"skip": SKIP})


@pytest.fixture(scope="module")
def whole(a_run: Run) -> Recorder:
    return a_run.fit()[0]


@pytest.fixture(scope="module")
def saved_once(a_run: Run) -> Path:
    """After batches 0 and 3."""
    path = a_run.directory / "saved.ckpt"
    a_run.fit(callbacks=[SaveThenStop("on_train_batch_end", 2, path)])
    return path


@pytest.mark.parametrize(
    ("args", "place"),
    [
        (["--batches", 1], (0, 20)),
        (["--batches", 2], (0, 28)),
        (["--samples", 6], (0, 26)),
        (["--samples", 9], (1, 0)),
        (["--samples", 9 + 12], (1, 12)),
        (["--samples", 9 + 13], (1, 21)),
        (["--samples", 9 + 21 + 29 + 3], (3, 3)),
    ],
)
def test_what_is_skipped_anyway_is_not_counted(saved: Path, args: list[object], place: tuple[int, int]) -> None:
    moved = edit("skip", saved, *args)["loaders"]["train"]["to"]
    assert (moved["epoch"], moved["sample_in_epoch"]) == place


def test_fit_goes_on_after_what_was_moved_over(a_run: Run, whole: Recorder, saved: Path) -> None:
    assert edit("skip", saved, "--batches", 2)["trainer"]["batches"] == 4
    model, trainer = a_run.fit(ckpt_path=saved)
    assert model.seen == [*whole.seen[:8], *whole.seen[16:]]
    assert trainer.current_epoch == 3


def test_batches_that_lead_to_an_epoch_of_another_length_are_not_guessed(saved: Path) -> None:
    done = command("state", "skip", saved, "--batches", 3)
    assert done.code == 2
    assert "the run skips others (1-2, 5, 11-12)" in done.err


def test_show_tells_what_is_skipped(saved: Path, data: Path, whole: Recorder) -> None:
    shown = edit("show", saved)["loaders"]["train"]
    assert [list(end.values()) for end in shown["skipped"]["1-2"]] == [[0, 4], [0, 12]]
    counted = edit("show", saved, *(arg for name in "ab" for arg in ("--data", f"{name}={data / name}")))
    streams = counted["loaders"]["train"]["streams"]
    seen = [sample for _, sample in whole.seen[:8]]
    assert [one["this_epoch"] for one in streams] == [sum(s < 1000 for s in seen), sum(s >= 1000 for s in seen)]
    table = command("state", "show", saved).out
    assert "skips 11-12" in table
    assert "epoch 1, samples 12 to 20" in table


def test_of_finished_epochs_it_is_not_known_what_was_read_of_each_stream(saved: Path) -> None:
    edit("set", saved, "--epoch", 2, "--sample", 0)
    assert [one["before"] for one in edit("show", saved)["loaders"]["train"]["streams"]] == [None, None]


def test_the_state_loads_with_plain_values_alone(saved: Path) -> None:
    state = torch.load(saved, weights_only=True)["callbacks"]["lightning_streaming.StreamingStateCallback"]
    assert state["loaders"]["train"]["skipped"] == {"1-2": [0, 4, 0, 12], "5": [0, 20, 0, 24], "11-12": [1, 12, 1, 20]}
