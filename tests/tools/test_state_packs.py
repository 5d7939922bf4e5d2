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
    assert "--config run.yaml`" in alone.out
    (loader,) = run("state", "show", saved, "--json").json["loaders"].values()
    assert {one["this_epoch"] for one in loader["streams"]} == {None}
    told = refused("show", saved, *(word for name in LENGTHS for word in ("--data", f"{name}={data / name}")))
    assert "--config run.yaml" in told


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
