"""Fetching ahead of the reader."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest

from lightning_streaming.loading.prefetch import Reach, ShardNeed, ShardPrefetcher, default_reach
from tests.helpers import make_dataset, make_loader, write_dataset
from tests.loading.processes import wait_until


def _prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shard-prefetch")]


def _needs(*samples: int) -> list[ShardNeed]:
    return [ShardNeed(sample, shard) for shard, sample in enumerate(samples)]


def test_shards_are_fetched_in_the_order_of_need_up_to_the_horizon() -> None:
    def fetch(shard: int) -> bool:
        fetched.append(shard)
        return True

    fetched: list[int] = []
    prefetcher = ShardPrefetcher(iter(_needs(0, 4, 8, 12)), fetch, Reach(8, 8), num_threads=1)
    assert wait_until(lambda: len(fetched) == 2)
    prefetcher.reader_at(1)
    assert wait_until(lambda: len(fetched) == 3)
    time.sleep(0.02)
    assert fetched == [0, 1, 2]
    prefetcher.close()
    assert wait_until(lambda: not _prefetch_threads())


def test_before_the_first_sample_is_read_fewer_shards_may_be_fetched() -> None:
    def fetch(shard: int) -> bool:
        fetched.append(shard)
        return True

    fetched: list[int] = []
    prefetcher = ShardPrefetcher(iter(_needs(0, 4, 8, 12)), fetch, Reach(at_first=2, later=8), num_threads=1)
    assert wait_until(lambda: len(fetched) == 1)
    time.sleep(0.02)
    assert fetched == [0]
    prefetcher.reader_at(1)
    assert wait_until(lambda: len(fetched) == 3)
    prefetcher.close()


@pytest.mark.parametrize(
    ("batch_size", "samples_per_shard", "readers", "at_first", "later"),
    [(1, 8, 1, 64, 64), (32, 1000, 1, 256, 4000), (32, 1000, 8, 256, 500), (32, 1000.5, 4, 256, 1001)],
)
def test_without_being_told_a_worker_looks_ahead_some_batches_and_some_shards(
    batch_size: int, samples_per_shard: float, readers: int, at_first: int, later: int
) -> None:
    assert default_reach(batch_size, samples_per_shard, readers) == (at_first, later)


def test_several_shards_are_fetched_at_a_time() -> None:
    together = threading.Barrier(4)
    prefetcher = ShardPrefetcher(iter(_needs(0, 0, 0, 0)), lambda shard: together.wait(5) >= 0, Reach(1, 1))
    assert wait_until(lambda: not _prefetch_threads())
    for shard in range(4):
        prefetcher.retry_if_failed(shard)


def test_a_failure_waits_for_whoever_needs_the_shard_and_stops_nobody_else() -> None:
    def fetch(shard: int) -> bool:
        fetched.append(shard)
        if shard == 1:
            raise OSError("no such shard")
        return True

    fetched: list[int] = []
    prefetcher = ShardPrefetcher(iter(_needs(0, 0, 0)), fetch, Reach(1, 1))
    assert wait_until(lambda: not _prefetch_threads())
    assert sorted(fetched) == [0, 1, 2]
    prefetcher.retry_if_failed(0)
    with pytest.raises(OSError, match="no such shard"):
        prefetcher.retry_if_failed(1)


def test_a_shard_without_room_waits_until_the_reader_has_moved_on_and_all_after_it_wait_too() -> None:
    def fetch(shard: int) -> bool:
        tried.append(shard)
        return shard != 1 or has_room.is_set()

    tried: list[int] = []
    has_room = threading.Event()
    prefetcher = ShardPrefetcher(iter(_needs(0, 0, 0, 0)), fetch, Reach(1, 1), num_threads=1)
    assert wait_until(lambda: tried == [0, 1])
    prefetcher.moved_on()
    assert wait_until(lambda: tried == [0, 1, 1])
    has_room.set()
    prefetcher.moved_on()
    assert wait_until(lambda: tried == [0, 1, 1, 1, 2, 3])
    assert wait_until(lambda: not _prefetch_threads())


def test_who_waits_for_room_ends_with_the_pass() -> None:
    def fetch(shard: int) -> bool:
        tried.set()
        return False

    tried = threading.Event()
    prefetcher = ShardPrefetcher(iter(_needs(0, 0)), fetch, Reach(1, 1))
    assert tried.wait(5)
    prefetcher.close()
    assert wait_until(lambda: not _prefetch_threads())


def test_an_abandoned_pass_takes_its_threads_with_it(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    gc.disable()
    try:
        samples = iter(make_dataset(root, local=str(tmp_path / "cache"), predownload=1))
        next(samples)
        assert len(_prefetch_threads()) == 4
        del samples
        assert wait_until(lambda: not _prefetch_threads())
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["close", "next pass"])
def test_a_pass_that_is_given_up_stops_fetching(tmp_path: Path, end: str) -> None:
    loader = make_loader(write_dataset(tmp_path / "data"), local=str(tmp_path / "cache"), predownload=1)
    next(iter(loader))
    if end == "close":
        loader.close()
    else:
        assert len(list(loader)) == 8
    assert wait_until(lambda: not _prefetch_threads())


def test_nothing_is_fetched_ahead_where_data_is_read_in_place(tmp_path: Path) -> None:
    samples = iter(make_dataset(write_dataset(tmp_path / "data"), predownload=1))
    next(samples)
    assert not _prefetch_threads()
