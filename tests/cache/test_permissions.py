"""Several users who share a directory, and begin at once."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.permissions import make_directories, open_shared
from lightning_streaming.errors import StorageError
from tests.cache.datasets import cached, fetch_shard, raw_data, write_dataset
from tests.cache.users import open_to_all

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
_FORK: Any = multiprocessing.get_context("fork")
GROUP = 4242
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def become(user: int) -> None:
    os.setgroups([GROUP])
    os.setgid(GROUP)
    os.setuid(user)
    os.umask(0o077)


def cache_of(tmp_path: Path) -> ShardCache:
    return ShardCache(CacheConfig(name="code", remote=str(tmp_path / "remote"), local=tmp_path / "cache"))


def read_all(user: int, tmp_path: Path, start: Any) -> None:
    become(user)
    cache = cache_of(tmp_path)
    start.wait()
    for number, shard in enumerate(cache.read_index().shards):
        with cache.hold(shard) as directory:
            assert (directory / shard.raw_data.basename).read_bytes() == raw_data(number)


def shared_directory(tmp_path: Path, mode: int) -> Path:
    root = tmp_path / "cache"
    root.mkdir()
    os.chown(root, -1, GROUP)
    root.chmod(mode)
    open_to_all(root)
    return root


@as_root
@pytest.mark.parametrize("mode", [0o2770, 0o2777, 0o777, 0o1777], ids=oct)
def test_two_users_may_begin_at_once(tmp_path: Path, mode: int) -> None:
    write_dataset(tmp_path / "remote", shards=4)
    shared_directory(tmp_path, mode)
    cache_of(tmp_path).read_index()
    start = _FORK.Barrier(4)
    readers = [_FORK.Process(target=read_all, args=(user, tmp_path, start)) for user in (4001, 4002, 4001, 4002)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert [reader.exitcode for reader in readers] == [0] * 4


@as_root
def test_a_wrong_file_of_another_user_that_may_not_be_removed_is_told(tmp_path: Path) -> None:
    write_dataset(tmp_path / "remote", shards=1)
    wrong = shared_directory(tmp_path, 0o1777) / "shard.00000.mds"
    wrong.write_bytes(b"wrong")
    reader = _FORK.Process(target=_is_told_of_the_wrong_file, args=(tmp_path,))
    reader.start()
    reader.join()
    assert reader.exitcode == 0
    assert wrong.read_bytes() == b"wrong"


def _is_told_of_the_wrong_file(tmp_path: Path) -> None:
    become(4001)
    cache = cache_of(tmp_path)
    with pytest.raises(StorageError, match="belongs to user 0, whose file may not be removed"):
        fetch_shard(cache, cache.read_index().shards[0])


def test_a_shared_file_has_its_permissions_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o2770)
    link, rename = os.link, Path.rename
    seen: list[int] = []

    def record_link(source: str, target: Path) -> None:
        seen.append(Path(source).stat().st_mode & 0o7777)
        link(source, target)

    def record_rename(source: Path, target: Path) -> Path:
        seen.append(source.stat().st_mode & 0o7777)
        return rename(source, target)

    monkeypatch.setattr(os, "link", record_link)
    monkeypatch.setattr(Path, "rename", record_rename)
    os.close(open_shared(tmp_path / ".usage", tmp_path))
    make_directories(tmp_path / "sub", tmp_path)
    make_directories(tmp_path / "sub", tmp_path)
    assert seen == [0o660, 0o2770]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".usage", "sub"]


def test_a_filesystem_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    os.close(open_shared(tmp_path / ".usage", tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [".usage"]
    assert not cached(tmp_path)
