"""Files found in a cache directory: ours and unchanged, or looked at closely."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.marks import verified_mark
from lightning_streaming.cache.sources import RemoteSource
from lightning_streaming.formats.index import FileInfo
from tests.cache.datasets import fetch_shard, raw_data, write_dataset
from tests.cache.users import open_to_all
from tests.servers import HttpStore


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed where they were found."""
    names: list[str] = []
    check = RemoteSource.check

    def noting(self: RemoteSource, file: FileInfo, path: Path) -> bool:
        names.append(file.basename)
        return check(self, file, path)

    monkeypatch.setattr(RemoteSource, "check", noting)
    return names


def cache_of(store: HttpStore, tmp_path: Path, **settings: Any) -> ShardCache:
    return ShardCache(CacheConfig(name="code", remote=store.url, local=tmp_path / "cache", **settings))


def ensure(store: HttpStore, tmp_path: Path) -> Path:
    cache = cache_of(store, tmp_path)
    shard = cache.read_index().shards[0]
    directory = fetch_shard(cache, shard)
    assert directory is not None
    return directory / shard.raw_data.basename


def downloads(store: HttpStore) -> int:
    return store.requests().count("shard.00000.mds")


def test_what_we_fetched_is_not_hashed_again(http_store: HttpStore, tmp_path: Path, hashed: list[str]) -> None:
    write_dataset(http_store.root, shards=1)
    assert ensure(http_store, tmp_path) == ensure(http_store, tmp_path)
    assert (hashed, downloads(http_store)) == ([], 1)


def test_what_somebody_put_there_is_hashed_once_and_used(
    http_store: HttpStore, tmp_path: Path, hashed: list[str]
) -> None:
    write_dataset(http_store.root, shards=1)
    path = tmp_path / "cache" / "shard.00000.mds"
    path.parent.mkdir()
    path.write_bytes(raw_data(0))
    inode = path.stat().st_ino
    for _ in range(3):
        assert ensure(http_store, tmp_path) == path
    assert (hashed, downloads(http_store)) == (["shard.00000.mds"], 0)
    assert path.stat().st_ino == inode
    own = cache_of(http_store, tmp_path).place.own
    assert own.mark is not None
    assert path.stat().st_mtime_ns == verified_mark(own.mark)


@pytest.mark.parametrize("found", [bytes(3000), b"short", raw_data(0) + b"long", b""])
def test_what_is_wrong_is_replaced(http_store: HttpStore, tmp_path: Path, found: bytes) -> None:
    write_dataset(http_store.root, shards=1)
    path = tmp_path / "cache" / "shard.00000.mds"
    path.parent.mkdir()
    path.write_bytes(found)
    assert ensure(http_store, tmp_path).read_bytes() == raw_data(0)
    assert downloads(http_store) == 1


def test_what_was_changed_after_it_was_checked_is_replaced(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, shards=1)
    path = ensure(http_store, tmp_path)
    with path.open("r+b") as file:
        file.write(b"damage")
    assert ensure(http_store, tmp_path).read_bytes() == raw_data(0)
    assert downloads(http_store) == 2


@pytest.mark.parametrize("compression", [None, "gz"])
@pytest.mark.parametrize("has_old_index", [False, True])
def test_without_a_hash_files_of_an_earlier_dataset_are_not_taken_for_ours(
    has_old_index: bool, compression: str | None, http_store: HttpStore, tmp_path: Path
) -> None:
    """All sizes are alike; only the bytes differ."""
    write_dataset(http_store.root, shards=2, hashes=(), compression=compression)
    write_dataset(tmp_path / "cache", shards=3, hashes=(), seed=1)
    if not has_old_index:
        (tmp_path / "cache" / "index.json").unlink()
    for _ in range(2):
        assert ensure(http_store, tmp_path).read_bytes() == raw_data(0)
    stored = "shard.00000.mds" + (".gz" if compression else "")
    assert http_store.requests().count(stored) == 1, "what was fetched is known again"


@pytest.mark.parametrize("hashes", [(), ("sha1",)])
@pytest.mark.parametrize("seeds", [(0, 1), (1, 0)])
@pytest.mark.parametrize("compressions", [(None, None), (None, "gz"), ("gz", None), ("gz", "gz")])
def test_a_remote_that_gets_new_data_of_the_same_sizes_is_read_anew(
    compressions: tuple[str | None, str | None],
    seeds: tuple[int, int],
    hashes: tuple[str, ...],
    http_store: HttpStore,
    tmp_path: Path,
) -> None:
    """But where neither index nor sizes say that anything has changed."""
    for number, (compression, seed) in enumerate(zip(compressions, seeds, strict=True)):
        for path in http_store.root.iterdir():
            path.unlink()
        write_dataset(http_store.root, shards=2 - number, hashes=hashes, compression=compression, seed=seed)
        cache = cache_of(http_store, tmp_path)
        with cache.hold(cache.read_index().shards[0]) as directory:
            assert (directory / "shard.00000.mds").read_bytes() == raw_data(0, seed=seed)


@pytest.mark.parametrize("compression", [None, "gz"])
def test_without_a_hash_what_came_with_the_same_index_is_used(
    compression: str | None, http_store: HttpStore, tmp_path: Path
) -> None:
    """As where the dataset was copied to the directory before; but a raw form may be anybody's."""
    write_dataset(http_store.root, shards=2, hashes=(), compression=compression)
    write_dataset(tmp_path / "cache", shards=2, hashes=(), compression=compression)
    if compression:
        (tmp_path / "cache" / "shard.00000.mds").write_bytes(raw_data(0, seed=1))
    for _ in range(2):
        assert ensure(http_store, tmp_path).read_bytes() == raw_data(0)
    assert [name for name in http_store.requests() if name.startswith("shard.")] == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_two_users_share_a_directory(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root, shards=4)
    shared = tmp_path / "cache"
    shared.mkdir()
    os.chown(shared, -1, 4242)
    shared.chmod(0o2775)
    open_to_all(shared)
    for user, shards in [(4001, [0, 1]), (4002, [1, 2]), (4001, [0, 2, 3])]:
        child = multiprocessing.get_context("fork").Process(target=_as_user, args=(user, http_store, tmp_path, shards))
        child.start()
        child.join()
        assert child.exitcode == 0
    assert http_store.requests().count("shard.00001.mds") == 1
    names = {path.name: path.stat() for path in shared.iterdir()}
    assert [names[f"shard.0000{number}.mds"].st_uid for number in (2, 3)] == [4002, 4001]
    assert {found.st_gid for found in names.values()} == {4242}


def _as_user(user: int, store: HttpStore, tmp_path: Path, shards: list[int]) -> None:
    """Read shards and evict one, in a process of another user of the group."""
    os.setgroups([4242])
    os.setgid(user)
    os.setuid(user)
    os.umask(0o077)
    os.environ["LIGHTNING_STREAMING_RUNTIME"] = f"/tmp/lightning-streaming-{user}-{os.getpid()}"
    cache = cache_of(store, tmp_path)
    index = cache.read_index()
    assert None not in [fetch_shard(cache, index.shards[shard]) for shard in shards]
    for shard in shards:
        assert (tmp_path / "cache" / f"shard.{shard:05}.mds").read_bytes() == raw_data(shard)
    assert cache.evict(index.shards[shards[0]])
