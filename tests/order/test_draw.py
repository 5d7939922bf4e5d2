"""Drawing an epoch's order: what is drawn, where to, and the name of it."""

from __future__ import annotations

import string
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError
from lightning_streaming.order import draw as draw_module
from lightning_streaming.order.draw import draw_into, draw_order, is_identity, is_on_demand, order_digest, order_dtype
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shape import DatasetShape
from lightning_streaming.order.shuffle import SHUFFLES
from lightning_streaming.order.weights import ResolvedWeights
from tests.order.builders import make_settings, make_shape

shards = st.lists(st.integers(1, 20), min_size=1, max_size=6)


def draw(settings: OrderSettings, shape: DatasetShape, epoch: int = 0) -> list[int]:
    order = draw_order(settings, shape, epoch)
    assert isinstance(order, np.ndarray)
    assert order.dtype == np.uint32
    return list(order.tolist())


def test_an_order_that_is_the_identity_is_not_written_out() -> None:
    settings, shape = make_settings(shuffle=False), make_shape([7, 5, 9])
    assert is_identity(settings, shape)
    assert draw_order(settings, shape, 0) is None
    assert not is_identity(make_settings(), shape)
    assert not is_identity(settings, make_shape([7, 5, 9], repeat=2))


def test_resampling_alone_makes_an_order() -> None:
    assert draw(make_settings(shuffle=False), make_shape([2, 1], repeat=2)) == [0, 1, 0, 1, 2, 2]


@pytest.mark.parametrize("algo", sorted(SHUFFLES))
def test_shuffling_keeps_what_was_drawn_and_changes_with_the_epoch(algo: str) -> None:
    settings, shape = make_settings(shuffle_algo=algo, sampling_method="fixed"), make_shape([20, 30], [40], repeat=1.5)
    first, second = draw(settings, shape, 0), draw(settings, shape, 1)
    assert sorted(first) == sorted(second) == sorted(draw(replace(settings, shuffle=False), shape))
    assert first != second
    assert first == draw(settings, shape, 0)


@given(streams=st.lists(shards, min_size=2, max_size=4), repeat=st.sampled_from([None, 0.4, 1, 2.5]))
@pytest.mark.parametrize("shuffle", [False, True])
def test_streams_that_do_not_share_batches_are_drawn_one_after_another_each_by_itself(
    shuffle: bool, streams: list[list[int]], repeat: float | None
) -> None:
    shape = make_shape([9], *streams, repeat=repeat)
    settings = make_settings(batching_method="stratified", shuffle=shuffle, num_canonical_nodes=1, shuffle_algo="py1s")
    expected: list[int] = []
    first = 0
    for sizes, choose in zip(shape.shard_sizes, shape.weights.choose, strict=True):
        alone = ResolvedWeights(proportion=(1.0,), repeat=(1.0,), choose=(choose,), epoch_size=choose)
        order = np.empty(choose, np.int64)
        draw_into(
            replace(settings, batching_method="random"), DatasetShape(shard_sizes=(sizes,), weights=alone), 0, order
        )
        expected += (first + order).tolist()
        first += int(sizes.sum())
    out = np.empty(shape.epoch_size, np.int64)
    draw_into(settings, shape, 0, out)
    assert out.tolist() == expected


@pytest.mark.parametrize("algo", sorted(SHUFFLES))
@given(sizes=shards, repeat=st.sampled_from([None, 0.7, 2.5]))
def test_an_order_is_the_same_whatever_holds_it(algo: str, sizes: list[int], repeat: float | None) -> None:
    settings, shape = make_settings(shuffle_algo=algo, num_canonical_nodes=1), make_shape([5], sizes, repeat=repeat)
    wide = np.empty(shape.epoch_size, np.int64)
    draw_into(settings, shape, 3, wide)
    assert draw(settings, shape, 3) == wide.tolist()


def test_repeated_samples_are_looked_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, shape = make_settings(), make_shape([20, 30], repeat=2.5)
    whole = draw(settings, shape)
    monkeypatch.setattr(draw_module, "_CHUNK", 7)
    assert draw(settings, shape) == whole


@pytest.mark.parametrize(
    ("samples", "repeat", "dtype"),
    [(2**32, None, np.uint32), (2**32 + 1, None, np.int64), (2**31, 2, np.uint32), (2**31 + 1, 2, np.int64)],
)
def test_ids_take_four_bytes_wherever_they_and_their_places_fit(
    samples: int, repeat: float | None, dtype: type[np.integer]
) -> None:
    assert order_dtype(make_shape([samples], repeat=repeat)) == dtype


@pytest.mark.parametrize("batching", ["random", "stratified"])
def test_an_order_on_demand_has_every_sample_drawn(batching: str) -> None:
    settings = make_settings(shuffle_algo="blockwise", batching_method=batching, num_canonical_nodes=2)
    shape = make_shape([20, 30], [40], repeat=2)
    order = draw_order(settings, shape, 0)
    assert order is not None
    assert len(order) == 180
    ids = np.sort(order[np.arange(180)])
    assert ids.tolist() == np.repeat(np.arange(90), 2).tolist()


def test_only_a_blockwise_shuffle_is_on_demand() -> None:
    assert is_on_demand(make_settings(shuffle_algo="blockwise"))
    assert not is_on_demand(make_settings(shuffle_algo="blockwise", shuffle=False))
    assert not is_on_demand(make_settings())


def test_an_epoch_before_the_first_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        draw_order(make_settings(shuffle=False), make_shape([5]), -1)


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


def test_generators_come_with_the_first_import_rather_than_at_the_first_draw() -> None:
    """numpy imports them when they are first used, which each forked worker would then do for itself."""
    program = "import sys, lightning_streaming.order.draw; assert 'numpy.random' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
