"""What a run waits for before its first batch is drawn for somebody who looks at a terminal; else the log is told."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_streaming import StreamingConfig, StreamingDataModule, StreamingDataset, waits
from lightning_streaming.reading.measures import Fetched
from lightning_streaming.trainer.datamodule import download_message, first_download_callback, progress_display
from tests.helpers import write_dataset
from tests.servers import http_server

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class Tiny(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch["id"].float().unsqueeze(1)).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(directory: Path, bar: Callback | None, **train: Any) -> None:
    data = StreamingDataModule(
        train=StreamingConfig(**{"remote": str(directory / "data"), "local": str(directory / "cache"), **train}),
        batch_size=4,
        num_workers=1,
    )
    Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False,
        callbacks=[bar] if bar else [], enable_progress_bar=bar is not None, default_root_dir=directory,
    ).fit(Tiny(), datamodule=data)  # fmt: skip


def written_to_a_terminal(do: Callable[[], object]) -> str:
    """What a process writes to its terminal, a fork of this one."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
        code = 1
        try:
            do()
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    written = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # how Linux tells that the other end is closed
            piece = b""
        if not piece:
            break
        written += piece
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    text = written.decode(errors="replace")
    assert status == 0, text
    return text


@pytest.mark.rotate(2)
@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar, None])
def test_a_terminal_is_shown_the_first_download(tmp_path: Path, bar: type[Callback] | None) -> None:
    write_dataset(tmp_path / "data")
    text = written_to_a_terminal(lambda: fit(tmp_path, None if bar is None else bar()))
    assert bool(re.search(r"fetching \d of 6 shards", text)) is (bar is not None)
    if bar is not None:
        before, _, after = text.rpartition("fetching ")
        assert "Epoch 0" in before + after
        assert "8/8" in after, "Lightning's own bar goes on to its end"


def test_a_file_is_shown_nothing_of_a_short_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "data")
    fit(tmp_path, TQDMProgressBar())
    told = capsys.readouterr()
    assert "8/8" in told.out
    assert "fetching" not in told.out + told.err


def lingering(id: int) -> bool:  # noqa: A002  a condition is told of columns by their names
    """A condition that takes its time."""
    time.sleep(0.03)
    return id >= 0


@pytest.mark.nightly
@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar, None])
def test_a_terminal_is_shown_how_far_a_selection_is(tmp_path: Path, bar: type[Callback] | None) -> None:
    write_dataset(tmp_path / "data")
    text = written_to_a_terminal(lambda: fit(tmp_path, None if bar is None else bar(), selection={"where": lingering}))
    found = re.search(r"evaluating where=lingering of data\.train: +0%", text)
    assert bool(found) is (bar is not None), text


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the log is told, where waits count as long after a moment."""
    monkeypatch.setattr(waits, "_FIRST_LINE", 0.1)
    monkeypatch.setattr(waits, "_NEXT_LINE", 0.2)
    caplog.set_level("INFO", "lightning_streaming.waits")
    return caplog


@pytest.mark.nightly
@pytest.mark.parametrize("bar", [TQDMProgressBar, None])
def test_the_log_is_told_of_each_wait_where_there_is_no_terminal(
    tmp_path: Path, bar: type[Callback] | None, soon: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "data")
    with http_server(tmp_path / "data", latency=0.3) as url:
        fit(tmp_path, None if bar is None else bar(), remote=url, selection={"where": lingering})
        fit(tmp_path, None if bar is None else bar(), remote=url, local=str(tmp_path / "other"))
    told = [one.getMessage() for one in soon.records if one.name == "lightning_streaming.waits"]
    assert any(one.startswith("reading indexes: 0 of 1 datasets, after ") for one in told)
    assert any(
        re.fullmatch(r"evaluating where=lingering of data.train: 0 of 29 samples, after \d s", one) for one in told
    )
    assert any(one.startswith("fetching ") and "of 6 shards" in one for one in told)
    assert "fetching" not in capsys.readouterr().err


def test_of_the_ranks_of_a_node_the_first_one_tells(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    assert first_download_callback(trainer) is not None
    assert (progress_display(trainer).lines, progress_display(trainer).bars) == (True, False)
    second = cast("Trainer", SimpleNamespace(is_global_zero=False, local_rank=1, progress_bar_callback=None))
    assert first_download_callback(second) is None
    other_node = cast("Trainer", SimpleNamespace(is_global_zero=False, local_rank=0, progress_bar_callback=None))
    assert (progress_display(other_node).lines, progress_display(other_node).bars) == (True, False)


def test_a_dataset_without_a_trainer_draws_nothing(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data")
    text = written_to_a_terminal(
        lambda: len(StreamingDataset(remote=str(tmp_path / "data"), batch_size=4, selection={"where": lingering}))
    )
    assert not text


def test_the_words_tell_shards_bytes_and_rate() -> None:
    assert download_message(Fetched(3, 0, 812, 0, 0.5)) == "fetching 3 of 812 shards"
    assert (
        download_message(Fetched(3, 2, 1812, 280 << 20, 2.0))
        == "fetching 3 of 1,812 shards: 2 here, 280.0 MB, 140.0 MB/s"
    )
