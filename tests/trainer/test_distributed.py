"""Real processes training together: they share each epoch, and go on in other numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.harness import EPOCHS, TRAIN_SAMPLES, Run, write_data

ALL_SAMPLES = sum(TRAIN_SAMPLES.values())


def train(**settings: Any) -> list[dict[str, Any]]:
    """Run :mod:`tests.trainer.ddp_run` and give each rank's report."""
    directory = Path(settings["report"])
    directory.mkdir()
    subprocess.run(
        [sys.executable, "-m", "tests.trainer.ddp_run", json.dumps(settings)],
        check=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
        capture_output=True,
    )
    return [
        json.loads((directory / f"rank{rank}.json").read_text())
        for rank in range(settings.get("reports", settings["devices"]))
    ]


def drawn(reports: list[dict[str, Any]], epoch: int) -> list[int]:
    return [sample for report in reports for of_epoch, sample in report["seen"] if of_epoch == epoch]


def test_two_ranks_share_each_epoch_and_have_equally_many_batches(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    reports = train(data=str(data), report=str(tmp_path / "run"), devices=2, strategy="ddp", batch_size=2)
    assert reports[0]["batches"] == reports[1]["batches"] == "8"
    for epoch in range(EPOCHS):
        counts = Counter(drawn(reports, epoch))
        # 29 samples on 2 ranks: one is read twice so that both have 15.
        assert len(counts) == ALL_SAMPLES
        assert counts.total() == ALL_SAMPLES + 1


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"devices": 2, "strategy": "ddp", "batch_size": 2}, {"devices": 1, "batch_size": 3}),
        ({"devices": 1, "batch_size": 3, "workers": 2}, {"devices": 2, "strategy": "ddp", "batch_size": 2}),
    ],
    ids=["2 ranks to 1", "1 rank to 2"],
)
def test_resuming_on_other_ranks_repeats_and_skips_nothing(
    then: dict[str, Any], now: dict[str, Any], tmp_path: Path
) -> None:
    data = str(write_data(tmp_path / "data"))
    whole, _ = Run(data=Path(data), directory=tmp_path, batch_size=1).fit()
    ckpt_path = str(tmp_path / "saved.ckpt")
    before = train(data=data, report=str(tmp_path / "before"), stop_at=["on_train_batch_end", 3, ckpt_path], **then)
    after = train(data=data, report=str(tmp_path / "after"), ckpt_path=ckpt_path, **now)
    read_before, read_after = drawn(before, 0), drawn(after, 0)
    padding = len(read_before) + len(read_after) - ALL_SAMPLES
    assert 0 <= padding < now["devices"]
    in_order = [sample for epoch, sample in whole.seen if epoch == 0]
    assert set(read_before) == set(in_order[: len(read_before)])
    assert set(read_after) - set(in_order[len(read_before) :]) <= set(read_before), "only padding is read again"
    assert set(read_before + read_after) == set(in_order)
    for epoch in range(1, EPOCHS):
        assert set(drawn(after, epoch)) == set(in_order)
        assert {str(report["steps"][str(epoch)]) for report in after} == {after[0]["batches"]}


def test_processes_that_lightning_spawns_know_their_rank(tmp_path: Path) -> None:
    # What spawned ranks have seen stays in them; the checkpoint that rank 0 writes tells how far both have come.
    data, report = write_data(tmp_path / "data"), tmp_path / "run"
    train(data=str(data), report=str(report), devices=2, strategy="ddp_spawn", batch_size=2, save_every=5, reports=1)
    checkpoint = torch.load(report / "last.ckpt", weights_only=True)
    state = checkpoint["callbacks"]["lightning_streaming.StreamingStateCallback"]
    assert state["trainer"] == {"epoch": 2, "batches": 4, "batches_in_epoch": 8}
    assert state["loaders"]["train"]["sample_in_epoch"] == 4 * 4


def test_tensor_parallel_ranks_read_the_same_samples(tmp_path: Path) -> None:
    data = str(write_data(tmp_path / "data"))
    first, second = train(
        data=data, report=str(tmp_path / "run"), devices=2, strategy="tensor_parallel", batch_size=4,
        trainer={"max_epochs": 1},
    )  # fmt: skip
    assert first["seen"] == second["seen"]
    assert len({sample for _, sample in first["seen"]}) == ALL_SAMPLES
