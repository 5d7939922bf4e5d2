"""The simulation of a large job: beside a real one, as far as that goes on one machine; and a whole run of it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.scale import Setting, changes
from benchmarks.scale_node import Cluster, Order, bytes_of_shards, node_epoch
from benchmarks.scale_store import Store, storm
from lightning_streaming import StreamingDataLoader, StreamingDataset, World
from lightning_streaming.storage import retries
from lightning_streaming.tools.planning.node import NodeCache, first_requests, read_epoch
from tests.helpers import write_shards
from tests.servers import http_server

ROOT = Path(__file__).parents[2]
SHARDS, SHARD_SAMPLES, EPOCHS = 80, 48, 2
STORE = Store(per_second=100, latency=0.05, link=1e9)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 shards of 48 samples, 100 KB each."""
    columns, blob = {"id": "int", "blob": "bytes"}, bytes(2000)
    root = tmp_path_factory.mktemp("scale") / "data"
    return write_shards(root, [SHARD_SAMPLES] * SHARDS, columns, lambda number: {"id": number, "blob": blob})


def cluster_of(data: Path) -> Cluster:
    size = (data / "shard.00000.mds").stat().st_size
    samples = SHARDS * SHARD_SAMPLES
    return Cluster(samples=samples, shards=SHARDS, shard_bytes=size, nodes=2, ranks=1, workers=2, batch_size=4)


def downloads(url: str) -> Counter[str]:
    """How often each shard was sent, and the bytes of all."""
    asked = urllib.request.Request(f"{url}/__log", data=b"shard", method="POST")
    with urllib.request.urlopen(asked) as answer:
        found = json.loads(answer.read())
    assert all(entry["status"] == 200 for entry in found)
    return Counter({"files": len(found), "bytes": sum(entry["sent"] for entry in found)})


def read_really(url: str, node: int, cache: Path, limit: int | None, options: dict[str, Any]) -> None:
    world = World(num_nodes=2, ranks_per_node=1, rank=node)
    dataset = StreamingDataset(remote=url, local=str(cache), batch_size=4, world=world, cache_limit=limit, **options)
    loader = StreamingDataLoader(dataset, num_workers=2)
    for _ in range(EPOCHS):
        assert sum(len(batch["id"]) for batch in loader) == SHARDS * SHARD_SAMPLES // 2
    loader.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("order", "part"),
    [
        (Order(name="py1e", block_size=192, canonical_each=1), 0.7),
        (Order(name="blockwise", block_size=48, canonical_each=2), 0.8),
        (Order(name="stored"), 0.3),
        (Order(name="stored"), None),
    ],
    ids=["py1e", "blockwise", "stored", "no limit"],
)
def test_two_real_nodes_fetch_what_was_worked_out(data: Path, tmp_path: Path, order: Order, part: float | None) -> None:
    cluster, options = cluster_of(data), order.options(2)
    room = None if part is None else int(part * cluster.share_bytes)
    limit = None if room is None else room + (data / "index.json").stat().st_size
    with http_server(data) as url:
        for node in range(2):
            read_really(url, node, tmp_path / str(node), limit, options)
        really = downloads(url)
    dataset, worked_out = StreamingDataset(remote=str(data), batch_size=4, **options, world=World(num_nodes=2)), 0
    for node in range(2):
        epochs = [node_epoch(dataset, cluster, node, epoch) for epoch in range(EPOCHS)]
        cache = NodeCache(bytes_of_shards(epochs[0]), room)
        assert [read_epoch(epoch, cache) for epoch in epochs] == [epoch.num_batches for epoch in epochs]
        worked_out += cache.downloads
    assert worked_out == pytest.approx(really["files"], rel=0.02)
    assert worked_out * cluster.shard_bytes == pytest.approx(really["bytes"], rel=0.02)
    if part is None:
        assert worked_out == SHARDS
    else:
        assert 1.2 * SHARDS < worked_out < 2 * SHARDS  # it tells a cache that keeps something from one that does not


def test_a_node_asks_once_for_each_shard_that_it_reads(data: Path) -> None:
    cluster = cluster_of(data)
    dataset = StreamingDataset(remote=str(data), batch_size=4, shuffle=True, world=World(num_nodes=2))
    both = [first_requests(node_epoch(dataset, cluster, node)) for node in range(2)]
    assert sorted(np.concatenate([one.shards for one in both]).tolist()) == list(range(SHARDS))
    for node, asked in enumerate(both):
        epoch = node_epoch(dataset, cluster, node)
        # Before the first batch what it needs, and nothing after the last.
        assert set().union(*epoch.first_shards()) <= set(asked.shards[asked.steps == 0].tolist())
        assert asked.steps.max() < epoch.num_batches


def test_a_node_less_reads_about_twice_and_dealt_in_turn_as_often_as_there_are_nodes(tmp_path: Path) -> None:
    cluster = Cluster(
        samples=200_000, shards=2000, shard_bytes=10_000, nodes=20, ranks=1, workers=1, batch_size=20
    )  # fmt: skip
    setting = Setting(
        cluster=cluster, store=STORE, step_seconds=1, drawn_nodes=2, sampled_nodes=3, scratch=str(tmp_path)
    )
    same, gathered, in_turn = changes(setting, "stored", [19])
    assert same["of_the_rest"] == pytest.approx(1, rel=0.05)
    assert gathered["of_the_data"] <= 3
    assert in_turn["of_the_data"] == pytest.approx(19)


def test_a_store_that_is_asked_within_its_limit_refuses_nothing() -> None:
    found = storm(STORE, nodes=10, each=10, size=1, attempts=1)
    assert (found.requests, found.refused, found.gave_up) == (100, 0, 0)
    assert found.seconds < 1


def test_a_store_that_puts_requests_off_is_outlasted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = storm(STORE, nodes=50, each=20, size=1, attempts=1)
    assert found.gave_up == 0
    assert found.seconds > 1000 / STORE.per_second - 1
    monkeypatch.setattr(retries, "_MAX_POSTPONED", 0)
    counted = storm(STORE, nodes=50, each=20, size=1, attempts=3)
    assert counted.gave_up > 500


@pytest.mark.nightly
def test_it_works_out_and_prints_tables(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = "--samples 40k --shards 400 --nodes 4 --ranks 2 --workers 2 --drawn-nodes 2 --sampled-nodes 2 --limits 0.6"
    words += " --orders blockwise py1e stored"
    more = ["--shard-bytes", "1mb", "--goes-on", "3", "--processes", "1", "--directory", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.scale", *words.split(), *more, "--json", str(out)]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = json.loads(out.read_text())
    assert found["costs"]["shard_requests"] == 1
    assert found["costs"]["index_requests"] >= 1
    assert {row["order"] for row in found["epochs"]} == {row["order"] for row in found["starts"]}
    assert found["state"] > 100
    assert "| stored | 3, dealt in turn |" in printed
    assert not list(tmp_path.glob("scale-*"))
