"""Sequence steps of the user under a trainer, resumed on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import StateMismatchError
from tests.helpers import write_dataset
from tests.trainer.phased_run import PhasedRun, flat

STEP = {"class_path": "examples.every_nth.EveryNth", "init_args": {"n": 3}}


def train_of(root: Path, *steps: dict[str, Any]) -> dict[str, Any]:
    streams = {name: {"remote": str(root / name)} for name in ("a", "b")}
    schedule = {"one": {"end": 120, "mix": {"a": 3, "b": 1}}, "two": {"end": 360, "mix": {"a": [3, 1], "b": 1}}}
    return {"streams": streams, "schedule": schedule, "num_canonical_nodes": 4, "sequence": list(steps)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(("a", "b")):
        write_dataset(tmp_path / name, 200, first_id=1000 * number, size_limit=2000)
    return tmp_path


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:.*use of fork.*:DeprecationWarning")
def test_a_run_with_a_step_resumes_on_two_ranks(root: Path) -> None:
    train = train_of(root, STEP)
    whole = PhasedRun(directory=str(root / "whole"), train=train, batch_size=4)
    whole.fit()
    read = flat(whole.read_by())
    assert len(read) == len({position for _, position, _ in read}) == 104
    killed = PhasedRun(directory=str(root / "killed"), train=train, batch_size=4, workers=1, pause_after=12)
    killed.run_and_kill()
    checkpoint = killed.newest_checkpoint()
    resumed = PhasedRun(
        directory=str(root / "resumed"), train=train, batch_size=3, devices=2, ckpt_path=str(checkpoint)
    )
    resumed.run_to_end()
    assert flat(killed.read_up_to(checkpoint)) + flat(resumed.read_by()) == read
    for steps, words in (((), "EveryNth"), (({**STEP, "init_args": {"n": 2}},), "sequence.0.arguments.n: saved 3")):
        other = PhasedRun(
            directory=str(root / "other"), train=train_of(root, *steps), batch_size=4, ckpt_path=str(checkpoint)
        )
        with pytest.raises(StateMismatchError) as caught:
            other.fit()
        assert words in str(caught.value)
