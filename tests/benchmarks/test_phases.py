"""The benchmark of phases: a whole run on few streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.phases import ALGOS

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_it_measures_and_prints_a_table(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--samples", "300k", "--streams", "4", "--phases", "3", "--json", str(out)]
    command = [sys.executable, "-m", "benchmarks.phases", *words]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = json.loads(out.read_text())
    assert [one["algo"] for one in found] == list(ALGOS)
    assert all(set(one["seconds"]) == {"start", "save", "resume"} for one in found)
    # A ramp of 16 steps between two phases of one.
    assert printed.count("| 18 |") == 2
