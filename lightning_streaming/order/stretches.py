"""What a step of a phase takes of a stream: a stretch of its passes, as units of whole shards and parts of shards.

A stream's passes follow each other without end; each reads all of its samples, shard by shard in an order of its own,
and each shard in an order of its own. Stretches that follow each other share no sample of a pass and leave none out.
For example two passes over shards of 4 and 2 samples, and three stretches of 5, 4 and 3:

    pass           0               1
    shards         B B | A A A A | A A A A | B B
    stretches      1 1   1 1 1 2   2 2 2 3   3 3
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.permutation import Permutations, drawn_keys, numbered_keys
from lightning_streaming.order.runs import RunLookup

MOST_STEPS = 1 << 20
"""More than an epoch can have, so that the steps of all epochs can be numbered."""
_CHUNK = 1 << 16
"""Ids that are worked out at once: as many as a processor's cache holds, which takes half of the time of many more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Where in a stream's passes a step begins to read it."""

    stream: str
    """Its name, by which its passes differ from those of other streams."""
    first_id: int
    """Sample id at which it begins."""
    start: int
    """Samples of its passes before, over all epochs."""


@dataclass(frozen=True, slots=True, eq=False)
class StretchUnits:
    """Shards, and parts of shards, in no particular order."""

    first_ids: NDArray[np.int64]
    """Sample id at which the unit's shard starts."""
    shard_sizes: NDArray[np.int64]
    """Samples of that shard."""
    offsets: NDArray[np.int64]
    """Samples of the shard that the pass has read before, in the order of the unit's key."""
    sizes: NDArray[np.int64]
    """Samples of the unit, at least one."""
    keys: NDArray[np.uint64]
    """Of the order in which the pass reads the shard; of no meaning where the unit is the whole shard, or in order."""
    are_parts: NDArray[np.bool_]
    """Whether the unit is a part of its shard, which is read in the order of its key."""

    def write_ids(self, out: NDArray[np.integer[Any]]) -> None:
        """Fill an array, of length ``sizes.sum()``, with the sample ids of one unit after another."""
        lookup, permutations = RunLookup(np.cumsum(self.sizes)), Permutations(self.shard_sizes)
        index_minus_place = self.offsets - (lookup.stops - self.sizes)
        for start in range(0, len(out), _CHUNK):
            places = np.arange(start, min(start + _CHUNK, len(out)))
            units = lookup.find(places)
            indexes = places + index_minus_place.take(units)
            parts = np.flatnonzero(self.are_parts.take(units))
            if parts.size:
                of = units[parts]
                indexes[parts] = permutations.permuted(of, indexes[parts], self.keys.take(of))
            out[start : start + len(places)] = self.first_ids.take(units) + indexes


def stretch_units(
    shard_sizes: Sequence[NDArray[np.int64]],
    counts: Sequence[int],
    stretches: Sequence[Stretch],
    seed: int,
    *,
    is_shuffled: bool,
) -> StretchUnits:
    """The units of some streams' stretches, stream by stream.

    Args:
        shard_sizes: Samples in each shard, per stream.
        counts: Samples to take of each stream.
        stretches: Where they begin, per stream.
        seed: Of all passes.
        is_shuffled: Whether a pass has an order of its own, rather than that of the stored samples.
    """
    asked = zip(shard_sizes, counts, stretches, strict=True)
    return _joined([_of_stream(sizes, count, one, seed, is_shuffled) for sizes, count, one in asked])


def _of_stream(sizes: NDArray[np.int64], count: int, stretch: Stretch, seed: int, is_shuffled: bool) -> StretchUnits:
    total = int(sizes.sum())
    found = []
    first, last = stretch.start // total, (stretch.start + count - 1) // total
    whole = range(first, last + 1)
    for number in dict.fromkeys((first, last)):
        start, stop = (min(max(place - number * total, 0), total) for place in (stretch.start, stretch.start + count))
        if (start, stop) != (0, total):
            found.append(_part_of_pass(sizes, start, stop, stretch, (seed, number), is_shuffled))
            whole = range(whole.start + (number == first), whole.stop - (number == last))
    if len(whole) > 0:
        found.append(_whole_passes(sizes, len(whole), stretch.first_id))
    return _joined(found)


def _whole_passes(sizes: NDArray[np.int64], count: int, first_id: int) -> StretchUnits:
    """As they are shuffled with all else of the step, the orders of their shards play no part."""
    firsts = first_id + np.cumsum(sizes) - sizes
    firsts, sizes = (np.tile(one[sizes > 0], count) for one in (firsts, sizes))
    zeros = np.zeros_like(sizes)
    return StretchUnits(firsts, sizes, zeros, sizes, zeros.astype(np.uint64), zeros.astype(np.bool_))


def _part_of_pass(
    sizes: NDArray[np.int64], start: int, stop: int, stretch: Stretch, key: tuple[int, int], is_shuffled: bool
) -> StretchUnits:
    """What a pass reads from ``start`` to ``stop``, counted within it."""
    seed, number = key
    name = int.from_bytes(hashlib.blake2b(stretch.stream.encode(), digest_size=8).digest(), "little")
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_PURPOSE, number, name)))
    order = generator.permutation(len(sizes)) if is_shuffled else np.arange(len(sizes))
    pass_key = drawn_keys(generator, 1)
    stops = np.cumsum(sizes[order])
    starts = stops - sizes[order]
    first, last = np.searchsorted(stops, start, side="right"), np.searchsorted(starts, stop, side="left")
    starts, stops, shards = starts[first:last], stops[first:last], order[first:last]
    offsets = np.maximum(start - starts, 0)
    units = StretchUnits(
        first_ids=stretch.first_id + (np.cumsum(sizes) - sizes)[shards],
        shard_sizes=sizes[shards],
        offsets=offsets,
        sizes=np.minimum(stops, stop) - starts - offsets,
        keys=numbered_keys(np.repeat(pass_key, len(shards)), shards),
        are_parts=(offsets > 0) | (stops > stop) if is_shuffled else np.zeros(len(shards), np.bool_),
    )
    kept = units.sizes > 0
    return StretchUnits(*(getattr(units, one.name)[kept] for one in fields(StretchUnits)))


_PURPOSE = 3
"""Tells these generators from those of other purposes, which ``blockwise`` counts from 0."""


def _joined(several: Sequence[StretchUnits]) -> StretchUnits:
    return StretchUnits(
        *(np.concatenate([getattr(one, field.name) for one in several]) for field in fields(StretchUnits))
    )
