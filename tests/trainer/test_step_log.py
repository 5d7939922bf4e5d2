"""A log of steps tells which samples are in the weights, whatever was lost, and shows every difference of two runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import SampleKey, StepLog, Stream, StreamingDataset, read_step_log
from lightning_streaming.errors import ConfigError, FormatError
from tests.trainer.harness import TRAIN_SAMPLES, Recorder, Run, SaveAtEveryStep, with_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def _seen(log: Path, data: Path) -> list[tuple[int, int]]:
    dataset = StreamingDataset(
        streams={name: Stream(remote=str(data / name)) for name in TRAIN_SAMPLES}, batch_size=1, shuffle=True
    )
    return [(key.epoch, dataset.restore_sample(key)["id"]) for key in read_step_log(log)]


@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (2, 1), (0, 2)])
def test_a_run_that_lost_steps_and_went_on_has_the_log_of_one_that_did_not(
    data: Path, tmp_path: Path, workers: int, accumulate: int
) -> None:
    run = with_trainer(Run(data=data, directory=tmp_path, workers=workers), accumulate_grad_batches=accumulate)
    model, _ = run.fit(callbacks=[StepLog(tmp_path / "whole")])
    assert _seen(tmp_path / "whole", data) == model.seen
    saver = SaveAtEveryStep(tmp_path)
    run.fit(callbacks=[saver, StepLog(tmp_path / "parts")], max_steps=7)
    assert len(read_step_log(tmp_path / "parts")) < len(read_step_log(tmp_path / "whole"))
    resumed, _ = run.fit(ckpt_path=saver.saved[3 * accumulate], callbacks=[StepLog(str(tmp_path / "parts"))])
    assert resumed.seen == model.seen
    assert read_step_log(tmp_path / "parts") == read_step_log(tmp_path / "whole")


def test_other_batches_change_nothing_and_the_model_gets_what_it_always_got(data: Path, tmp_path: Path) -> None:
    run = Run(data=data, directory=tmp_path)
    run.fit(callbacks=[StepLog(tmp_path / "fours")])
    model, _ = Run(data=data, directory=tmp_path, batch_size=3).fit(callbacks=[StepLog(tmp_path / "threes")])
    assert type(model) is Recorder
    assert read_step_log(tmp_path / "fours") == read_step_log(tmp_path / "threes")
    run.fit(callbacks=[StepLog(tmp_path / "less")], limit_train_batches=3)
    assert read_step_log(tmp_path / "less") != read_step_log(tmp_path / "fours")


def _write(directory: Path, *lines: tuple[int, int, int, Sequence[int]], loader: str = "train") -> Path:
    """Lines of rank, run, step, and positions."""
    directory.mkdir(exist_ok=True)
    for rank, run, step, positions in lines:
        values: dict[str, Any] = {"run": run, "step": step, "loader": loader, "epoch": 0, "shuffle_seed": 9}
        values["samples"] = [[position, "a", 0, 10 * position] for position in positions]
        with (directory / f"rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")
    return directory


def _positions(directory: Path, loader: str = "train") -> list[int]:
    return [key.position for key in read_step_log(directory, loader)]


def test_what_is_in_no_weights_any_more_is_left_out_on_all_ranks(tmp_path: Path) -> None:
    log = _write(tmp_path / "a", (0, 1, 0, [0]), (1, 1, 0, [1]), (0, 1, 1, [2]), (1, 1, 1, [3]), (1, 1, 2, [5]))
    assert _positions(log) == [0, 1, 2, 3, 5]
    _write(log, (0, 2, 1, [2, 3]), (0, 2, 2, [4, 5]))
    assert _positions(log) == [0, 1, 2, 3, 4, 5]
    assert read_step_log(log)[4] == SampleKey(stream="a", shard=0, index=40, epoch=0, position=4, shuffle_seed=9)


def test_what_was_read_twice_is_there_twice_but_ranks_that_read_the_same_count_once(tmp_path: Path) -> None:
    assert _positions(_write(tmp_path / "twice", (0, 1, 0, [0, 1]), (0, 2, 1, [1, 2]))) == [0, 1, 1, 2]
    assert _positions(_write(tmp_path / "ranks", (0, 1, 0, [0, 1]), (1, 1, 0, [0, 1]))) == [0, 1]


def test_loaders_are_told_apart_and_what_is_not_there_is_named(tmp_path: Path) -> None:
    log = _write(tmp_path / "log", (0, 1, 0, [0]), loader="text")
    _write(log, (0, 1, 0, [7]), loader="pictures")
    assert (_positions(log, "text"), _positions(log, "pictures")) == ([0], [7])
    with pytest.raises(ConfigError, match="train loader 'train'; loaders in it: pictures, text"):
        read_step_log(log)
    with pytest.raises(ConfigError, match="loaders in it: none"):
        read_step_log(tmp_path / "nowhere")
    (log / "rank1.jsonl").write_text('{"run": 1}\n')
    with pytest.raises(FormatError, match=r"line 1 of .*rank1.jsonl is not one of a log of steps"):
        read_step_log(log, "text")
