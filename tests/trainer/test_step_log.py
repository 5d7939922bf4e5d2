"""A log of steps tells which samples are in the weights, whatever was lost, and shows every difference of two runs."""

from __future__ import annotations

import errno
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer

from lightning_streaming import (
    MDSWriter,
    SampleKey,
    StepLog,
    Stream,
    StreamingConfig,
    StreamingDataModule,
    StreamingDataset,
)
from lightning_streaming.dataset.line_log import LineLog
from lightning_streaming.dataset.step_lines import read_step_lines
from lightning_streaming.errors import ConfigError, FormatError, StorageError, UnsupportedError
from lightning_streaming.logs import PartKey, read_step_log
from tests.helpers import assert_error
from tests.trainer.harness import TRAIN_SAMPLES, Recorder, Run, SaveAtEveryStep, SaveThenStop, with_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def _seen(log: Path, data: Path) -> list[tuple[int, int]]:
    dataset = StreamingDataset(
        streams={name: Stream(remote=str(data / name)) for name in TRAIN_SAMPLES}, batch_size=1, shuffle=True
    )
    return [(key.epoch, dataset.restore_sample(key)["id"]) for key in read_step_log(log)]


@pytest.mark.rotate(1)
@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (2, 1), (0, 2)])
def test_a_run_that_lost_steps_and_went_on_has_the_log_of_one_that_did_not(
    data: Path, tmp_path: Path, workers: int, accumulate: int
) -> None:
    run = with_trainer(Run(data=data, directory=tmp_path, workers=workers), accumulate_grad_batches=accumulate)
    model, _ = run.fit(callbacks=[StepLog(tmp_path / "whole")])
    assert _seen(tmp_path / "whole", data) == model.seen
    saver = SaveAtEveryStep(tmp_path)
    run.fit(callbacks=[saver, StepLog(tmp_path / "parts")], max_steps=7)
    assert len(read_step_log(tmp_path / "parts")) < len(read_step_log(tmp_path / "whole"))
    resumed, _ = run.fit(ckpt_path=saver.saved[3 * accumulate], callbacks=[StepLog(str(tmp_path / "parts"))])
    assert resumed.seen == model.seen
    assert read_step_log(tmp_path / "parts") == read_step_log(tmp_path / "whole")


def test_other_batches_change_nothing_and_the_model_gets_what_it_always_got(data: Path, tmp_path: Path) -> None:
    run = Run(data=data, directory=tmp_path)
    run.fit(callbacks=[StepLog(tmp_path / "fours")])
    model, _ = Run(data=data, directory=tmp_path, batch_size=3).fit(callbacks=[StepLog(tmp_path / "threes")])
    assert type(model) is Recorder
    assert read_step_log(tmp_path / "fours") == read_step_log(tmp_path / "threes")
    run.fit(callbacks=[StepLog(tmp_path / "less")], limit_train_batches=3)
    assert read_step_log(tmp_path / "less") != read_step_log(tmp_path / "fours")


class _OfTokens(Recorder):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.pending += batch["input_ids"].flatten().tolist()
        return self.loss({"id": batch["input_ids"].flatten()})


@dataclass(frozen=True, kw_only=True)
class _OfPacks(Run):
    def datamodule(self) -> StreamingDataModule:
        config = StreamingConfig(remote=str(self.data), shuffle=True, num_canonical_nodes=2, packing=self.order)
        return StreamingDataModule(train=config, batch_size=self.batch_size)


def _documents(root: Path) -> Path:
    with MDSWriter(out=str(root), columns={"tokens": "ndarray:int32"}, size_limit=300) as writer:
        for number, length in enumerate([5, 31, 8, 3, 12, 40, 6, 7, 22, 9]):
            writer.write({"tokens": (1000 * (number + 1) + np.arange(length)).astype(np.int32)})
    return root


