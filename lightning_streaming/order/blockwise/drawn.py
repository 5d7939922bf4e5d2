"""The units that an epoch draws: shards repeated whole, and parts of shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.blockwise.counts import shard_counts
from lightning_streaming.order.blockwise.generators import Purpose, generator_for
from lightning_streaming.order.blockwise.keys import drawn_keys
from lightning_streaming.order.settings import OrderSettings


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Parts of shards: of each, the first so many samples of the shard's permutation."""

    first_ids: NDArray[np.int64]
    """Sample id at which the shard starts."""
    shard_sizes: NDArray[np.int64]
    """Samples in the shard, drawn or not."""
    keys: NDArray[np.uint64]
    """Key of the shard's permutation."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Units in the order of their shards: each full repeat of a shard, and each part of one."""

    sizes: NDArray[np.int64]
    """Samples in each unit, at least one."""
    first_ids: NDArray[np.int64]
    """Sample id at which the unit's shard starts."""
    parts: NDArray[np.int64]
    """Which of ``part_table`` each unit is; -1 for whole shards."""
    part_table: Parts
    """The shards that give a part of their samples."""


def draw(
    shard_sizes: Sequence[NDArray[np.int64]], choose: Sequence[int], settings: OrderSettings, epoch: int, first_id: int
) -> Drawn:
    """Draw ``choose[s]`` samples from each stream ``s``.

    Args:
        shard_sizes: Samples in each shard, per stream.
        choose: Samples to draw from each stream; more than it holds repeats it.
        settings: Seed, method and granularity.
        epoch: Counts from 0.
        first_id: Sample id at which the first shard starts.
    """
    sizes = np.concatenate(shard_sizes)
    counts = _counts(shard_sizes, choose, settings, epoch, first_id)
    repeats, rest = np.divmod(counts, np.maximum(sizes, 1))
    first_ids = first_id + np.cumsum(sizes) - sizes
    partial = np.flatnonzero(rest)
    part_epoch = epoch if settings.sampling_method == "balanced" else 0
    generator = generator_for(Purpose.PARTS, settings.shuffle_seed, part_epoch, first_id)
    # A key for every shard, so that which samples it gives does not hang on which other shards give a part.
    keys = drawn_keys(generator, len(sizes) if partial.size else 0)
    return Drawn(
        *_units(sizes, first_ids, repeats, rest),
        Parts(first_ids[partial], sizes[partial], keys[partial]),
    )


def _counts(
    shard_sizes: Sequence[NDArray[np.int64]], choose: Sequence[int], settings: OrderSettings, epoch: int, first_id: int
) -> NDArray[np.int64]:
    """Samples that each shard gives."""
    count_epoch = epoch if settings.redraws_shards else 0
    counts = []
    for stream, (sizes, wanted) in enumerate(zip(shard_sizes, choose, strict=True)):
        generator = generator_for(Purpose.COUNTS, settings.shuffle_seed, count_epoch, first_id, stream)
        counts.append(shard_counts(sizes, wanted, settings.sampling_granularity, generator))
    return np.concatenate(counts)


def _units(
    sizes: NDArray[np.int64], first_ids: NDArray[np.int64], repeats: NDArray[np.int64], rest: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Size, first id and part of each unit; of a shard its full repeats come first."""
    partial = rest > 0
    copies = repeats + partial
    unit_sizes = np.repeat(sizes, copies)
    parts = np.full(len(unit_sizes), -1, np.int64)
    last_units = (np.cumsum(copies) - 1)[partial]
    unit_sizes[last_units] = rest[partial]
    parts[last_units] = np.arange(len(last_units))
    return unit_sizes, np.repeat(first_ids, copies), parts
