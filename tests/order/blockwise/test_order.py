from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import SampleIndexError
from lightning_streaming.order.blockwise import BlockwiseOrder, blockwise_order, joined
from tests.order.blockwise.test_blocks import block_sizes
from tests.order.builders import make_settings

streams = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any), min_size=1, max_size=4)
choices = st.lists(st.integers(0, 300), min_size=4, max_size=4)
settings_said = st.fixed_dictionaries(
    {
        "num_canonical_nodes": st.integers(1, 12),
        "sampling_method": st.sampled_from(["balanced", "fixed"]),
        "sampling_granularity": st.integers(1, 50),
        "shuffle": st.booleans(),
        "shuffle_seed": st.integers(0, 2**63 - 1),
    }
)


def order_of(
    sizes: list[list[int]],
    choose: list[int] | None = None,
    *,
    epoch: int = 0,
    first_id: int = 0,
    block_size: int = 64,
    **said: Any,
) -> BlockwiseOrder:
    """All samples once unless ``choose`` says otherwise."""
    shards = [np.asarray(stream, np.int64) for stream in sizes]
    wanted = [sum(stream) for stream in sizes] if choose is None else choose
    return blockwise_order(shards, wanted, make_settings(**said), epoch, first_id, block_size)


def read(order: BlockwiseOrder) -> NDArray[np.int64]:
    return order[np.arange(len(order))]


def shard_of(sizes: list[int], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(np.cumsum(sizes), ids, side="right")


@given(sizes=streams, choose=choices, said=settings_said, epoch=st.integers(0, 99), block_size=st.integers(1, 500))
def test_an_epoch_reads_what_each_stream_is_to_give(
    sizes: list[list[int]], choose: list[int], said: dict[str, Any], epoch: int, block_size: int
) -> None:
    choose = choose[: len(sizes)]
    ids = read(order_of(sizes, choose, epoch=epoch, first_id=1000, block_size=block_size, **said))
    assert len(ids) == sum(choose)
    times = np.bincount(ids, minlength=1000 + sum(map(sum, sizes)))
    assert not times[:1000].any()
    first = 1000
    for stream, wanted in zip(sizes, choose, strict=True):
        mine = times[first : first + sum(stream)]
        assert mine.sum() == wanted
        repeats = wanted // sum(stream)
        assert set(mine.tolist()) <= {repeats, repeats + 1}
        first += sum(stream)
    assert first == len(times)


@given(sizes=streams, choose=choices, said=settings_said, data=st.data())
def test_any_places_read_the_same_as_reading_from_the_start(
    sizes: list[list[int]], choose: list[int], said: dict[str, Any], data: st.DataObject
) -> None:
    choose = choose[: len(sizes)]
    order = order_of(sizes, choose, **said)
    whole = read(order)
    if not len(whole):
        return
    places = np.asarray(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=12)), np.int64)
    assert order_of(sizes, choose, **said)[places].tolist() == whole[places].tolist()


def test_places_of_any_shape_are_read() -> None:
    order = order_of([[100] * 500])
    places = np.arange(48_000).reshape(16, -1)[:, ::3]
    assert not places.flags.c_contiguous
    assert np.array_equal(order[places], read(order)[places])
    assert order[np.zeros((0, 3), np.int64)].shape == (0, 3)


@pytest.mark.parametrize("place", [-1, 80])
def test_a_place_outside_is_refused(place: int) -> None:
    with pytest.raises(SampleIndexError, match=r"in \[0, 80\)"):
        order_of([[50, 30]])[np.asarray([3, place])]


def test_the_order_does_not_change() -> None:
    # It is part of every run in progress.
    drawn = order_of([[6, 4, 5], [5]], [15, 3], block_size=4, num_canonical_nodes=2)
    assert read(drawn).tolist() == [11, 14, 12, 10, 13, 8, 6, 9, 7, 0, 15, 17, 19, 4, 1, 3, 5, 2]


