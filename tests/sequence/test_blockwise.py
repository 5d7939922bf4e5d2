"""The `blockwise` order: each sample as often as its stream gives it, at any place without the places before."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.errors import SampleIndexError
from lightning_streaming.sequence.blockwise import (
    Blocks,
    BlockwiseOrder,
    blockwise_order,
    cut_blocks,
    shard_counts,
    staggered_blocks,
)
from lightning_streaming.sequence.weights import StreamGroup
from tests.sequence.builders import make_settings

streams = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any), min_size=1, max_size=4)
choices = st.lists(st.integers(0, 300), min_size=4, max_size=4)
settings_said = st.fixed_dictionaries(
    {
        "num_canonical_nodes": st.integers(1, 12),
        "sampling_method": st.sampled_from(["balanced", "fixed"]),
        "sampling_granularity": st.integers(1, 50),
        "shuffle_seed": st.integers(0, 2**63 - 1),
    }
)


def group_of(sizes: list[list[int]], choose: list[int], first_id: int, block_size: int) -> StreamGroup:
    shards = tuple(np.asarray(stream, np.int64) for stream in sizes)
    return StreamGroup(shard_sizes=shards, choose=tuple(choose), first_id=first_id, block_size=block_size)


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
    wanted = [sum(stream) for stream in sizes] if choose is None else choose
    return blockwise_order([group_of(sizes, wanted, first_id, block_size)], make_settings(**said), epoch)


def read(order: BlockwiseOrder) -> NDArray[np.int64]:
    return order.ids(np.arange(len(order)))


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
    assert order_of(sizes, choose, **said).ids(places).tolist() == whole[places].tolist()


def test_places_of_any_shape_are_read() -> None:
    order = order_of([[100] * 500])
    places = np.arange(48_000).reshape(16, -1)[:, ::3]
    assert not places.flags.c_contiguous
    assert np.array_equal(order.ids(places), read(order)[places])
    assert order.ids(np.zeros((0, 3), np.int64)).shape == (0, 3)


@pytest.mark.parametrize("place", [-1, 80])
def test_a_place_outside_is_refused(place: int) -> None:
    with pytest.raises(SampleIndexError, match=r"in \[0, 80\)"):
        order_of([[50, 30]]).ids(np.asarray([3, place]))


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


@given(samples=st.integers(1, 11), epoch=st.integers(0, 9))
def test_fewer_samples_than_canonical_nodes_are_all_read(samples: int, epoch: int) -> None:
    assert sorted(read(order_of([[samples]], epoch=epoch)).tolist()) == list(range(samples))


@given(sizes=streams, choose=choices, said=settings_said)
def test_joined_orders_read_one_after_another(sizes: list[list[int]], choose: list[int], said: dict[str, Any]) -> None:
    first_ids = np.cumsum([0, *map(sum, sizes)]).tolist()
    groups = [
        group_of([stream], [wanted], first, 5 + first)
        for stream, wanted, first in zip(sizes, choose, first_ids, strict=False)
    ]
    together = blockwise_order(groups, make_settings(**said), 0)
    assert len(together) == sum(choose[: len(sizes)])
    alone = [read(blockwise_order([group], make_settings(**said), 0)) for group in groups]
    assert read(together).tolist() == np.concatenate(alone).tolist()


@pytest.mark.parametrize("canonical", [1, 2, 1024])
def test_the_largest_epochs_are_read_at_both_ends(canonical: int) -> None:
    # 10**11 samples; every sum and product on the way must fit 64 bits.
    sizes = np.full(10_000, 10**7)
    settings = make_settings(num_canonical_nodes=canonical)
    group = StreamGroup(shard_sizes=(sizes,), choose=(10**11,), first_id=0, block_size=settings.shuffle_block_size)
    order = blockwise_order([group], settings, 0)
    places = np.concatenate([np.arange(3000), 9 * 10**10 + np.arange(3000), 10**11 - 1 - np.arange(3000)])
    ids = order.ids(places)
    assert len(np.unique(ids)) == len(places)
    assert ids.min() >= 0
    assert ids.max() < 10**11
    # One block lies in at most two shards of this size, so each stretch of places in at most four of them.
    assert len(np.unique(ids // 10**7)) <= 12


def test_a_block_as_large_as_the_largest_epoch_is_mixed_whole() -> None:
    settings = make_settings(num_canonical_nodes=1)
    sizes = np.full(1000, 10**8)
    group = StreamGroup(shard_sizes=(sizes,), choose=(10**11,), first_id=0, block_size=10**11)
    order = blockwise_order([group], settings, 0)
    ids = order.ids(np.arange(20_000))
    assert len(np.unique(ids)) == len(ids)
    counts = np.bincount(ids // (2 * 10**9), minlength=50)
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 4 * np.sqrt(2 * 49)


def cut(num_samples: int, num_canonical_nodes: int, block_size: int, seed: int = 0) -> Blocks:
    return cut_blocks(num_samples, num_canonical_nodes, block_size, np.random.default_rng(seed))


def block_sizes(blocks: Blocks) -> list[list[int]]:
    """Sizes of the blocks of each canonical node."""
    lengths, sizes = (blocks.stops - blocks.starts).tolist(), blocks.sizes.tolist()
    rows = [[size] * (length // size) if length else [] for length, size in zip(lengths, sizes, strict=True)]
    return [list(chain.from_iterable(rows[first : first + 3])) for first in range(0, len(rows), 3)]


def mixed(blocks: Blocks) -> NDArray[np.int64]:
    return blocks.mixed(np.arange(blocks.stops[-1]))


def test_blocks_are_cut_as_in_the_example() -> None:
    assert block_sizes(cut(200, 2, 30)) == [[34, 33, 33], [28, 36, 36]]


@given(samples=st.integers(0, 3000), canonical=st.integers(1, 70), block=st.integers(-1, 4000))
def test_blocks_cover_their_canonical_nodes_and_none_is_far_from_the_size(
    samples: int, canonical: int, block: int
) -> None:
    about = max(block, 1)
    for c, sizes in enumerate(block_sizes(cut(samples, canonical, block))):
        total = samples * (c + 1) // canonical - samples * c // canonical
        assert sum(sizes) == total
        assert len(sizes) == (max((2 * total + about) // (2 * about), 1) if total else 0)
        assert max(sizes, default=0) <= about * 5 / 3 + 1
        assert min(sizes, default=total) >= min(about * 3 / 8 - 1, total)
        if len(sizes) > 1:
            assert max(sizes[1:]) - min(sizes[1:]) <= 1
            assert 2 * sizes[0] + 1 >= min(sizes[1:])


@given(samples=st.integers(1, 3000), canonical=st.integers(1, 40), block=st.integers(1, 4000))
def test_each_block_is_permuted_within_itself(samples: int, canonical: int, block: int) -> None:
    blocks = cut(samples, canonical, block)
    places = mixed(blocks)
    stop = 0
    for size in chain.from_iterable(block_sizes(blocks)):
        start, stop = stop, stop + size
        assert np.array_equal(np.sort(places[start:stop]), np.arange(start, stop))
    assert stop == samples


def test_canonical_nodes_come_to_the_ends_of_blocks_at_different_times() -> None:
    firsts = [sizes[0] for sizes in block_sizes(cut(80_000, 8, 1000))]
    assert np.diff(firsts).max() < -40
    assert min(firsts) > 500


def test_staggering_does_not_overflow_at_the_largest_epochs() -> None:
    totals = np.full(1024, 10**11 // 1024)
    firsts, counts = staggered_blocks(totals, 10**11)
    assert firsts.tolist() == totals.tolist()
    assert not counts.any()
    firsts, counts = staggered_blocks(totals, 1)
    assert (firsts == 1).all()
    assert (abs(2 * (totals - counts) - 1) == 1).all()
    firsts, _ = staggered_blocks(np.asarray([10**11]), 5 * 10**10 + 1)
    assert firsts.tolist() == [5 * 10**10]


def test_blocks_of_one_size_are_mixed_differently_and_anew_with_other_keys() -> None:
    blocks = cut(40_000, 4, 2500)
    inside = mixed(blocks).reshape(4, -1)
    assert len({tuple(row[-1200:] - row[-1200:].min()) for row in inside}) == 4
    assert (mixed(cut(40_000, 4, 2500, seed=1)) != mixed(blocks)).mean() > 0.99


shards = st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(any)


def count(sizes: list[int], choose: int, granularity: int = 1, seed: int = 0) -> NDArray[np.int64]:
    return shard_counts(np.asarray(sizes, np.int64), choose, granularity, np.random.default_rng(seed))


@given(sizes=shards, choose=st.integers(0, 3000), granularity=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_shards_give_exactly_what_is_asked_and_no_more_than_they_have(
    sizes: list[int], choose: int, granularity: int, seed: int
) -> None:
    counts = count(sizes, choose, granularity, seed)
    repeats = choose // sum(sizes)
    assert counts.sum() == choose
    assert (counts >= repeats * np.asarray(sizes)).all()
    assert (counts <= (repeats + 1) * np.asarray(sizes)).all()


@given(sizes=shards, share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_single_picks_keep_every_shard_near_its_share(sizes: list[int], share: float, seed: int) -> None:
    choose = int(share * sum(sizes))
    exact = np.asarray(sizes) * choose / sum(sizes)
    # Rounded up or down, and one sample more or less for the first shard to make the sum come out.
    assert (np.abs(count(sizes, choose, 1, seed) - exact) < 2 + 1e-6).all()


def test_a_granularity_above_the_shards_picks_whole_shards() -> None:
    counts = count([10] * 40, 200, granularity=2**62)
    assert sorted(counts.tolist()) == [0] * 20 + [10] * 20


def test_whole_repeats_need_no_luck() -> None:
    assert count([3, 0, 5], 24).tolist() == [9, 0, 15]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("granularity", [1, 7, 64, 100, 1000])
def test_over_many_draws_every_sample_has_the_same_chance(granularity: int) -> None:
    sizes = np.tile([100, 40, 7, 1, 0, 100, 64, 65], 10)
    draws = 2000
    mean = sum(count(sizes.tolist(), 1500, granularity, seed) for seed in range(draws)) / draws
    by_size = np.bincount(sizes, mean, minlength=101)
    expected = np.bincount(sizes, sizes * 1500 / sizes.sum(), minlength=101)
    # A count varies by at most its shard's size, so a mean over 10 shards and all draws by little.
    assert (np.abs(by_size - expected) <= 5 * np.arange(101) / 2 * np.sqrt(20 / draws)).all()


def test_sums_come_out_at_sizes_beyond_float32() -> None:
    sizes = np.random.default_rng(1).integers(0, 2 * 10**6, 100_000)
    choose = int(sizes.sum()) - 1
    counts = shard_counts(sizes, choose, 1, np.random.default_rng(2))
    assert counts.sum() == choose
    assert (counts <= sizes).all()
