"""Directories and files that a user may not get to, or that are something else: our errors, or no matter."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import MDSWriter, Stream, StreamingDataset
from lightning_streaming.cache import index_files
from lightning_streaming.cache.config import CACHE_VARIABLE, RUNTIME_VARIABLE
from lightning_streaming.errors import ConfigError
from lightning_streaming.writing import merge, write_parallel
from tests.cache.helpers import as_nobody, open_to_all
from tests.helpers import assert_error, write_dataset
from tests.servers import HttpStore

only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def read(**settings: Any) -> list[Any]:
    dataset = StreamingDataset(batch_size=4, **settings)
    return [dataset[28]["id"], next(iter(dataset))["id"], dataset.cache_usage]


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    """A directory that nobody may enter."""
    path = tmp_path / "locked"
    path.mkdir(mode=0o700)
    open_to_all(path)
    return path


def elsewhere(root: Path, then: Callable[[], Any]) -> Callable[[], Any]:
    """With another root of all caches."""

    def look() -> Any:
        os.environ[CACHE_VARIABLE] = str(root)
        return then()

    return look


@pytest.mark.rotate(2)
@only_root
@pytest.mark.parametrize("limit", [None, "1gb"])
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("under", ["", "lightning_streaming"])
def test_an_uncompressed_dataset_in_place_needs_no_cache(
    under: str, is_large: bool, limit: str | None, locked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a user who may not enter their own home."""
    write_dataset(tmp_path / "data")
    if is_large:
        monkeypatch.setattr(index_files, "LARGE_INDEX_BYTES", 10)
    look = elsewhere(locked / under, lambda: read(remote=str(tmp_path / "data"), cache_limit=limit))
    assert as_nobody(look) == [28, 0, 0]


@only_root
def test_a_compressed_one_says_what_it_needs(locked: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", compression="gz")
    words = as_nobody(elsewhere(locked, lambda: read(remote=str(tmp_path / "data"))))
    assert "cannot be created" in words
    assert CACHE_VARIABLE in words


@pytest.mark.rotate(2)
@only_root
@pytest.mark.parametrize("place", ["remote", "local", "both", "cache", "cache-http", "cache/below"])
def test_a_directory_that_may_not_be_entered_is_told(
    place: str, locked: Path, tmp_path: Path, http_store: HttpStore
) -> None:
    write_dataset(tmp_path / "data")
    where = {
        "remote": {"remote": str(locked)},
        "local": {"local": str(locked)},
        "both": {"remote": str(locked), "local": str(locked)},
        "cache": {"remote": str(tmp_path / "data"), "local": str(locked)},
        "cache-http": {"remote": http_store.url, "local": str(locked)},
        "cache/below": {"remote": str(tmp_path / "data"), "local": str(locked / "below")},
    }[place]
    words = as_nobody(lambda: read(**where))
    assert words.startswith("stream '0': ")
    assert str(locked) in words


@pytest.mark.rotate(4)
@only_root
@pytest.mark.parametrize("mode", [0o755, 0o777])
@pytest.mark.parametrize("name", ["index.json", ".origin", "shard.00000.mds", ".usage"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_file_that_may_not_be_read_is_told_or_not_needed(
    in_place: bool, name: str, mode: int, locked: Path, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "data")
    local = tmp_path / "local"
    read(remote=str(tmp_path / "data"), local=str(local))
    (local / name).chmod(0o600)
    local.chmod(mode)
    where = {"local": str(local)} if in_place else {"remote": str(tmp_path / "data"), "local": str(local)}
    found = as_nobody(elsewhere(locked, lambda: read(**where)))
    is_needed = name in ("index.json", "shard.00000.mds") or (name == ".origin" and not in_place)
    if is_needed:
        assert found.startswith("stream '0': ")
        assert str(local) in found
    elif in_place or mode == 0o755:
        assert found[:2] == [28, 0]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("kind", ["file", "below a file", "tmp", "nowhere"])
def test_a_runtime_directory_that_cannot_be_is_told(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / f"lightning_streaming-{os.getuid()}"
    taken.write_text("")
    chosen = {"file": taken, "below a file": taken / "x", "nowhere": Path("/proc/x"), "tmp": ""}[kind]
    monkeypatch.setenv(RUNTIME_VARIABLE, str(chosen))
    if kind == "tmp":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with MDSWriter(out=str(tmp_path / "data"), columns={"x": "uint8"}) as writer:
        for _ in range(70_000):
            writer.write({"x": np.uint8(0)})
    dataset = StreamingDataset(remote=str(tmp_path / "data"), batch_size=4, shuffle=True, shuffle_algo="py1e")
    with assert_error(ConfigError, option=RUNTIME_VARIABLE):
        next(iter(dataset))


BAD_OPTIONS = ["key=SECRET", ["SECRET"], 3, {1: "SECRET"}, ""]


def _use(way: str, options: Any, tmp_path: Path) -> None:
    """Read or write with storage options."""
    data, url = str(tmp_path / "data"), "memory://bucket/data"
    columns = {"id": "int"}
    own, joined = str(tmp_path / "own"), {"remote": url, "key": "id", "storage": {"options": options}}
    function: Any = iter
    ways: dict[str, Callable[[], Any]] = {
        "dataset": lambda: StreamingDataset(remote=data, storage={"options": options}).size,
        "url": lambda: StreamingDataset(remote=url, storage={"options": options}).size,
        "stream": lambda: StreamingDataset(streams={"a": Stream(remote=url, storage={"options": options})}).size,
        "join": lambda: StreamingDataset(remote=str(write_dataset(Path(own))), join={"a": joined}).size,
        "writer": lambda: MDSWriter(out=url, columns=columns, storage_options=options),
        "pair": lambda: MDSWriter(out=(data, url), columns=columns, storage_options=options),
        "merge": lambda: merge([f"{url}/a"], url, storage_options=options),
        "parallel": lambda: write_parallel([1], function, url, columns=columns, storage_options=options),
    }
    ways[way]()


WAYS = {
    **dict.fromkeys(("dataset", "url", "stream"), "storage.options"),
    **dict.fromkeys(("writer", "pair", "merge", "parallel"), "storage_options"),
}


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=repr)
@pytest.mark.parametrize(("way", "option"), WAYS.items(), ids=WAYS)
def test_storage_options_that_are_no_mapping_are_refused(way: str, option: str, options: Any, tmp_path: Path) -> None:
    with assert_error(ConfigError, option=option) as caught:
        _use(way, options, tmp_path)
    assert "values" in str(caught.value)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(("way", "option"), [("join", "storage.options"), *list(WAYS.items())[1:]])
def test_an_unset_variable_is_reported_with_the_option(way: str, option: str, tmp_path: Path) -> None:
    with assert_error(ConfigError, option=option) as caught:
        _use(way, {"key": "${STORE_MISSING}"}, tmp_path)
    assert str(caught.value).count(option) == 1
