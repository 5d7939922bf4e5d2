"""Fetching ahead of the reader."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming import StreamingDataLoader, StreamingDataset
from lightning_streaming.reading import prefetch
from lightning_streaming.reading.prefetch import (
    BatchShards,
    LastUses,
    Lookahead,
    NodePlan,
    ShardNeed,
    ShardPrefetcher,
    batches_until,
    default_lookahead,
)
from tests.helpers import make_dataset, make_loader, write_dataset
from tests.reading.processes import wait_until


def _prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shard-prefetch")]


def _needs(*samples: int) -> list[ShardNeed]:
    return [ShardNeed(sample, shard) for shard, sample in enumerate(samples)]


def test_shards_are_fetched_in_the_order_of_need_up_to_the_horizon() -> None:
    def fetch(shard: int) -> bool:
        fetched.append(shard)
        return True

    fetched: list[int] = []
    prefetcher = ShardPrefetcher(iter(_needs(0, 4, 8, 12)), fetch, Lookahead(8, 8), num_threads=1)
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
    prefetcher = ShardPrefetcher(iter(_needs(0, 4, 8, 12)), fetch, Lookahead(at_first=2, later=8), num_threads=1)
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
    assert default_lookahead(batch_size, samples_per_shard, readers) == (at_first, later)


def test_nodes_that_are_in_step_look_ahead_differently_far_at_most_twice_and_evenly_spread() -> None:
    found = [default_lookahead(32, 10_000, 8, node) for node in range(200)]
    assert {one.at_first for one in found} == {256}
    assert found[0].later == 5000
    in_tenths, _ = np.histogram([one.later for one in found], 10, (5000, 10_000))
    assert set(in_tenths.tolist()) <= {19, 20, 21}


def test_several_shards_are_fetched_at_a_time() -> None:
    together = threading.Barrier(4)
    prefetcher = ShardPrefetcher(iter(_needs(0, 0, 0, 0)), lambda shard: together.wait(5) >= 0, Lookahead(1, 1))
    assert wait_until(lambda: not _prefetch_threads())
    assert not together.broken
    prefetcher.close()


def test_a_failure_is_left_to_the_reader_and_stops_no_other_shard() -> None:
    def fetch(shard: int) -> bool:
        fetched.append(shard)
        if shard == 1:
            raise OSError("no such shard")
        return True

    fetched: list[int] = []
    ShardPrefetcher(iter(_needs(0, 0, 0)), fetch, Lookahead(1, 1))
    assert wait_until(lambda: not _prefetch_threads())
    assert sorted(fetched) == [0, 1, 2]


def test_what_is_joined_does_not_wait_for_a_later_need_of_its_shard() -> None:
    def needs() -> Iterator[ShardNeed]:
        yield ShardNeed(0, 0)
        yield ShardNeed(1, 0, np.array([3]))
        far_is_taken.set()
        yield ShardNeed(100, 0)

    def fetch(shard: int) -> bool:
        assert far_is_taken.wait(5)
        time.sleep(0.02)
        fetched.append(shard)
        return True

    fetched: list[int] = []
    far_is_taken = threading.Event()
    prefetcher = ShardPrefetcher(needs(), fetch, Lookahead(8, 8), num_threads=3, find=lambda *_: [7])
    try:
        assert wait_until(lambda: fetched == [0, 7], seconds=10)
    finally:
        prefetcher.close()


def test_what_is_joined_waits_for_the_shard_that_has_the_ids() -> None:
    def find(shard: int, indexes: Any) -> list[int]:
        done.append(f"found of {shard}")
        return [7]

    def fetch(shard: int) -> bool:
        time.sleep(0.02)
        done.append(f"fetched {shard}")
        return True

    done: list[str] = []
    needs = [ShardNeed(0, 0), ShardNeed(0, 1), ShardNeed(1, 0, np.array([3]))]
    ShardPrefetcher(iter(needs), fetch, Lookahead(8, 8), num_threads=3, find=find)
    assert wait_until(lambda: not _prefetch_threads())
    assert done.index("fetched 0") < done.index("found of 0") < done.index("fetched 7")


def test_ids_that_cannot_be_read_ahead_let_no_shard_be_fetched_twice() -> None:
    def find(shard: int, indexes: Any) -> list[int]:
        raise OSError("damaged")

    def fetch(shard: int) -> bool:
        fetched.append(shard)
        return True

    fetched: list[int] = []
    needs = [ShardNeed(0, 0), ShardNeed(1, 0, np.array([3])), ShardNeed(2, 1)]
    ShardPrefetcher(iter(needs), fetch, Lookahead(8, 8), find=find)
    assert wait_until(lambda: not _prefetch_threads())
    assert sorted(fetched) == [0, 1]


def test_a_shard_without_room_waits_until_the_reader_has_moved_on_and_all_after_it_wait_too() -> None:
    def fetch(shard: int) -> bool:
        tried.append(shard)
        return shard != 1 or has_room.is_set()

    tried: list[int] = []
    has_room = threading.Event()
    prefetcher = ShardPrefetcher(iter(_needs(0, 0, 0, 0)), fetch, Lookahead(1, 1), num_threads=1)
    assert wait_until(lambda: tried == [0, 1])
    prefetcher.moved_on()
    assert wait_until(lambda: tried == [0, 1, 1])
    has_room.set()
    prefetcher.moved_on()
    assert wait_until(lambda: tried == [0, 1, 1, 1, 2, 3])
    assert wait_until(lambda: not _prefetch_threads())


def test_what_the_reader_has_passed_is_not_fetched_by_a_thread_that_comes_late() -> None:
    def fetch(shard: int) -> bool:
        fetched.append(shard)
        return goes_on.wait(5)

    fetched: list[int] = []
    goes_on = threading.Event()
    prefetcher = ShardPrefetcher(iter(_needs(0, 1, 2, 3)), fetch, Lookahead(8, 8), num_threads=1)
    assert wait_until(lambda: fetched == [0])
    # It has read two samples, fetching their shards itself, and is about to read two more at once.
    prefetcher.reader_at(2, about_to_be=4)
    goes_on.set()
    assert wait_until(lambda: not _prefetch_threads())
    assert fetched == [0, 2, 3]


def test_what_found_no_room_before_the_reader_has_passed_it_is_not_tried_again() -> None:
    def fetch(shard: int) -> bool:
        tried.append(shard)
        return shard != 0

    tried: list[int] = []
    prefetcher = ShardPrefetcher(iter(_needs(0, 1)), fetch, Lookahead(8, 8), num_threads=1)
    assert wait_until(lambda: tried == [0])
    prefetcher.reader_at(1)
    prefetcher.moved_on()
    assert wait_until(lambda: not _prefetch_threads())
    assert tried == [0, 1]


def test_who_waits_for_room_ends_with_the_pass() -> None:
    def fetch(shard: int) -> bool:
        tried.set()
        return False

    tried = threading.Event()
    prefetcher = ShardPrefetcher(iter(_needs(0, 0)), fetch, Lookahead(1, 1))
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


class Overridden(StreamingDataset):
    """A dataset that creates samples itself, so that a pass refers to it."""

    def get_item(self, sample_id: int, retry: int = 1) -> Any:
        return super().get_item(sample_id, retry)


@pytest.mark.parametrize("kind", [StreamingDataset, Overridden])
@pytest.mark.parametrize("has_loader", [False, True])
def test_threads_of_an_abandoned_iterator_end_while_the_dataset_is_kept(
    kind: type[StreamingDataset], has_loader: bool, tmp_path: Path
) -> None:
    root = write_dataset(tmp_path / "data")
    dataset = kind(remote=str(root), local=str(tmp_path / "cache"), predownload=8, batch_size=4)
    iterated: Any = StreamingDataLoader(dataset, batch_size=4) if has_loader else dataset
    gc.disable()
    try:
        items = iter(iterated)
        next(items)
        assert _prefetch_threads()
        del items
        assert wait_until(lambda: not _prefetch_threads())
    finally:
        gc.enable()
        dataset.close()
    if not has_loader:
        assert dataset.state_dict()["sample_in_epoch"] == 1


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


def plan_of(batches: list[list[int]], worker: int = 0, num_workers: int = 1) -> NodePlan:
    """A node whose batches hold these shards."""

    def of_node() -> Iterator[BatchShards]:
        for number, batch in enumerate(batches):
            yield BatchShards(np.full(len(batch), number), np.asarray(batch, np.int64))

    return NodePlan(
        worker=worker,
        num_workers=num_workers,
        num_shards=6,
        num_samples=sum(map(len, batches)),
        own=lambda: (np.asarray(batch, np.int64)[:, None] for batch in batches[worker::num_workers]),
        of_node=of_node,
    )


_batches = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), max_size=12)


@given(_batches)
def test_each_shard_has_one_last_use_after_which_it_is_not_named(batches: list[list[int]]) -> None:
    order = [shard for batch in batches for shard in batch]
    uses = LastUses(plan_of(batches))
    found: list[bool] = []
    for batch in batches:
        found += uses.among(np.asarray(batch), len(found)).tolist()
    assert found == [shard not in order[place + 1 :] for place, shard in enumerate(order)]


@given(_batches, st.integers(1, 3), st.data())
def test_a_shard_is_finished_when_no_worker_needs_it_any_more(
    batches: list[list[int]], num_workers: int, data: st.DataObject
) -> None:
    worker = data.draw(st.integers(0, num_workers - 1))
    uses = LastUses(plan_of(batches, worker, num_workers))
    own = batches[worker::num_workers]
    told: list[int] = []
    for read in range(1, len(own) + 20):
        finished = uses.finished(read)
        told += finished
        latest = worker + (read - 1) * num_workers
        behind = latest - prefetch._ROUNDS_BEHIND * num_workers
        assert not {shard for batch in batches[max(behind + 1, 0) :] for shard in batch} & set(finished)
    assert sorted(told) == sorted({shard for batch in own for shard in batch})


def test_the_example_of_three_workers() -> None:
    passed = batches_until(np.asarray([0, 1, 2, 4, 5]), 1, 3) - prefetch._ROUNDS_BEHIND
    assert passed.tolist() == [1, 1, 2, 2, 3]


def test_a_long_plan_is_looked_through_beside_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_FEW_SAMPLES", 1)
    uses = LastUses(plan_of([[1, 0, 1]]))
    assert wait_until(lambda: uses.among(np.asarray([0]), 1).tolist() == [True])
    assert uses.finished(3) == [0, 1]
    uses.close()


def test_a_plan_that_is_too_long_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Iterator[Any]:
        raise AssertionError

    monkeypatch.setattr(prefetch, "_MOST_SAMPLES", 2)
    monkeypatch.setattr(prefetch, "_FEW_SAMPLES", 1)
    uses = LastUses(replace(plan_of([[0, 0, 0]]), own=never, of_node=never))
    assert uses.among(np.asarray([0]), 2).tolist() == [False]
    assert uses.finished(9) == []
