"""The demo in small: a real training process, a real SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from examples import demo
from examples.compare_runs import read_history
from examples.demo import MARK, ROOT, clear, progress, train
from tests.reading.processes import wait_until

pytestmark = pytest.mark.timeout(300)  # six processes that import torch, on a busy machine


@pytest.mark.nightly
def test_demo_proves_the_resume_exact_and_leaves_logs_and_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "examples/demo.py", "--out", str(out), "--steps", "32", "--samples", "500"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # more would only wait for each other on a busy machine
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Killed with SIGKILL" in ended.stdout
    assert "Resumed 'train' at epoch 1" in ended.stdout
    assert ended.stderr == ""
    assert "\r" not in ended.stdout, "a bar is for terminals"
    assert len(ended.stdout.splitlines()) < 80
    for log in ("killed.log", "resumed.log"):
        assert (out / "interrupted" / log).exists()
    assert "Exact: 0 samples repeated, 0 skipped, in the same order." in ended.stdout
    interrupted, whole = read_history(out / "interrupted"), read_history(out / "uninterrupted")
    assert [step.step for step in interrupted.kept] == [step.step for step in whole.kept] == list(range(1, 33))
    assert whole.lost == []
    assert interrupted.samples == whole.samples
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert str(out / "losses.png") in ended.stdout


def test_a_training_without_progress_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PATIENCE", 0.2)
    with pytest.raises(SystemExit, match=r"no progress after step 0 in 0\.2 seconds"):
        train(["sleep", "60"], tmp_path, "idle", 1)


def test_a_training_that_makes_progress_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, looks = tmp_path / "released", count()

    def changing(*_: object) -> tuple[object, ...]:
        look = next(looks)
        if look == 20:
            released.touch()
        return (look,)

    monkeypatch.setattr(demo, "PATIENCE", 0.01)
    monkeypatch.setattr(demo, "progress", changing)
    command = ["sh", "-c", 'until [ -e "$1" ]; do sleep 0.01; done; echo done', "sh", str(released)]
    assert train(command, tmp_path, "slow", 1).read_text() == "done\n"
    assert next(looks) > 20


def test_steps_output_and_work_are_progress(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        first = progress(process, tmp_path, log)
        assert wait_until(lambda: progress(process, tmp_path, log)[2] != first[2])
        log.write_text("starting")
        (tmp_path / "steps.jsonl").write_text('{"step": 1}\n')
        assert progress(process, tmp_path, log)[:2] == (1, 8) != first[:2]
        process.kill()


def test_only_what_a_demo_wrote_is_removed(tmp_path: Path) -> None:
    clear(tmp_path)
    (tmp_path / "data" / "code").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARK, "notes.txt"]


def test_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(SystemExit, match="no demo wrote"):
        clear(tmp_path)
    assert (tmp_path / "data").exists()
