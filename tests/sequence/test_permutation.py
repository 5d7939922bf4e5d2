"""Keyed permutations: of any size, and the same in every release."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.sequence.permutation import LARGEST_SIZE, Permutation, Permutations, drawn_keys, numbered_keys

KEYS = (0, 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF)
ROOTS = (181, 256, 511, 999, 1024)
AROUND = sorted(
    {edge + step for edge in (*(2**k for k in range(9, 21)), *(r * r for r in ROOTS)) for step in (-1, 0, 1)}
)


def whole(size: int, key: int) -> NDArray[np.int64]:
    """The permutation of one size and key, written out."""
    return images(size, np.arange(size), np.full(size, key, np.uint64))


def images(size: int, indexes: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    return Permutations(np.asarray([size])).permuted(np.zeros(len(indexes), np.int64), indexes, keys)


def under_many_keys(size: int, index: int, count: int = 40_000) -> NDArray[np.int64]:
    """Where an index goes under many keys."""
    keys = np.random.default_rng([size, 7]).integers(2**64, size=count, dtype=np.uint64)
    return images(size, np.full(count, index), keys)


def surprise(counts: NDArray[np.int64], expected: NDArray[np.float64] | float) -> float:
    """How many standard deviations the chi-square of these counts lies above its mean."""
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.rotate(2)
@pytest.mark.parametrize("key", KEYS)
def test_every_small_size_is_permuted(key: int) -> None:
    for size in range(1, 301):
        assert np.array_equal(np.sort(whole(size, key)), np.arange(size)), size


def test_a_size_of_0_permutes_nothing() -> None:
    assert whole(0, 5).size == 0


@pytest.mark.rotate(4)
@pytest.mark.parametrize("size", AROUND)
def test_sizes_around_powers_of_two_and_squares_are_permuted(size: int) -> None:
    for key in KEYS[:3]:
        assert np.array_equal(np.sort(whole(size, key)), np.arange(size))


@given(size=st.integers(1, 20_000), key=st.integers(0, 2**64 - 1))
def test_any_size_is_permuted(size: int, key: int) -> None:
    assert np.array_equal(np.sort(whole(size, key)), np.arange(size))


@given(size=st.integers(2**20, LARGEST_SIZE), key=st.integers(0, 2**64 - 1), data=st.data())
def test_indexes_of_huge_sizes_stay_apart_and_inside(size: int, key: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 1000))
    indexes = np.concatenate([np.arange(first, first + 1000), np.arange(size - 10, size)])
    indexes = np.unique(indexes)
    places = images(size, indexes, np.full(len(indexes), key, np.uint64))
    assert places.min() >= 0
    assert places.max() < size
    assert len(np.unique(places)) == len(indexes)


def test_one_call_serves_sizes_and_keys_in_any_mix() -> None:
    sizes = np.asarray([3, 5000, 0, 900, 1, 262_144])
    entries = np.asarray([0, 1, 3, 4, 5]).repeat(40)
    generator = np.random.default_rng(3)
    indexes = generator.integers(0, sizes[entries])
    keys = generator.integers(2**64, size=len(entries), dtype=np.uint64)
    together = Permutations(sizes).permuted(entries, indexes, keys)
    alone = [
        int(images(size, np.asarray([index]), np.asarray([key], np.uint64))[0])
        for size, index, key in zip(sizes[entries].tolist(), indexes.tolist(), keys.tolist(), strict=True)
    ]
    assert together.tolist() == alone


@given(
    size=st.integers(1, 3000) | st.integers(1, 2**36) | st.sampled_from([2**32 - 1, 2**32, 2**32 + 1]),
    key=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 9),
)
@example(size=1023, key=5, seed=0)
@example(size=1024, key=5, seed=0)  # from which on fewer rounds do
def test_a_permutation_by_table_is_the_same(size: int, key: int, seed: int) -> None:
    indexes = np.random.default_rng(seed).integers(size, size=300)
    expected = images(size, indexes, np.full(len(indexes), key, np.uint64))
    assert Permutation(size, np.uint64(key)).permuted(indexes).tolist() == expected.tolist()


def test_the_permutation_of_a_key_does_not_change() -> None:
    # What a key means is part of every run in progress.
    assert whole(12, 9176).tolist() == [4, 10, 7, 1, 0, 5, 9, 11, 2, 3, 8, 6]
    assert whole(5000, 9176)[:6].tolist() == [1811, 2240, 1951, 3073, 4026, 4914]


@pytest.mark.parametrize("size", range(1, 17))
def test_an_index_of_a_tiny_size_goes_everywhere(size: int) -> None:
    for index in range(size):
        assert len(np.unique(under_many_keys(size, index, 2000))) == size


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_tiny_size_are_equally_frequent(size: int) -> None:
    places = np.column_stack([under_many_keys(size, index) for index in range(size)])
    codes = places @ size ** np.arange(size)
    expected = {int(np.dot(order, size ** np.arange(size))) for order in itertools.permutations(range(size))}
    found, counts = np.unique(codes, return_counts=True)
    assert set(found.tolist()) == expected
    assert surprise(counts, len(codes) / len(expected)) < 4


@pytest.mark.parametrize("size", [2, 7, 9, 16, 100, 1023, 1024, 4096])
@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
def test_an_index_goes_everywhere_equally_often(size: int, where: float) -> None:
    places = under_many_keys(size, int(where * size))
    bins = min(size, 400)
    weights = np.bincount(np.arange(size) * bins // size) / size
    assert surprise(np.bincount(places * bins // size, minlength=bins), weights * len(places)) < 4


@pytest.mark.parametrize("size", [4, 7, 9, 16, 25, 64])
def test_pairs_of_places_are_equally_frequent(size: int) -> None:
    first = under_many_keys(size, 0)
    for other in (1, 2, size // 2, size - 1):
        second = under_many_keys(size, other)
        counts = np.bincount(first * (size - 1) + second - (second > first), minlength=size * (size - 1))
        assert surprise(counts, len(first) / len(counts)) < 4


@pytest.mark.parametrize("size", [1000, 1024, 4096, 200_000])
def test_distances_of_neighbours_are_equally_frequent(size: int) -> None:
    first, bins = under_many_keys(size, 0), 500
    weights = np.bincount(np.arange(size - 1) * bins // (size - 1)) / (size - 1)
    # Neighbours in either half of the network: index + 1, and index + about the square root.
    for other in (1, math.isqrt(size), math.isqrt(size) + 1):
        distances = (under_many_keys(size, other) - first) % size - 1
        assert surprise(np.bincount(distances * bins // (size - 1), minlength=bins), weights * len(first)) < 4


@pytest.mark.rotate(2)
@pytest.mark.parametrize("size", [9, 16, 100, 1024, 4096])
def test_whole_permutations_look_random(size: int) -> None:
    count = min(2000, 2_000_000 // size)
    keys = np.random.default_rng(size).integers(2**64, size=count, dtype=np.uint64)
    orders = images(size, np.tile(np.arange(size), count), np.repeat(keys, size)).reshape(count, size)

    def deviations(values: NDArray[np.int64], mean: float, variance: float) -> float:
        return abs(float(values.mean()) - mean) * math.sqrt(count / variance)

    cycles = np.asarray([count_cycles(order) for order in orders.tolist()])
    harmonic = sum(1 / k for k in range(1, size + 1))
    assert deviations((orders == np.arange(size)).sum(axis=1), 1, 1) < 4
    assert deviations((np.diff(orders, axis=1) == 1).sum(axis=1), (size - 1) / size, 1) < 4
    assert deviations((np.diff(orders, axis=1) > 0).sum(axis=1), (size - 1) / 2, (size + 1) / 12) < 4
    assert deviations(cycles, harmonic, harmonic - sum(1 / k**2 for k in range(1, size + 1))) < 4
    assert deviations((size - cycles) % 2, 0.5, 0.25) < 4


def count_cycles(order: list[int]) -> int:
    seen = [False] * len(order)
    cycles = 0
    for start in range(len(order)):
        cycles += not seen[start]
        while not seen[start]:
            seen[start] = True
            start = order[start]
    return cycles


def test_numbered_keys_are_the_published_sequence() -> None:
    keys = numbered_keys(np.full(3, 1234567, np.uint64), np.arange(3))
    assert keys.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_of_many_numbers_and_keys_are_all_different() -> None:
    keys = np.repeat(drawn_keys(np.random.default_rng(0), 100), 1000)
    assert len(np.unique(numbered_keys(keys, np.tile(np.arange(1000), 100)))) == 100_000
