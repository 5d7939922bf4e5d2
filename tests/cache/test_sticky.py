"""Users who share a directory with the sticky bit, as ``/tmp`` has: each reads all files and removes only their own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.ledger import read_ledger
from lightning_streaming.cache.room import CacheRoom
from lightning_streaming.cache.scan import scan
from lightning_streaming.errors import StorageError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, dump_index
from tests.cache.datasets import fetch_shard, raw_data, write_dataset
from tests.cache.indexes import LARGE, let_a_minute_pass, put
from tests.cache.users import as_user

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user"),
]
FIRST, SECOND = 4001, 4002


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory with a remote of two shards and an empty cache, to which all may write.

    Not in pytest's own, which another run of the same user closes to others when it starts.
    """
    with TemporaryDirectory() as name:
        root = Path(name)
        write_dataset(root / "remote", shards=2)
        (root / "cache").mkdir()
        (root / "cache").chmod(0o1777)
        root.chmod(0o755)
        read_all(root, "own")  # imports what other users may not
        yield root


def cache_of(root: Path, local: str = "cache") -> ShardCache:
    return ShardCache(CacheConfig(name="code", remote=str(root / "remote"), local=root / local, download_retry=0))


def read_all(root: Path, local: str = "cache") -> list[bytes]:
    cache = cache_of(root, local)
    found = []
    for shard in cache.read_index().shards:
        with cache.hold(shard) as directory:
            found.append((directory / shard.raw_data.basename).read_bytes())
    return found


def read_second(root: Path) -> bytes:
    cache = cache_of(root)
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
    assert as_user(FIRST, partial(read_all, shared)) == data[:2]
    write_dataset(shared / "remote", shards=3)
    let_a_minute_pass(shared / "cache")
    assert as_user(SECOND, partial(read_all, shared)) == data
    owners = [(shared / "cache" / f"shard.{number:05}.mds").stat().st_uid for number in range(3)]
    assert owners == [FIRST, FIRST, SECOND]
    for user in (SECOND, FIRST):
        let_a_minute_pass(shared / "cache")
        assert as_user(user, partial(read_all, shared)) == data


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
    as_user(FIRST, partial(read_all, shared))
    change(shared)
    before = (shared / "cache" / INDEX_BASENAME).read_bytes()

    def look() -> tuple[int, list[str]]:
        with caplog.at_level(logging.WARNING):
            return len(cache_of(shared).read_index().shards), caplog.messages

    for _ in range(2):
        found = as_user(SECOND, look)
        assert found[0] == (2 if change is cut_index else LARGE), found
        assert "may not be replaced" in found[1][0]
        assert "local=" in found[1][0]
    assert (shared / "cache" / INDEX_BASENAME).read_bytes() == before


def test_a_shard_of_another_user_that_is_wrong_by_now_is_told_and_the_rest_is_read(shared: Path) -> None:
    as_user(FIRST, partial(read_all, shared))
    write_over_the_first(shared)
    told = as_user(SECOND, partial(read_all, shared))
    assert f"belongs to user {FIRST}" in told
    assert "choose another directory" in told
    assert as_user(SECOND, partial(read_second, shared)) == raw_data(1)
    assert as_user(FIRST, partial(read_all, shared)) == [raw_data(0, seed=1), raw_data(1)]
    assert as_user(SECOND, partial(read_all, shared)) == [raw_data(0, seed=1), raw_data(1)]


def test_what_was_fetched_by_an_index_that_could_not_be_put_there_counts_and_is_evicted(shared: Path) -> None:
    def read_first_index() -> None:
        cache_of(shared).read_index()

    as_user(FIRST, read_first_index)
    write_over_the_first(shared)
    assert as_user(SECOND, partial(read_all, shared)) == [raw_data(0, seed=1), raw_data(1)]

    def evict() -> tuple[bool, ...]:
        cache = cache_of(shared)
        shards = cache.read_index().shards
        counted = scan(shared / "cache", cache.place.own).bytes == read_ledger(shared / "cache") == 6000
        return counted, cache.evict(shards[0]), cache.evict(shards[1])

    let_a_minute_pass(shared / "cache")
    assert as_user(FIRST, evict) == (True, False, False)  # not theirs to remove, but counted
    assert as_user(SECOND, evict) == (True, True, True)


def test_a_limit_full_of_another_users_shards_is_exceeded_rather_than_hung_at(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_streaming.cache.room._PATIENCE_SECONDS", 0.2)
    as_user(FIRST, partial(read_all, shared))
    write_dataset(shared / "remote", shards=3)
    let_a_minute_pass(shared / "cache")

    def read_under_a_limit() -> bytes:
        cache = cache_of(shared)
        shard = cache.read_index().shards[2]
        room = CacheRoom([cache.place], 8000)
        with suppress(StorageError), cache.hold(shard, room) as directory:
            return (directory / shard.raw_data.basename).read_bytes()
        return b""

    assert as_user(SECOND, read_under_a_limit) == raw_data(2)
