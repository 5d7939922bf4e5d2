"""An evaluation on several ranks finds what one rank finds, to the last bit, whatever the metric adds up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_streaming import (
    KeyedBatch,
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingStateCallback,
)
from lightning_streaming.distributed import SampleKeys, all_gather_samples
from lightning_streaming.errors import ConfigError
from tests.forked_ranks import on_ranks
from tests.helpers import ids, make_dataset, write_dataset

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*use of fork.*",
    "ignore:It is recommended to use .*sync_dist=True",
)


class Scorer(LightningModule):
    """A model whose metric is a mean of many digits: any other order, or one sample more, makes it another number."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[torch.Tensor] = []
        self.keys: list[SampleKeys] = []
        self.count = 0
        self.metric = ""

    def on_validation_epoch_start(self) -> None:
        self.scores, self.keys = [], []

    def validation_step(self, batch: KeyedBatch, batch_idx: int) -> None:
        # Division is exact in any batch, as functions that come in vectors of eight need not be.
        self.scores.append(1 / (batch.batch["id"].float() + 3))
        self.keys.append(batch.keys)

    def on_validation_epoch_end(self) -> None:
        scores = all_gather_samples(self.scores, self.keys)
        self.count = len(scores)
        self.metric = float(scores.mean()).hex()
        self.log("score", scores.mean())


def evaluate(case: dict[str, Any], **trainer: Any) -> tuple[int, str, int]:
    """Validate as a case says: data, batch_size, and maybe workers, shuffle and limit.

    Returns:
        How many samples the metric is of, its digits, and the batches that this rank has seen.
    """
    model = Scorer()
    datamodule = StreamingDataModule(
        val=StreamingConfig(remote=case["data"], shuffle=case.get("shuffle", False)),
        batch_size=case["batch_size"],
        num_workers=case.get("workers", 0),
        return_keys=["val"],
        return_valid_mask=["val"],
    )
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    limit = {"limit_val_batches": case["limit"]} if "limit" in case else {}
    Trainer(**{**settings, "devices": 1, **limit, **trainer}).validate(model, datamodule, verbose=False)
    return model.count, model.metric, len(model.keys)


RANKS = 2


def _evaluate_all(cases: list[dict[str, Any]]) -> list[tuple[int, str, int]]:
    """What this rank finds in each case."""
    return [evaluate(case, devices=RANKS, strategy="ddp") for case in cases]


def test_two_ranks_find_the_metric_of_one(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"samples": 29, "batch_size": 4},
        {"samples": 29, "batch_size": 4, "workers": 2},
        {"samples": 29, "batch_size": 3, "shuffle": True},
        {"samples": 28, "batch_size": 7},
        {"samples": 5, "batch_size": 4},
        {"samples": 1, "batch_size": 4},
        {"samples": 29, "batch_size": 4, "limit": 3},
    ]
    for case in cases:
        case["data"] = str(tmp_path / f"data{case['samples']}")
        if not Path(case["data"]).exists():
            write_dataset(Path(case["data"]), case["samples"])
    first, second = on_ranks(_evaluate_all, cases, meeting=tmp_path / "ranks", count=RANKS)
    assert first == second, "ranks agree, and had as many batches"
    for case, (count, metric, _) in zip(cases, first, strict=True):
        alone = {**case, **({"limit": RANKS * case["limit"]} if "limit" in case else {})}
        expected_count, expected, _ = evaluate(alone)
        assert (count, metric) == (expected_count, expected), case
        assert count == (RANKS * 4 * 3 if "limit" in case else case["samples"])


class _Seen(LightningModule):
    """Keeps the batches of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch)
        loss: torch.Tensor = self.layer(torch.ones(1, 1)).sum()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)
        self.log("one", 1.0)  # for which Lightning infers the batch size

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trainer(**settings: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**quiet, "accelerator": "cpu", "devices": 1, "max_epochs": 1, **settings})


def _predicted(model: LightningModule, loader: StreamingDataLoader) -> list[Any]:
    batches = _trainer(callbacks=[StreamingStateCallback()]).predict(model, loader)
    assert batches is not None
    return batches


def test_each_stage_has_the_labels_it_asked_for(tmp_path: Path) -> None:
    config = StreamingConfig(remote=str(write_dataset(tmp_path / "data")))
    datamodule = StreamingDataModule(
        train=config,
        val=config,
        test=config,
        batch_size=8,
        return_keys=["train", "val"],
        return_valid_mask=["val", "test"],
    )
    model = _Seen()
    _trainer(limit_val_batches=0, limit_train_batches=1).fit(model, datamodule)
    _trainer(limit_val_batches=1).validate(model, datamodule, verbose=False)
    _trainer(limit_test_batches=1).test(model, datamodule, verbose=False)
    trained, validated, tested = model.batches
    assert [isinstance(batch, KeyedBatch) for batch in model.batches] == [True, True, False]
    assert [list(trained.batch), list(validated.batch), list(tested)] == [["id"], ["id", "valid"], ["id", "valid"]]


@pytest.mark.parametrize("stages", ["val", ["validate"], [True]])
def test_a_stage_that_does_not_exist_is_refused(stages: Any) -> None:
    for name in ("return_keys", "return_valid_mask"):
        with pytest.raises(ConfigError, match=f"{name} must be a list of stages"):
            StreamingDataModule(**{name: stages})


def test_a_loader_that_lightning_makes_anew_keeps_its_labels(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    model = _Seen()
    model.predict_step = lambda batch, batch_idx: batch  # type: ignore[method-assign]
    loader = StreamingDataLoader(make_dataset(root), fixed_epoch=True, return_keys=True, return_valid_mask=True)
    first, second = (_predicted(model, loader) for _ in range(2))
    assert all(isinstance(batch, KeyedBatch) and batch.batch["valid"].all() for batch in first)
    assert ids(batch for batch, _ in first) == ids(batch for batch, _ in second)
