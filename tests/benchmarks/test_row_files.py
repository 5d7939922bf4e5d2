"""The benchmark of NumPy and Megatron files: a whole run on little data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.row_files import GATHER, KINDS, write_files
from lightning_streaming import StreamingDataset

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_it_measures_and_prints_a_table(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--samples", "2k", "--rounds", "1", "--directory", str(tmp_path), "--json", str(out)]
    command = [sys.executable, "-m", "benchmarks.row_files", *words]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = json.loads(out.read_text())
    assert {kind: set(ways) for kind, ways in found.items()} == {
        "rows": {GATHER, "npy", "mds"},
        "blocks": {GATHER, "npy", "megatron", "mds"},
    }
    assert "| blocks | megatron | " in printed


@pytest.mark.parametrize("name", KINDS)
def test_all_formats_hold_the_same_samples(tmp_path: Path, name: str) -> None:
    written = write_files(tmp_path / "data", name, 100)
    expected = np.load(tmp_path / "data" / "whole.npy")
    for settings in written.values():
        dataset = StreamingDataset(**settings)
        found = [dataset[number][KINDS[name].column] for number in range(len(dataset))]
        assert np.array_equal(found, expected)
