"""What the monitor tells the loggers, and what it advises when the fit ends."""

from __future__ import annotations

import csv
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_streaming import Stream, StreamingDataLoader, StreamingMonitor, StreamingStateCallback, World
from lightning_streaming.errors import ConfigError
from lightning_streaming.logs import LoaderStatistics, WaitTimes
from lightning_streaming.trainer.monitor import LoadingSetup, advice
from lightning_streaming.trainer.rank_waits import RankWait, rank_metrics, straggler
from tests.forked_ranks import on_ranks
from tests.helpers import ids, make_dataset, make_loader, write_dataset
from tests.phased_data import phased_dataset, phased_train, write_streams
from tests.servers.stores import HttpStore

NAMES = {
    "wait_ms",
    "wait_download_ms",
    "wait_decompress_ms",
    "wait_decode_ms",
    "wait_queue_ms",
    "wait_start_ms",
    "wait_share",
    "ready_share",
    "step_ms",
    "samples_per_s",
    "global_samples_per_s",
    "bytes_per_s",
    "fetched_bytes_per_s",
    "shards_opened",
    "cache_hits",
    "bad_samples",
    "shards_open",
}
"""Of each loader, beside its streams."""


class Model(LightningModule):
    """A model that takes any batch, and logs something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(torch.ones(1, 1)).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    directory: Path, loaders: Any, model: Model | None = None, ckpt_path: Path | None = None, **trainer: Any
) -> Trainer:
    """Train with a monitor; a CSVLogger writes every step under ``directory``."""
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": CSVLogger(directory, name="", version="run"),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "callbacks": [StreamingMonitor(), StreamingStateCallback()],
    }
    fitting = Trainer(**{**settings, **trainer})
    fitting.fit(model or Model(), loaders, ckpt_path=ckpt_path)
    return fitting


def logged(directory: Path, prefix: str = "data/") -> list[dict[str, float]]:
    """The rows that a CSVLogger wrote of names like these, each with its step."""
    with (directory / "run" / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if any(name.startswith(prefix) for name in row)]


def slow(sample: Any) -> Any:
    """A transform that takes a hundredth of a second."""
    time.sleep(0.01)
    return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_a_logger_holds_every_number_at_the_steps_of_the_trainer(tmp_path: Path, workers: int) -> None:
    for number, name in enumerate("ab"):
        write_dataset(tmp_path / name, 20, first_id=1000 * number)
    streams = {name: Stream(remote=str(tmp_path / name)) for name in "ab"}
    fit(tmp_path, make_loader(streams=streams, workers=workers), log_every_n_steps=2)
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [row["step"] for row in logged(tmp_path, "loss")] == [1, 3, 5, 7, 9]
    wanted = {f"data/{name}" for name in (*NAMES, "stream/a", "stream/b")}
    assert all(wanted <= row.keys() for row in rows)
    assert [row["data/stream/a"] + row["data/stream/b"] for row in rows] == [8] * 5
    assert sum(row["data/stream/b"] for row in rows) == 20
    assert sum(row["data/shards_opened"] for row in rows) == sum(row["data/cache_hits"] for row in rows) > 0
    for row in rows:
        parts = sum(row[f"data/wait_{part}_ms"] for part in WaitTimes._fields)
        assert row["data/wait_ms"] == pytest.approx(parts)
        assert 0 < row["data/wait_share"] < 1
        assert row["data/global_samples_per_s"] == row["data/samples_per_s"] > 0
        assert row["data/bytes_per_s"] > 0
        assert row["data/shards_open"] > 0


def test_several_loaders_are_told_apart(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", 20)
    loaders = {
        "text": make_loader(root),
        "plain": torch.utils.data.DataLoader(range(5)),  # type: ignore[arg-type]  # a sequence is as good
        "half": make_loader(root, world=World(num_nodes=1, ranks_per_node=2, rank=1)),
    }
    fit(tmp_path, loaders, limit_train_batches=2)
    first = logged(tmp_path)[0]
    names = {name for name in first if name.startswith("data/")}
    assert names == {f"data/{loader}/{name}" for loader in ("text", "half") for name in (*NAMES, "stream/0")}
    assert first["data/half/global_samples_per_s"] == 2 * first["data/half/samples_per_s"]


def test_with_accumulation_every_optimizer_step_is_logged_once(tmp_path: Path) -> None:
    fit(tmp_path, make_loader(write_dataset(tmp_path / "data", 24)), accumulate_grad_batches=2)
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["data/stream/0"] for row in rows] == [8, 8, 8]


def test_after_a_resume_it_counts_what_this_run_reads(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", 24)
    fit(tmp_path / "first", make_loader(root), max_steps=4).save_checkpoint(tmp_path / "saved.ckpt")
    fit(tmp_path / "second", make_loader(root), ckpt_path=tmp_path / "saved.ckpt")
    assert [row["step"] for row in logged(tmp_path / "first")] == [0, 1, 2, 3]
    assert [(row["step"], row["data/stream/0"]) for row in logged(tmp_path / "second")] == [(4, 4), (5, 4)]


class Reloading(Model):
    """A model that makes its train loader anew for every epoch."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def train_dataloader(self) -> StreamingDataLoader:
        return StreamingDataLoader(make_dataset(self.root))


