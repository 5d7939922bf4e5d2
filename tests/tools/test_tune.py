"""``lightning-streaming tune`` on real runs, and what it says where their own functions fail."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import LightningModule

from lightning_streaming import MDSWriter, StreamingConfig, StreamingDataLoader, StreamingDataModule, StreamingDataset
from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.commands import parser_of, read_run_files
from lightning_streaming.tools.runs.trace_run import trace_run
from lightning_streaming.tools.tuning.tune_run import tune_run
from lightning_streaming.units import parse_bytes
from tests.broken_data import write_broken_json
from tests.helpers import assert_error
from tests.reading.processes import wait_until
from tests.servers import HttpStore, http_server, refused_port
from tests.tools.running import Outcome, contents, run
from tests.tools.tuning.tuned import QUICK, SAMPLES, streams, write_config, write_data

pytestmark = [
    pytest.mark.usefixtures("temporary"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

_NOTE = re.compile(r"lightning-streaming tune: read with \d+ workers?")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        predicted: torch.Tensor = self.layer(batch["id"].float().unsqueeze(1))
        return predicted.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Marking(StreamingDataModule):
    """Leaves a file for each of its functions that was called."""

    def transform(self, sample: dict[str, Any], stage: str, rng: np.random.Generator) -> Any:
        Path(f"transformed-{stage}").touch()
        return sample

    def collate(self, samples: list[Any]) -> Any:
        Path("collated").touch()
        return super().collate(samples)


def bytes_of(root: Path, names: str) -> int:
    return sum(path.stat().st_size for path in root.rglob(names))


def tuned(*args: object) -> Any:
    shown = run("tune", *args, "--json")
    assert shown.code == 0
    assert all(_NOTE.fullmatch(line) for line in shown.err.splitlines())
    return shown.json


def test_data_in_place_is_measured_with_each_number_of_workers_and_left_as_it_was(
    tmp_path: Path, temporary: Path
) -> None:
    before = contents(write_data(tmp_path / "data"))
    config = write_config(
        tmp_path / "run.yaml", {"streams": streams(tmp_path / "data"), "debug": {"sample_log": "logs"}}
    )
    shown = tuned("--config", config, *QUICK)
    assert [one["num_workers"] for one in shown["measured"]] == [0, 1]
    for one in shown["measured"]:
        assert min(one["samples_per_second"], one["bytes_per_second"], one["first_batch"]) > 0
        assert one["samples_per_second"] == pytest.approx(4 * one["batches_per_second"])
        assert 0 < sum(one["wait"].values()) < 1.01
        assert one["step_waits"] is None
    assert shown["link"] is None
    assert list(shown["recommended"]) == ["num_workers"]
    assert contents(tmp_path / "data") == before
    assert not list(temporary.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run.yaml", "temporary"]


def test_bad_samples_are_replaced_and_not_added_to_the_runs_log(tmp_path: Path, temporary: Path) -> None:
    replaced = {"bad_samples": {"action": "replace", "log": str(tmp_path / "bad")}}
    train = {"remote": str(write_broken_json(tmp_path / "data")), **replaced}
    assert tuned("--config", write_config(tmp_path / "run.yaml", train), *QUICK)["measured"]
    assert not (tmp_path / "bad").exists()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_data_that_must_be_fetched_is_fetched_elsewhere_and_taken_away(
    http_store: HttpStore, tmp_path: Path, temporary: Path, compression: str | None
) -> None:
    write_data(http_store.root, compression=compression)
    config = write_config(
        tmp_path / "run.yaml", {"streams": streams(http_store.url, local="kept"), "epoch_size": 30}, num_workers=3
    )
    shown = tuned("--config", config, *QUICK, "--num-workers", "0")
    assert shown["link"]["bytes"] == bytes_of(http_store.root, "*.mds" if compression is None else "*.zstd")
    assert min(shown["link"][name] for name in ("bytes_per_second", "seconds_per_shard", "seconds_of_first_shard")) > 0
    assert shown["measured"][0]["wait"]["download"] == 0
    recommended = shown["recommended"]
    assert list(recommended) == ["num_workers", "predownload", "cache_limit"]
    assert (recommended["num_workers"]["now"], recommended["num_workers"]["better"]) == (3, 0)
    assert recommended["cache_limit"]["better"] is None
    assert not (tmp_path / "kept").exists()
    assert not (tmp_path / "caches").exists()
    assert not list(temporary.iterdir())


def test_compressed_shards_in_place_are_decompressed_elsewhere(tmp_path: Path, temporary: Path) -> None:
    write_data(tmp_path / "data", compression="zstd")
    config = write_config(tmp_path / "run.yaml", {"streams": streams(tmp_path / "data")})
    shown = tuned("--config", config, *QUICK)
    assert list(shown["recommended"]) == ["num_workers", "cache_limit"]
    assert not (tmp_path / "caches").exists()
    assert not list(temporary.iterdir())


@pytest.mark.nightly
def test_one_dataset_with_a_split_is_fetched_as_far_as_is_asked_for(http_store: HttpStore, tmp_path: Path) -> None:
    write_data(http_store.root)
    config = write_config(tmp_path / "run.yaml", {"remote": http_store.url, "split": "web"})
    shown = tuned("--config", config, *QUICK, "--fetch", "1500b")
    assert shown["link"]["shards"] == 2
    assert tuned("--config", config, *QUICK, "--fetch", "1b")["link"]["shards"] == 1


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_the_fragment_goes_after_the_configuration_of_fit(http_store: HttpStore, tmp_path: Path) -> None:
    write_data(http_store.root)
    config = write_config(
        tmp_path / "run.yaml",
        {"streams": streams(http_store.url, local="kept"), "cache_limit": "1mb"},
        num_workers=1,
        prefetch_factor=4,
        persistent_workers=True,
    )
    indexes, shards = (
        sum(path.stat().st_size for path in http_store.root.rglob(f"*.{end}")) for end in ("json", "mds")
    )
    disk = indexes + shards * 3 // 4
    shown = run("tune", "--config", config, *QUICK, "--num-workers", "0", "--disk", disk, "--yaml")
    assert (shown.code, shown.err) == (0, "lightning-streaming tune: read with 0 workers\n")
    limit = yaml.safe_load(shown.out)["data"]["init_args"]["train"]["cache_limit"]
    assert limit == f"{math.ceil(disk * 0.9 / 1024)}kb"
    assert yaml.safe_load(shown.out)["data"] == {
        "init_args": {
            "num_workers": 0,
            "prefetch_factor": None,
            "train": {"cache_limit": limit},
        }
    }
    better = tmp_path / "tuned.yaml"
    better.write_text(shown.out)
    assert run("fit", "--config", config, "--config", better).code == 0
    assert list((tmp_path / "kept").rglob("*.mds"))


def test_the_recommended_limit_fetches_nothing_twice(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "data", columns={"x": "ndarray:uint8:1000"}, size_limit=1 << 16) as writer:
        for _ in range(6000):
            writer.write({"x": np.zeros(1000, np.uint8)})
    order = {"shuffle": True, "shuffle_block_size": 500}
    train = {"remote": str(tmp_path / "data"), "local": str(tmp_path / "kept"), **order}
    config = write_config(tmp_path / "run.yaml", train, batch_size=10)
    shown = tuned("--config", config, *QUICK, "--num-workers", "0", "--disk", "5mb")
    limit = shown["recommended"]["cache_limit"]["better"]
    assert parse_bytes(limit) < parse_bytes("4mb")
    assert "so this should fetch none twice" in shown["recommended"]["cache_limit"]["why"]
    dataset = StreamingDataset(**{**train, "shuffle": True}, cache_limit=limit)  # type: ignore[arg-type]
    loader = StreamingDataLoader(dataset, batch_size=10)
    assert sum(1 for _ in loader) == 600
    assert loader.statistics().fetched_bytes == bytes_of(tmp_path / "data", "*.mds")
    loader.close()


def test_transform_and_collate_of_the_data_module_are_used_for_the_stage_that_is_asked_for(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    config = write_config(
        tmp_path / "run.yaml",
        {"streams": streams(tmp_path / "data")},
        "tests.tools.test_tune.Marking",
        val={"remote": str(tmp_path / "data" / "web")},
        eval_batch_size=7,
    )
    assert tuned("--config", config, *QUICK, "--stage", "validate")["batch_size"] == 7
    assert (tmp_path / "collated").exists()
    assert (tmp_path / "transformed-val").exists()
    assert not (tmp_path / "transformed-train").exists()


@pytest.mark.nightly
def test_tables_say_what_was_measured_and_why(http_store: HttpStore, tmp_path: Path) -> None:
    write_data(http_store.root)
    config = write_config(tmp_path / "run.yaml", {"streams": streams(http_store.url)})
    out = run("tune", "--config", config, *QUICK, "--consumer-ms", 2, "--batch-size", 8).out
    assert out.startswith("fetched ")
    assert "reading train in batches of 8, with reasons of waiting" in out
    assert "a step waits" in out
    assert "null   null" not in out
    assert "predownload may stay at its default: the link brings" in out
    assert "cache_limit may stay at its default: all " in out
    assert re.search(r"data:\n  init_args:\n    num_workers: \d\n$", out)
    for row in re.findall(r"^ +[01]  .* ms  .*%$", out, re.MULTILINE):
        *parts, step_waits = re.findall(r"(\d+)%", row)
        assert 99 <= sum(map(int, parts)) <= 101, step_waits
    write_data(tmp_path / "data")
    config = write_config(tmp_path / "run.yaml", {"streams": streams(tmp_path / "data")})
    out = run("tune", "--config", config, *QUICK).out
    assert "nothing to recommend for predownload and cache_limit, as the data is read in place\n" in out
    assert "cache_limit: " not in out
    assert re.search(r"^a step is assumed to do nothing.*\n\nrecommended$", out, re.MULTILINE)
    assert "a step was taken" not in run("tune", "--config", config, *QUICK, "--consumer-ms", 0).out


def test_a_run_goes_on_without_workers_where_its_configuration_is_for_some(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    many: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}
    config = write_config(tmp_path / "run.yaml", {"streams": streams(tmp_path / "data")}, **many)
    better = tmp_path / "tuned.yaml"
    better.write_text(run("tune", "--config", config, *QUICK, "--num-workers", "0", "--yaml").out)
    assert better.read_text() == "data:\n  init_args:\n    num_workers: 0\n    prefetch_factor: null\n"
    module = read_run_files([str(config), str(better)], {}).datamodule
    module.setup("fit")
    assert sum(1 for _ in module.train_dataloader()) == sum(SAMPLES.values()) // 4
    module.teardown("fit")


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


@pytest.mark.rotate(3)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--num-workers", "2,x"], "must be whole numbers with commas between"),
        (["--seconds", "0"], "must be a positive number"),
        (["--seconds", "-1"], "must be a positive number"),
        (["--consumer-ms", "soon"], "must be a number of at least 0"),
        (["--consumer-ms", "-1"], "must be a number of at least 0"),
        (["--disk", "much"], "size must be a number"),
        (["--stage", "validate"], "there is no data.val, so there is no validation"),
        (["--stage", "sing"], "invalid choice"),
        (["--config", "no.yaml"], "there is no no.yaml"),
        (["--yaml", "--json"], "pass one of them"),
        (["--batch-size", "400"], "an epoch of this data has no batch; with drop_last it must fill one"),
    ],
)
def test_what_cannot_be_tuned_is_refused(args: list[object], words: str, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    config = write_config(tmp_path / "run.yaml", {"streams": streams(tmp_path / "data")}, drop_last=True)
    assert words in refused("--config", config, *QUICK, *args).err


def joined(root: object, *, joined_from: object = None, **join: Any) -> dict[str, Any]:
    """Streams, of which one has the columns of its own data twice."""
    asked = streams(root)
    asked["web"]["join"] = {"again": {"remote": f"{joined_from or root}/web", "prefix": "b_", **join}}
    asked["books"]["join"] = {"again": {"remote": f"{root}/books", "prefix": "b_"}}
    return asked


@pytest.mark.rotate(1)
@pytest.mark.parametrize("how", [{}, {"key": "id", "columns": ["id", "text"]}])
def test_joined_data_that_is_read_in_place_is_measured(tmp_path: Path, how: dict[str, Any]) -> None:
    root, other = write_data(tmp_path / "data"), write_data(tmp_path / "other")
    config = write_config(tmp_path / "run.yaml", {"streams": joined(root, joined_from=other, **how)})
    found = run("tune", "--config", config, *QUICK, "--json").json
    assert [one["num_workers"] for one in found["measured"]] == [0, 1]
    assert set(found["recommended"]) == {"num_workers"}
    for path in (other / "web").glob("shard.*"):
        path.write_bytes(b"")
    told = run("tune", "--config", config, *QUICK)
    assert (told.code, told.out) == (1, "")
    assert "stream 'web' of data.train, join 'again'" in told.err


def test_joined_data_that_is_fetched_is_refused_before_that(tmp_path: Path, http_store: HttpStore) -> None:
    root = write_data(tmp_path / "data")
    packed = write_data(tmp_path / "packed", compression="gz")
    for train, why in (
        (joined(root, joined_from=http_store.url), "its shards are fetched"),
        (joined(root, joined_from=packed), "its shards are compressed"),
        (streams(root, str(tmp_path / "local")) | {"web": joined(root)["web"]}, "stream 'books' is fetched"),
    ):
        told = refused("--config", write_config(tmp_path / "run.yaml", {"streams": train}), *QUICK).err
        assert f"stream 'web' has join 'again', and {why}; tune measures" in told
        assert "lightning-streaming copy" in told
    assert http_store.requests() == []


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("lightning.pytorch.demos.boring_classes.BoringDataModule", "BoringDataModule"),
        (
            "tests.tools.test_tune.Stubborn",
            "num_workers=1 is set, but this data module's build_dataloader",
        ),
        ("tests.tools.test_tune.Manifold", "this data module's train_dataloader returns a list"),
        ("tests.tools.test_tune.Elsewhere", "this data module's build_dataset uses"),
    ],
)
def test_data_modules_that_cannot_be_tuned_are_refused(module: str, words: str, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    config = write_config(tmp_path / "run.yaml", {"streams": streams(tmp_path / "data")}, module)
    assert words in refused("--config", config, *QUICK, "--num-workers", "1").err


def test_errors_about_several_loaders_name_the_option_of_the_data(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    train = {"streams": streams(tmp_path / "data")}
    config = str(write_config(tmp_path / "run.yaml", train, "tests.tools.test_tune.Manifold"))
    with assert_error(ConfigError, option="data.train"):
        tune_run(parser_of("tune").parse_args(["--config", config, "--num-workers", "1"]))
    with assert_error(ConfigError, option="data"):
        trace_run(parser_of("trace").parse_args(["--config", config, "--step", "0"]))


@pytest.mark.rotate(2)
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
        tmp_path / "run.yaml", {"streams": streams(tmp_path / "data")}, f"tests.tools.test_tune.{module}"
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


def _ended(process: subprocess.Popen[bytes], told: signal.Signals) -> int | None:
    """End a process as people do: Python loses an exception that a signal raises in the moment of a fork."""
    for _ in range(4):
        process.send_signal(told)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(20)
    return None


@pytest.mark.nightly
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
                assert _ended(process, told) == code
            finally:
                process.kill()
    assert not [path for path in temporary.iterdir() if "tune" in path.name]
