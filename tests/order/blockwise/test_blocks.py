from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming.order.blockwise.blocks import Blocks, cut_blocks, joined_blocks, staggered_blocks


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


def test_joined_blocks_mix_as_each_did() -> None:
    several = [cut(700, 3, 90), cut(0, 3, 90), cut(50, 1, 7, seed=4)]
    expected = np.concatenate([mixed(several[0]), 700 + mixed(several[2])])
    assert mixed(joined_blocks(several)).tolist() == expected.tolist()
