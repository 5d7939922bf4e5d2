"""The benchmark of lengths: a whole run on little data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lengths import ALONE, BESIDE, WAYS, lengths_of, write_documents
from lightning_streaming import StreamingDataset
from tests.tools.running import run

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_it_measures_and_prints_tables(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--documents", "3k", "--directory", str(tmp_path), "--json", str(out)]
    command = [sys.executable, "-m", "benchmarks.lengths", *words]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = json.loads(out.read_text())
    assert set(found["counted"]) == set(WAYS)
    assert {one["tokens"] for one in found["counted"].values()} == {int(lengths_of(0, 3000).sum())}
    assert "| offsets | 3,000 |" in printed
    assert set(found["looked_up"]) == {"one", "selected", "gathered", "three", "ids"}


@pytest.mark.parametrize("columns", [ALONE, BESIDE])
def test_its_documents_are_a_dataset(tmp_path: Path, columns: dict[str, str]) -> None:
    write_documents(tmp_path / "documents", columns, 50)
    dataset = StreamingDataset(remote=str(tmp_path / "documents"), batch_size=1)
    expected = lengths_of(0, 50).tolist()
    assert [len(dataset[number]["tokens"]) for number in range(50)] == expected
    if columns == BESIDE:
        assert [int(dataset[number]["num_tokens"]) for number in range(50)] == expected
    assert run("verify", tmp_path / "documents").code == 0
