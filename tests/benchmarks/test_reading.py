"""The reading benchmark: a whole run on tiny data, what it computes from turns, and systems that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.reading.__main__ import main
from benchmarks.reading.case import Case
from benchmarks.reading.children import ROOT, TurnFailedError
from benchmarks.reading.crew import Crew
from benchmarks.reading.options import parser
from benchmarks.reading.probes import PROBES, samples_of
from benchmarks.reading.report import growth, tables
from benchmarks.reading.rounds import Result, measure
from benchmarks.reading.suite import SUITE, chosen
from benchmarks.reading.systems import load
from benchmarks.reading.works import WORKS, rows, samples

SAMPLES = 40
WITH_ROWS = [name for name, work in WORKS.items() if work.row]


def _case(tmp_path: Path, work: str = "tokens", **options: Any) -> Case:
    sizes = {"samples": SAMPLES, "size": 64, "batch_size": 8, "seconds": 0.001}
    return Case(work=work, root=str(tmp_path), **{**sizes, **options})


@pytest.mark.parametrize("work", WITH_ROWS)
def test_rows_are_the_samples(work: str) -> None:
    matrix = rows(WORKS[work], 5, 8)
    for row, sample in zip(matrix, samples(WORKS[work], 5, 8), strict=True):
        values = row.item() if row.dtype.names else [row]
        for value, stored in zip(values, sample.values(), strict=True):
            assert np.array_equal(value, np.frombuffer(stored, np.uint8) if isinstance(stored, bytes) else stored)


@pytest.mark.rotate(4)
@pytest.mark.parametrize("system", ["ours", "plain", "copying"])
@pytest.mark.parametrize("work", WITH_ROWS)
def test_an_epoch_has_every_sample(tmp_path: Path, work: str, system: str) -> None:
    case, reader = _case(tmp_path, work), load(system)
    reader.write(case)
    assert sum(samples_of(batch) for batch in reader.loader(case)) == SAMPLES
    [turn] = islice(PROBES["epochs"](reader, case), 1)
    assert turn["rate"] > 0


@pytest.mark.parametrize("work", ["text", "jpeg", "transform"])
def test_works_without_rows_are_read(tmp_path: Path, work: str) -> None:
    case, ours = _case(tmp_path, work), load("ours")
    ours.write(case)
    assert sum(samples_of(batch) for batch in ours.loader(case)) == SAMPLES


@pytest.mark.rotate(2)
@pytest.mark.parametrize("probe", ["access", "first", "resume", "gap", "memory"])
def test_probes_take_turn_after_turn(tmp_path: Path, probe: str) -> None:
    workers: dict[str, Any] = {"num_workers": 1, "persistent": True} if probe in ("gap", "memory") else {}
    case, ours = _case(tmp_path, **workers), load("ours")
    ours.write(case)
    turns = iter(PROBES[probe](ours, case))
    assert all(value > 0 for turn in islice(turns, 2) for value in turn.values())
    del turns


def test_ratios_are_medians_of_rounds_and_above_one_where_ours_is_better(tmp_path: Path) -> None:
    rates = {"ours": [10.0, 30.0, 20.0], "plain": [5.0, 3.0, 20.0]}
    result = Result(SUITE[0], _case(tmp_path), {name: [{"rate": one} for one in all_] for name, all_ in rates.items()})
    assert (result.median("ours"), result.times("plain")) == (20, 2)
    times = {name: [{"seconds": 1 / one} for one in all_] for name, all_ in rates.items()}
    assert Result(SUITE[0], _case(tmp_path), times).times("plain") == pytest.approx(2)


def test_growth_is_that_of_a_line_through_all() -> None:
    assert growth([100, 101, 102]) == pytest.approx(0.02)
    assert growth([100, 90, 100, 90, 100]) == pytest.approx(0)
    assert growth([100]) == 0


@pytest.mark.nightly
def test_a_system_that_fails_drops_out_and_is_shown_as_failed(tmp_path: Path) -> None:
    pythons = {"ours": sys.executable, "plain": "false", "copying": sys.executable}
    [measurement] = [one for one in chosen(["records"]) if not one.has_workers]
    broken = _case(tmp_path, "records", size=3)
    with Crew(pythons, tmp_path) as crew:
        result = measure(crew, measurement, broken, list(pythons), rounds=1)
        assert set(result.turns) == {"ours", "copying"}
        assert set(result.failed) == {"plain"}
        assert "failed" in tables([result])
        with pytest.raises(TurnFailedError, match="ValueError"):
            measure(crew, measurement, _case(tmp_path, "text", size=-1), ["ours"], rounds=1)


@pytest.mark.nightly
def test_a_run_prints_tables_and_writes_json_and_plots(tmp_path: Path) -> None:
    options = ["--only", "records", "memory", "--rounds", "2", "--epochs", "3", "--seconds", "0.01", "--workers", "1"]
    sizes = ["--samples", f"tokens={SAMPLES}", f"records={SAMPLES}", "--size", "tokens=5", "--batch-sizes", "8"]
    places = ["--directory", str(tmp_path), "--json", str(tmp_path / "out.json"), "--plots", str(tmp_path / "plots")]
    command = [sys.executable, "-m", "benchmarks.reading", *options, *sizes, *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads((tmp_path / "out.json").read_text())
    assert [one["name"] for one in found["results"]] == ["records", "records", "memory"]
    assert {len(turns) for turns in found["results"][0]["turns"].values()} == {2}
    assert len(found["results"][2]["turns"]["ours"]) == 3
    assert found["versions"]["ours"]["torch"]
    assert found["machine"]["cores"] > 0
    assert "| 2 `int` and 8 `float32` | 0 | 8 |" in done.stdout
    assert "| of copying |" in done.stdout
    assert f"wrote {tmp_path / 'out.json'}\n" in done.stderr
    assert f"drew {tmp_path / 'plots' / 'reading_rates.png'}" in done.stderr
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"reading_rates.png", "reading_memory.png"}
    assert {path.name for path in tmp_path.iterdir()} == {"out.json", "plots"}


def test_plots_go_where_nothing_is_kept_unless_the_documents_are_to_have_them() -> None:
    assert parser("").parse_args([]).plots == Path("build")


def test_help_says_what_each_name_covers_and_how_large_each_work_is() -> None:
    words = " ".join(parser("").format_help().split())
    assert "tokens (and free-tokens), records" in words
    assert "resumed at 90 % of an epoch" in words
    assert "free-tokens=20000" in words
    assert "jpeg=224" in words


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rounds", "0"], "--rounds: must be a whole number of at least 1, but got '0'"),
        (["--batch-sizes", "0"], "--batch-sizes: must be a whole number of at least 1"),
        (["--seconds", "nan"], "--seconds: must be a positive number, but got 'nan'"),
        (["--samples", "tokens=0"], "'tokens=0' is not like tokens=1000"),
        (["--samples", "free-tokens=31"], "free-tokens has 31 samples, fewer than one batch of 32"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    args: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["reading", "--only", "tokens", *args])
    with pytest.raises(SystemExit):
        main()
    assert words in capsys.readouterr().err
