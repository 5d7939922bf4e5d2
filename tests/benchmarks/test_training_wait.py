"""The benchmark of waiting for data: what it computes, and a whole run on little data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.training_wait import summarize

ROOT = Path(__file__).parents[2]


def test_waiting_is_what_a_cached_batch_does_not_take() -> None:
    def run(gaps: float) -> dict[str, float]:
        return {"gaps": gaps, "step": 1.0, "first_batch": 1.0, "pss": 1.0}

    cached = {0.5: [run(0.1), run(0.3)]}
    results = summarize(
        {"cached batch": cached, "slow": {0.5: [run(0.4), run(0.5), run(0.9)]}, "fast": {0.5: [run(0.1)]}}
    )
    assert results["slow"]["waiting"][0.5] == pytest.approx(0.3)
    assert results["fast"]["waiting"][0.5] == 0


@pytest.mark.nightly
@pytest.mark.timeout(600)  # it starts twenty processes that import Lightning
def test_it_measures_ours_and_loses_no_sample(tmp_path: Path) -> None:
    out, plot = tmp_path / "results.json", tmp_path / "plot.png"
    words = "--samples 1600 --files 4 --shard-bytes 300000 --sleeps 0.01 --seconds 0.1 --rounds 1 --latency 0"
    command = [sys.executable, "-m", "benchmarks.training_wait", *words.split()]
    more = ["--directory", str(tmp_path), "--json", str(out), "--plot", str(plot)]
    printed = subprocess.run([*command, *more], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert printed.startswith("| | waiting at 0.01 s | first batch |")
    results = json.loads(out.read_text())["results"]
    assert set(results) == {"cached batch", "ours, Parquet", "ours, MDS"}
    for system in ("ours, Parquet", "ours, MDS"):
        assert results[system]["whole"] == {"lost": 0, "repeated": 0, "failed": False}
        assert results[system]["killed"] == {"lost": 0, "repeated": 0, "failed": False, "resumed_at": 25}
        assert results[system]["fetched"] >= 1
    assert set(tmp_path.iterdir()) == {out, plot}
