"""A disk that is full, and a cache directory that somebody removes."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.arrival import claim
from lightning_streaming.cache.fetching import Absence
from lightning_streaming.cache.ledger import read_ledger
from lightning_streaming.cache.room import CacheRoom
from lightning_streaming.errors import DiskFullError, StorageError
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.mapping import map_file
from tests.cache.datasets import cached, parts, raw_data, write_dataset
from tests.loading.processes import wait_until

SHARD = 3000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk of 64 KiB, of which an index and a few shards take most: a page is 4 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", path], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


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
    assert read_ledger(small_disk / "cache") == len(here) * SHARD


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_disk_full_of_what_must_stay_is_told(
    small_disk: Path, tmp_path: Path, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_streaming.cache.room._PATIENCE_SECONDS", 0.05)
    cache = cache_on(small_disk, tmp_path / "remote", compression)
    shards = cache.read_index().shards
    used: list[memoryview] = []

    def map_all() -> None:
        for shard in shards:
            with cache.hold(shard) as directory:
                used.append(map_file(directory / shard.raw_data.basename, SHARD))

    with pytest.raises(DiskFullError, match=r"stream 'code': shard\.000"):
        map_all()
    assert [bytes(view) for view in used] == [raw_data(number) for number in range(len(used))]
    assert not parts(small_disk / "cache")


def full_of_maps(cache: ShardCache) -> tuple[list[ShardInfo], list[memoryview]]:
    """Map shards until none fits; gives the shards that are not here, and the maps."""
    shards, used = list(cache.read_index().shards), []
    while os.statvfs(cache.place.directory).f_bavail > 1:
        with cache.hold(shards[0]) as directory:
            used.append(map_file(directory / shards.pop(0).raw_data.basename, SHARD))
    (cache.place.directory.parent / "filler").write_bytes(bytes(1))
    return shards, used


def test_a_reader_lets_go_of_its_own_shards_where_the_disk_is_full(small_disk: Path, tmp_path: Path) -> None:
    cache = cache_on(small_disk, tmp_path / "remote", None)
    shards, used = full_of_maps(cache)
    with cache.hold(shards[0], let_go=used.clear) as directory:
        assert (directory / shards[0].raw_data.basename).stat().st_size == SHARD


def test_a_reader_waits_on_a_full_disk_until_others_let_go_and_who_fetches_ahead_stands_back(
    small_disk: Path, tmp_path: Path
) -> None:
    cache = cache_on(small_disk, tmp_path / "remote", None)
    shards, used = full_of_maps(cache)
    room = CacheRoom([cache.place])
    assert cache.fetch_ahead(shards[1], room, None) is Absence.NO_ROOM
    reader = threading.Thread(target=cache.ensure, args=(shards[0],))
    reader.start()
    assert wait_until(room.somebody_waits)
    assert cache.fetch_ahead(shards[1], room, None) in (Absence.NO_ROOM, Absence.FETCHED_ELSEWHERE)
    used.clear()
    reader.join()
    assert cache.has(shards[0])
    assert not room.somebody_waits()
    assert read_ledger(cache.place.directory) == sum(
        path.stat().st_size for path in cache.place.directory.glob("*.mds")
    )


def test_a_directory_that_is_removed_while_room_is_made_is_told(tmp_path: Path) -> None:
    write_dataset(tmp_path / "remote", shards=1)
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    cache.ensure(cache.read_index().shards[0])
    part = claim(tmp_path / "cache", "other.mds")
    assert part is not None
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(StorageError, match="was removed while it was in use"):
        CacheRoom([cache.place], 10**6).reserve(cache.place, [(part, 5)], spare_since=None)
    with pytest.raises(StorageError, match="was removed while it was in use"):
        CacheRoom([cache.place], 1).reserve_now(cache.place, [(part, 5)], lambda: None)
    part.close()


def test_a_cache_directory_that_was_removed_is_told_and_not_made_again(tmp_path: Path) -> None:
    write_dataset(tmp_path / "remote", shards=3)
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    shards = cache.read_index().shards
    cache.ensure(shards[0])
    view = map_file(tmp_path / "cache" / shards[0].raw_data.basename, SHARD)
    shutil.rmtree(tmp_path / "cache")
    for shard in shards:
        with pytest.raises(
            StorageError, match=r"stream 'code': the cache directory .*cache was removed while it was in"
        ):
            cache.ensure(shard)
    assert not (tmp_path / "cache").exists()
    assert bytes(view) == raw_data(0)


def test_what_arrives_in_a_directory_that_is_removed_meanwhile_is_told(tmp_path: Path) -> None:
    write_dataset(tmp_path / "remote", shards=1)
    cache = ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))
    (shard,) = cache.read_index().shards
    cache.place.prepare()
    shutil.rmtree(tmp_path / "cache" / ".arriving", ignore_errors=True)
    cache.ensure(shard)  # a directory of ours within it is made again
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(StorageError, match="was removed while it was in use"):
        cache.fetch_ahead(shard, cache._unlimited, None)
