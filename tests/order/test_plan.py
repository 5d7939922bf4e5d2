from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, UnsupportedError
from lightning_streaming.order.deal import Deal
from lightning_streaming.order.draw import draw_order, order_digest
from lightning_streaming.order.plan import EpochPlan, plan_epoch
from lightning_streaming.order.sequence import CanonicalSequence
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shape import DatasetShape
from lightning_streaming.order.weights import StreamWeight, resolve_weights

CANONICAL = 12
NODES_THAT_FIT = (1, 2, 3, 4, 6, 12)


def make_shape(*streams: list[int], epoch_size: int | None = None, **said: Any) -> DatasetShape:
    sizes = tuple(np.asarray(stream, np.int64) for stream in streams)
    weights = resolve_weights(
        [StreamWeight(**said)] * len(sizes), [int(stream.sum()) for stream in sizes], epoch_size, seed=0
    )
    return DatasetShape(shard_sizes=sizes, weights=weights)


def make_settings(**said: Any) -> OrderSettings:
    return OrderSettings(**{"shuffle": True, "num_canonical_nodes": CANONICAL, **said}).settled(1)


def draw(settings: OrderSettings, shape: DatasetShape, epoch: int = 0) -> list[int]:
    order = draw_order(settings, shape, epoch)
    assert order is not None
    assert order.dtype == np.int64
    return list(order.tolist())


def test_an_order_that_is_the_identity_is_not_written_out() -> None:
    settings, shape = make_settings(shuffle=False), make_shape([7, 5, 9])
    assert draw_order(settings, shape, 0) is None
    plan = plan_epoch(settings, shape, num_nodes=1, order=None)
    assert set(plan.ids_between(0, len(plan))) == set(range(21))


def test_resampling_alone_makes_an_order() -> None:
    assert draw(make_settings(shuffle=False), make_shape([2, 1], repeat=2)) == [0, 1, 0, 1, 2, 2]


@pytest.mark.parametrize("algo", ["naive", "py1s", "py1e"])
def test_shuffling_keeps_what_was_drawn_and_changes_with_the_epoch(algo: str) -> None:
    settings, shape = make_settings(shuffle_algo=algo, sampling_method="fixed"), make_shape([20, 30], [40], repeat=1.5)
    first, second = draw(settings, shape, 0), draw(settings, shape, 1)
    assert sorted(first) == sorted(second) == sorted(draw(replace(settings, shuffle=False), shape))
    assert first != second
    assert first == draw(settings, shape, 0)


def test_an_order_does_not_know_of_nodes() -> None:
    shape = make_shape([20, 30])
    plans = [plan_epoch(make_settings(), shape, nodes, draw_order(make_settings(), shape, 0)) for nodes in (1, 4, 12)]
    first, *others = [plan.ids_between(0, len(plan)).tolist() for plan in plans]
    assert others == [first, first]


def test_a_plan_reads_a_memory_mapped_order(tmp_path: Path) -> None:
    settings, shape = make_settings(), make_shape([20, 30])
    order = draw_order(settings, shape, 3)
    assert order is not None
    np.save(tmp_path / "order.npy", order)
    plan = plan_epoch(settings, shape, 2, order)
    mapped = plan_epoch(settings, shape, 2, np.load(tmp_path / "order.npy", mmap_mode="r"))
    assert mapped.ids_between(5, 40).tolist() == plan.ids_between(5, 40).tolist()
    assert mapped.ids(np.asarray([[9, 3], [0, 9]])).tolist() == plan.ids(np.asarray([[9, 3], [0, 9]])).tolist()


leg = st.tuples(st.sampled_from(NODES_THAT_FIT), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))


@given(
    shards=st.lists(st.integers(1, 20), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) >= CANONICAL),
    algo=st.sampled_from(["naive", "py1s", "py1e"]),
    legs=st.lists(leg, min_size=4, max_size=4),
)
def test_an_epoch_cut_three_times_reads_the_samples_of_one_that_was_not(
    shards: list[int], algo: str, legs: list[tuple[int, int, int, int]]
) -> None:
    settings, shape = make_settings(shuffle_algo=algo), make_shape(shards)
    order = draw_order(settings, shape, 0)
    start, read = 0, []
    for nodes, ranks, batch_size, steps in legs:
        plan = plan_epoch(settings, shape, nodes, order)
        deal = Deal(length=len(plan), start=start, num_nodes=nodes, ranks_per_node=ranks, batch_size=batch_size)
        for t in range(steps):
            places = [deal.batch(t, node, rank) for node in range(nodes) for rank in range(ranks)]
            positions = np.unique(np.concatenate(places))
            read += plan.ids(positions[positions >= deal.position_after(t)]).tolist()
        start = deal.position_after(steps)
    assert read == plan.ids_between(0, start).tolist()


def test_an_order_of_another_length_is_refused() -> None:
    sequence = CanonicalSequence(num_samples=9, num_canonical_nodes=1, num_nodes=1)
    with pytest.raises(ConfigError, match="9 samples"):
        EpochPlan(sequence=sequence, order=np.arange(8))


def test_relaxed_is_orig_where_canonical_nodes_fit_and_not_served_where_they_do_not() -> None:
    relaxed, shape = make_settings(), make_shape([100])
    assert plan_epoch(relaxed, shape, 4, None, initial_num_nodes=6).sequence.num_nodes == 4
    with pytest.raises(UnsupportedError, match="divides 12"):
        plan_epoch(relaxed, shape, 5, None, initial_num_nodes=6)
    for settings, began in ((relaxed, None), (make_settings(partition_algo="orig"), 6)):
        with pytest.raises(ConfigError, match="multiple or a divisor") as caught:
            plan_epoch(settings, shape, 5, None, initial_num_nodes=began)
        assert not isinstance(caught.value, UnsupportedError)


def test_an_epoch_before_the_first_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        draw_order(make_settings(shuffle=False), make_shape([5]), -1)


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


def test_a_digest_is_32_hexadecimal_digits_and_the_same_each_time() -> None:
    digest = order_digest(make_settings(), make_shape([5, 2]), 0)
    assert digest == order_digest(make_settings(), make_shape([5, 2]), 0)
    assert len(digest) == 32
    assert set(digest) <= set(string.hexdigits)


def test_a_digest_changes_with_all_that_an_order_depends_on() -> None:
    settings, shape = make_settings(), make_shape([5, 2], [3])
    changed = [
        order_digest(settings, shape, 1),
        order_digest(settings, make_shape([2, 5], [3]), 0),
        order_digest(settings, make_shape([5], [2, 3]), 0),
        order_digest(settings, make_shape([5, 2], [3], epoch_size=11), 0),
        order_digest(replace(settings, shuffle=False), shape, 0),
        order_digest(replace(settings, shuffle_algo="py1s"), shape, 0),
        order_digest(replace(settings, shuffle_seed=1), shape, 0),
        order_digest(replace(settings, shuffle_block_size=99), shape, 0),
        order_digest(replace(settings, num_canonical_nodes=2), shape, 0),
        order_digest(replace(settings, sampling_method="fixed"), shape, 0),
        order_digest(replace(settings, sampling_granularity=2), shape, 0),
    ]
    assert len({order_digest(settings, shape, 0), *changed}) == 1 + len(changed)
