"""The sample id at each place of an epoch, worked out when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import SampleIndexError
from lightning_streaming.order.blockwise.blocks import Blocks, cut_blocks, joined_blocks
from lightning_streaming.order.blockwise.drawn import Drawn, draw
from lightning_streaming.order.blockwise.generators import Purpose, generator_for
from lightning_streaming.order.blockwise.pieces import Pieces, joined_pieces, pieces_of
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shuffle.spans import Spans, epoch_parts
from lightning_streaming.order.shuffle.task import ShuffleTask

_CHUNK = 16_384
"""Places worked on at once: few enough that all about them stays in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockwiseOrder:
    """An epoch's samples: canonical nodes one after another, each its shards in random order, mixed within blocks."""

    blocks: Blocks | None
    """How places are mixed; None where they are not."""
    pieces: Pieces
    """The shards behind the places."""

    def __len__(self) -> int:
        """Places: the samples that the epoch draws."""
        return len(self.pieces)

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at these places, of the same shape.

        Raises:
            SampleIndexError: A place lies outside ``[0, len(self))``.
        """
        if places.size and not (places.min() >= 0 and places.max() < len(self)):
            raise SampleIndexError(
                f"places must be in [0, {len(self)}), but range from {places.min()} to {places.max()}"
            )
        flat = np.ascontiguousarray(places, np.int64).reshape(-1)
        ids = np.empty_like(flat)
        for start in range(0, len(flat), _CHUNK):
            chunk = flat[start : start + _CHUNK]
            laid_out = chunk if self.blocks is None else self.blocks.mixed(chunk)
            ids[start : start + _CHUNK] = self.pieces.ids(laid_out)
        return ids.reshape(places.shape)


def blockwise_order(
    shard_sizes: Sequence[NDArray[np.int64]],
    choose: Sequence[int],
    settings: OrderSettings,
    epoch: int,
    first_id: int,
    block_size: int,
) -> BlockwiseOrder:
    """The order of streams that are drawn and shuffled together.

    Takes time and memory for each shard and canonical node, none for a sample.

    Args:
        shard_sizes: Samples in each shard, per stream.
        choose: Samples to draw from each stream; more than it holds repeats it.
        settings: Settled; see :meth:`OrderSettings.settled`. Which shuffle it names does not matter here.
        epoch: Counts from 0.
        first_id: Sample id at which the first shard of the first stream starts.
        block_size: Samples to mix with each other, about; below 1 as 1.

    Returns:
        An order of ``sum(choose)`` samples.
    """
    assert settings.num_canonical_nodes, "settle the settings first"
    drawn = draw(shard_sizes, choose, settings, epoch, first_id)
    if not settings.shuffle:
        return BlockwiseOrder(None, pieces_of(drawn, Spans(np.cumsum(drawn.sizes) - drawn.sizes, drawn.sizes)))
    generator = generator_for(Purpose.MIXING, settings.shuffle_seed, epoch, first_id)
    spans = _laid_out(drawn, settings.num_canonical_nodes, settings.shuffle_seed, epoch, generator)
    blocks = cut_blocks(sum(choose), settings.num_canonical_nodes, block_size, generator)
    return BlockwiseOrder(blocks, pieces_of(drawn, spans))


def _laid_out(drawn: Drawn, num_canonical_nodes: int, seed: int, epoch: int, generator: np.random.Generator) -> Spans:
    """Each canonical node's spans of the units, in this epoch's order, one canonical node after another."""
    task = ShuffleTask(units=drawn.sizes, num_canonical_nodes=num_canonical_nodes, seed=seed, epoch=epoch, block_size=1)
    parts = epoch_parts(task, generator)
    return Spans(np.concatenate([part.firsts for part in parts]), np.concatenate([part.sizes for part in parts]))


def joined(orders: Sequence[BlockwiseOrder]) -> BlockwiseOrder:
    """One order after another, for streams that are drawn and shuffled each by itself.

    Args:
        orders: At least one; all shuffled, or none.
    """
    if len(orders) == 1:
        return orders[0]
    shuffled = [order.blocks for order in orders if order.blocks is not None]
    return BlockwiseOrder(
        joined_blocks(shuffled) if shuffled else None, joined_pieces([order.pieces for order in orders])
    )
