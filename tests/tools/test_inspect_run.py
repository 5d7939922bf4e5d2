"""``inspect --config``: what a run will read of each stream in each phase is what it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_streaming import StreamingDataLoader
from tests.helpers import write_shards
from tests.phased_data import (
    PHASES,
    SIZES,
    counted_by_stream,
    ids_of_epoch,
    phased_dataset,
    phased_train,
    write_config,
    write_streams,
)
from tests.tools.running import run


@pytest.fixture(autouse=True)
def _without_deprecations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # instantiate_classes, as Lightning calls it, too


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_streams(tmp_path)


def test_what_is_told_of_phases_is_what_they_read(data: Path) -> None:
    train = phased_train(data)
    (stage,) = run("inspect", "--config", write_config(data / "run.yaml", train), "--json").json["stages"]
    ids = ids_of_epoch(train)
    assert stage["epoch_size"] == len(ids) == 120
    assert {one["stream"]: one["drawn"] for one in stage["streams"]} == counted_by_stream(ids)
    places = [(one["phase"], one["begins"], one["ends"], one["steps"]) for one in stage["schedule"]]
    assert places == [("broad", 0, 52, 1), ("ramp", 52, 84, 4), ("anneal", 84, 120, 1)]
    for phase in stage["schedule"]:
        read = counted_by_stream(ids[phase["begins"] : phase["ends"]])
        so_far = counted_by_stream(ids[: phase["ends"]])
        for one in phase["streams"]:
            name = one["stream"]
            assert one["drawn"] == read[name]
            assert one["share"] == read[name] / (phase["ends"] - phase["begins"])
            assert one["drawn_by_end"] == so_far[name]
            assert one["passes_by_end"] == so_far[name] / SIZES[name]
    ramp = {one["stream"]: (one["begin_share"], one["end_share"]) for one in stage["schedule"][1]["streams"]}
    assert ramp == {"code": (0.1, 0.3), "math": (0.0, 0.2), "web": (0.9, 0.5)}
    assert [one["max_repeats"] for one in stage["schedule"][2]["streams"]] == [None, 4.0]


def test_phases_are_shown_as_a_table(data: Path) -> None:
    shown = run("inspect", "--config", write_config(data / "run.yaml", phased_train(data)))
    assert (shown.code, shown.err) == (0, "")
    of_phases = shown.out.partition("phases of an epoch; weights count samples")[2]
    rows = [line.split() for line in of_phases.splitlines() if line.strip()]
    assert rows[0] == ["phase", "ends", "steps", "stream", "weight", "samples", "share", "so", "far", "passes"]
    assert rows[2] == ["broad", "52", "1", "code", "10.0%", "5", "9.6%", "5", "0.125"]
    assert rows[4][:7] == ["ramp", "84", "4", "code", "10.0%", "to", "30.0%"]
    assert rows[-1][0] == "math"


def test_without_a_ramp_the_table_has_no_columns_for_one(data: Path) -> None:
    plain = [PHASES[0], {**PHASES[2], "mix": {"math": 1, "code": 1}}]
    streams = {name: {"remote": str(data / name)} for name in SIZES}
    train = phased_train(data, phases=plain, streams=streams)
    shown = run("inspect", "--config", write_config(data / "run.yaml", train)).out
    assert "steps" not in shown.partition("phases of an epoch")[2]
    assert "to" not in shown.partition("phases of an epoch")[2].split()


def test_a_long_phase_tells_its_steps_though_it_is_no_ramp(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    train = phased_train(data, phases=[{"name": "long", "mix": {"web": 1, "code": 1, "math": 1}}], epoch_size="10m")
    shown = run("inspect", "--config", write_config(data / "run.yaml", train)).out
    lines = shown.partition("phases of an epoch; weights count samples")[2].splitlines()
    heads, _, first, *_ = [line.split() for line in lines if line.strip()]
    assert heads == ["phase", "ends", "steps", "stream", "weight", "samples", "share", "so", "far", "passes"]
    assert first[:4] == ["long", "10,000,000", "3", "code"]


@pytest.mark.rotate(1)
@pytest.mark.parametrize("length", [3, 60])
def test_no_number_is_cut_whatever_the_width(data: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    phases = [{**PHASES[0], "name": "b" * length, "ended_at": 40}, *PHASES[1:]]
    config = write_config(data / "run.yaml", phased_train(data, phases=phases), max_epochs=1)
    told = run("inspect", "--config", config)
    (stage,) = run("inspect", "--config", config, "--json").json["stages"]
    rows = [line.split() for line in told.out.partition("phases of an epoch")[2].splitlines() if line.strip()]
    assert ["b" * length, "40", "early", "1"] in [row[:4] for row in rows]
    numbers = [str(one["drawn_by_end"]) for phase in stage["schedule"] for one in phase["streams"]]
    assert [row[-2] for row in rows if row[-1].replace(".", "").isdigit()] == numbers
    assert "…" not in told.out


@pytest.mark.nightly
def test_phases_that_would_be_read_again_though_one_was_cut_are_told(data: Path) -> None:
    phases = [{**PHASES[0], "ended_at": 40}, *PHASES[1:]]

    def told(**trainer: object) -> bool:
        config = write_config(data / "run.yaml", phased_train(data, phases=phases), {"batch_size": 4}, **trainer)
        shown = run("inspect", "--config", config)
        assert shown.code == 0
        assert ("max_epochs=1" in shown.err) == bool(shown.err)
        return bool(shown.err)

    assert told(max_epochs=2)
    assert told(max_epochs=2, max_steps=31)
    assert told(max_steps=16, accumulate_grad_batches=2)
    assert not told(max_epochs=1)
    assert not told(max_steps=30)


def test_streams_of_different_columns_are_told_before_the_run(data: Path) -> None:
    write_shards(data / "other", [10], {"id": "int", "more": "int"}, lambda number: {"id": number, "more": 0})
    streams = {"web": {"remote": str(data / "web")}, "other": {"remote": str(data / "other")}}
    config = write_config(data / "run.yaml", {"streams": streams}, {"batch_size": 4})
    told = run("inspect", "--config", config)
    assert (told.code, "name those that all have with columns=['id'" in told.err) == (0, True)
    assert run("inspect", "--config", config, "--set", "train.columns=[id]").err == ""


def test_a_setting_of_the_data_is_changed_by_hand(data: Path) -> None:
    config = write_config(data / "run.yaml", phased_train(data), max_epochs=1)
    told = run("inspect", "--config", config, "--set", "data.train.epoch_size=200", "--json")
    assert told.json["stages"][0]["epoch_size"] == 200
    assert "--set changes the data of a run" in run("inspect", data / "web", "--set", "train.shuffle=true").err


def test_of_a_checkpoint_of_several_loaders_one_is_named(data: Path) -> None:
    train = phased_train(data)
    loader = StreamingDataLoader(phased_dataset(train, 4))
    next(iter(loader))
    (data / "saved.json").write_text(json.dumps({name: loader.state_dict() for name in ("text", "code")}))
    asked = ["inspect", "--config", write_config(data / "run.yaml", train), "--ckpt", data / "saved.json"]
    assert "there are positions of 2 loaders; name one with --loader: text, code" in run(*asked).err
    assert run(*asked, "--loader", "code").out == run(*asked[:3]).out
    assert "--loader names a train loader of a checkpoint" in run(*asked[:3], "--loader", "code").err
    assert "--loader needs a run" in run("inspect", data / "web", "--loader", "code").err


def test_borders_are_those_of_as_many_nodes_as_the_run_has(data: Path) -> None:
    train = {**phased_train(data), "shuffle_algo": "py1br", "num_canonical_nodes": None}
    ends = []
    for nodes in (1, 3):
        config = write_config(data / "run.yaml", train, num_nodes=nodes, devices=1)
        (stage,) = run("inspect", "--config", config, "--json").json["stages"]
        ends.append([one["ends"] for one in stage["schedule"]])
    assert ends == [[50, 84, 120], [51, 84, 120]]


def test_a_run_that_goes_on_may_have_done_with_streams(data: Path) -> None:
    phases = [{**PHASES[0], "end": 52}, {"name": "late", "mix": {"math": 1}}]
    train = phased_train(data, phases=phases, num_canonical_nodes=4)
    del train["streams"]["code"], train["streams"]["web"]
    whole = {**train, "streams": {**phased_train(data)["streams"]}}
    loader = StreamingDataLoader(phased_dataset(whole, 4))
    for _ in zip(range(15), loader, strict=False):
        pass
    (data / "saved.json").write_text(json.dumps(loader.state_dict()))
    config = write_config(data / "run.yaml", {**train, "num_canonical_nodes": None})
    assert "schedule.broad.mix reads stream 'code'" in run("inspect", "--config", config).err
    shown = run("inspect", "--config", config, "--ckpt", data / "saved.json", "--json")
    assert (shown.code, shown.err) == (0, "")
    (stage,) = shown.json["stages"]
    assert [(one["phase"], one["ends"]) for one in stage["schedule"]] == [("broad", 52), ("late", 120)]
    assert [one["passes_by_end"] for phase in stage["schedule"] for one in phase["streams"]] == [None, None, 68 / 20]
    assert run("inspect", "--config", config, "--ckpt", data / "saved.json").code == 0
    assert "--ckpt needs a run" in run("inspect", data / "math", "--ckpt", data / "saved.json").err


def test_what_would_be_read_too_often_is_told_before_the_run(data: Path) -> None:
    phases = [*PHASES[:2], {**PHASES[2], "max_repeats": {"math": 1}}]
    refused = run("inspect", "--config", write_config(data / "run.yaml", phased_train(data, phases=phases)))
    assert refused.code == 2
    assert "by the end of phase 'anneal', stream 'math' would have been read 1.2" in refused.err