@pytest.mark.rotate(1)
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_parts_of_documents_are_told_apart_whatever_the_batch_size(tmp_path: Path, method: str) -> None:
    def run(batch_size: int) -> _OfPacks:
        pack = {"column": "tokens", "capacity": 8, "method": method}
        return _OfPacks(data=data, directory=tmp_path, batch_size=batch_size, validate=False, order=pack)

    data = _documents(tmp_path / "documents")
    model, _ = run(1).fit(callbacks=[StepLog(tmp_path / "1")], model=_OfTokens)
    whole = read_step_log(tmp_path / "1")
    assert len(set(whole)) == len(whole)
    found = Counter((key.epoch, key.first_token if isinstance(key, PartKey) else 0) for key in whole)
    assert found[0, 0] == found[1, 0] == 10, "documents"
    first_tokens = Counter(key.first_token for key in whole if isinstance(key, PartKey))
    assert first_tokens
    assert {*first_tokens} <= {token % 1000 for token in model.seen}
    for batch_size in (2, 4):
        run(batch_size).fit(callbacks=[StepLog(tmp_path / f"{batch_size}")], model=_OfTokens)
        assert read_step_log(tmp_path / f"{batch_size}") == whole
    saver = SaveAtEveryStep(tmp_path)
    run(2).fit(callbacks=[saver, StepLog(tmp_path / "parts")], model=_OfTokens, max_steps=6)
    run(4).fit(callbacks=[StepLog(tmp_path / "parts")], model=_OfTokens, ckpt_path=saver.saved[3])
    assert read_step_log(tmp_path / "parts") == whole


class _Leaves(Recorder):
    """Goes on to the next epoch at the third batch of each."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:  # type: ignore[override]
        return -1 if batch_idx == 2 else None


class _Manual(Recorder):
    """Does not tell Lightning of its backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx).backward()  # type: ignore[no-untyped-call]
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        optimizer.step()


class _ManualWithOwnOptimizer(_Manual):
    """Steps an optimizer that Lightning does not wrap, so its global step stays 0."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:  # type: ignore[override]
        Recorder.training_step(self, batch, batch_idx).backward()  # type: ignore[no-untyped-call]
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.step()
        self.seen += self.pending
        self.pending = []


class _LeavesOutLosses(Recorder):
    """Returns no loss for the second batch of each epoch."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class _Fetches(Recorder):
    def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def test_what_the_model_leaves_out_is_not_in_the_log(data: Path, tmp_path: Path) -> None:
    model, _ = Run(data=data, directory=tmp_path).fit(callbacks=[StepLog(tmp_path / "log")], model=_Leaves)
    assert _seen(tmp_path / "log", data) == model.seen
    assert len(model.seen) == 3 * 2 * 4


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_batch_without_a_loss_is_not_in_the_log(data: Path, tmp_path: Path, accumulate: int) -> None:
    run = with_trainer(Run(data=data, directory=tmp_path), accumulate_grad_batches=accumulate, max_epochs=1)
    model, _ = run.fit(callbacks=[StepLog(tmp_path / "log")], model=_LeavesOutLosses)
    assert _seen(tmp_path / "log", data) == model.seen
    assert len(model.seen) == 29 - 4


def test_what_no_optimizer_step_took_is_left_out(data: Path, tmp_path: Path) -> None:
    run = with_trainer(Run(data=data, directory=tmp_path), accumulate_grad_batches=3)
    stop = SaveThenStop("on_train_batch_end", 5, tmp_path / "saved.ckpt")
    model, _ = run.fit(callbacks=[stop, StepLog(tmp_path / "log")])
    assert len(model.seen) == 12
    assert _seen(tmp_path / "log", data) == model.seen
    resumed, _ = run.fit(callbacks=[StepLog(tmp_path / "log")], ckpt_path=tmp_path / "saved.ckpt")
    assert _seen(tmp_path / "log", data) == resumed.seen


@pytest.mark.rotate(2)
@pytest.mark.parametrize("model", [Recorder, _Manual, _ManualWithOwnOptimizer])
def test_whoever_saves_at_a_batchs_end_finds_it_in_the_log(data: Path, tmp_path: Path, model: type[Recorder]) -> None:
    run, ckpt_path = Run(data=data, directory=tmp_path), tmp_path / "saved.ckpt"
    run.fit(callbacks=[SaveThenStop("on_train_batch_end", 3, ckpt_path), StepLog(tmp_path / "parts")], model=model)
    assert len(read_step_log(tmp_path / "parts")) == 12
    run.fit(callbacks=[StepLog(tmp_path / "parts")], model=model, ckpt_path=ckpt_path)
    run.fit(callbacks=[StepLog(tmp_path / "whole")], model=model)
    assert read_step_log(tmp_path / "parts") == read_step_log(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_model_that_fetches_batches_itself_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"of _Fetches: its training_step takes dataloader_iter .* drop"):
        Run(data=data, directory=tmp_path).fit(callbacks=[StepLog(tmp_path / "log")], model=_Fetches)
    assert not (tmp_path / "log").exists()


