"""The benchmark of simulated accelerators: its search, and a whole run on little data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.accelerators import largest
from benchmarks.accelerators_trial import WORKLOADS, Files, write

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("most", [1, 5, 24])
@pytest.mark.parametrize("kept", [0, 1, 2, 5, 23, 24, 30])
def test_the_search_finds_the_largest_number(kept: int, most: int) -> None:
    tried: list[int] = []

    def keeps(number: int) -> bool:
        tried.append(number)
        return number <= kept

    assert largest(keeps, most) == min(kept, most)
    assert max(tried) <= most
    assert len(set(tried)) == len(tried)


def test_files_have_the_samples_of_the_workload(tmp_path: Path) -> None:
    workload = WORKLOADS["retinanet"]
    write("plain", tmp_path / "plain", workload, 3)
    files = Files(str(tmp_path / "plain"), workload)
    assert len(files) == 3
    assert len({files[number]["image"].tobytes() for number in range(3)}) == 3


def test_a_record_has_all_arrays_of_a_sample() -> None:
    workload = WORKLOADS["flux"]
    arrays = workload.arrays(np.arange(workload.sample_bytes).astype(np.uint8))
    assert {name: (array.dtype.name, len(array)) for name, array in arrays.items()} == workload.columns


@pytest.mark.nightly
def test_it_searches_and_prints_a_table(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    words = "--workloads retinanet --cores 1 --bytes 2e7 --seconds 0.1 --most 1"
    command = [sys.executable, "-m", "benchmarks.accelerators", *words.split()]
    more = ["--directory", str(tmp_path), "--json", str(out)]
    printed = subprocess.run([*command, *more], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "| RetinaNet, B200 | store | 1 | 85% |" in printed
    trials = json.loads(out.read_text())["trials"]
    assert [(trial["system"], trial["place"]) for trial in trials] == [
        ("ours", "local"),
        ("plain", "local"),
        ("ours", "store"),
    ]
    assert all(0 < trial["utilization"] <= 1 for trial in trials)
    assert list(tmp_path.iterdir()) == [out]
