from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.arrival import claim
from lightning_streaming.cache.inspection import FileKind, Removed, clear_cache, collect_garbage, list_cache
from lightning_streaming.cache.ledger import read_ledger
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import INDEX_BASENAME, dump_index
from lightning_streaming.formats.mapping import map_file
from tests.cache.datasets import cached, parts, write_dataset


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A cache directory of an index, two shards of ours, and a foreign file."""
    write_dataset(tmp_path / "remote", shards=2)
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    for shard in cache.read_index().shards:
        cache.ensure(shard)
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    return tmp_path / "cache"


def test_every_file_is_listed_with_what_it_is(filled: Path) -> None:
    view = map_file(filled / "shard.00000.mds", 3000)
    part = claim(filled, "shard.00005.mds")
    assert part is not None
    part.resize(7)
    found = {file.name: (file.kind, file.bytes, file.in_use) for file in list_cache(filled)}
    assert found == {
        f".arriving/{part.path.name}": (FileKind.ARRIVING, 7, True),
        INDEX_BASENAME: (FileKind.INDEX, (filled / INDEX_BASENAME).stat().st_size, False),
        "notes.txt": (FileKind.FOREIGN, 4, False),
        "shard.00000.mds": (FileKind.OURS, 3000, True),
        "shard.00001.mds": (FileKind.OURS, 3000, False),
    }
    last_used = {file.name: file.last_used for file in list_cache(filled)}["shard.00001.mds"]
    assert last_used is not None
    assert last_used <= time.time()
    part.close()
    view.release()
    assert not any(file.in_use for file in list_cache(filled))


def test_clearing_leaves_what_is_in_use_or_not_ours(filled: Path) -> None:
    view = map_file(filled / "shard.00000.mds", 3000)
    assert clear_cache(filled) == Removed(files=1, bytes=3000)
    assert list(cached(filled)) == [INDEX_BASENAME, "notes.txt", "shard.00000.mds"]
    view.release()
    assert clear_cache(filled) == Removed(files=1, bytes=3000)
    assert list(cached(filled)) == [INDEX_BASENAME, "notes.txt"]
    assert read_ledger(filled) == 0


def test_garbage_is_what_nobody_will_need(filled: Path, tmp_path: Path) -> None:
    part = claim(filled, "shard.00005.mds")
    assert part is not None
    part.resize(7)
    part.close()
    (filled / ".index-0123456789abcdef").write_bytes(b"old")
    index = write_dataset(tmp_path / "remote", shards=1)
    (filled / INDEX_BASENAME).write_bytes(dump_index(index.shards))
    assert collect_garbage(filled).files == 3
    assert list(cached(filled)) == [INDEX_BASENAME, "notes.txt", "shard.00000.mds"]
    assert not parts(filled)
    assert collect_garbage(filled) == Removed(files=0, bytes=0)


def test_decompressed_shards_of_a_dataset_in_place_are_listed_and_cleared(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", shards=2, compression="zstd")
    cache = ShardCache(CacheConfig(name="code", local=tmp_path / "data"))
    before = cached(tmp_path / "data")
    for shard in cache.read_index().shards:
        cache.ensure(shard)
    root = cache.place.directory
    assert [(file.name, file.kind) for file in list_cache(root)] == [
        ("shard.00000.mds", FileKind.OURS),
        ("shard.00001.mds", FileKind.OURS),
    ]
    assert collect_garbage(root) == Removed(files=0, bytes=0)
    assert clear_cache(root) == Removed(files=2, bytes=6000)
    assert cached(tmp_path / "data") == before


@pytest.mark.parametrize("action", [list_cache, clear_cache, collect_garbage])
def test_another_directory_is_refused_and_left(tmp_path: Path, action: object) -> None:
    write_dataset(tmp_path, shards=1)
    before = cached(tmp_path)
    assert callable(action)
    with pytest.raises(ConfigError, match="is not a cache directory of one stream"):
        action(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(before)
