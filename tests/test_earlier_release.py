"""What release 0.1 left is taken up: its checkpoints go on with the samples it would have read, its caches are full.

It uses public names alone, so it says the same of every release. tests/golden/release_0_1/make.py made the files.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning_streaming import StreamingDataset
from lightning_streaming.__main__ import main
from tests.golden import golden_path
from tests.golden.release_0_1.runs import MADE_WITH, MODULES, accelerated, fit, ids, loader_of, read

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*use of fork.*:DeprecationWarning",
    "ignore:You're resuming from a checkpoint",  # it means the ordinary loader
)

GOLDEN = golden_path("release_0_1")
AFTER: dict[str, Any] = json.loads((GOLDEN / "after.json").read_text())
SAID: dict[str, Any] = json.loads((GOLDEN / "said.json").read_text())
REMOTE = "memory://release-0-1"
CALLBACK_KEY = "lightning_streaming.StreamingStateCallback"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples, in another place than then."""
    return Path(shutil.copytree(GOLDEN / "data", tmp_path_factory.mktemp("earlier") / "data"))


STATES = {1: GOLDEN, 2: GOLDEN / "version_2"}
"""Where states of each version are, of the same runs."""


@pytest.mark.rotate(2)
@pytest.mark.parametrize("version", STATES)
@pytest.mark.parametrize("kind", MODULES)
def test_a_checkpoint_goes_on_as_it_would_have(kind: str, version: int, data: Path, tmp_path: Path) -> None:
    batch_size, workers, _ = MADE_WITH[kind]
    saved = STATES[version] / f"{kind}.ckpt"
    assert torch.load(saved, weights_only=True)["callbacks"][CALLBACK_KEY]["version"] == version
    seen, expected = fit(kind, data, tmp_path, batch_size, workers, ckpt_path=saved), AFTER[kind]
    if kind == "several":  # of which the ordinary one begins anew, as no loader of torch's can be resumed
        seen, expected = ([batch[:-1] for batch in one] for one in (seen, expected))
    assert seen == expected


@pytest.mark.rotate(2)
@pytest.mark.parametrize(("batch_size", "workers"), [(6, 2), (5, 0)])
@pytest.mark.parametrize("kind", ["single", "mixture", "stratified", "skipped"])
def test_a_checkpoint_goes_on_with_other_batches_and_workers(
    kind: str, batch_size: int, workers: int, data: Path, tmp_path: Path
) -> None:
    seen = fit(kind, data, tmp_path, batch_size, workers, ckpt_path=GOLDEN / f"{kind}.ckpt")
    first = [one for one in ids(AFTER[kind]) if one[0] == AFTER[kind][0][0]]
    assert ids(seen)[: len(first)] == first
    if kind in ("single", "mixture"):
        assert ids(seen) == ids(AFTER[kind])


@pytest.mark.parametrize(("version", "batch_size", "workers"), [(1, 4, 0), (1, 7, 2), (2, 7, 2)])
def test_a_state_of_a_loader_goes_on(version: int, batch_size: int, workers: int, data: Path) -> None:
    loader = loader_of(data, batch_size, workers)
    loader.load_state_dict(json.loads((STATES[version] / "loader.json").read_text()))
    assert ids(read(loader)) == ids(AFTER["loader"])


def test_a_state_saved_by_accelerate_goes_on(data: Path) -> None:
    assert accelerated(data, GOLDEN / "accelerate", resume=True) == AFTER["accelerate"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache as it was left; of its remote, nothing is there any more but the index."""
    with tarfile.open(GOLDEN / "cache.tar.xz") as tar:
        tar.extractall(tmp_path, filter="fully_trusted")
    for name, time in json.loads((tmp_path / "times.json").read_text()).items():
        os.utime(tmp_path / name, ns=(time, time))
    monkeypatch.setenv("LIGHTNING_STREAMING_CACHE", str(tmp_path / "cache"))
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/release-0-1/index.json", (tmp_path / "remote" / "index.json").read_bytes())
    yield next((tmp_path / "cache").iterdir())
    filesystem.rm("/release-0-1", recursive=True)


def said(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    """What a command prints as JSON."""
    assert main([*map(str, args), "--json"]) in (0, None)
    return json.loads(capsys.readouterr().out)


def files_in(cache: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of each shard."""
    found = {path.name: path.stat() for path in cache.glob("shard.*")}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def test_a_cache_is_read_without_a_download(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_in(cache)
    dataset = StreamingDataset(remote=REMOTE)
    assert [sample["id"] for sample in dataset[:]] == list(range(150))
    dataset.close()
    assert list(cache.parent.iterdir()) == [cache]
    assert files_in(cache) == before
    (told,) = said(capsys, "cache", "info")["caches"]
    assert {name: told[name] for name in SAID["cache info"]} == SAID["cache info"]


def test_a_dataset_is_inspected_as_it_was(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = said(capsys, "inspect", cache.parents[1] / "remote")
    assert {name: told[name] for name in SAID["inspect"]} == SAID["inspect"]
