"""What ``plan`` says of a run is what the run then does: its reads, downloads and cache, measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_streaming import StreamingDataModule
from lightning_streaming.trainer.config import config_of
from tests.packed_data import CAPACITY
from tests.schedules import schedule
from tests.servers import http_server
from tests.tools.really import Really, Watch, forget, read_run, sent, write_config, write_stream
from tests.tools.running import run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*worker processes in total.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]
FIRST_ID = {"web": 0, "code": 100_000, "math": 200_000}
SIZES = {"web": 1800, "code": 700, "math": 100}
PHASES = [
    {"name": "broad", "end": 1000, "mix": {"web": 0.8, "code": 0.2}},
    {"name": "ramp", "end": 1800, "mix": {"web": [0.8, 0.4], "code": 0.2, "math": [0, 0.4]}},
    {"name": "anneal", "mix": {"math": 0.5, "code": 0.5}},
]
TWO_NODES = {"max_epochs": 2, "devices": 2, "num_nodes": 2}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "phases that repeat, two nodes of two ranks, a limit": (
        {"schedule": schedule(PHASES), "epoch_size": 2400, "shuffle_block_size": 300, "cache_limit": "4300000"},
        TWO_NODES,
        {"batch_size": 4, "num_workers": 2},
    ),
    "proportions, two ranks, a limit": (
        {"epoch_size": 2600, "shuffle_block_size": 300, "num_canonical_nodes": 2, "cache_limit": 5_500_000},
        {"max_epochs": 2, "devices": 2},
        {"batch_size": 4, "num_workers": 2},
    ),
    "blockwise, a limit": (
        {"shuffle_algo": "blockwise", "shuffle_block_size": 150, "num_canonical_nodes": 2, "cache_limit": 5_750_000},
        {"max_epochs": 2, "devices": 2},
        {"batch_size": 8, "num_workers": 1},
    ),
    "replication over two nodes": (
        {"replication": 2, "num_canonical_nodes": 2, "epoch_size": 1200, "shuffle_block_size": 300},
        {"max_epochs": 1, "devices": 2, "num_nodes": 2},
        {"batch_size": 4, "num_workers": 1},
    ),
    "replication over two nodes, a limit": (
        {"replication": 2, "num_canonical_nodes": 2, "shuffle_block_size": 300, "cache_limit": 4_500_000},
        {"max_epochs": 1, "devices": 4, "num_nodes": 2},
        {"batch_size": 4, "num_workers": 1},
    ),
    "looking ahead less than a batch": (
        {"predownload": 2, "epoch_size": 800},
        {"max_epochs": 2, "devices": 2},
        {"batch_size": 8, "num_workers": 1, "drop_last": True},
    ),
    "some batches of each epoch, and others skipped": (
        {"skip": ["3-20", "150-190"]},
        {"max_epochs": 3, "devices": 2, "limit_train_batches": 40},
        {"batch_size": 8},
    ),
    "no limit, some steps": ({"epoch_size": 1500}, {"max_steps": 150, "devices": 2}, {"batch_size": 8}),
    "without workers, a small limit": (
        {"shuffle_block_size": 200, "cache_limit": 2_760_000},
        {"max_epochs": 2, "devices": 1},
        {"batch_size": 8, "num_workers": 0},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("stored")
    for name, samples in SIZES.items():
        write_stream(root / name, samples, FIRST_ID[name])
    lengths = np.minimum(np.random.default_rng(0).lognormal(3, 1, 500).astype(int) + 1, 240)
    write_stream(root / "books", 200, 0, lengths=lengths[:200].tolist(), size_limit=2000)
    write_stream(root / "zip", 600, 0, compression="zstd")
    with http_server(root) as url:
        yield url


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAMING_CACHE", str(tmp_path / "plans"))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def configured(
    url: str, path: Path, train: Mapping[str, Any], trainer: Mapping[str, Any], data: Mapping[str, Any]
) -> Path:
    streams = {name: {"remote": f"{url}/{name}"} for name in SIZES}
    return write_config(path / "run.yaml", {"streams": streams, **train}, trainer, **data)


def assert_agree(plan: Mapping[str, Any], really: Really) -> None:
    """Samples and repeats are the same; downloads and the peak of a cache agree within 2 %."""
    for one in plan["streams"]:
        first = FIRST_ID.get(one["stream"], 0)
        reads = {sample: times for sample, times in really.reads.items() if first <= sample < first + 100_000}
        assert one["samples"] == sum(reads.values())
        assert one["repeats"] == max(reads.values(), default=0)
        assert one["passes"] == pytest.approx(sum(reads.values()) / one["selected"])
    cache = plan["caches"][0]
    assert cache["bytes"] == pytest.approx(really.bytes, rel=0.02)
    assert cache["peak"] == pytest.approx(really.peak, rel=0.02)
    assert cache["simulated"] == 1


NIGHTLY = (
    "phases that repeat, two nodes of two ranks, a limit",
    "proportions, two ranks, a limit",
    "blockwise, a limit",
    "replication over two nodes, a limit",
)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in RUNS])
def test_a_run_does_what_was_planned(url: str, tmp_path: Path, name: str) -> None:
    train, trainer, data = RUNS[name]
    config = configured(url, tmp_path, train, trainer, data)
    plan = run("plan", "--config", config, "--json").json
    really = read_run(config, url, tmp_path / "caches")
    assert_agree(plan, really)
    steps = plan["run"]["steps"]
    assert steps == len(really.order)


def test_what_is_fetched_again_is_told(url: str, tmp_path: Path) -> None:
    """The runs above tell a cache that keeps all it is given from one that does not."""
    told = {}
    for name in ("without workers, a small limit", "no limit, some steps"):
        train, trainer, data = RUNS[name]
        plan = run("plan", "--config", configured(url, tmp_path, train, trainer, data), "--json").json
        told[name] = plan["caches"][0]["refetched"]
    assert told["no limit, some steps"] == 1
    assert told["without workers, a small limit"] > 1.5


def test_the_step_of_the_first_repeat_is_that_of_the_run(url: str, tmp_path: Path) -> None:
    phases = [{"name": "all", "mix": {"web": 0.5, "math": 0.5}}]
    train = {"streams": {name: {"remote": f"{url}/{name}"} for name in ("web", "math")}, "schedule": schedule(phases)}
    config = write_config(tmp_path / "run.yaml", {**train, "epoch_size": 400}, {"devices": 2}, batch_size=4)
    plan = run("plan", "--config", config, "--json").json
    really = read_run(config, url, tmp_path / "caches")
    seen, steps = Counter[int](), dict[str, int]()
    for step, ids in enumerate(really.order):
        for sample in ids:
            name = "math" if sample >= FIRST_ID["math"] else "web"
            if seen[sample]:
                steps.setdefault(name, step)
            seen[sample] += 1
    found = {one["stream"]: one["first_repeat"] for one in plan["streams"]}
    assert steps == {"math": found["math"]["step"]}
    assert found["web"] is None


class Idle(LightningModule):
    """A model that learns nothing, and remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ids = torch.nn.Linear(1, 1), list[int]()

    def training_step(self, batch: Mapping[str, Any], _: int) -> torch.Tensor:
        self.ids += batch["id"].tolist()
        time.sleep(0.008)  # for what is fetched ahead
        loss: torch.Tensor = self.layer(torch.zeros(1)).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Untouched(StreamingDataModule):
    """Hands batches on as they are: Lightning would look at each byte of texts."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


def fit(train: Mapping[str, Any], scratch: Path, steps: int, ckpt: Path | None = None) -> tuple[Idle, Trainer]:
    """Train with these streams, each in a cache of its own below ``scratch``."""
    streams = {name: {**one, "local": str(scratch / name)} for name, one in train["streams"].items()}
    model, config = Idle(), config_of({**train, "streams": streams})
    trainer = Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=scratch,
    )  # fmt: skip
    trainer.fit(model, datamodule=Untouched(train=config, batch_size=4), ckpt_path=ckpt)
    return model, trainer


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_what_is_left_of_a_run_is_planned_from_its_checkpoint(url: str, tmp_path: Path) -> None:
    streams = {name: {"remote": f"{url}/{name}"} for name in SIZES}
    train = {"streams": streams, "schedule": schedule(PHASES), "epoch_size": 2400, "shuffle_block_size": 300}
    train["cache_limit"] = 3_500_000
    before, trainer = fit(train, tmp_path / "before", 550)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    config = write_config(tmp_path / "run.yaml", train, {"max_steps": 1300, "devices": 1}, batch_size=4)
    plan = run("plan", "--config", config, "--ckpt", tmp_path / "run.ckpt", "--json").json
    forget(url)
    with Watch([tmp_path / "after" / name for name in SIZES]) as watch:
        after, _ = fit(train, tmp_path / "after", 1300, tmp_path / "run.ckpt")
    log = sent(url)
    assert plan["run"]["begins"]["step"] == 550
    assert plan["run"]["stop_step"] == 1300
    for one in plan["streams"]:
        first = FIRST_ID[one["stream"]]
        left, whole = (
            Counter(sample for sample in ids if first <= sample < first + 100_000)
            for ids in (after.ids, before.ids + after.ids)
        )
        assert one["samples"] == left.total()
        assert one["repeats"] == max(whole.values())
        assert one["passes"] == pytest.approx(whole.total() / one["selected"])
    cache = plan["caches"][0]
    assert cache["bytes"] == pytest.approx(sum(size for _, size in log), rel=0.02)
    assert cache["peak"] == pytest.approx(watch.peak, rel=0.02)
    assert cache["refetched"] > 1


@pytest.mark.nightly
def test_packs_are_as_full_as_planned(url: str, tmp_path: Path) -> None:
    pack = {"column": "tokens", "capacity": CAPACITY, "window": 32}
    train = {"streams": {"books": {"remote": f"{url}/books"}}, "packing": pack, "num_canonical_nodes": 2}
    config = write_config(tmp_path / "run.yaml", train, {"devices": 2, "max_epochs": 2}, batch_size=2)
    plan = run("plan", "--config", config, "--json").json
    really = read_run(config, url, tmp_path / "caches")
    assert plan["streams"][0]["samples"] == sum(really.reads.values())
    assert plan["streams"][0]["tokens"] == really.tokens
    assert plan["packs"]["fill"] == pytest.approx(really.tokens / (really.packs * CAPACITY))
    assert plan["caches"][0]["bytes"] == pytest.approx(really.bytes, rel=0.02)


@pytest.mark.nightly
def test_of_compressed_shards_the_stored_bytes_are_fetched_and_the_raw_ones_kept(url: str, tmp_path: Path) -> None:
    train = {"streams": {"zip": {"remote": f"{url}/zip"}}}
    config = write_config(tmp_path / "run.yaml", train, {"max_epochs": 1}, batch_size=8)
    plan = run("plan", "--config", config, "--json").json
    really = read_run(config, url, tmp_path / "caches")
    cache = plan["caches"][0]
    assert cache["bytes"] == really.bytes
    assert cache["peak"] > 20 * cache["bytes"]
    assert cache["peak"] == pytest.approx(really.peak, rel=0.02)