def test_a_log_that_cannot_be_written_is_an_error_that_names_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with assert_error(StorageError, option="dirpath", path=tmp_path / "file"):
        Run(data=data, directory=tmp_path).fit(callbacks=[StepLog(tmp_path / "file")])

    def disk_is_full(self: LineLog, line: Mapping[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LineLog, "write", disk_is_full)
    with assert_error(StorageError, option="dirpath", path=tmp_path / "log") as raised:
        Run(data=data, directory=tmp_path).fit(callbacks=[StepLog(tmp_path / "log")])
    assert "No space left on device" in str(raised.value)


def test_runs_are_in_turn_whatever_the_clocks_say(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, saver = Run(data=data, directory=tmp_path), SaveAtEveryStep(tmp_path)
    model, _ = run.fit(callbacks=[saver, StepLog(tmp_path / "log")])
    # A later run has a line on a rank that the next one does not have.
    _write(tmp_path / "log", (1, 5, len(saver.saved), []))
    monkeypatch.setattr(time, "time_ns", lambda: 3)
    run.fit(callbacks=[StepLog(tmp_path / "log")], ckpt_path=saver.saved[4])
    assert _seen(tmp_path / "log", data) == model.seen
    numbers = [json.loads(line)["run"] for line in (tmp_path / "log" / "rank0.jsonl").read_text().splitlines()]
    assert numbers == sorted(numbers)
    assert {*numbers} == {1, 6}


def _write(directory: Path, *lines: tuple[int, int, int, Sequence[int]], loader: str = "train") -> Path:
    """Lines of rank, run, batch, and positions; all of them are in the weights."""
    directory.mkdir(exist_ok=True)
    for rank, run, step, positions in lines:
        values: dict[str, Any] = {"run": run, "batch": step, "step": step, "loader": loader}
        values |= {"epoch": 0, "shuffle_seed": 9}
        values["samples"] = [[position, "a", 0, 10 * position, 0] for position in positions]
        with (directory / f"rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n" + json.dumps({"run": run, "taken": step + 1}) + "\n")
    return directory


def _positions(directory: Path, loader: str = "train") -> list[int]:
    return [key.position for key in read_step_log(directory, loader)]


def test_what_is_in_no_weights_any_more_is_left_out_on_all_ranks(tmp_path: Path) -> None:
    log = _write(tmp_path / "a", (0, 1, 0, [0]), (1, 1, 0, [1]), (0, 1, 1, [2]), (1, 1, 1, [3]), (1, 1, 2, [5]))
    assert _positions(log) == [0, 1, 2, 3, 5]
    with (log / "rank1.jsonl").open("a") as file:  # the rank that was ended last
        file.write((log / "rank1.jsonl").read_text().splitlines()[-2].replace('"batch": 2', '"batch": 3') + "\n")
    assert _positions(log) == [0, 1, 2, 3, 5], "no optimizer step is known to have taken batch 3"
    _write(log, (0, 2, 1, [2, 3]), (0, 2, 2, [4, 5]))
    assert _positions(log) == [0, 1, 2, 3, 4, 5]
    assert read_step_log(log)[4] == SampleKey(stream="a", shard=0, sample_index=40, epoch=0, position=4, shuffle_seed=9)


def test_what_was_read_twice_is_there_twice_but_ranks_that_read_the_same_count_once(tmp_path: Path) -> None:
    assert _positions(_write(tmp_path / "twice", (0, 1, 0, [0, 1]), (0, 2, 1, [1, 2]))) == [0, 1, 1, 2]
    assert _positions(_write(tmp_path / "ranks", (0, 1, 0, [0, 1]), (1, 1, 0, [0, 1]))) == [0, 1]


def test_loaders_are_told_apart_and_what_is_not_there_is_named(tmp_path: Path) -> None:
    log = _write(tmp_path / "log", (0, 1, 0, [0]), loader="text")
    _write(log, (0, 1, 0, [7]), loader="pictures")
    assert (_positions(log, "text"), _positions(log, "pictures")) == ([0], [7])
    with pytest.raises(ConfigError, match="train loader 'train'; loaders in it: pictures, text"):
        read_step_log(log)
    with pytest.raises(ConfigError, match="loaders in it: none"):
        read_step_log(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "line",
    [
        b'{"run": 1}',
        b'{"run": 1, "batch": 2, "step": 3, "loader": "\xff", "epoch": 0}',
        b'{"run": ' + b"1" * 5000 + b', "batch": 2, "step": 3, "loader": "a", "epoch": 0}',
        b'{"run": 1, "batch": 2, "values": [["loss", 1' + b"0" * 400 + b"]]}",
    ],
)
def test_a_damaged_line_is_an_error_of_its_file(tmp_path: Path, line: bytes) -> None:
    log = _write(tmp_path / "log", (0, 1, 0, [0]))
    (log / "rank1.jsonl").write_bytes(line + b"\n")
    with pytest.raises(FormatError, match=r"line 1 of .*rank1.jsonl is not one of a log of steps"):
        read_step_log(log)


@pytest.mark.parametrize("dirpath", ["", 3, None, b"log"])
def test_the_directory_of_a_log_is_a_path(dirpath: Any) -> None:
    with assert_error(ConfigError, option="dirpath"):
        StepLog(dirpath)


class _Logs(Recorder):
    """Logs metrics in every way, and remembers the losses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        self.log("both", loss * 2, on_step=True, on_epoch=True, prog_bar=True)
        self.log("plain", float(len(self.losses)))
        return {"loss": loss, "returned": torch.tensor(batch_idx), "text": "no number"}


@pytest.mark.rotate(1)
@pytest.mark.filterwarnings("ignore:You called `self.log")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_values_are_those_of_each_batch_whatever_the_accumulation(data: Path, tmp_path: Path, accumulate: int) -> None:
    run = with_trainer(Run(data=data, directory=tmp_path), accumulate_grad_batches=accumulate, max_epochs=2)
    log = StepLog(tmp_path / "log", values=["loss", "both", "both_step", "plain", "returned"])
    model, _ = run.fit(callbacks=[log], model=_Logs)
    assert isinstance(model, _Logs)
    lines = read_step_lines(tmp_path / "log")
    assert [line.step for line in lines.batches] == [
        epoch * -(-8 // accumulate) + batch // accumulate for epoch in range(2) for batch in range(8)
    ]
    values = [lines.values[line.run, line.rank, line.batch] for line in lines.batches]
    assert [value["loss"] for value in values] == pytest.approx(model.losses)
    assert [value["both"] for value in values] == pytest.approx([2 * loss for loss in model.losses])
    assert [value["both_step"] for value in values] == [value["both"] for value in values]
    assert [value["plain"] for value in values] == [*range(1, 17)]
    assert [value["returned"] for value in values] == [*range(8)] * 2


def test_a_loss_that_is_no_number_is_logged_and_a_name_without_value_is_warned_of(data: Path, tmp_path: Path) -> None:
    class Breaks(Recorder):
        def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().loss(batch) * (float("nan") if self.trainer.global_step == 1 else 1)

    run = with_trainer(Run(data=data, directory=tmp_path), max_steps=3)
    with pytest.warns(UserWarning, match="the first step has no value of typo;"):
        run.fit(callbacks=[StepLog(tmp_path / "log", values=["loss", "typo"])], model=Breaks)
    values = [line["loss"] for line in read_step_lines(tmp_path / "log").values.values()]
    assert [np.isnan(value) for value in values] == [False, True, True]
    run.fit(callbacks=[StepLog(tmp_path / "none", values=())])
    assert not read_step_lines(tmp_path / "none").values


@pytest.mark.parametrize("values", ["loss", [3], 3, [""]])
def test_values_are_a_list_of_names(values: Any) -> None:
    with assert_error(ConfigError, option="values"):
        StepLog("log", values=values)


class _LogsElsewhere(_Logs):
    """Logs other things under the same names: means of epochs, of validations, and a norm once per step."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        loss = Recorder.training_step(self, batch, batch_idx)
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("loss", torch.tensor(-7.0))
        self.log("norm", torch.tensor(-7.0), on_step=True)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("norm", float(len(self.losses)))


@pytest.mark.filterwarnings("ignore:You called `self.log")
def test_a_value_is_logged_with_the_batch_that_it_is_of_and_with_no_other(data: Path, tmp_path: Path) -> None:
    run = with_trainer(Run(data=data, directory=tmp_path), accumulate_grad_batches=4, max_epochs=2)
    log = StepLog(tmp_path / "log", values=["loss", "norm", "mean"])
    with pytest.warns(UserWarning, match="the first step has no value of mean;"):
        model, _ = run.fit(callbacks=[log], model=_LogsElsewhere)
    assert isinstance(model, _LogsElsewhere)
    lines = read_step_lines(tmp_path / "log")
    values = [lines.values[line.run, line.rank, line.batch] for line in lines.batches]
    assert [value["loss"] for value in values] == pytest.approx(model.losses)
    norms = {number: value["norm"] for number, value in enumerate(values) if "norm" in value}
    assert norms == {3: 4.0, 7: 8.0, 11: 12.0, 15: 16.0}
    assert {name for value in values for name in value} == {"loss", "norm"}
