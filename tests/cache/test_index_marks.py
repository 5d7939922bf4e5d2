"""What becomes of files that were checked by one index when there is another, also under jobs that began before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.cache.layout import ORIGIN_BASENAME
from lightning_streaming.cache.ledger import read_ledger
from lightning_streaming.cache.marks import SECOND
from lightning_streaming.cache.scan import scan
from lightning_streaming.errors import IntegrityError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, dump_index
from tests.cache.datasets import raw_data, write_dataset

NAMES = ["shard.00000.mds", "shard.00001.mds"]


def opened(root: Path) -> ShardCache:
    """A job that begins now."""
    cache = ShardCache(CacheConfig(name="code", remote=str(root / "remote"), local=root / "cache", download_retry=0))
    cache.read_index()
    return cache


def fetched(cache: ShardCache, number: int = 0) -> bytes:
    """What a job reads of a shard."""
    shard = cache.read_index().shards[number]
    with cache.hold(shard) as directory:
        return (directory / shard.raw_data.basename).read_bytes()


def put_index(root: Path, index: DatasetIndex) -> None:
    (root / INDEX_BASENAME).write_bytes(dump_index(index.shards))


def rewrite(root: Path, seed: int) -> None:
    """Write another dataset of the same sizes in the same place."""
    write_dataset(root / "remote", shards=2, seed=seed)


def write_next_index(root: Path) -> DatasetIndex:
    """Let the remote have the index of a dataset whose first shard will be another, but its old files still."""
    first, second = (write_dataset(root / f"seed{seed}", shards=2, seed=seed).shards for seed in (1, 0))
    index = DatasetIndex([first[0], second[1]])
    put_index(root / "remote", index)
    return index


def time_of(root: Path, name: str) -> int:
    return (root / "cache" / name).stat().st_mtime_ns


def delete(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def take_from_remote(path: Path) -> None:
    """As somebody does who brings a cache up to date, or who is killed before the rest of it."""
    shutil.copyfile(path.parent.parent / "remote" / INDEX_BASENAME, path)


@pytest.mark.parametrize("change", [delete, cut, take_from_remote])
def test_an_index_that_comes_without_the_one_before_has_all_files_checked(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    rewrite(tmp_path, 0)
    assert fetched(opened(tmp_path)) == raw_data(0, seed=0)
    rewrite(tmp_path, 1)
    change(tmp_path / "cache" / INDEX_BASENAME)
    assert fetched(opened(tmp_path)) == raw_data(0, seed=1)


def test_the_same_index_again_leaves_files_checked(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    cache = opened(tmp_path)
    fetched(cache)
    (tmp_path / "cache" / INDEX_BASENAME).unlink()
    assert opened(tmp_path).place.own == cache.place.own
    assert cache.place.own.mark == time_of(tmp_path, NAMES[0])


def test_what_an_old_job_publishes_late_is_not_believed(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    index = write_next_index(tmp_path)
    new = opened(tmp_path)
    assert new.read_index() == index
    assert fetched(old) == raw_data(0, seed=0)
    shutil.copy(tmp_path / "seed1" / NAMES[0], tmp_path / "remote")
    assert fetched(new) == raw_data(0, seed=1)
    assert fetched(opened(tmp_path)) == raw_data(0, seed=1)


def test_an_old_job_does_not_read_what_a_new_one_fetched(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    write_next_index(tmp_path)
    shutil.copy(tmp_path / "seed1" / NAMES[0], tmp_path / "remote")
    new = opened(tmp_path)
    assert fetched(new) == raw_data(0, seed=1)
    with pytest.raises(IntegrityError, match="must be"):
        fetched(old)
    assert fetched(new) == raw_data(0, seed=1)


def test_files_of_shards_that_are_the_same_stay_checked_and_keep_their_last_use(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    for number in range(2):
        fetched(old, number)
    os.utime(tmp_path / "cache" / NAMES[1], ns=(5 * SECOND, time_of(tmp_path, NAMES[1])))
    write_next_index(tmp_path)
    new = opened(tmp_path)
    assert new.place.own != old.place.own
    assert time_of(tmp_path, NAMES[1]) == new.place.own.mark
    assert (tmp_path / "cache" / NAMES[1]).stat().st_atime_ns == 5 * SECOND
    assert not (tmp_path / "cache" / NAMES[0]).exists()


def test_jobs_of_two_indexes_leave_each_others_marks(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    fetched(old, 1)
    write_next_index(tmp_path)
    new = opened(tmp_path)
    for job in (old, new, old):
        assert fetched(job, 1) == raw_data(1, seed=0)
        assert time_of(tmp_path, NAMES[1]) == new.place.own.mark
    new.discard(new.read_index().shards[1])
    fetched(old, 1)
    assert time_of(tmp_path, NAMES[1]) == old.place.own.mark
    fetched(new, 1)
    assert time_of(tmp_path, NAMES[1]) == new.place.own.mark


def test_both_count_what_the_other_fetched(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    write_next_index(tmp_path)
    shutil.copy(tmp_path / "seed1" / NAMES[0], tmp_path / "remote")
    new = opened(tmp_path)
    fetched(new)
    fetched(old, 1)
    for job in (old, new):
        assert scan(tmp_path / "cache", job.place.own).bytes == read_ledger(tmp_path / "cache") == 6000


def test_a_shard_that_comes_back_as_another_is_noticed(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    fetched(opened(tmp_path), 1)
    put_index(tmp_path / "remote", write_dataset(tmp_path / "short", shards=1))
    opened(tmp_path)
    rewrite(tmp_path, 1)
    assert fetched(opened(tmp_path), 1) == raw_data(1, seed=1)


def test_shards_that_were_added_leave_the_mark(tmp_path: Path) -> None:
    rewrite(tmp_path, 0)
    old = opened(tmp_path)
    write_dataset(tmp_path / "remote", shards=3)
    assert opened(tmp_path).place.own == old.place.own


def test_a_note_that_names_no_index_has_all_files_checked(tmp_path: Path) -> None:
    """As after a kill between choosing a mark and saying what it goes with."""
    rewrite(tmp_path, 0)
    fetched(opened(tmp_path))
    path = tmp_path / "cache" / ORIGIN_BASENAME
    path.write_text("\n".join([*path.read_text().splitlines()[:2], "null", ""]))
    (tmp_path / "cache" / NAMES[0]).write_bytes(before := bytes(3000))
    os.utime(tmp_path / "cache" / NAMES[0], ns=(0, int(path.read_text().splitlines()[1])))
    assert fetched(opened(tmp_path)) == raw_data(0) != before
