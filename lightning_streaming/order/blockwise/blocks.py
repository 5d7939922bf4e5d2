"""Blocks: each canonical node's places cut into runs that are mixed each by itself.

A canonical node's first block is shorter than its others, by more from one canonical node to the next, so that they do
not come to the ends of their blocks together and ask for new shards all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.blockwise.keys import drawn_keys, numbered_keys
from lightning_streaming.order.blockwise.permutation import Permutations
from lightning_streaming.order.runs import RunLookup


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks in rows: the blocks of a row follow each other, are of one size, and share a key.

    A canonical node has three rows: its first block, the blocks that are one place larger than the others, and the
    others. Any of them may be empty.
    """

    starts: NDArray[np.int64]
    """Place at which each row begins."""
    stops: NDArray[np.int64]
    """Place at which each row ends (exclusive), rising."""
    sizes: NDArray[np.int64]
    """Places in each block of the row."""
    keys: NDArray[np.uint64]
    """One for each row, to make those of its blocks from."""

    @cached_property
    def _rows(self) -> RunLookup:
        return RunLookup(self.stops)

    @cached_property
    def _permutations(self) -> Permutations:
        return Permutations(self.sizes)

    def mixed(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each place of the order reads: a place in the same block.

        Args:
            places: In one dimension, each below the end of the last row.
        """
        rows = self._rows.find(places)
        offsets = places - self.starts.take(rows)
        # Unsigned division is the faster one.
        sizes = self.sizes.take(rows).view(np.uint64)
        blocks = (offsets.view(np.uint64) // sizes).view(np.int64)
        indexes = offsets - blocks * sizes.view(np.int64)
        keys = numbered_keys(self.keys.take(rows), blocks)
        return places - indexes + self._permutations.permuted(rows, indexes, keys)


def cut_blocks(num_samples: int, num_canonical_nodes: int, block_size: int, generator: np.random.Generator) -> Blocks:
    """Cut each canonical node ``c``, which owns places ``[n * c // C, n * (c + 1) // C)``, into blocks.

    Args:
        num_samples: Places in all, n.
        num_canonical_nodes: Canonical nodes, C.
        block_size: Places in a block, about.
        generator: Draws the keys, this epoch's.
    """
    borders = num_samples * np.arange(num_canonical_nodes + 1) // num_canonical_nodes
    totals = np.diff(borders)
    firsts, counts = staggered_blocks(totals, max(min(block_size, num_samples), 1))
    small, larger = np.divmod(totals - firsts, np.maximum(counts, 1))
    sizes = np.column_stack([firsts, small + 1, small])
    starts = borders[:-1, np.newaxis] + np.column_stack([np.zeros_like(firsts), firsts, firsts + larger * (small + 1)])
    stops = np.append(starts.ravel()[1:], num_samples)
    return Blocks(starts.ravel(), stops, sizes.ravel(), drawn_keys(generator, sizes.size))


def staggered_blocks(totals: NDArray[np.int64], block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Size of each canonical node's first block, and how many blocks share the rest.

    The number of blocks is rounded, so that a block is of ``block_size`` on average, and at most 5 / 3 of it. The first
    block of canonical node ``c`` of ``C`` is to the others as ``1 - c / (2 * C)`` to 1: 100 places in blocks of 30 are
    34, 33 and 33 in canonical node 0 of 2, and 28, 36 and 36 in canonical node 1.

    Args:
        totals: Places of each canonical node.
        block_size: Places in a block, about; at least 1 and at most all places.
    """
    unit = 2 * len(totals)
    first_share = unit - np.arange(len(totals))
    counts: NDArray[np.int64] = np.maximum((2 * totals + block_size) // (2 * block_size), 1) - 1
    firsts: NDArray[np.int64] = -(-totals * first_share // (unit * counts + first_share))
    return firsts, counts


def joined_blocks(several: Sequence[Blocks]) -> Blocks:
    """One after another."""
    ends = [int(blocks.stops[-1]) for blocks in several]
    first_places = (np.cumsum(ends) - ends).tolist()
    return Blocks(
        np.concatenate([blocks.starts + first for blocks, first in zip(several, first_places, strict=True)]),
        np.concatenate([blocks.stops + first for blocks, first in zip(several, first_places, strict=True)]),
        np.concatenate([blocks.sizes for blocks in several]),
        np.concatenate([blocks.keys for blocks in several]),
    )
