"""``state`` of runs that pack documents: it counts packs, and tells what was read of documents by the configuration."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_streaming import StreamingDataModule
from lightning_streaming.trainer.config import config_of
from tests.packed_data import FIRST, LENGTHS, packed_loader, packed_train, pieces, write_documents
from tests.phased_data import write_config
from tests.schedules import schedule
from tests.tools.running import edit_state, run

PHASES = [{"name": "one", "end": 40, "mix": {"web": 1}}, {"name": "two", "mix": {"books": 1, "web": 1}}]
ORDERS: list[dict[str, Any]] = [
    {},
    {"packing": {"method": "concat"}, "skip": ["2"]},
    {"epoch_size": 100, "schedule": schedule(PHASES)},
]


@pytest.fixture(autouse=True)
def _without_deprecations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # instantiate_classes, as Lightning calls it, too


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents"))


def refused(*args: object) -> str:
    done = run("state", *args)
    assert (done.code, done.out) == (2, "")
    return done.err


def read_some(train: dict[str, Any], batches: int, saved: Path) -> Counter[str]:
    """Read so many batches of 2 packs, save the place, and say how many documents of each stream have begun."""
    loader, begun = packed_loader(train, 2), Counter[str]()
    for _, batch in zip(range(batches), loader, strict=False):
        begun.update("web" if one.number >= FIRST["web"] else "books" for one in pieces(batch) if not one.start)
    saved.write_text(json.dumps(loader.state_dict()))
    loader.close()
    return begun


@pytest.mark.rotate(2)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_documents_read_are_counted_by_the_configuration(data: Path, tmp_path: Path, order: dict[str, Any]) -> None:
    train, saved = packed_train(data, **order), tmp_path / "state.json"
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 2})
    begun = read_some(train, 15, saved)
    (loader,) = run("state", "show", saved, "--config", config, "--json").json["loaders"].values()
    assert (loader["counts"], loader["epoch_size"], loader["epoch_done"]) == ("packs", None, None)
    assert {one["name"]: one["this_epoch"] for one in loader["streams"]} == {name: begun[name] for name in LENGTHS}
    alone = run("state", "show", saved)
    assert f"pack in epoch         {loader['sample_in_epoch']}\n" in alone.out
    assert "documents read, state" in alone.out
    assert "--config run.yaml`" in alone.out or "schedule" not in order
    assert "use --data NAME=PLACE for each of them" in alone.out or "schedule" in order
    (loader,) = run("state", "show", saved, "--json").json["loaders"].values()
    assert {one["this_epoch"] for one in loader["streams"]} == {None}
    places = [word for name in LENGTHS for word in ("--data", f"{name}={data / name}")]
    if "schedule" in order:
        assert "--config run.yaml" in refused("show", saved, *places)
    else:
        by_config = run("state", "show", saved, "--config", config, "--json").json["loaders"]
        assert run("state", "show", saved, *places, "--json").json["loaders"] == by_config


BY_TOKENS: dict[str, Any] = {"mixing": {"weights_in": "tokens"}, "epoch_size": 2000}


@pytest.mark.rotate(1)
@pytest.mark.parametrize("order", [{}, {"packing": {"method": "concat"}}, {"skip": ["2", "30-31"]}, BY_TOKENS], ids=str)
def test_tokens_and_documents_of_all_epochs_are_counted(data: Path, tmp_path: Path, order: dict[str, Any]) -> None:
    train, saved = packed_train(data, **order), tmp_path / "state.json"
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 2})
    if "mixing" in order:
        train["streams"] = {name: {**stream, "proportion": 0.5} for name, stream in train["streams"].items()}
        config = write_config(tmp_path / "run.yaml", train, {"batch_size": 2})
    loader, documents, tokens = packed_loader(train, 2), Counter[str](), Counter[str]()
    batches = list(loader)
    batches += list(loader)
    batches += [batch for _, batch in zip(range(7), loader, strict=False)]
    for piece in (piece for batch in batches for piece in pieces(batch)):
        stream = "web" if piece.number >= FIRST["web"] else "books"
        documents[stream] += piece.start == 0
        tokens[stream] += piece.stop - piece.start
    saved.write_text(json.dumps(loader.state_dict()))
    loader.close()
    (shown,) = run("state", "show", saved, "--config", config, "--json").json["loaders"].values()
    assert {stream["name"]: stream["tokens"] for stream in shown["streams"]} == tokens
    assert {stream["name"]: stream["before"] + stream["this_epoch"] for stream in shown["streams"]} == documents
    table = run("state", "show", saved, "--config", config).out
    assert "tokens" in table
    assert f"{tokens['web']:,}" in table
    (unknown,) = run("state", "show", saved, "--json").json["loaders"].values()
    assert {stream["tokens"] for stream in unknown["streams"]} == {None}


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": {"lengths": "size"}},
        {"packing": None, "token_budget": {"column": "tokens", "tokens": 300, "longer": "truncate"}},
    ],
    ids=["lengths in a column", "budget"],
)
def test_a_run_in_python_is_counted_by_its_data(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    train, saved = {**packed_train(data), **changes}, tmp_path / "state.json"
    if train["packing"] is not None:
        train = packed_train(data, **changes)
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 1})
    loader = packed_loader(train, 1)
    for _ in range(2):
        for _batch in zip(range(12), loader, strict=False):
            pass
    saved.write_text(json.dumps(loader.state_dict()))
    loader.close()
    places = [word for name in LENGTHS for word in ("--data", f"{name}={data / name}")]
    by_data = run("state", "show", saved, *places, "--json")
    assert by_data.code == 0, by_data.err
    assert by_data.json == run("state", "show", saved, "--config", config, "--json").json
    (shown,) = by_data.json["loaders"].values()
    assert all(stream["tokens"] for stream in shown["streams"])


def test_lengths_that_a_function_counts_need_the_configuration(data: Path, tmp_path: Path) -> None:
    def count(size: int) -> int:
        return size

    saved = tmp_path / "state.json"
    read_some(packed_train(data, packing={"lengths": count}), 3, saved)
    message = refused("show", saved, *(word for name in LENGTHS for word in ("--data", f"{name}={data / name}")))
    assert "whose lengths are in no column: lengths=" in message
    assert "as data.init_args.train" in message


def test_a_place_of_packs_is_moved_by_packs(data: Path, tmp_path: Path) -> None:
    train, saved = packed_train(data), tmp_path / "state.json"
    read_some(train, 3, saved)
    whole = [batch["input_ids"].tolist() for batch in packed_loader(train, 1)]
    edit_state("skip", saved, "--samples", 5)
    assert json.loads(saved.read_text())["sample_in_epoch"] == 11
    edit_state("set", saved, "--epoch", 0, "--sample", 13)
    loader = packed_loader(train, 1)
    loader.load_state_dict(json.loads(saved.read_text()))
    assert [batch["input_ids"].tolist() for batch in loader] == whole[13:]
    told = refused("branch", saved)
    assert "has no phases" in told


def test_a_phase_of_packs_is_not_cut(data: Path, tmp_path: Path) -> None:
    saved = tmp_path / "state.json"
    read_some(packed_train(data, epoch_size=100, schedule=schedule(PHASES)), 3, saved)
    assert "counts packs" in refused("branch", saved)


class Model(LightningModule):
    """Remembers the packs it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        self.seen += batch["input_ids"].tolist()
        predicted: torch.Tensor = self.layer(batch["input_ids"].float().mean().reshape(1, 1))
        return predicted.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def fit(train: dict[str, Any], checkpoint: Path | None = None, **settings: Any) -> tuple[Model, Trainer]:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", enable_checkpointing=False, **quiet, **settings)
    model = Model()
    data = StreamingDataModule(train=config_of(train), batch_size=2)
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
    return model, trainer


def test_fit_goes_on_where_it_was_moved_and_is_traced(data: Path, tmp_path: Path) -> None:
    train, saved = packed_train(data), tmp_path / "run.ckpt"
    whole, _ = fit(train, max_epochs=2)
    _, trainer = fit(train, max_steps=4, max_epochs=-1)
    trainer.save_checkpoint(saved)
    edit_state("skip", saved, "--batches", 3)
    resumed, _ = fit(train, saved, max_epochs=2)
    assert resumed.seen == whole.seen[14:]
    told = refused("skip", saved, "--batches", 1000)
    assert "how many packs later epochs have" in told
    assert "global batch          2 packs" in run("state", "show", saved).out
    config = write_config(tmp_path / "run.yaml", train, {"batch_size": 2}, devices=1)
    reads = run("trace", "--config", config, "--ckpt", saved, "--step", 5, "--json").json["reads"]
    assert [read["packing"]["position"] for read in reads if read["packing"]["document"] == 0] == [16, 17]
    first = next(read for read in reads if read["packing"]["document"] == 0)
    assert resumed.seen[2][: first["packing"]["stop"] - first["packing"]["start"]] == [
        first["sample"] * 250 + token for token in range(first["packing"]["start"], first["packing"]["stop"])
    ]
