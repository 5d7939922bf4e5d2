"""Which samples an epoch draws: streams repeated whole, in part, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.settings import OrderSettings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Resampled:
    """The samples an epoch draws, before shuffling, shard by shard."""

    units: NDArray[np.int64]
    """Sizes of the runs that shuffling treats as one shard: each full repeat, and each part of a shard."""
    sample_ids: NDArray[np.int64] | None
    """The samples drawn, unit after unit; None where each sample is drawn once, in order."""


def resample(
    shard_sizes: Sequence[NDArray[np.int64]], choose: Sequence[int], settings: OrderSettings, epoch: int
) -> Resampled:
    """Draw ``choose[s]`` samples from each stream ``s``.

    Sample ids count from 0 at the first shard of the first stream given here.

    Args:
        shard_sizes: Samples in each shard, per stream.
        choose: Samples to draw from each stream; more than it holds repeats it.
        settings: Seed, method and granularity.
        epoch: Counts from 0.
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

    repeats, rest = np.divmod(counts, np.maximum(sizes, 1))
    units = np.repeat(
        np.column_stack([sizes, rest]).ravel(),
        np.column_stack([repeats, rest > 0]).ravel(),
    )
    return Resampled(units=units, sample_ids=_draw(sizes, repeats, rest, sample_seed))


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
    pick_sizes = np.full(pick_stops[-1], granularity, np.int64)
    # An empty shard has no pick: as in the reference, this makes the pick before it a full one, which may take more
    # from that shard than it has left. Where several shards name one pick the last of them wins.
    pick_sizes[pick_stops - 1] = sizes - (picks - 1) * granularity

    order = np.random.default_rng(seed).permutation(len(pick_sizes))
    pick_sizes = pick_sizes[order]
    drawn = np.cumsum(pick_sizes)
    last = int(np.searchsorted(drawn, rest))
    pick_sizes[last] -= drawn[last] - rest
    shards = np.searchsorted(pick_stops, order[: last + 1], side="right")
    np.add.at(counts, shards, pick_sizes[: last + 1])
    return counts


def _draw(
    sizes: NDArray[np.int64], repeats: NDArray[np.int64], rest: NDArray[np.int64], seed: int
) -> NDArray[np.int64]:
    """Write out each shard's ids ``repeats`` times, then ``rest`` of them at random, in rising order."""
    generator = np.random.default_rng(seed)
    sample_ids = np.empty(int((sizes * repeats + rest).sum()), np.int64)
    first_ids = np.cumsum(sizes) - sizes
    stop = 0
    for first, size, times, part in zip(
        first_ids.tolist(), sizes.tolist(), repeats.tolist(), rest.tolist(), strict=True
    ):
        start, stop = stop, stop + times * size
        sample_ids[start:stop].reshape(times, size)[:] = np.arange(first, first + size)
        if part:
            start, stop = stop, stop + part
            sample_ids[start:stop] = first + np.sort(generator.choice(size, part, replace=False))
    return sample_ids