def test_the_order_depends_on_epoch_and_seed() -> None:
    orders = [
        read(order_of([[50] * 20], block_size=200, epoch=epoch, shuffle_seed=seed)).tolist()
        for epoch, seed in ((0, 1), (1, 1), (0, 2), (1, 0))
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_a_canonical_node_keeps_its_samples_over_epochs() -> None:
    sizes, canonical = [7 + shard % 5 for shard in range(60)], 6
    epochs = [read(order_of([sizes], epoch=epoch, num_canonical_nodes=canonical)) for epoch in range(3)]
    for node in range(canonical):
        start, stop = sum(sizes) * node // canonical, sum(sizes) * (node + 1) // canonical
        kept = [sorted(order[start:stop].tolist()) for order in epochs]
        assert kept[0] == kept[1] == kept[2]
        assert len({tuple(order[start:stop].tolist()) for order in epochs}) == 3


def test_a_block_opens_no_more_shards_than_lie_behind_it() -> None:
    sizes, canonical = [40] * 300, 4
    order = order_of([sizes], block_size=400, num_canonical_nodes=canonical)
    assert order.blocks is not None
    shards = shard_of(sizes, read(order))
    stop = 0
    for size in chain.from_iterable(block_sizes(order.blocks)):
        start, stop = stop, stop + size
        opened = len(np.unique(shards[start:stop]))
        # One more where shards and blocks do not begin together, and two that a canonical node's borders have cut.
        assert size / 40 <= opened <= size // 40 + 1 + 1 + 2


def test_blocks_mix_their_shards_evenly() -> None:
    order = order_of([[500] * 40], block_size=20_000, num_canonical_nodes=1)
    shards = shard_of([500] * 40, read(order)).reshape(40, -1)
    counts = np.stack([np.bincount(batch, minlength=40) for batch in shards])
    # 40 batches of 500 over 40 shards: 12.5 of each shard in a batch, as when drawn without replacement.
    assert abs((counts - 12.5).std() / np.sqrt(12.5 * (1 - 1 / 40) * (1 - 1 / 40)) - 1) < 0.1


def test_fixed_sampling_draws_the_same_each_epoch_and_balanced_does_not() -> None:
    def drawn(method: str, epoch: int) -> list[int]:
        return sorted(read(order_of([[30] * 20], [250], sampling_method=method, epoch=epoch)).tolist())

    assert drawn("fixed", 0) == drawn("fixed", 5)
    assert drawn("balanced", 0) != drawn("balanced", 5)


def test_parts_of_shards_are_drawn_from_all_over_the_shard() -> None:
    times = np.zeros(64, np.int64)
    for epoch in range(400):
        times[read(order_of([[64]], [16], epoch=epoch))] += 1
    assert ((times - 100) ** 2 / 75).sum() < 64 + 4 * np.sqrt(128)


def test_an_unshuffled_order_reads_repeats_shard_by_shard() -> None:
    order = order_of([[3, 0, 2], [2]], [10, 2], shuffle=False)
    assert read(order).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4, 5, 6]


@given(samples=st.integers(1, 11), epoch=st.integers(0, 9))
def test_fewer_samples_than_canonical_nodes_are_all_read(samples: int, epoch: int) -> None:
    assert sorted(read(order_of([[samples]], epoch=epoch)).tolist()) == list(range(samples))


@given(sizes=streams, choose=choices, said=settings_said)
def test_joined_orders_read_one_after_another(sizes: list[list[int]], choose: list[int], said: dict[str, Any]) -> None:
    first_ids = np.cumsum([0, *map(sum, sizes)]).tolist()
    orders = [
        order_of([stream], [wanted], first_id=first, block_size=5 + first, **said)
        for stream, wanted, first in zip(sizes, choose, first_ids, strict=False)
    ]
    together = joined(orders)
    assert len(together) == sum(choose[: len(sizes)])
    assert read(together).tolist() == np.concatenate([read(order) for order in orders]).tolist()


@pytest.mark.parametrize("canonical", [1, 2, 1024])
def test_the_largest_epochs_are_read_at_both_ends(canonical: int) -> None:
    # 10**11 samples; every sum and product on the way must fit 64 bits.
    sizes = np.full(10_000, 10**7)
    settings = make_settings(num_canonical_nodes=canonical)
    order = blockwise_order([sizes], [10**11], settings, 0, 0, settings.shuffle_block_size or 0)
    places = np.concatenate([np.arange(3000), 9 * 10**10 + np.arange(3000), 10**11 - 1 - np.arange(3000)])
    ids = order[places]
    assert len(np.unique(ids)) == len(places)
    assert ids.min() >= 0
    assert ids.max() < 10**11
    # One block lies in at most two shards of this size, so each stretch of places in at most four of them.
    assert len(np.unique(ids // 10**7)) <= 12


def test_a_block_as_large_as_the_largest_epoch_is_mixed_whole() -> None:
    settings = make_settings(num_canonical_nodes=1)
    order = blockwise_order([np.full(1000, 10**8)], [10**11], settings, 0, 0, 10**11)
    ids = order[np.arange(20_000)]
    assert len(np.unique(ids)) == len(ids)
    counts = np.bincount(ids // (2 * 10**9), minlength=50)
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 4 * np.sqrt(2 * 49)
