"""The steps of a planned run are those that a trainer makes of it: accumulated, limited, skipped, repeated, resumed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming.tools.planning import planned_reads
from lightning_streaming.tools.planning.planned_reads import Tally
from tests.phased_data import FIRST_ID, PHASES, SIZES, write_config, write_streams
from tests.schedules import schedule
from tests.tools.running import run
from tests.tools.trained import Trained, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval.*"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_streams(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setenv("LIGHTNING_STREAMING_CACHE", str(tmp_path / "caches"))


def configured(path: Path, data: Path, batch: dict[str, Any] | None = None, of: Any = None, **trainer: Any) -> Path:
    streams = {name: {"remote": str(data / name)} for name in SIZES}
    train = {"streams": streams, "num_canonical_nodes": 4, "shuffle_seed": 3, **(of or {})}
    return write_config(path / "run.yaml", train, {"batch_size": 4, **(batch or {})}, devices=1, **trainer)


def by_stream(ids: list[int]) -> dict[str, Counter[int]]:
    return {name: Counter(one for one in ids if first <= one < first + 1000) for name, first in FIRST_ID.items()}


def assert_same(plan: Any, really: Trained, before: list[int] | None = None) -> None:
    """Steps, epochs, samples of each stream, repeats and the step of the first are those of the trainer."""
    assert plan["run"]["stop_step"] == max(really.steps) + 1
    assert plan["run"]["first_step"] == min(really.steps)
    assert plan["run"]["steps"] == len(really.steps)
    assert plan["run"]["epochs"] == really.epochs
    assert plan["run"]["looked_at"] == 1
    seen, first_repeats = Counter(before or []), dict[int, int]()
    for step, ids in really.steps.items():
        for one in ids:
            if seen[one]:
                first_repeats.setdefault(one // 1000, step)
            seen[one] += 1
    whole = by_stream([*(before or []), *really.ids])
    for place, one in enumerate(plan["streams"]):
        reads = by_stream(really.ids)[one["stream"]]
        assert one["samples"] == reads.total()
        assert one["samples_before"] == whole[one["stream"]].total() - reads.total()
        assert one["repeats"] == max(whole[one["stream"]].values(), default=0)
        repeat = one["first_repeat"]
        assert one["is_exact"]
        assert (None if repeat is None else repeat["step"]) == first_repeats.get(place)
    over = plan["over_time"]
    assert over["steps"][-1] == plan["run"]["stop_step"]
    assert {name: counts[-1] for name, counts in over["samples"].items()} == {
        one["stream"]: one["samples"] for one in plan["streams"]
    }


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a last step of fewer batches": ({"epoch_size": 20}, {}, {"accumulate_grad_batches": 2, "max_epochs": 2}),
    "steps that end a run within an epoch": ({}, {}, {"accumulate_grad_batches": 4, "max_steps": 11}),
    "a limit of batches": ({}, {}, {"limit_train_batches": 7, "max_epochs": 3, "accumulate_grad_batches": 3}),
    "a part of an epoch": ({}, {"batch_size": 7}, {"limit_train_batches": 0.5, "max_steps": 20}),
    "drop_last": ({"epoch_size": 50}, {"batch_size": 7, "drop_last": True}, {"max_epochs": 2}),
    "a skipped epoch": ({"skip": ["28-65"]}, {}, {"max_epochs": 4}),
    "the first epoch skipped": ({"skip": ["0-29"]}, {}, {"max_epochs": 2}),
    "skipped batches": ({"skip": ["3-5", "31"]}, {}, {"max_epochs": 2, "accumulate_grad_batches": 2}),
    "repeats": ({"epoch_size": 300}, {}, {"max_epochs": 2}),
    "phases": ({"schedule": schedule(PHASES), "epoch_size": 120}, {"batch_size": 3}, {"max_epochs": 2}),
}  # fmt: skip


@pytest.mark.rotate(2)
@pytest.mark.parametrize("name", RUNS)
def test_steps_are_those_of_the_trainer(data: Path, tmp_path: Path, name: str) -> None:
    of, batch, trainer = RUNS[name]
    config = configured(tmp_path, data, batch, of, **trainer)
    assert_same(run("plan", "--config", config, "--json").json, train(config))


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("of", "batch", "trainer", "steps"),
    [
        ({}, {}, {"limit_train_batches": 7, "max_epochs": 4}, 14),
        ({"epoch_size": 50}, {"batch_size": 7, "drop_last": True}, {"max_epochs": 3}, 9),
        ({"skip": ["3-5", "31", "45"]}, {}, {"max_epochs": 3}, 40),
        ({"skip": ["28-65"]}, {}, {"max_epochs": 4}, 40),
        ({}, {}, {"max_epochs": 3, "accumulate_grad_batches": 4}, 10),
    ],
    ids=["a limit of batches", "drop_last", "skipped batches", "a skipped epoch", "accumulated"],
)
def test_what_was_read_before_a_checkpoint_is_what_the_run_had_read(
    data: Path, tmp_path: Path, of: dict[str, Any], batch: dict[str, Any], trainer: dict[str, Any], steps: int
) -> None:
    config, ckpt = configured(tmp_path, data, batch, of, **trainer), tmp_path / "run.ckpt"
    before = train(config, save=ckpt, max_steps=steps)
    plan = run("plan", "--config", config, "--ckpt", ckpt, "--json").json
    assert_same(plan, train(config, ckpt=ckpt), before.ids)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("trainer", [{"max_steps": 100}, {"max_steps": 106, "max_epochs": 9}, {"max_epochs": 5}])
def test_epochs_that_nobody_looks_at_end_where_the_run_does(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any]
) -> None:
    config = configured(tmp_path, data, accumulate_grad_batches=2, **trainer)
    whole = run("plan", "--config", config, "--json").json
    monkeypatch.setattr(planned_reads, "_MOST_EPOCHS", 2)
    part = run("plan", "--config", config, "--json").json
    really = train(config)
    assert part["run"]["steps"] == whole["run"]["steps"] == len(really.steps)
    assert part["run"]["epochs"] == whole["run"]["epochs"] == really.epochs
    assert 0 < part["run"]["looked_at"] < 1
    for one, other in zip(part["streams"], whole["streams"], strict=True):
        assert one["samples"] == pytest.approx(other["samples"], abs=12)  # the last epoch is not read to its end
        assert one["repeats"] <= other["repeats"]
        assert one["repeats"] >= one["samples"] // SIZES[one["stream"]]
    assert part["over_time"]["steps"][-1] == part["run"]["stop_step"]
    for name, counts in part["over_time"]["samples"].items():
        assert counts[-1] == next(one["samples"] for one in part["streams"] if one["stream"] == name)
    assert any("2 of" in note for note in part["notes"])


def test_mixing_is_that_of_the_steps_that_are_planned(data: Path, tmp_path: Path) -> None:
    of = {"shuffle": False, "num_canonical_nodes": 1, "epoch_size": 400}
    config = configured(tmp_path, data, {"batch_size": 2}, of, max_epochs=1)
    mixing = [run("plan", "--config", config, "--steps", steps, "--json").json["mixing"] for steps in (8, 9)]
    assert mixing[0] == 0  # of samples in order, five of which are a shard
    assert mixing[1] == pytest.approx(1 / 9)  # the last of them is of two shards


@pytest.mark.nightly
def test_phases_are_marked_where_they_begin(data: Path, tmp_path: Path) -> None:
    of = {"schedule": schedule(PHASES), "epoch_size": 120}
    config, ckpt = configured(tmp_path, data, {"batch_size": 2}, of, max_epochs=1), tmp_path / "run.ckpt"
    told = run("plan", "--config", config, "--accumulate", 2, "--json").json["over_time"]
    assert [one["step"] for one in told["schedule"]] == [0, 13, 21]  # they begin with samples 52 and 84
    train(config, save=ckpt, max_steps=30)
    page = tmp_path / "plan.html"
    told = run("plan", "--config", config, "--ckpt", ckpt, "--html", page, "--json").json["over_time"]
    assert [(one["phase"], one["step"]) for one in told["schedule"]] == [("anneal", 42)]
    assert page.read_text().count("<title>anneal</title>") == 2  # in the charts of mixture and passes
    told = run("plan", "--config", config, "--steps", 30, "--json").json["over_time"]
    assert [one["phase"] for one in told["schedule"]] == ["broad", "ramp"]


def test_a_run_that_reads_nothing_more_is_told(data: Path, tmp_path: Path) -> None:
    config = configured(tmp_path, data, max_epochs=1)
    train(config, save=tmp_path / "run.ckpt")
    done = run("plan", "--config", config, "--ckpt", tmp_path / "run.ckpt")
    assert done.code == 2
    assert "there is nothing to read" in done.err


# --- counts ---


@pytest.mark.parametrize("times", [65_534, 65_535, 65_536, 200_000])
def test_a_count_that_is_full_stays_so_and_says_it(times: int) -> None:
    tally, rng = Tally(3), np.random.default_rng(0)
    ids = rng.permutation(np.repeat([0, 1, 2], [times, 5, 70]))
    for start in range(0, len(ids), 70_000):
        tally.add(ids[start : start + 70_000])
    assert tally.reads.tolist() == [min(times, 65_535), 5, 70]
    assert tally.is_full == (times > 65_535)
