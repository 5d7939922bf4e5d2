"""A disk that is full, and a cache directory that somebody removes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.file_states import claim
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.cache.records import read_usage
from lightning_streaming.cache.shard_cache import FetchStatus
from lightning_streaming.errors import DiskFullError, StorageError
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.mds import map_file
from tests.cache.helpers import cached, disk_of, fetch_shard, parts, raw_data, write_dataset
from tests.helpers import assert_error
from tests.reading.processes import wait_until

SHARD = 3000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk of ten pages, of which an index and a few shards take most."""
    with disk_of(tmp_path / "disk", 40) as path:
        yield path


def cache_on(disk: Path, remote: Path, compression: str | None) -> ShardCache:
    write_dataset(remote, shards=12, compression=compression)
    return ShardCache(CacheConfig(name="code", remote=str(remote), local=disk / "cache", download_retry=0))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_full_disk_makes_room_by_eviction(small_disk: Path, tmp_path: Path, compression: str | None) -> None:
    cache = cache_on(small_disk, tmp_path / "remote", compression)
    for number, shard in enumerate(cache.read_index().shards):
        with cache.hold(shard) as directory:
            assert (directory / shard.raw_data.basename).read_bytes() == raw_data(number)
    assert not parts(small_disk / "cache")
    here = [name for name in cached(small_disk / "cache") if name.endswith(".mds")]
    assert 0 < len(here) < 12
    assert read_usage(small_disk / "cache") == len(here) * SHARD


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_however_little_is_left_a_shard_is_right_or_the_error_says_that_the_disk_is_full(
    small_disk: Path, tmp_path: Path, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index, where it is from, the count, parts, the queue: each is the first for which there is no room."""
    monkeypatch.setattr("lightning_streaming.cache.quota._WAIT_SECONDS", 0.05)
    found = []
    for pages in range(11):
        shutil.rmtree(small_disk / "cache", ignore_errors=True)
        (small_disk / "filling").write_bytes(bytes(4096 * (10 - pages)))
        cache = cache_on(small_disk, tmp_path / "remote", compression)
        with suppress(DiskFullError):
            found.append(fetch_shard(cache, cache.read_index().shards[0]) / "shard.00000.mds")
            assert found[-1].read_bytes() == raw_data(0)
    assert 0 < len(found) < 10


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_disk_full_of_what_must_stay_is_told(
    small_disk: Path, tmp_path: Path, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_streaming.cache.quota._WAIT_SECONDS", 0.05)
    cache = cache_on(small_disk, tmp_path / "remote", compression)
    shards = cache.read_index().shards
    used: list[memoryview] = []

    def map_all() -> None:
        for shard in shards:
            with cache.hold(shard) as directory:
                used.append(map_file(directory / shard.raw_data.basename, SHARD))

    with assert_error(DiskFullError, stream="code"):
        map_all()
    assert [bytes(view) for view in used] == [raw_data(number) for number in range(len(used))]
    assert not parts(small_disk / "cache")


def full_of_maps(cache: ShardCache) -> tuple[list[ShardInfo], list[memoryview]]:
    """Map shards until none fits; gives the shards that are not here, and the maps."""
    shards, used = list(cache.read_index().shards), []
    while os.statvfs(cache.directory.path).f_bavail > 1:
        with cache.hold(shards[0]) as directory:
            used.append(map_file(directory / shards.pop(0).raw_data.basename, SHARD))
    (cache.directory.path.parent / "filler").write_bytes(bytes(1))
    return shards, used


def test_a_reader_lets_go_of_its_own_shards_where_the_disk_is_full(small_disk: Path, tmp_path: Path) -> None:
    cache = cache_on(small_disk, tmp_path / "remote", None)
    shards, used = full_of_maps(cache)
    with cache.hold(shards[0], release=used.clear) as directory:
        assert (directory / shards[0].raw_data.basename).stat().st_size == SHARD


def test_a_reader_waits_on_a_full_disk_until_others_let_go_and_who_fetches_ahead_stands_back(
    small_disk: Path, tmp_path: Path
) -> None:
    cache = cache_on(small_disk, tmp_path / "remote", None)
    shards, used = full_of_maps(cache)
    room = CacheQuota([cache.directory])
    assert cache.fetch_ahead(shards[1], room) is FetchStatus.NO_ROOM
    reader = threading.Thread(target=fetch_shard, args=(cache, shards[0]))
    reader.start()
    assert wait_until(room.has_waiting_reader)
    assert cache.fetch_ahead(shards[1], room) in (FetchStatus.NO_ROOM, FetchStatus.FETCHED_ELSEWHERE)
    used.clear()
    reader.join()
    assert cache.has(shards[0])
    assert not room.has_waiting_reader()
    assert read_usage(cache.directory.path) == sum(path.stat().st_size for path in cache.directory.path.glob("*.mds"))


def test_a_directory_that_is_removed_while_room_is_made_is_told(tmp_path: Path) -> None:
    write_dataset(tmp_path / "remote", shards=1)
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    fetch_shard(cache, cache.read_index().shards[0])
    part = claim(tmp_path / "cache", "other.mds")
    assert part is not None
    shutil.rmtree(tmp_path / "cache")
    with assert_error(StorageError, path="cache") as caught:
        CacheQuota([cache.directory], 10**6).reserve(cache.directory, [(part, 5)], spare_since=None)
    assert "removed" in str(caught.value)
    with assert_error(StorageError, path="cache") as caught:
        CacheQuota([cache.directory], 1).reserve(cache.directory, [(part, 5)], release=lambda: None)
    assert "removed" in str(caught.value)
    part.close()


def test_a_cache_directory_that_was_removed_is_told_and_not_made_again(tmp_path: Path) -> None:
    write_dataset(tmp_path / "remote", shards=3)
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    shards = cache.read_index().shards
    fetch_shard(cache, shards[0])
    view = map_file(tmp_path / "cache" / shards[0].raw_data.basename, SHARD)
    shutil.rmtree(tmp_path / "cache")
    for shard in shards:
        with assert_error(StorageError, path="cache", stream="code") as caught:
            fetch_shard(cache, shard)
        assert "removed" in str(caught.value)
    assert not (tmp_path / "cache").exists()
    assert bytes(view) == raw_data(0)


def test_what_arrives_in_a_directory_that_is_removed_meanwhile_is_told(tmp_path: Path) -> None:
    write_dataset(tmp_path / "remote", shards=1)
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    (shard,) = cache.read_index().shards
    cache.directory.prepare()
    shutil.rmtree(tmp_path / "cache" / ".arriving", ignore_errors=True)
    fetch_shard(cache, shard)  # a directory of ours within it is made again
    shutil.rmtree(tmp_path / "cache")
    with assert_error(StorageError, path="cache") as caught:
        cache.fetch_ahead(shard)
    assert "removed" in str(caught.value)
