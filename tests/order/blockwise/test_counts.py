from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.order.blockwise.counts import shard_counts

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
