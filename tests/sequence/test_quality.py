"""Scores of orders whose score is known, costs that can be counted by hand, and what holds for all."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.order_mixing import Mixing, largest_burst, lru_downloads, mixing, needed_within, uniform_mixing
from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.sequence.quality import (
    Visits,
    entropy_of_rows,
    open_at_once,
    shard_visits,
    shards_of,
)

SHARDS = np.full(100, 256)
IN_ORDER = np.arange(25_600).reshape(-1, 64)
UNIFORM = uniform_mixing(IN_ORDER, SHARDS)


def shuffled(ids: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(ids.ravel()).reshape(ids.shape)


def score(ids: NDArray[np.int64], before: NDArray[np.int64], shard_sizes: NDArray[np.int64] = SHARDS) -> Mixing:
    return mixing(ids, before, shard_sizes).relative_to(uniform_mixing(ids, shard_sizes))


def visits_to(*batches: list[int], num_shards: int = 4) -> Visits:
    """Visits of a node that reads the first sample of each of these shards, of 10 samples each."""
    widest = max(map(len, batches))
    ids = [[shard * 10 for shard in batch] + [-1] * (widest - len(batch)) for batch in batches]
    return shard_visits(np.asarray(ids, np.int64), np.full(num_shards, 10))


@st.composite
def epochs(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sample ids of shape (batches, batch size), some missing, and the sizes of their shards."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any))
    shape = draw(st.tuples(st.integers(1, 20), st.integers(1, 8)))
    count = math.prod(shape)
    ids = draw(st.lists(st.integers(-1, sum(sizes) - 1), min_size=count, max_size=count))
    return np.asarray(ids, np.int64).reshape(shape), np.asarray(sizes, np.int64)


def test_a_sample_lies_in_the_shard_that_holds_its_id() -> None:
    sizes = np.asarray([3, 0, 2])
    assert shards_of(np.asarray([[0, 2, 3], [4, -1, 1]]), sizes).tolist() == [[0, 0, 2], [2, -1, 0]]
    with pytest.raises(SampleIndexError, match="below 5, but got 5"):
        shards_of(np.asarray([5]), sizes)


@pytest.mark.parametrize(
    ("rows", "entropy"),
    [
        ([[7, 7, 7, 7]], 0),
        ([[0, 1, 0, 1]], math.log(2)),
        ([[0, 0, 1, 1], [5, 5, 5, 5]], math.log(2) / 2),
        ([[0, 0, 0, 1]], 2 * math.log(2) - 0.75 * math.log(3)),
        ([[3, 1, 2, 0]], math.log(4)),
        ([[1], [1]], 0),  # rows that end and begin alike are two rows
    ],
)
def test_the_entropy_of_a_row_is_that_of_its_labels(rows: list[list[int]], entropy: float) -> None:
    assert entropy_of_rows(np.asarray(rows)) == pytest.approx(entropy, abs=1e-12)


def test_a_uniform_permutation_scores_one() -> None:
    measured = score(shuffled(IN_ORDER, seed=3), shuffled(IN_ORDER, seed=4))
    assert measured.shards == pytest.approx(1, abs=0.005)
    assert measured.distances == pytest.approx(1, abs=0.005)
    assert measured.epochs == pytest.approx(1, abs=0.005)


def test_reading_in_order_scores_zero() -> None:
    assert score(IN_ORDER, IN_ORDER) == Mixing(shards=0, distances=0, epochs=0)


def test_two_shards_in_turn_mix_two_shards_and_no_distances() -> None:
    halves = IN_ORDER.reshape(2, -1).T.reshape(-1, 64)  # 0, 12800, 1, 12801, ...
    entropies = mixing(halves, IN_ORDER, SHARDS)
    assert entropies.shards == pytest.approx(math.log(2))
    assert entropies.epochs == pytest.approx(math.log(2))
    assert score(halves, IN_ORDER).distances < 0.2  # one half on and one half back, less one


def test_a_regular_stride_uses_many_shards_and_only_the_distances_show_it() -> None:
    strided = IN_ORDER.reshape(64, -1).T.reshape(-1, 64)  # each batch: one sample from each 64th of the data
    measured = score(strided, shuffled(IN_ORDER, seed=3))
    assert measured.shards > 1
    assert measured.distances == 0


def test_a_stride_that_goes_around_the_end_is_one_distance() -> None:
    around = (np.arange(25_600) * 999 % 25_600).reshape(-1, 64)
    assert mixing(around, around, SHARDS).distances == 0


def test_samples_that_meet_again_show_in_the_epochs_alone() -> None:
    now = shuffled(IN_ORDER, seed=3)
    again = score(np.random.default_rng(0).permuted(now, axis=1), now)
    assert again.epochs == 0
    assert again.shards == pytest.approx(1, abs=0.005)


def test_shuffling_within_a_shard_changes_no_shards_but_mixes_epochs_a_little() -> None:
    within = np.random.default_rng(0).permuted(IN_ORDER.reshape(-1, 256), axis=1).reshape(-1, 64)
    measured = score(within, IN_ORDER)
    assert measured.shards == 0
    assert 0.3 < measured.distances < 0.4  # six of the 256 bins
    assert measured.epochs == pytest.approx(math.log(4) / math.log(64), rel=0.05)  # from the shard's four batches


def test_the_uniform_permutation_is_of_the_samples_that_are_read() -> None:
    """A stream of one shard, read as often as all others together, is half of every batch of any fair order."""
    often = np.concatenate([np.tile(np.arange(256), 99), np.arange(256, 25_600)]).reshape(-1, 64)
    assert score(shuffled(often, seed=1), shuffled(often, seed=2)).shards == pytest.approx(1, abs=0.005)


def test_where_there_is_nothing_to_mix_the_score_is_one() -> None:
    one_shard = np.asarray([25_600])
    assert score(IN_ORDER, IN_ORDER, one_shard).shards == 1
    assert score(IN_ORDER.reshape(-1, 1), IN_ORDER.reshape(-1, 1)) == Mixing(shards=1, distances=1, epochs=1)


def test_only_full_batches_are_measured() -> None:
    cut_short = np.vstack([IN_ORDER, np.where(np.arange(64) < 10, 0, -1)])
    assert mixing(cut_short, cut_short, SHARDS) == mixing(IN_ORDER, IN_ORDER, SHARDS)
    with pytest.raises(ConfigError, match="none of 1 is"):
        mixing(cut_short[-1:], IN_ORDER, SHARDS)


@given(epochs(), st.integers(0, 9))
def test_no_entropy_exceeds_that_of_labels_all_different(
    epoch: tuple[NDArray[np.int64], NDArray[np.int64]], seed: int
) -> None:
    ids, sizes = epoch
    ids = np.maximum(ids, 0)
    entropies = mixing(ids, shuffled(ids, seed), sizes)
    most = math.log(ids.shape[1]) + 1e-9
    assert 0 <= entropies.shards <= min(most, math.log(len(sizes)) + 1e-9)
    assert 0 <= entropies.distances <= most
    assert 0 <= entropies.epochs <= min(most, math.log(len(ids)) + 1e-9)


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_moving_samples_by_a_few_places_never_scores_as_mixed(seed: int, reach: int) -> None:
    moved = np.argsort(IN_ORDER.ravel() + np.random.default_rng(seed).uniform(0, reach, IN_ORDER.size))
    measured = mixing(moved.reshape(-1, 64), IN_ORDER, SHARDS).relative_to(UNIFORM)
    assert 0 <= measured.shards < 0.1
    assert 0 <= measured.distances < 0.2
    assert 0 <= measured.epochs < 0.5


def test_visits_are_each_batch_and_shard_once() -> None:
    visits = visits_to([1, 0, 1], [3], [], [0, 3])
    assert visits.batches.tolist() == [0, 0, 1, 3, 3]
    assert visits.shards.tolist() == [0, 1, 3, 0, 3]
    assert visits.first_batches().tolist() == [0, 0, -1, 1]
    assert visits.last_batches().tolist() == [3, 0, -1, 3]
    assert visits.used().tolist() == [0, 1, 3]


def test_a_shard_is_open_from_its_first_to_its_last_use() -> None:
    visits = visits_to([0], [1], [0, 2], [2], [])
    assert open_at_once(visits, np.ones(4, np.int64)).tolist() == [1, 2, 2, 1, 0]
    assert open_at_once(visits, np.asarray([5, 70, 300, 9000])).tolist() == [5, 75, 305, 300, 0]


def test_what_the_first_batches_need_is_counted_once() -> None:
    visits = visits_to([0, 1], [1, 2], [0], [3])
    sizes = np.asarray([1, 10, 100, 1000])
    assert [needed_within(visits, sizes, batches) for batches in (0, 1, 2, 3, 4, 9)] == [0, 11, 111, 111, 1111, 1111]


def test_bursts_are_relative_to_an_even_arrival() -> None:
    in_turn = visits_to(*([shard] for shard in range(12)), num_shards=12)
    assert largest_burst(in_turn, run=2) == 1
    at_start = visits_to([0, 1, 2, 3], *[[0]] * 7)
    assert largest_burst(at_start, run=2) == 0
    # After the first two batches, shards 1, 2, 3 come within two batches of each other: 3 where 4 * 2 / 8 is even.
    in_the_middle = visits_to([0], [0], [0], [1, 2], [3], [0], [0], [0])
    assert largest_burst(in_the_middle, run=2) == 3
    assert largest_burst(in_the_middle, run=5) == 0  # no second run of five
    with pytest.raises(ConfigError, match="at least one batch, but got 0"):
        largest_burst(in_turn, run=0)


@pytest.mark.parametrize(
    ("batches", "limit", "downloads"),
    [
        ([[0], [1], [0], [1]], 2, 2),  # both fit
        ([[0], [1], [0], [1]], 1, 4),  # one at a time
        ([[0], [1], [2], [0]], 2, 4),  # 0 made room for 2
        ([[0], [1], [0], [2], [0]], 2, 3),  # 1 did, as 0 was used since
        ([[0, 1, 2], [0, 1, 2]], 0, 3),  # a batch stays until it is done, so the next one finds it
        ([[0, 1, 2], [3], [1, 2]], 3, 4),  # of 0, 1, 2 the lowest goes
        ([[0, 1, 2], [3], [0]], 3, 5),
    ],
)
def test_downloads_under_a_limit(batches: list[list[int]], limit: int, downloads: int) -> None:
    assert lru_downloads(visits_to(*batches), np.ones(4, np.int64), limit) == downloads


def test_a_large_shard_takes_the_room_of_several() -> None:
    shard_bytes = np.asarray([1, 1, 1, 3])
    assert lru_downloads(visits_to([0], [1], [2], [3], [0], [1], [2]), shard_bytes, limit=3) == 7
    assert lru_downloads(visits_to([0], [1], [2], [3], [2], [1], [0]), shard_bytes, limit=5) == 5


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="must not be negative, but got -1"):
        lru_downloads(visits_to([0]), np.ones(4, np.int64), limit=-1)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=60), st.integers(1, 9))
def test_one_shard_at_a_time_is_the_cache_of_the_textbooks(reads: list[int], limit: int) -> None:
    cache: OrderedDict[int, None] = OrderedDict()
    downloads = 0
    for shard in reads:
        downloads += shard not in cache
        cache[shard] = None
        cache.move_to_end(shard)
        if len(cache) > limit:
            cache.popitem(last=False)
    visits = visits_to(*([shard] for shard in reads), num_shards=8)
    assert lru_downloads(visits, np.ones(8, np.int64), limit) == downloads


@given(epochs(), st.data())
def test_costs_agree_with_each_other(epoch: tuple[NDArray[np.int64], NDArray[np.int64]], data: st.DataObject) -> None:
    ids, sizes = epoch
    shard_bytes = np.asarray(data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes))))
    visits = shard_visits(ids, sizes)
    used = visits.used()
    assert set(used.tolist()) == set(shards_of(ids[ids >= 0], sizes).tolist())

    opened = open_at_once(visits, shard_bytes)
    assert opened.shape == (len(ids),)
    assert 0 <= opened.min() <= opened.max() <= shard_bytes[used].sum()
    assert needed_within(visits, shard_bytes, len(ids)) == shard_bytes[used].sum()
    assert largest_burst(visits, run=1) >= 0

    downloads = [lru_downloads(visits, shard_bytes, limit) for limit in (0, int(opened.max()), 10**9)]
    assert len(visits.batches) >= downloads[0] >= len(used)
    assert downloads[1] >= len(used)
    assert downloads[2] == len(used)
