"""How workers learn where a pass begins."""

from __future__ import annotations

import copy
from multiprocessing import get_context
from typing import Any

import pytest

from lightning_streaming import World
from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.cursor import Cursor, Handover, PassCounter, PassStart
from lightning_streaming.order.layout import BatchGeometry

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

START = PassStart(
    cursor=Cursor(3, 2**40),
    world=World(num_nodes=4, ranks_per_node=8, rank=31),
    batch_size=7,
    geometry=BatchGeometry(num_nodes=2, ranks_per_node=16, batch_size=3),
    shuffle_seed=2**63 - 1,
    num_canonical_nodes=64,
    shuffle_block_size=2**20,
)


def _in_child(function: Any, *arguments: Any) -> Any:
    context = get_context("fork")
    answer = context.SimpleQueue()

    def call_and_answer() -> None:
        try:
            answer.put(function(*arguments))
        except ConfigError as error:
            answer.put(error)

    child = context.Process(target=call_and_answer)
    child.start()
    value = answer.get()
    child.join()
    return value


def test_a_pass_that_begins_later_begins_at_an_epoch() -> None:
    assert [Cursor(2, 9).passes_later(passes) for passes in (0, 1, 3)] == [(2, 9), (3, 0), (5, 0)]


def test_what_is_assigned_arrives_as_it_was() -> None:
    handover = Handover()
    handover.assign(START)
    assert handover.assigned() == START


def test_a_child_sees_what_is_assigned_after_it_started() -> None:
    handover, context = Handover(), get_context("fork")
    told, answer = context.Event(), context.SimpleQueue()

    def wait_and_answer() -> None:
        told.wait()
        answer.put(handover.assigned())

    child = context.Process(target=wait_and_answer)
    child.start()
    handover.assign(START)
    told.set()
    assert answer.get() == START
    child.join()


def test_each_worker_counts_its_own_passes() -> None:
    counter = PassCounter()
    counter.reset(Cursor(2, 12))
    begun = [_in_child(counter.count_pass, worker) for worker in (0, 1, 0, 0)]
    assert begun == [(2, 12), (2, 12), (3, 0), (4, 0)]
    assert counter.passes_counted() == 3
    counter.reset(Cursor(0, 0))
    assert counter.passes_counted() == 0


def test_a_worker_beyond_the_last_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="up to 1024 workers"):
        PassCounter().count_pass(1024)


def test_a_copy_counts_for_itself_and_still_across_processes() -> None:
    counter = PassCounter()
    counter.reset(Cursor(1, 5))
    copied = copy.deepcopy(counter)
    assert _in_child(copied.count_pass, 0) == (1, 5)
    assert (counter.passes_counted(), copied.passes_counted()) == (0, 1)


def test_a_counter_that_is_reset_in_another_process_is_that_processs_own() -> None:
    counter = PassCounter()

    def reset_and_count() -> list[Cursor]:
        counter.reset(Cursor(4, 0))
        return [_in_child(counter.count_pass, 0), _in_child(counter.count_pass, 0)]

    assert _in_child(reset_and_count) == [(4, 0), (5, 0)]
    assert counter.passes_counted() == 0
