"""What is read to keep ranks even is told apart from what is read for the first time."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.sequence.batching import Batched, batched
from lightning_streaming.sequence.draw import Shuffled, drawn_here
from lightning_streaming.sequence.partition import BatchGeometry, Partition, fits
from lightning_streaming.sequence.settings import BATCHING_METHODS
from lightning_streaming.sequence.weights import DatasetShape
from tests.sequence.builders import epoch_of, geometry_of, make_settings, make_shape

TWO_NODES = BatchGeometry(num_nodes=2, ranks_per_node=2, batch_size=3)


def test_a_plan_without_an_order_reads_each_place_itself() -> None:
    settings, shape = make_settings(shuffle=False), make_shape([7, 5, 9])
    plan = epoch_of(settings, shape, TWO_NODES)
    assert set(plan.ids_between(0, len(plan))) == set(range(21))


def test_where_batches_are_random_an_epoch_is_the_same_for_all_machines_and_batch_sizes() -> None:
    settings, shape = make_settings(), make_shape([20, 30])
    plans = [epoch_of(settings, shape, geometry_of(*machines)) for machines in ((1, 1, 1), (4, 2, 3), (12, 1, 7))]
    first, *others = [plan.ids_between(0, len(plan)).tolist() for plan in plans]
    assert others == [first, first]


def test_a_plan_reads_a_memory_mapped_order(tmp_path: Path) -> None:
    settings, shape = make_settings(), make_shape([20, 30])
    order = Shuffled(settings, shape, 3)
    np.save(tmp_path / "order.npy", drawn_here(order))
    plan = batched(order, TWO_NODES)
    in_file = Shuffled(settings, shape, 3, draw=lambda _: np.load(tmp_path / "order.npy", mmap_mode="r"))
    mapped = batched(in_file, TWO_NODES)
    assert mapped.ids_between(5, 40).tolist() == plan.ids_between(5, 40).tolist()
    assert mapped.ids(np.asarray([[9, 3], [0, 9]])).tolist() == plan.ids(np.asarray([[9, 3], [0, 9]])).tolist()


def test_ids_are_whole_numbers_of_8_bytes_whatever_holds_the_order() -> None:
    order = Shuffled(make_settings(), make_shape([20]), 0, draw=lambda _: np.arange(20, dtype=np.uint32)[::-1])
    plan = batched(order, TWO_NODES)
    assert plan.ids_between(0, 3).dtype == np.int64


@pytest.mark.parametrize("method", BATCHING_METHODS)
def test_another_epoch_composes_other_batches_and_the_same_epoch_the_same(method: str) -> None:
    settings, shape = make_settings(batching_method=method), make_shape([200], [300])
    plans = [epoch_of(settings, shape, TWO_NODES, epoch) for epoch in (0, 1, 1)]
    first, second, again = [plan.ids_between(0, len(plan)).tolist() for plan in plans]
    assert first != second
    assert second == again


@pytest.mark.parametrize("method", ["stratified", "per_stream", "device_per_stream"])
def test_composed_epochs_can_be_resumed_up_to_their_end_and_not_beyond_the_data(method: str) -> None:
    sequence = epoch_of(make_settings(batching_method=method), make_shape([200], [300]), TWO_NODES)
    assert [sequence.resume_position(consumed, 4) for consumed in (0, 24, len(sequence))] == [0, 24, len(sequence)]
    with pytest.raises(StateError, match="900 samples were consumed of an epoch that has 500"):
        sequence.resume_position(900, 4)


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
    assert (len(shape), shape.epoch_size) == (10, 20)


@pytest.mark.parametrize(
    ("consumed", "position"), [(1000, 1000), (1001, 1001), (1004, 1001), (1007, 1001), (1008, 1008)]
)
def test_where_only_repeats_are_left_the_position_is_one_on_any_number_of_nodes(consumed: int, position: int) -> None:
    settings, shape = make_settings(num_canonical_nodes=1), make_shape([1001])
    many, alone = (epoch_of(settings, shape, geometry_of(nodes, 1, 1)) for nodes in (8, 1))
    assert len(many) == 1008
    assert many.resume_position(consumed, num_ranks=8) == position
    assert alone.resume_position(min(position, 1001), num_ranks=1) == min(consumed, 1001)


class Epoch(NamedTuple):
    """An epoch's sequence and how it is dealt."""

    sequence: Batched
    partition: Partition


