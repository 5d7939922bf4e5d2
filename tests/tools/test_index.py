"""``lightning-streaming index``: indexes of other formats, made ahead."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lightning_streaming import StreamingDataset
from lightning_streaming.cache.config import CACHE_VARIABLE
from lightning_streaming.formats.index import INDEX_BASENAME
from tests.tools.running import run


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    for number in range(3):
        np.save(root / f"{number}.npy", np.arange(number * 20, number * 20 + 20).reshape(10, 2))
    return root


def test_an_index_beside_the_data_makes_it_a_dataset(data: Path) -> None:
    made = run("index", data, "--format", "npy", "--json")
    assert made.code == 0
    assert made.json["samples"] == 30
    assert made.json["shards"] == 3
    assert made.json["columns"] == "values"
    assert Path(made.json["written_to"]) == data / INDEX_BASENAME
    dataset = StreamingDataset(remote=str(data), shuffle=False, num_canonical_nodes=1, batch_size=1)
    assert [sample["values"].tolist() for sample in dataset] == np.arange(60).reshape(30, 2).tolist()
    assert list((data.parent / "caches").rglob("*.journal")) == []


def test_tools_understand_what_has_an_index(data: Path, tmp_path: Path) -> None:
    assert run("index", data, "--format", "npy").code == 0
    assert run("inspect", data, "--json").json["samples"] == 30
    assert run("verify", data).code == 0
    assert run("copy", data, tmp_path / "copy").code == 0
    copied = StreamingDataset(remote=str(tmp_path / "copy"), shuffle=False, num_canonical_nodes=1, batch_size=1)
    assert sum(1 for _ in copied) == 30
    (data / "1.npy").write_bytes((data / "1.npy").read_bytes()[:-1])
    assert run("verify", data).code == 1


def test_an_index_is_written_elsewhere(data: Path, tmp_path: Path) -> None:
    assert run("index", data, "--format", "npy", "--out", tmp_path / "out").code == 0
    assert not (data / INDEX_BASENAME).exists()
    assert len(json.loads((tmp_path / "out" / INDEX_BASENAME).read_text())["shards"]) == 3


def test_another_librarys_index_is_not_replaced(data: Path) -> None:
    (data / INDEX_BASENAME).write_text('{"chunks": [], "config": {}}')
    failed = run("index", data, "--format", "npy")
    assert failed.code == 2
    assert "--out" in failed.err
    assert "chunks" in (data / INDEX_BASENAME).read_text()


def test_what_a_killed_process_left_of_an_index_is_removed(data: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, of_a_living = (
        data / f"{INDEX_BASENAME}.{socket.gethostname()}-{pid}-1.part" for pid in (ended.pid, os.getpid())
    )
    left.write_text("{")
    of_a_living.write_text("{")
    assert run("index", data, "--format", "npy").code == 0
    assert not left.exists()
    assert of_a_living.exists()


def test_mistakes_are_told(data: Path, tmp_path: Path) -> None:
    assert run("index", tmp_path / "nowhere", "--format", "npy").code == 2
    assert run("index", data, "--format", "webdataset").code == 2
    assert run("index", data, "--format", "npy", "--block-length", "0").code == 2
    (data / "1.npy").write_bytes(b"no array")
    failed = run("index", data, "--format", "npy")
    assert failed.code == 1
    assert "1.npy" in failed.err
