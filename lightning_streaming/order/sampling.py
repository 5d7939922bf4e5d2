"""Which samples an epoch draws: streams repeated whole, in part, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lightning_streaming.order.run_ids import write_runs
from lightning_streaming.order.runs import RunLookup
from lightning_streaming.order.settings import OrderSettings
from lightning_streaming.order.shuffle.items import shuffle_items

_CHUNK = 1 << 18
"""Picks that are counted at once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Resampled:
    """The samples an epoch draws, before shuffling, shard by shard."""

    units: NDArray[np.int64]
    """Sizes of the runs that shuffling treats as one shard: each full repeat, and each part of a shard."""
    sample_ids: NDArray[np.integer[Any]] | None
    """The samples drawn, unit after unit; None where each sample is drawn once, in order."""


def resample(
    shard_sizes: Sequence[NDArray[np.int64]],
    choose: Sequence[int],
    settings: OrderSettings,
    epoch: int,
    dtype: DTypeLike = np.int64,
) -> Resampled:
    """Draw ``choose[s]`` samples from each stream ``s``.

    Sample ids count from 0 at the first shard of the first stream given here.

    Args:
        shard_sizes: Samples in each shard, per stream.
        choose: Samples to draw from each stream; more than it holds repeats it.
        settings: Seed, method and granularity.
        epoch: Counts from 0.
        dtype: Of the sample ids.
    """
    seed = settings.shuffle_seed
    shard_seed = seed + epoch if settings.redraws_shards else seed
    sample_seed = seed + epoch if settings.sampling_method == "balanced" else seed

    sizes = np.concatenate(shard_sizes)
    counts = np.concatenate(
        [
            per_shard_choice(stream_sizes, stream_choose, settings.sampling_granularity, shard_seed)
            for stream_sizes, stream_choose in zip(shard_sizes, choose, strict=True)
        ]
    )
    if np.array_equal(counts, sizes):
        return Resampled(units=sizes[sizes > 0], sample_ids=None)

    sample_ids = np.empty(int(counts.sum()), dtype)
    return Resampled(units=_draw(sizes, counts, sample_seed, sample_ids), sample_ids=sample_ids)


def per_shard_choice(sizes: NDArray[np.int64], choose: int, granularity: int, seed: int) -> NDArray[np.int64]:
    """Divide the ``choose`` samples to draw from a stream among its shards.

    Each shard gives all its samples as often as the whole stream is wanted. What is left is picked in runs of
    ``granularity`` samples, in random order over all shards.

    Args:
        sizes: Samples in each shard; at least one in all.
        choose: Samples to draw.
        granularity: Samples per pick; a shard's last pick has what is left of it.
        seed: Orders the picks.

    Returns:
        Samples to draw from each shard; sums to ``choose``.
    """
    repeats, rest = divmod(choose, int(sizes.sum()))
    counts = sizes * repeats
    if rest == 0:
        return counts

    picks = -(-sizes // granularity)
    pick_stops = np.cumsum(picks)
    last_sizes = sizes - (picks - 1) * granularity
    # An empty shard has no pick: as in the reference, this makes the pick before it a full one, which may take more
    # from that shard than it has left.
    last_sizes[:-1][picks[1:] == 0] = granularity

    order = _permutation(int(pick_stops[-1]), seed)
    lookup, start = RunLookup(pick_stops), 0
    while rest > 0:
        # As many as there are left to take, and the short ones, of which a shard has one at most.
        chunk = order[start : start + min(rest // granularity + len(sizes) + 1, _CHUNK)].astype(np.int64)
        start += len(chunk)
        shards = lookup.find(chunk)
        pick_sizes = np.where(chunk == pick_stops[shards] - 1, last_sizes[shards], granularity)
        # What each pick finds left to take; nothing after the last one.
        left = rest - (np.cumsum(pick_sizes) - pick_sizes)
        np.add.at(counts, shards, np.clip(left, 0, pick_sizes))
        rest = int(left[-1] - pick_sizes[-1])
    return counts


def _permutation(size: int, seed: int) -> NDArray[np.integer[Any]]:
    """``np.random.default_rng(seed).permutation(size)`` in half the memory where numbers are small."""
    order = np.arange(size, dtype=np.uint32 if size <= 1 << 32 else np.int64)
    shuffle_items(order, np.random.default_rng(seed))
    return order


def _draw(
    sizes: NDArray[np.int64], counts: NDArray[np.int64], seed: int, out: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """Write out each shard's ids as often as it gives all of them, then the rest of ``counts`` at random, rising.

    Returns:
        Sizes of the runs written: each full repeat, and each part of a shard.
    """
    repeats, rest = np.divmod(counts, np.maximum(sizes, 1))
    times = np.column_stack([repeats, rest > 0]).ravel()
    units = np.repeat(np.column_stack([sizes, rest]).ravel(), times)
    first_ids = np.cumsum(sizes) - sizes
    write_runs(np.repeat(np.repeat(first_ids, 2), times), units, out)

    generator = np.random.default_rng(seed)
    parts = np.flatnonzero(rest)
    part_stops = np.cumsum(counts)[parts]
    for first, size, part, stop in zip(
        first_ids[parts].tolist(), sizes[parts].tolist(), rest[parts].tolist(), part_stops.tolist(), strict=True
    ):
        out[stop - part : stop] = first + np.sort(generator.choice(size, part, replace=False))
    return units
