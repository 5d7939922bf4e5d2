from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.arrival import claim
from lightning_streaming.cache.index_lock import held_index
from lightning_streaming.cache.inspection import FileKind, find_index, is_cache, list_cache
from lightning_streaming.cache.layout import ORIGIN_BASENAME, default_cache_directory
from lightning_streaming.cache.marks import make_mark
from lightning_streaming.cache.stamps import stamp_finished, stamp_used
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, ShardInfo, dump_index, parse_index
from lightning_streaming.formats.mapping import map_file
from tests.cache.datasets import cached, fetch_shard, write_dataset


def read_again(directory: Path) -> Iterable[ShardInfo]:
    """The shards of the index there."""
    return parse_index((directory / INDEX_BASENAME).read_bytes(), "index").shards


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


def test_a_shard_that_was_finished_with_is_known_to_have_been_used(filled: Path) -> None:
    before = time.time()
    for name in ("shard.00000.mds", "shard.00001.mds"):
        os.utime(filled / name, ns=(0, (filled / name).stat().st_mtime_ns))
    stamp_used(filled / "shard.00000.mds")
    stamp_finished(filled / "shard.00001.mds")
    for file in list_cache(filled):
        if file.kind is FileKind.OURS:
            assert file.last_used is not None
            assert before - 1 <= file.last_used <= time.time() + 1


def test_what_an_index_is_fetched_into_is_in_use_as_long_as_its_part_is_locked(filled: Path) -> None:
    with held_index(filled, 1) as lock:
        lock.scratch.write_bytes(b"half")
        assert {file.name: file.in_use for file in list_cache(filled)}[lock.scratch.name]
        (filled / "kept").write_bytes(b"half")
    (filled / "kept").rename(lock.scratch)
    assert not {file.name: file.in_use for file in list_cache(filled)}[lock.scratch.name]


@pytest.mark.parametrize("shards", [3, 6000])
def test_the_index_is_found_whether_it_has_a_parsed_form_or_not(filled: Path, shards: int) -> None:
    index = DatasetIndex(tuple(replace(one, samples=1) for one in list(read_again(filled)) * (shards // 2)))
    text = dump_index(index.shards)
    (filled / INDEX_BASENAME).write_bytes(text)
    found = find_index(filled)
    assert found is not None
    assert found.digest == hashlib.sha256(text).hexdigest()
    assert len(found.index.shards) == len(index.shards)


@pytest.mark.parametrize("text", [None, b"{"])
def test_an_index_that_is_missing_or_damaged_is_none(filled: Path, text: bytes | None) -> None:
    (filled / INDEX_BASENAME).unlink()
    if text is not None:
        (filled / INDEX_BASENAME).write_bytes(text)
    assert find_index(filled) is None


def test_decompressed_shards_of_a_dataset_in_place_are_listed(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", shards=2, compression="zstd")
    cache = ShardCache(CacheConfig(name="code", local=tmp_path / "data"))
    before = cached(tmp_path / "data")
    for shard in cache.read_index().shards:
        fetch_shard(cache, shard)
    root = cache.place.directory
    assert [(file.name, file.kind) for file in list_cache(root)] == [
        ("shard.00000.mds", FileKind.OURS),
        ("shard.00001.mds", FileKind.OURS),
    ]
    assert cached(tmp_path / "data") == before


@pytest.mark.parametrize("in_default", [False, True])
def test_what_was_not_fetched_is_foreign_also_without_an_index(tmp_path: Path, in_default: bool) -> None:
    """People keep files of their own beside shards, and old ones have times of the years that marks are of."""
    write_dataset(tmp_path / "remote", shards=1)
    url = (tmp_path / "remote").as_uri()
    local = default_cache_directory(url) if in_default else tmp_path / "cache"
    cache = ShardCache(CacheConfig(name="code", remote=url, local=local))
    fetch_shard(cache, cache.read_index().shards[0])
    (local / "notes.txt").write_text("mine")
    os.utime(local / "notes.txt", ns=(0, make_mark()))
    (local / INDEX_BASENAME).unlink()
    assert {file.name: file.kind for file in list_cache(local)} == {
        "notes.txt": FileKind.FOREIGN,
        "shard.00000.mds": FileKind.OURS,
    }


@pytest.mark.parametrize("text", [None, "", "0123456789abcdef", "0123456789abcdef\nnonsense\nnull"])
@pytest.mark.parametrize("has_index", [False, True])
def test_a_directory_that_does_not_say_what_is_ours_is_none(filled: Path, text: str | None, has_index: bool) -> None:
    if not has_index:
        (filled / INDEX_BASENAME).unlink()
    (filled / ORIGIN_BASENAME).unlink()
    if text is not None:
        (filled / ORIGIN_BASENAME).write_text(text)
    assert not is_cache(filled)
    with pytest.raises(ConfigError, match="is not a cache directory of one stream"):
        list_cache(filled)


def test_a_directory_is_for_fetched_or_for_decompressed_files(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", shards=1, compression="zstd")
    in_place = ShardCache(CacheConfig(name="code", local=tmp_path / "data"))
    fetch_shard(in_place, in_place.read_index().shards[0])
    root = in_place.place.directory
    fetched = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "data"), local=root))
    with pytest.raises(ConfigError, match="is for raw files decompressed from"):
        fetched.read_index()
    origin = (root / ORIGIN_BASENAME).read_text().splitlines()
    (root / ORIGIN_BASENAME).write_text(f"{origin[0]}\n{make_mark()}\nnull\n")
    again = ShardCache(CacheConfig(name="code", local=tmp_path / "data"))
    with pytest.raises(ConfigError, match="is for files fetched from"):
        fetch_shard(again, again.read_index().shards[0])


def test_another_directory_is_refused_and_left(tmp_path: Path) -> None:
    write_dataset(tmp_path, shards=1)
    before = cached(tmp_path)
    assert not is_cache(tmp_path)
    with pytest.raises(ConfigError, match="is not a cache directory of one stream"):
        list_cache(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(before)
