"""``trace`` of packed documents: the packs of a step and the documents in them, and the packs of a document."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import StreamingDataModule, World
from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.runs.trace_run import Read, reads_of_key, reads_of_sample, reads_of_step
from lightning_streaming.tools.runs.training_run import TracedRun, run_on
from lightning_streaming.trainer.config import config_of
from tests.helpers import raises
from tests.packed_data import CAPACITY, Piece, packed_loader, packed_train, pieces, write_documents
from tests.phased_data import write_config
from tests.schedules import schedule
from tests.tools.running import run

PHASES = [{"name": "one", "end": 40, "mix": {"web": 1}}, {"name": "two", "mix": {"books": 1, "web": 1}}]
ORDERS: list[dict[str, Any]] = [
    {},
    {"packing": {"method": "concat"}},
    {"packing": {"longer": "truncate"}, "shuffle_algo": "blockwise", "shuffle_block_size": 32},
    {"skip": ["3-4"]},
    {"epoch_size": 100, "schedule": schedule(PHASES)},
]


@pytest.fixture(autouse=True)
def _without_deprecations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # instantiate_classes, as Lightning calls it, too


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents"))


Seen = tuple[int, int, str, int, int, Piece]
"""Step, rank, stream, shard and index, and what is read of the document."""


def read_by(train: dict[str, Any], batch_size: int, ranks: int, epochs: int) -> list[Seen]:
    """What all ranks of a node read, step by step."""
    seen: list[Seen] = []
    for rank in range(ranks):
        loader = packed_loader(train, batch_size, world=World(ranks_per_node=ranks, rank=rank), return_keys=True)
        step = 0
        for _ in range(epochs):
            for batch, keys in loader:
                found = zip(keys, pieces(batch), strict=True)
                seen += [(step, rank, key.stream, key.shard, key.sample_index, piece) for key, piece in found]
                step += 1
    return sorted(seen, key=lambda one: one[:2])


def as_seen(read: Read) -> Seen:
    key = read.key
    assert read.pack is not None
    piece = Piece(read.place, read.pack.document, read.sample, read.pack.start, read.pack.stop)
    return read.step, read.rank, key.stream, key.shard, key.sample_index, piece


def traced_run(train: dict[str, Any], batch_size: int, ranks: int, checkpoint: Path | None = None) -> TracedRun:
    module = StreamingDataModule(train=config_of(train), batch_size=batch_size)
    asked = Namespace(nodes=1, ranks_per_node=ranks, accumulate=None, checkpoint=checkpoint, loader=None)
    return run_on(module, {}, asked)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_step_and_every_document_are_traced_as_they_are_read(
    data: Path, order: dict[str, Any], ranks: int
) -> None:
    train = packed_train(data, **order)
    seen, at = read_by(train, 2, ranks, epochs=3), traced_run(train, 2, ranks)
    for step in range(seen[-1][0] + 1):
        assert [as_seen(read) for read in reads_of_step(at, step)] == [one for one in seen if one[0] == step]
    longest = max(seen, key=lambda one: one[5].stop)
    for _, _, stream, shard, index, _ in (seen[0], longest):
        found = reads_of_sample(at, stream, shard, index, epochs=1)
        everywhere = [one for one in seen if one[2:5] == (stream, shard, index)]
        assert [as_seen(read) for read in found] == everywhere[: len(found)]
        assert len(everywhere) > len(found) > 0
        key = found[-1].key
        assert reads_of_key(at, key) == [read for read in found if read.key == key]
        with raises(ConfigError, "another run"):
            reads_of_key(at, replace(key, position=key.position + 1))


def test_epochs_have_as_many_steps_as_they_have_packs(data: Path) -> None:
    train = packed_train(data)
    loader = packed_loader(train, 1)
    epochs = [sum(1 for _ in loader) for _ in range(6)]
    assert len(set(epochs)) > 1
    at, before = traced_run(train, 1, 1), 0
    for epoch, steps in enumerate(epochs):
        assert {read.key.epoch for read in reads_of_step(at, before)} == {epoch}
        before += steps
        assert {read.key.epoch for read in reads_of_step(at, before - 1)} == {epoch}


@pytest.mark.nightly
def test_the_command_names_packs_and_documents(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    train = packed_train(data)
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 2}, devices=2)
    seen = read_by(train, 2, 2, epochs=1)
    here = [one for one in seen if one[0] == 3]
    shown = run("trace", "--config", config, "--step", 3, "--json").json
    assert shown["run"]["pack_capacity"] == CAPACITY
    told = [(one["ranks"], one["place"], one["packing"]["start"], one["packing"]["stop"]) for one in shown["reads"]]
    assert told == [([one[1]], one[5].place, one[5].start, one[5].stop) for one in here]
    table = run("trace", "--config", config, "--step", 3).out.splitlines()
    assert table[0] == "step 3, epoch 0, 2 ranks, packs of 64 tokens"
    assert table[2].split() == ["batch", "rank", "place", "pack", "sample", "tokens", "fields"]
    _, rank, stream, shard, index, piece = here[-1]
    last = [line for line in table if line.strip()][-1].split()
    pack = str(shown["reads"][-1]["packing"]["position"])
    name = f"{stream}:{shard}:{index}"
    assert last[:8] == ["3", str(rank), str(piece.place), pack, name, str(piece.start), "to", str(piece.stop - 1)]
    back = run("trace", "--config", config, "--sample", name).out
    assert " ".join(last[:8]) in " ".join(back.split())
    key = shown["reads"][-1]["key"]
    by_key = run("trace", "--config", config, "--sample", json.dumps(key), "--json").json["reads"]
    assert shown["reads"][-1] in by_key