def random_epoch(samples: int, canonical: int, geometry: BatchGeometry) -> Batched:
    return epoch_of(make_settings(num_canonical_nodes=canonical), make_shape([samples]), geometry)


@st.composite
def epochs(draw: st.DrawFn, largest_start: int = 0) -> Epoch:
    """Epochs on 1 to 6 nodes of 1 to 3 ranks, whatever the canonical nodes, often with fewer samples than those."""
    nodes = draw(st.integers(1, 6))
    geometry = geometry_of(nodes, draw(st.integers(1, 3)), draw(st.integers(1, 5)))
    canonical = draw(st.integers(1, 12).filter(lambda canonical: fits(canonical, nodes)))
    sequence = random_epoch(draw(st.integers(1, 60)), canonical, geometry)
    start = draw(st.integers(0, min(largest_start, len(sequence))))
    partition = Partition(sequence=sequence, start=start, geometry=geometry)
    return Epoch(sequence, partition)


def first_reads(epoch: Epoch) -> list[int]:
    """Positions of all first reads, over all ranks."""
    found: list[int] = []
    machines, ts = epoch.partition.geometry, np.arange(epoch.partition.num_batches())
    for node in range(machines.num_nodes):
        for rank in range(machines.ranks_per_node):
            are_first = epoch.sequence.are_first_reads(epoch.partition, ts, node, rank)
            found += epoch.partition.batches(ts, node, rank)[are_first].tolist()
    return found


def places(epoch: Epoch, positions: list[int]) -> NDArray[np.int64]:
    return epoch.sequence.places(np.asarray(positions, np.int64))


@given(epoch=epochs())
def test_each_place_of_an_epoch_has_one_first_read(epoch: Epoch) -> None:
    assert sorted(places(epoch, first_reads(epoch))) == list(range(epoch.sequence.num_samples))


@given(epoch=epochs(largest_start=60))
def test_what_was_read_before_a_resume_is_no_first_read_after_it(epoch: Epoch) -> None:
    before = set(places(epoch, list(range(epoch.partition.start))).tolist())
    after = places(epoch, first_reads(epoch)).tolist()
    assert sorted(after) == sorted(set(range(epoch.sequence.num_samples)) - before)


def test_an_epoch_that_divides_has_first_reads_only() -> None:
    sequence = random_epoch(24, 2, TWO_NODES)
    partition = Partition(sequence=sequence, geometry=TWO_NODES)
    assert all(
        sequence.are_first_reads(partition, np.arange(2), node, rank).all() for node in (0, 1) for rank in (0, 1)
    )


def test_four_ranks_that_read_ten_samples() -> None:
    # As 0 1 2 3 | 4 5 6 7 | 8 9 5 6: the last two ranks read their last sample again.
    sequence = random_epoch(10, 1, geometry_of(1, 4, 2))
    partition = Partition(sequence=sequence, geometry=geometry_of(1, 4, 2))
    masks = [sequence.are_first_reads(partition, np.arange(2), 0, rank).tolist() for rank in range(4)]
    assert masks == [[[True, True], [True, False]]] * 2 + [[[True, True], [False, False]]] * 2


def test_what_ranks_read_again_of_composed_batches_is_told_too() -> None:
    settings = make_settings(batching_method="stratified", num_canonical_nodes=1)
    sequence = epoch_of(settings, make_shape([9], [7]), geometry_of(1, 1, 4))
    partition = Partition(sequence=sequence, start=3, geometry=geometry_of(1, 2, 4))
    positions = first_reads(Epoch(sequence, partition))
    assert sorted(positions) == list(range(3, len(sequence)))
    assert partition.samples_per_rank() * 2 > len(positions)
