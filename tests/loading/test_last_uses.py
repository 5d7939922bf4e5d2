from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.loading import last_uses
from lightning_streaming.loading.last_uses import BatchShards, LastUses, NodePlan, batches_until
from tests.loading.processes import wait_until


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
        own=lambda: (np.asarray(batch, np.int64) for batch in batches[worker::num_workers]),
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
        behind = latest - last_uses._ROUNDS_BEHIND * num_workers
        assert not {shard for batch in batches[max(behind + 1, 0) :] for shard in batch} & set(finished)
    assert sorted(told) == sorted({shard for batch in own for shard in batch})


def test_the_example_of_three_workers() -> None:
    passed = batches_until(np.asarray([0, 1, 2, 4, 5]), 1, 3) - last_uses._ROUNDS_BEHIND
    assert passed.tolist() == [1, 1, 2, 2, 3]


def test_a_long_plan_is_looked_through_beside_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_uses, "_FEW_SAMPLES", 1)
    uses = LastUses(plan_of([[1, 0, 1]]))
    assert wait_until(lambda: uses.among(np.asarray([0]), 1).tolist() == [True])
    assert uses.finished(3) == [0, 1]
    uses.close()


def test_a_plan_that_is_too_long_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Iterator[Any]:
        raise AssertionError

    monkeypatch.setattr(last_uses, "_MOST_SAMPLES", 2)
    monkeypatch.setattr(last_uses, "_FEW_SAMPLES", 1)
    uses = LastUses(replace(plan_of([[0, 0, 0]]), own=never, of_node=never))
    assert uses.among(np.asarray([0]), 2).tolist() == [False]
    assert uses.finished(9) == []
