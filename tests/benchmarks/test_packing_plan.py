"""The benchmark of packing: a whole run on few documents."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.packing_plan import CAPACITY, WINDOW, first_fit

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_it_measures_and_prints_tables(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--documents", "30k", "--compared", "20k", "--directory", str(tmp_path), "--json", str(out)]
    words += ["--ways", "concat", "best fit", "budget"]
    command = [sys.executable, "-m", "benchmarks.packing_plan", *words]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = json.loads(out.read_text())
    assert set(found["planned"]) == {"concat", "best fit", "budget"}
    compared = found["compared"]
    assert compared["concat"]["packs"] <= compared["best fit"]["packs"] <= compared["first fit"]["packs"]
    assert compared["best fit"]["lost"] == 0 < compared["one a row"]["lost"]
    assert f"| best fit | {compared['best fit']['fill']:.2%} |" in printed
    assert "| budget |" in printed


def test_first_fit_takes_the_first_pack_with_room() -> None:
    lengths = np.zeros(WINDOW + 2, np.int64)
    # 5 and 3 of 8 parts, a full piece and its rest, which goes to the first pack; and another window.
    lengths[:4] = np.asarray([5, 4, 11, 4]) * CAPACITY // 8
    lengths[WINDOW:] = 1
    assert first_fit(lengths) == 4
