from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import (
    MDSWriter,
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
)
from tests.loading.processes import wait_until
from tests.servers import http_server, refused_port
from tests.tools.running import Outcome, run
from tests.tools.tuned import QUICK, streams, write_config, write_data

pytestmark = [
    pytest.mark.usefixtures("temporary"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


class Stubborn(StreamingDataModule):
    def build_dataloader(self, stage: Any, dataset: StreamingDataset) -> StreamingDataLoader:
        return StreamingDataLoader(dataset, batch_size=self.batch_size)


class Manifold(StreamingDataModule):
    def train_dataloader(self) -> Any:
        return [super().train_dataloader()] * 2


class Failing(StreamingDataModule):
    def transform(self, sample: dict[str, Any], stage: str, rng: np.random.Generator) -> Any:
        raise KeyError("label")


class FailingToCollate(StreamingDataModule):
    def collate(self, samples: list[Any]) -> Any:
        raise ValueError("these do not stack\nat all")


class Elsewhere(StreamingDataModule):
    def build_dataset(self, stage: Any, config: StreamingConfig) -> StreamingDataset:
        return StreamingDataset(remote="http://localhost:1/web", local="kept")


def refused(*args: object) -> Outcome:
    shown = run("tune", *args)
    assert (shown.code, shown.out) == (2, "")
    return shown


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--num-workers", "2,x"], "must be whole numbers with commas between"),
        (["--seconds", "0"], "must be a positive number"),
        (["--consumer-ms", "soon"], "must be a number of at least 0"),
        (["--consumer-ms", "-1"], "must be a number of at least 0"),
        (["--disk", "much"], "size must be a number"),
        (["--stage", "validate"], "there is no data.val, so there is no validation"),
        (["--stage", "sing"], "invalid choice"),
        (["--config", "no.yaml"], "there is no no.yaml"),
        (["--yaml", "--json"], "ask for one of them"),
        (["--batch-size", "400"], "an epoch of this data has no batch; with drop_last it must fill one"),
    ],
)
def test_what_cannot_be_tuned_is_refused(args: list[object], words: str, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    config = write_config(tmp_path / "run.yaml", {"streams": streams(tmp_path / "data")}, drop_last=True)
    assert words in refused("--config", config, *QUICK, *args).err


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("lightning.pytorch.demos.boring_classes.BoringDataModule", "BoringDataModule"),
        (
            "tests.tools.test_tune_failures.Stubborn",
            "num_workers=1 was asked for, but this data module's build_dataloader",
        ),
        ("tests.tools.test_tune_failures.Manifold", "this data module's train_dataloader gives a list"),
        ("tests.tools.test_tune_failures.Elsewhere", "this data module's build_dataset has it in"),
    ],
)
def test_data_modules_that_cannot_be_tuned_are_refused(module: str, words: str, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    config = write_config(tmp_path / "run.yaml", {"streams": streams(tmp_path / "data")}, module)
    assert words in refused("--config", config, *QUICK, "--num-workers", "1").err


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize(
    ("module", "words", "where"),
    [("Failing", "KeyError: 'label'", "transform"), ("FailingToCollate", "ValueError: these do not stack", "collate")],
)
def test_a_function_of_the_run_that_fails_is_told_in_the_first_line(
    module: str, words: str, where: str, workers: str, tmp_path: Path, temporary: Path
) -> None:
    write_data(tmp_path / "data")
    config = write_config(
        tmp_path / "run.yaml", {"streams": streams(tmp_path / "data")}, f"tests.tools.test_tune_failures.{module}"
    )
    first, second, *rest = refused("--config", config, *QUICK, "--num-workers", workers).err.splitlines()
    with_workers = f"reading with {workers} worker{'' if workers == '1' else 's'} failed"
    assert first == f"lightning-streaming tune: error: {with_workers}: {words}"
    assert second == "Traceback (most recent call last):"
    assert any(f"in {where}" in line for line in rest)
    assert not list(temporary.iterdir())


def test_a_store_that_does_not_answer_is_told(tmp_path: Path, temporary: Path) -> None:
    with refused_port() as port:
        train = {"remote": f"http://127.0.0.1:{port}/web", "download_retry": 0}
        assert (
            "data.train: could not download"
            in refused("--config", write_config(tmp_path / "run.yaml", train), *QUICK).err
        )
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(("told", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_nothing_is_left_of_a_run_that_is_told_to_end(
    told: signal.Signals, code: int, tmp_path: Path, temporary: Path
) -> None:
    with MDSWriter(out=tmp_path / "data", columns={"x": "bytes"}) as writer:
        writer.write({"x": bytes(500_000)})
    with http_server(tmp_path / "data", per_connection=20_000) as url:
        config = write_config(tmp_path / "run.yaml", {"remote": url})
        command = [sys.executable, "-m", "lightning_streaming", "tune", "--config", str(config)]
        with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)}) as process:
            try:
                assert wait_until(lambda: all(any(temporary.rglob(name)) for name in ("index.json", "*.part")), 60)
                process.send_signal(told)
                assert process.wait(15) == code
            finally:
                process.kill()
    assert not [path for path in temporary.iterdir() if "tune" in path.name]
