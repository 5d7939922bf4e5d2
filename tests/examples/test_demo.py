"""The demo in small: a real training process, a real SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.compare_runs import read_history
from examples.demo import MARK, ROOT, clear

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
