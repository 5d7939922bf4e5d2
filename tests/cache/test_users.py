"""Several users who share a directory, and begin at once.

Users who share a directory with the sticky bit, as ``/tmp`` has: each reads all files and removes only their own.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.cache.records import read_usage, scan
from lightning_streaming.cache.shared_files import make_directories, open_shared
from lightning_streaming.errors import StorageError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, dump_index
from tests.cache.helpers import (
    LARGE,
    as_user,
    cached,
    fetch_shard,
    let_a_minute_pass,
    open_to_all,
    put,
    raw_data,
    write_dataset,
)
from tests.helpers import assert_error

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


@pytest.mark.rotate(2)
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
    with assert_error(StorageError, path="shard.00000.mds") as caught:
        fetch_shard(cache, cache.read_index().shards[0])
    assert "belongs" in str(caught.value)


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


FIRST, SECOND = 4001, 4002


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory with a remote of two shards and an empty cache, to which all may write.

    Not in pytest's own, which another run of the same user closes to others when it starts.
    """
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with TemporaryDirectory() as name:
        root = Path(name)
        write_dataset(root / "remote", shards=2)
        (root / "cache").mkdir()
        (root / "cache").chmod(0o1777)
        root.chmod(0o755)
        read_all_in(root, "own")  # imports what other users may not
        yield root


def cache_in(root: Path, local: str = "cache") -> ShardCache:
    return ShardCache(CacheConfig(name="code", remote=str(root / "remote"), local=root / local, download_retry=0))


def read_all_in(root: Path, local: str = "cache") -> list[bytes]:
    cache = cache_in(root, local)
    found = []
    for shard in cache.read_index().shards:
        with cache.hold(shard) as directory:
            found.append((directory / shard.raw_data.basename).read_bytes())
    return found


def read_second(root: Path) -> bytes:
    cache = cache_in(root)
    directory = fetch_shard(cache, cache.read_index().shards[1])
    return (directory / "shard.00001.mds").read_bytes()


def write_over_the_first(root: Path) -> None:
    """Let the remote have another first shard by now, of the same size."""
    first, second = (write_dataset(root / f"seed{seed}", seed=seed).shards for seed in (1, 0))
    (root / "remote" / INDEX_BASENAME).write_bytes(dump_index(DatasetIndex([first[0], second[1]]).shards))
    (root / "remote" / "shard.00000.mds").write_bytes(raw_data(0, seed=1))
    let_a_minute_pass(root / "cache")


def test_what_one_user_fetched_the_other_reads_and_adds_to(shared: Path) -> None:
    data = [raw_data(number) for number in range(3)]
    assert as_user(FIRST, partial(read_all_in, shared)) == data[:2]
    write_dataset(shared / "remote", shards=3)
    let_a_minute_pass(shared / "cache")
    assert as_user(SECOND, partial(read_all_in, shared)) == data
    owners = [(shared / "cache" / f"shard.{number:05}.mds").stat().st_uid for number in range(3)]
    assert owners == [FIRST, FIRST, SECOND]
    for user in (SECOND, FIRST):
        let_a_minute_pass(shared / "cache")
        assert as_user(user, partial(read_all_in, shared)) == data


def cut_index(root: Path) -> None:
    os.truncate(root / "cache" / INDEX_BASENAME, 100)


def grow(root: Path) -> None:
    """Let the remote have an index that is large enough for a parsed form."""
    put(root / "remote", LARGE)
    let_a_minute_pass(root / "cache")


@pytest.mark.parametrize("change", [cut_index, grow])
def test_an_index_of_another_user_that_is_wrong_by_now_is_not_used(
    shared: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    as_user(FIRST, partial(read_all_in, shared))
    change(shared)
    before = (shared / "cache" / INDEX_BASENAME).read_bytes()

    def look() -> tuple[int, list[str]]:
        with caplog.at_level(logging.WARNING):
            return len(cache_in(shared).read_index().shards), caplog.messages

    for _ in range(2):
        found = as_user(SECOND, look)
        assert found[0] == (2 if change is cut_index else LARGE), found
        assert "may not be replaced" in found[1][0]
        assert "local=" in found[1][0]
    assert (shared / "cache" / INDEX_BASENAME).read_bytes() == before


def test_a_shard_of_another_user_that_is_wrong_by_now_is_told_and_the_rest_is_read(shared: Path) -> None:
    as_user(FIRST, partial(read_all_in, shared))
    write_over_the_first(shared)
    told = as_user(SECOND, partial(read_all_in, shared))
    assert f"belongs to user {FIRST}" in told
    assert "choose another directory" in told
    assert as_user(SECOND, partial(read_second, shared)) == raw_data(1)
    assert as_user(FIRST, partial(read_all_in, shared)) == [raw_data(0, seed=1), raw_data(1)]
    assert as_user(SECOND, partial(read_all_in, shared)) == [raw_data(0, seed=1), raw_data(1)]


def test_what_was_fetched_by_an_index_that_could_not_be_put_there_counts_and_is_evicted(shared: Path) -> None:
    def read_first_index() -> None:
        cache_in(shared).read_index()

    as_user(FIRST, read_first_index)
    write_over_the_first(shared)
    assert as_user(SECOND, partial(read_all_in, shared)) == [raw_data(0, seed=1), raw_data(1)]

    def evict() -> tuple[bool, ...]:
        cache = cache_in(shared)
        shards = cache.read_index().shards
        counted = scan(shared / "cache", cache.directory.own).bytes == read_usage(shared / "cache") == 6000
        return counted, cache.evict(shards[0]), cache.evict(shards[1])

    let_a_minute_pass(shared / "cache")
    assert as_user(FIRST, evict) == (True, False, False)  # not theirs to remove, but counted
    assert as_user(SECOND, evict) == (True, True, True)


def test_a_limit_full_of_another_users_shards_is_exceeded_rather_than_hung_at(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_streaming.cache.quota._WAIT_SECONDS", 0.2)
    as_user(FIRST, partial(read_all_in, shared))
    write_dataset(shared / "remote", shards=3)
    let_a_minute_pass(shared / "cache")

    def read_under_a_limit() -> bytes:
        cache = cache_in(shared)
        shard = cache.read_index().shards[2]
        room = CacheQuota([cache.directory], 8000)
        with suppress(StorageError), cache.hold(shard, room) as directory:
            return (directory / shard.raw_data.basename).read_bytes()
        return b""

    assert as_user(SECOND, read_under_a_limit) == raw_data(2)
