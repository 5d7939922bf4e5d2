from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.order.draw import draw_order
from lightning_streaming.order.layout import BatchGeometry
from lightning_streaming.order.plan import EpochPlan, epoch_sequence, plan_epoch, resume_position
from lightning_streaming.order.sequence import CanonicalSequence
from lightning_streaming.order.settings import BATCHING_METHODS
from lightning_streaming.order.shape import DatasetShape
from tests.order.builders import make_settings, make_shape

TWO_NODES = BatchGeometry(num_nodes=2, ranks_per_node=2, batch_size=3)


def test_a_plan_without_an_order_reads_each_place_itself() -> None:
    settings, shape = make_settings(shuffle=False), make_shape([7, 5, 9])
    plan = plan_epoch(settings, shape, TWO_NODES, 0, order=None)
    assert set(plan.ids_between(0, len(plan))) == set(range(21))


def test_where_batches_are_random_an_epoch_is_the_same_for_all_machines_and_batch_sizes() -> None:
    settings, shape = make_settings(), make_shape([20, 30])
    order = draw_order(settings, shape, 0)
    plans = [
        plan_epoch(settings, shape, BatchGeometry(num_nodes=nodes, ranks_per_node=ranks, batch_size=size), 0, order)
        for nodes, ranks, size in ((1, 1, 1), (4, 2, 3), (12, 1, 7))
    ]
    first, *others = [plan.ids_between(0, len(plan)).tolist() for plan in plans]
    assert others == [first, first]


def test_a_plan_reads_a_memory_mapped_order(tmp_path: Path) -> None:
    settings, shape = make_settings(), make_shape([20, 30])
    order = draw_order(settings, shape, 3)
    assert isinstance(order, np.ndarray)
    np.save(tmp_path / "order.npy", order)
    plan = plan_epoch(settings, shape, TWO_NODES, 3, order)
    mapped = plan_epoch(settings, shape, TWO_NODES, 3, np.load(tmp_path / "order.npy", mmap_mode="r"))
    assert mapped.ids_between(5, 40).tolist() == plan.ids_between(5, 40).tolist()
    assert mapped.ids(np.asarray([[9, 3], [0, 9]])).tolist() == plan.ids(np.asarray([[9, 3], [0, 9]])).tolist()


def test_ids_are_whole_numbers_of_8_bytes_whatever_holds_the_order() -> None:
    plan = plan_epoch(make_settings(), make_shape([20]), TWO_NODES, 0, np.arange(20, dtype=np.uint32)[::-1])
    assert plan.ids_between(0, 3).dtype == np.int64


@pytest.mark.parametrize("method", BATCHING_METHODS)
def test_another_epoch_composes_other_batches_and_the_same_epoch_the_same(method: str) -> None:
    settings, shape = make_settings(batching_method=method), make_shape([200], [300])
    plans = [plan_epoch(settings, shape, TWO_NODES, epoch, draw_order(settings, shape, epoch)) for epoch in (0, 1, 1)]
    first, second, again = [plan.ids_between(0, len(plan)).tolist() for plan in plans]
    assert first != second
    assert second == again


def test_an_order_of_another_length_is_refused() -> None:
    sequence = CanonicalSequence(num_samples=9, num_canonical_nodes=1, num_nodes=1)
    with pytest.raises(ConfigError, match="9 samples"):
        EpochPlan(sequence=sequence, order=np.arange(8))


@pytest.mark.parametrize("method", ["stratified", "per_stream", "device_per_stream"])
def test_composed_epochs_can_be_resumed_up_to_their_end_and_not_beyond_the_data(method: str) -> None:
    sequence = epoch_sequence(make_settings(batching_method=method), make_shape([200], [300]), TWO_NODES, 0)
    assert [resume_position(sequence, consumed, 4) for consumed in (0, 24, len(sequence))] == [0, 24, len(sequence)]
    with pytest.raises(StateError, match="900 samples were consumed of an epoch that has 500"):
        resume_position(sequence, 900, 4)


@pytest.mark.parametrize("shards", [[], [0, 0], [3, -1]], ids=str)
def test_a_stream_without_samples_is_refused(shards: list[int]) -> None:
    weights = make_shape([5]).weights
    with pytest.raises(ConfigError, match="stream 0 has no samples"):
        DatasetShape(shard_sizes=(np.asarray(shards, np.int64),), weights=weights)


def test_a_stream_without_a_weight_is_refused() -> None:
    shape = make_shape([5])
    with pytest.raises(ConfigError, match="2 streams and 1 weights"):
        DatasetShape(shard_sizes=shape.shard_sizes * 2, weights=shape.weights)


def test_a_shape_knows_its_sizes() -> None:
    shape = make_shape([5, 2], [3], repeat=2)
    assert (shape.num_samples, shape.epoch_size) == (10, 20)


@pytest.mark.parametrize(
    ("consumed", "position"), [(1000, 1000), (1001, 1001), (1004, 1001), (1007, 1001), (1008, 1008)]
)
def test_where_only_repeats_are_left_the_position_is_one_on_any_number_of_nodes(consumed: int, position: int) -> None:
    many = CanonicalSequence(num_samples=1001, num_canonical_nodes=1, num_nodes=8)
    alone = CanonicalSequence(num_samples=1001, num_canonical_nodes=1, num_nodes=1)
    assert len(many) == 1008
    assert resume_position(many, consumed, num_ranks=8) == position
    assert resume_position(alone, min(position, 1001), num_ranks=1) == min(consumed, 1001)
