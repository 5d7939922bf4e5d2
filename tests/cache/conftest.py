"""Fixtures of several tests of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from tests.cache.helpers import fetch_shard, write_dataset


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A cache directory of an index, two shards of ours, and a foreign file."""
    write_dataset(tmp_path / "remote", shards=2)
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    for shard in cache.read_index().shards:
        fetch_shard(cache, shard)
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    return tmp_path / "cache"