def test_loaders_that_are_made_anew_are_counted_on(tmp_path: Path) -> None:
    model = Reloading(write_dataset(tmp_path / "data", 24))
    fit(tmp_path, None, model, max_epochs=3, reload_dataloaders_every_n_epochs=1, log_every_n_steps=5)
    assert [row["data/stream/0"] for row in logged(tmp_path)] == [20, 20, 20]


def test_without_a_logger_or_a_streaming_loader_nothing_happens(tmp_path: Path) -> None:
    plain: Any = torch.utils.data.DataLoader(range(3))  # type: ignore[arg-type]  # a sequence is as good
    fit(tmp_path, make_loader(write_dataset(tmp_path / "data", 8)), logger=False)
    fit(tmp_path, plain, logger=False, callbacks=[StreamingMonitor()])
    assert not list(tmp_path.rglob("metrics.csv"))


def test_one_line_of_advice_ends_a_fit_that_waited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(tmp_path, make_loader(write_dataset(tmp_path / "data", 12), transform=slow), logger=False)
    lines = [message for message in caplog.messages if "Waited for the data of 'train'" in message]
    assert len(lines) == 1
    assert "mostly for reading, decoding and collating" in lines[0]
    assert "num_workers=1 or more" in lines[0]


class Validating(Model):
    """A model whose validation takes long, and that knows how long it was trained."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.seconds = 0.0

    def on_train_start(self) -> None:
        self.seconds -= time.perf_counter()

    def on_train_end(self) -> None:
        self.seconds += time.perf_counter()

    def val_dataloader(self) -> StreamingDataLoader:
        return make_loader(self.root, loader={"fixed_epoch": True})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.3)


def test_validation_is_not_taken_for_training(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", 8)
    model = Validating(root)
    fit(tmp_path, make_loader(root), model, max_epochs=2, num_sanity_val_steps=0)
    training = sum(row["data/stream/0"] / row["data/samples_per_s"] for row in logged(tmp_path))
    assert training < model.seconds - 0.6  # of the 1.2 that were slept, half of them after the last row


SETUP = LoadingSetup(name="train", num_workers=2, persistent_workers=False)


@pytest.mark.parametrize(
    ("wait", "setup", "says"),
    [
        (WaitTimes(download=3.0, decode=0.8), SETUP, "mostly for downloads (79% of it): raise predownload"),
        (WaitTimes(decompress=3.8), SETUP, "mostly for decompression (100% of it): raise predownload, raise num_wor"),
        (WaitTimes(decode=3.8), SETUP, "raise num_workers, read fewer columns="),
        (WaitTimes(queue=3.8), SETUP, "no more workers than the machine has cores"),
        (WaitTimes(start=3.8), SETUP, "persistent_workers=True"),
        (
            WaitTimes(start=3.8),
            LoadingSetup(name="train", num_workers=2, persistent_workers=True),
            "with a larger epoch_size",
        ),
        (
            WaitTimes(decode=3.8),
            LoadingSetup(name="train", num_workers=0, persistent_workers=False),
            "num_workers=1 or more",
        ),
    ],
)
def test_advice_names_the_reason_and_the_way_out(wait: WaitTimes, setup: LoadingSetup, says: str) -> None:
    line = advice([RankWait(LoaderStatistics(batches=10, wait=wait), 10.0)], setup)
    assert line is not None
    assert line.startswith("Waited for the data of 'train' 38% of the training time (3.8 of 10.0 s), mostly for ")
    assert says in line
    assert "\n" not in line


@pytest.mark.parametrize("statistics", [LoaderStatistics(), LoaderStatistics(batches=9, wait=WaitTimes(decode=0.9))])
def test_there_is_no_advice_for_a_run_that_did_not_wait(statistics: LoaderStatistics) -> None:
    assert advice([RankWait(statistics, 10.0)], SETUP) is None


def test_the_phase_of_each_step_is_logged_and_each_border_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = phased_train(write_streams(tmp_path))
    with caplog.at_level(logging.INFO):
        fit(tmp_path, StreamingDataLoader(phased_dataset(train, 8)), max_steps=20, max_epochs=-1)
    # 52 samples are of phase 0, up to 84 of phase 1, up to 120 of phase 2: as the first sample of each batch is.
    first = [8 * step % 120 for step in range(20)]
    assert [row["data/phase"] for row in logged(tmp_path)] == [(at >= 52) + (at >= 84) for at in first]
    lines = [message for message in caplog.messages if "reading phase" in message]
    assert lines == [
        "train: reading phase 'broad', number 0, at epoch 0, sample 0.",
        "train: reading phase 'ramp', number 1, at epoch 0, sample 56.",
        "train: reading phase 'anneal', number 2, at epoch 0, sample 88.",
        "train: reading phase 'broad', number 0, at epoch 1, sample 0.",
    ]


def test_a_run_that_goes_on_within_a_phase_tells_which(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = phased_train(write_streams(tmp_path))
    path = tmp_path / "saved.ckpt"
    fit(tmp_path / "first", StreamingDataLoader(phased_dataset(train, 8)), max_steps=9).save_checkpoint(path)
    with caplog.at_level(logging.INFO):
        loader = StreamingDataLoader(phased_dataset(train, 4))
        fit(tmp_path / "second", loader, ckpt_path=path, max_steps=12)
    assert [row["data/phase"] for row in logged(tmp_path / "second")] == [1, 1, 1]
    assert "train: reading phase 'ramp', number 1, at epoch 0, sample 72." in caplog.messages


def _monitored(directory: str, data: str) -> None:
    """Train on one of several ranks; the last of them decodes slowly."""
    is_slow = int(os.environ["RANK"]) == 1
    loader = make_loader(Path(data), transform=slow if is_slow else None)
    callbacks = [StreamingMonitor(every_rank=True), StreamingStateCallback()]
    fit(Path(directory), loader, devices=2, strategy="ddp", callbacks=callbacks, log_every_n_steps=2)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_rank_zero_logs_the_waits_of_every_rank(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", 32)
    on_ranks(_monitored, str(tmp_path), str(data), meeting=tmp_path / "ranks", count=2)
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [1, 3]
    for row in rows:
        shares = [row[f"data/rank_wait_share/{rank}"] for rank in range(2)]
        assert row["data/rank_wait_share/max"] == shares[1] > shares[0] == row["data/wait_share"]
        assert row["data/rank_wait_share/mean"] == pytest.approx(sum(shares) / 2)
        assert row["data/slowest_rank"] == 1
        assert row["data/rank_ready_share/1"] == 0
        assert row["data/rank_ready_share/0"] == row["data/ready_share"]


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_one_rank_alone_has_the_metrics_of_ranks(tmp_path: Path) -> None:
    callbacks = [StreamingMonitor(every_rank=True)]
    fit(tmp_path, make_loader(write_dataset(tmp_path / "data", 8)), callbacks=callbacks)
    assert all(row["data/slowest_rank"] == 0 for row in logged(tmp_path))


def _wait(share: float, **statistics: Any) -> RankWait:
    return RankWait(LoaderStatistics(batches=10, wait=WaitTimes(download=10 * share), **statistics), 10.0)


def test_advice_names_the_rank_and_the_stream_to_blame() -> None:
    slowest = _wait(0.4, download_per_stream={"web": 1.0, "books": 3.0})
    ranks = [_wait(0.01), _wait(0.02), slowest, _wait(0.03)]
    assert straggler(ranks) == 2
    line = advice(ranks, SETUP)
    assert line is not None
    assert line.startswith(
        "Waited for the data of 'train' 40% of the training time (4.0 of 10.0 s) on rank 2 (the median rank: 2%), "
        "mostly for downloads (100% of it, 75% of that for stream 'books'): raise predownload"
    )
    alike = advice([_wait(0.4), _wait(0.3), _wait(0.35)], SETUP)
    assert alike is not None
    assert "rank" not in alike
    assert rank_metrics(ranks)["slowest_rank"] == 2


def test_waits_for_downloads_are_counted_by_stream(tmp_path: Path, http_store: HttpStore) -> None:
    for name in ("far", "near"):
        write_dataset(http_store.root / name, 24)
    streams = {
        "far": Stream(remote=f"{http_store.url}/far", local=str(tmp_path / "far")),
        "near": Stream(remote=str(http_store.root / "near")),
    }
    fit(tmp_path, make_loader(streams=streams, predownload=1))
    rows = logged(tmp_path)
    assert sum(row["data/stream_download_ms/far"] for row in rows) > 0
    assert all(row["data/stream_download_ms/near"] == 0 for row in rows if "data/stream_download_ms/near" in row)
    for row in rows:
        assert row.get("data/stream_download_ms/far", 0) == pytest.approx(row["data/wait_download_ms"])


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_repeated_on_request_and_such_a_run_is_not_saved(tmp_path: Path, workers: int) -> None:
    root = write_dataset(tmp_path / "data", 40)
    whole, repeated = make_loader(root), make_loader(root, workers=workers, debug={"repeat_batches": 3})
    first = ids(whole)
    assert ids(repeated) == [first[number % 3] for number in range(10)]
    assert repeated.statistics().samples == 12
    with pytest.raises(ConfigError, match=r"debug.repeat_batches repeats batches .* cannot be saved"):
        repeated.state_dict()
    popped = [batch.pop("id").tolist() for batch in make_loader(root, debug={"repeat_batches": 1})]
    assert popped == [first[0]] * 10
    few = make_loader(root, debug={"repeat_batches": 99})
    assert ids(few) == first
    trainer = fit(tmp_path, make_loader(root, debug={"repeat_batches": 1}))
    assert trainer.global_step == 10
    assert all(row["data/step_ms"] > 0 for row in logged(tmp_path))
    with pytest.raises(ConfigError, match=r"Trainer\(enable_checkpointing=False\)"):
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
    assert not (tmp_path / "saved.ckpt").exists()
