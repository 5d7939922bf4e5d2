"""The benchmark of weights set by a run: a whole run on few documents."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.weight_changes import WAYS

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_it_measures_and_prints_a_table(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--documents", "20k", "--steps", "20", "--changes", "1", "20", "--alone", "--json", str(out)]
    command = [sys.executable, "-m", "benchmarks.weight_changes", *words]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    results = json.loads(out.read_text())
    assert [(row["way"], row["changes"]) for row in results] == [(way, changes) for way in WAYS for changes in (1, 20)]
    assert all(row["steps"] == 20 for row in results)
    assert printed.count("| 20 |") >= len(results)
