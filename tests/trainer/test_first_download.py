"""What the first batch waits for is shown to somebody who looks at a terminal, and to nobody else."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_streaming import StreamingConfig, StreamingDataModule
from lightning_streaming.loading.arrivals import Fetched
from lightning_streaming.trainer.first_download import words_of
from tests.helpers import write_dataset

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


def fit(directory: Path, bar: Callback | None) -> None:
    data = StreamingDataModule(
        train=StreamingConfig(remote=str(directory / "data"), local=str(directory / "cache")),
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


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar, None])
def test_a_terminal_is_shown_the_first_download(tmp_path: Path, bar: type[Callback] | None) -> None:
    write_dataset(tmp_path / "data")
    text = written_to_a_terminal(lambda: fit(tmp_path, None if bar is None else bar()))
    assert bool(re.search(r"fetching \d of 6 shards", text)) is (bar is not None)
    if bar is not None:
        before, _, after = text.rpartition("fetching ")
        assert "Epoch 0" in before + after
        assert "8/8" in after, "Lightning's own bar goes on to its end"


def test_a_file_is_shown_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "data")
    fit(tmp_path, TQDMProgressBar())
    told = capsys.readouterr()
    assert "8/8" in told.out
    assert "fetching" not in told.out + told.err


def test_the_words_tell_shards_bytes_and_rate() -> None:
    assert words_of(Fetched(3, 0, 812, 0, 0.5)) == "fetching 3 of 812 shards"
    assert words_of(Fetched(3, 2, 1812, 280 << 20, 2.0)) == "fetching 3 of 1,812 shards: 2 here, 280.0 MB, 140.0 MB/s"
