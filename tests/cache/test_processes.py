"""Several processes, one cache directory."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.formats.index import INDEX_BASENAME
from tests.cache.datasets import cached, fetch_shard, parts, raw_data, write_dataset
from tests.servers import HttpStore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def _cache(store: HttpStore, tmp_path: Path, **settings: Any) -> ShardCache:
    return ShardCache(CacheConfig(name="code", remote=store.url, local=tmp_path / "cache", **settings))


def _ensure_all(cache: ShardCache, start: Any = None) -> None:
    if start is not None:
        start.wait()
    for shard in cache.read_index().shards:
        fetch_shard(cache, shard)


@pytest.mark.parametrize(("method", "compression"), [("fork", None), ("fork", "zstd"), ("spawn", None)])
def test_eight_processes_fetch_each_file_once(
    http_store: HttpStore, tmp_path: Path, method: str, compression: str | None
) -> None:
    write_dataset(http_store.root, shards=20, compression=compression)
    context: Any = multiprocessing.get_context(method)
    start = context.Barrier(8)
    children = [context.Process(target=_ensure_all, args=(_cache(http_store, tmp_path), start)) for _ in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 8
    assert set(Counter(http_store.requests()).values()) == {1}
    assert list(cached(tmp_path / "cache")) == [INDEX_BASENAME, *(f"shard.{number:05}.mds" for number in range(20))]
    assert not parts(tmp_path / "cache")


def test_what_a_killed_process_was_fetching_is_fetched_by_the_next(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, shards=1)
    http_store.fail("shard.00000.mds", "stall", times=1)
    child = multiprocessing.get_context("fork").Process(target=_ensure_all, args=(_cache(http_store, tmp_path),))
    child.start()
    directory = tmp_path / "cache"
    while "shard.00000.mds" not in http_store.requests():
        assert child.is_alive()
        child.join(0.02)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert len(parts(directory)) == 1
    _ensure_all(_cache(http_store, tmp_path, download_retry=0, download_timeout=5))
    assert list(cached(directory)) == [INDEX_BASENAME, "shard.00000.mds"]
    assert not parts(directory)
    assert (directory / "shard.00000.mds").read_bytes() == raw_data(0)
