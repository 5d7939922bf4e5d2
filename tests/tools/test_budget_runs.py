"""Commands about a run within a budget of tokens: what they tell is what is read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import World
from lightning_streaming.resume import order_files
from tests.packed_data import FIRST, LENGTHS, TOKENS, packed_loader, write_documents
from tests.phased_data import write_config
from tests.tools.running import run

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

BUDGET = 300


@pytest.fixture(autouse=True)
def _without_deprecations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # instantiate_classes, as Lightning calls it, too


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents"))


@pytest.fixture
def train(data: Path) -> dict[str, Any]:
    streams = {name: {"remote": str(data / name)} for name in LENGTHS}
    budget = {"column": "tokens", "tokens": BUDGET, "window": 64, "buckets": 4}
    return {"streams": streams, "token_budget": budget, "shuffle": True, "num_canonical_nodes": 2}


def numbers_of(batch: dict[str, Any]) -> list[int]:
    """The documents of a batch."""
    return [int(tokens[0]) // 250 for tokens in batch["input_ids"]]


def test_groups_of_the_first_epoch_are_told_as_they_are_read(train: dict[str, Any], tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", train)
    loader = packed_loader(train, 1)
    groups, room = len(list(loader)), loader.statistics().token_room
    (stage,) = run("inspect", "--config", config, "--json").json["stages"]
    assert stage["packs"] == {
        "method": "budget",
        "tokens_per_group": BUDGET,
        "buckets": 4,
        "window": 64,
        "longer": "error",
        "lengths": "column='tokens'",
        "documents": 130,
        "tokens": TOKENS,
        "packs": groups,
        "fill": TOKENS / room,
    }
    assert "packs of the first epoch" in run("inspect", "--config", config).out


@pytest.mark.nightly
def test_what_a_run_needs_is_counted_and_planned(
    train: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_files, "_SMALL_PLAN", 0)  # so that plans are kept in files
    monkeypatch.setenv("LIGHTNING_STREAMING_RUNTIME", str(tmp_path / "runtime"))
    done = run("lengths", "--config", write_config(tmp_path / "run.yaml", train, devices=1), "--json")
    assert (done.code, done.err) == (0, "")
    (planned,) = done.json["planned"]
    monkeypatch.setattr(order_files, "plan_epoch", None)  # it is not planned again
    loader = packed_loader(train, 1)
    assert planned["packs"] == len(list(loader))
    assert planned["fill"] == TOKENS / loader.statistics().token_room


def test_a_step_is_traced_as_it_is_read(train: dict[str, Any], tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", train, devices=2)
    worlds = [World(ranks_per_node=2, rank=rank) for rank in range(2)]
    read = [[*packed_loader(train, 1, world=world, return_keys=True)][3] for world in worlds]
    traced = run("trace", "--config", config, "--step", 3, "--json").json
    expected = [
        (rank, number, 0, length)
        for rank, (batch, _) in enumerate(read)
        for number, length in zip(numbers_of(batch), batch["lengths"].tolist(), strict=True)
    ]
    told = [
        (one["ranks"][0], one["sample"], one["packing"]["start"], one["packing"]["stop"]) for one in traced["reads"]
    ]
    assert told == expected
    assert [one["key"] for one in traced["reads"]] == [key.as_dict() for _, keys in read for key in keys]
    table = run("trace", "--config", config, "--step", 3).out.splitlines()
    assert table[0] == f"step 3, epoch 0, 2 ranks, groups of at most {BUDGET} tokens"


def test_documents_read_are_counted_and_a_place_is_moved_by_groups(train: dict[str, Any], tmp_path: Path) -> None:
    saved, config = tmp_path / "state.json", write_config(tmp_path / "run.yaml", train)
    whole = [numbers_of(batch) for batch in packed_loader(train, 1)]
    loader = packed_loader(train, 1)
    begun = Counter[str]()
    for _, batch in zip(range(9), loader, strict=False):
        begun.update("web" if number >= FIRST["web"] else "books" for number in numbers_of(batch))
    saved.write_text(json.dumps(loader.state_dict()))
    loader.close()
    (told,) = run("state", "show", saved, "--config", config, "--json").json["loaders"].values()
    assert {one["name"]: one["this_epoch"] for one in told["streams"]} == {name: begun[name] for name in LENGTHS}
    shown = " ".join(run("state", "show", saved).out.split())
    assert "token budget tokens 300, buckets 4, window 64, longer error, column='tokens'" in shown
    assert run("state", "skip", saved, "--samples", 4).code == 0
    again = packed_loader(train, 1)
    again.load_state_dict(json.loads(saved.read_text()))
    assert [numbers_of(batch) for batch in again] == whole[13:]


def test_groups_are_measured(train: dict[str, Any], tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", train, devices=1)
    done = run("tune", "--config", config, "--seconds", 0.1, "--num-workers", "0", "--json")
    assert done.code == 0, done.err
    assert (done.json["batch_size"], done.json["batches_of"]) == (1, "group")
    (speed,) = done.json["measured"]
    assert speed["samples_per_second"] > 2 * speed["batches_per_second"]


def test_a_mistake_in_a_budget_is_told_by_name(train: dict[str, Any], tmp_path: Path) -> None:
    train["token_budget"]["bucket"] = train["token_budget"].pop("buckets")
    done = run("inspect", "--config", write_config(tmp_path / "run.yaml", train))
    assert done.code == 2
    assert "buckets" in done.err
