"""The benchmark of selections: a whole run on little data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.selecting import WAYS, write_records
from lightning_streaming import StreamingDataset
from tests.tools.running import run

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_it_measures_and_prints_tables(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--samples", "3k", "--held", "100k", "--function", "--directory", str(tmp_path), "--json", str(out)]
    command = [sys.executable, "-m", "benchmarks.selecting", *words]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = json.loads(out.read_text())
    assert set(found["evaluated"]) == set(WAYS)
    assert found["evaluated"]["where"]["selected"] == found["evaluated"]["function"]["selected"]
    assert f"| where | {found['evaluated']['where']['selected']:,.0f} of 3,000 |" in printed
    assert "| 100,000 |" in printed
    assert "| 3,000 |" in printed
    assert found["indexed"]["kept_mib"] > 3000 * 16 / 2**20


def test_its_records_are_a_dataset(tmp_path: Path) -> None:
    write_records(tmp_path / "records", 50)
    dataset = StreamingDataset(remote=str(tmp_path / "records"), batch_size=1)
    assert [dataset[number]["id"] for number in range(50)] == list(range(50))
    scores = np.random.default_rng(0).random(50, np.float32)
    assert [dataset[number]["score"] for number in range(50)] == scores.tolist()
    assert run("verify", tmp_path / "records").code == 0
