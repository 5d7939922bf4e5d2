"""How many samples each shard of a stream gives, worked out for all shards at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def shard_counts(
    sizes: NDArray[np.int64], choose: int, granularity: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Divide the ``choose`` samples to draw from a stream among its shards.

    Each shard gives all its samples as often as the whole stream is wanted. Of what is left, each gives a part near
    its share, in picks of ``granularity`` samples; so a granularity as large as the shards picks whole shards.

    Args:
        sizes: Samples in each shard; at least one in all.
        choose: Samples to draw.
        granularity: Samples per pick; a shard's last pick has what is left of it.
        generator: Used only where the stream is not repeated whole.

    Returns:
        Samples to draw from each shard; sums to ``choose``. No shard gives one of its samples more than once oftener
        than another.
    """
    repeats, rest = divmod(choose, int(sizes.sum()))
    counts = sizes * repeats
    if rest:
        counts += _parts(sizes, rest, granularity, generator)
    return counts


def _parts(sizes: NDArray[np.int64], rest: int, granularity: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Divide fewer samples than a stream has among its shards."""
    order = generator.permutation(len(sizes))
    sizes = sizes[order]
    granularity = min(granularity, int(sizes.max()))
    picks = -(-sizes // granularity)
    taken = _systematic(picks, rest / int(sizes.sum()), generator.random())
    # As likely as any other pick of its shard, the short one is among those taken.
    with_short = generator.random(len(sizes)) * picks < taken
    drawn = taken * granularity - with_short * (picks * granularity - sizes)

    parts = np.empty_like(sizes)
    parts[order] = _corrected(drawn, sizes, rest)
    return parts


def _systematic(picks: NDArray[np.int64], share: float, start: float) -> NDArray[np.int64]:
    """Take a share of each shard's picks, rounded up or down so that the shards together keep to the share.

    All picks stand in one line; one is taken wherever ``start + share * (picks so far)`` passes a whole number.
    """
    passed = np.floor(np.cumsum(picks) * share + start).astype(np.int64)
    taken: NDArray[np.int64] = np.minimum(np.diff(passed, prepend=0), picks)
    return taken


def _corrected(parts: NDArray[np.int64], sizes: NDArray[np.int64], rest: int) -> NDArray[np.int64]:
    """Fill up the first shards, or take from them, until the parts sum to ``rest``."""
    missing = rest - int(parts.sum())
    room = sizes - parts if missing > 0 else parts
    room_before = np.cumsum(room) - room
    correction: NDArray[np.int64] = np.sign(missing) * np.clip(abs(missing) - room_before, 0, room)
    return parts + correction
