"""``inspect --config`` and ``lengths --config`` of a run that packs documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.resume import order_files
from lightning_streaming.selection import scanning
from tests.packed_data import CAPACITY, LENGTHS, TOKENS, packed_loader, packed_train, write_documents
from tests.phased_data import write_config
from tests.tools.running import run


@pytest.fixture(autouse=True)
def _without_deprecations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # instantiate_classes, as Lightning calls it, too


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_documents(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_packs_of_the_first_epoch_are_told_as_they_are_read(data: Path, method: str) -> None:
    train = packed_train(data, packing={"method": method})
    config = write_config(data / "run.yaml", train, {"val": {"remote": str(data / "web")}})
    with_packs, without = run("inspect", "--config", config, "--json").json["stages"]
    packs = sum(len(batch["input_ids"]) for batch in packed_loader(train, 1))
    told = with_packs["packs"]
    assert (told["method"], told["capacity"], told["documents"]) == (method, CAPACITY, sum(map(len, LENGTHS.values())))
    assert (told["tokens"], told["packs"], told["fill"]) == (TOKENS, packs, TOKENS / (packs * CAPACITY))
    assert "packs" not in without
    shown = run("inspect", "--config", config).out
    table = [" ".join(line.split()) for line in shown.partition("train: packs of the first epoch")[2].splitlines()]
    assert {f"packs {packs:,}", f"tokens {TOKENS:,}", f"fill {told['fill']:.2%}", "lengths column='tokens'"} <= {*table}


def test_weights_and_what_is_read_are_apart_and_ends_have_units(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    schedule = {
        "first": {"end": 2000, "mix": {"books": 0.5, "web": 0.5}},
        "ramp": {"mix": {"books": [0.5, 0.9], "web": [0.5, 0.1]}, "steps": 2},
    }
    train = packed_train(data, schedule=schedule, mixing={"weights_in": "tokens"}, epoch_size=4000)
    config = write_config(data / "run.yaml", train, {"batch_size": 2})
    (stage,) = run("inspect", "--config", config, "--json").json["stages"]
    assert stage["weights_in"] == "tokens"
    for phase, end in zip(stage["schedule"], (2000, 4000), strict=True):
        assert phase["ends_in_tokens"] == pytest.approx(end, abs=300)
        assert phase["ends"] < phase["ends_in_tokens"] / 5, "documents"
    shown = run("inspect", "--config", config).out
    rows = [line.split() for line in shown.partition("phases of an epoch; weights count tokens")[2].splitlines()]
    rows = [row for row in rows if row]
    heads = (
        "phase ends, documents ends, tokens steps stream weight documents of documents tokens of tokens so far passes"
    )
    assert rows[0] == heads.split()
    first, ramp = stage["schedule"]
    assert rows[2][:6] == ["first", str(first["ends"]), f"{first['ends_in_tokens']:,}", "1", "books", "50.0%"]
    assert rows[4][4:8] == ["books", "50.0%", "to", "90.0%"]
    assert f"{ramp['streams'][0]['token_share']:.1%}" in rows[4]


def test_a_checkpoint_of_packs_goes_with_it(data: Path) -> None:
    train = packed_train(data)
    loader = packed_loader(train, 2)
    next(iter(loader))
    (data / "saved.json").write_text(json.dumps(loader.state_dict()))
    config = write_config(data / "run.yaml", train)
    asked: tuple[Any, ...] = ("inspect", "--config", config, "--json")
    assert run(*asked, "--ckpt", data / "saved.json").json == run(*asked).json
    other = write_config(data / "other.yaml", packed_train(data, packing={"capacity": 65}))
    refused = run("inspect", "--config", other, "--ckpt", data / "saved.json")
    assert (refused.code, refused.out) == (2, "")
    assert "packing" in refused.err


@pytest.mark.nightly
def test_what_a_run_needs_is_counted_and_planned(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_files, "_SMALL_PLAN", 0)  # so that plans are kept in files
    monkeypatch.setenv("LIGHTNING_STREAMING_RUNTIME", str(data / "runtime"))
    train = packed_train(data)
    val = {"remote": str(data / "web"), "packing": {"column": "tokens", "capacity": 32, "lengths": "size"}}
    config = write_config(data / "run.yaml", train, {"val": val, "test": {"remote": str(data / "web")}}, devices=1)
    done = run("lengths", "--config", config, "--json")
    assert (done.code, done.err) == (0, "")
    found = done.json
    assert [(one["asked"], one["samples"], one["was_kept"]) for one in found["made"]] == [
        ("column='tokens'", 40, False),
        ("column='tokens'", 90, False),
        ("lengths='size'", 90, False),
    ]
    assert all(Path(one["kept_at"]).exists() for one in found["made"])
    packs = sum(len(batch["input_ids"]) for batch in packed_loader(train, 1))
    planned, of_val = found["planned"]
    assert (planned["of"], planned["documents"], planned["packs"]) == ("data.train", 130, packs)
    assert (of_val["of"], of_val["tokens"]) == ("data.val", sum(LENGTHS["web"]))
    monkeypatch.setattr(scanning, "read_columns", None)  # nothing is looked at again
    monkeypatch.setattr(order_files, "plan_epoch", None)  # nor planned
    again = run("lengths", "--config", config)
    assert again.code == 0, again.err
    assert again.out.count("was kept") == 3
    assert "packs planned" in again.out
    assert len(packed_loader(train, 1)) == packs
    assert run("select", "--config", config, "--json").json["made"][2]["was_kept"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--column", "tokens"), "leave --column out"),
        (("data",), "either DATASET, a directory or URL, or --config"),
    ],
)
def test_a_configuration_is_given_alone(data: Path, words: tuple[str, ...], told: str) -> None:
    config = write_config(data / "run.yaml", packed_train(data))
    done = run("lengths", "--config", config, *words)
    assert (done.code, done.out) == (2, "")
    assert told in done.err


def test_a_run_that_packs_nothing_is_told_so(data: Path) -> None:
    done = run("lengths", "--config", write_config(data / "run.yaml", {"remote": str(data / "web")}))
    assert (done.code, done.out) == (2, "")
    assert "no data of this run has packing" in done.err
