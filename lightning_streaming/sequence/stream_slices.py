"""The slice that a mixture step takes of a stream's passes, as units of whole shards and parts of shards.

A stream's passes follow each other without end. Each reads all samples, shard by shard; the order of the shards, and
the order within each shard, differ from pass to pass. Consecutive slices share no sample of a pass and leave none out.
For example two passes over shards of 4 and 2 samples, and three slices of 5, 4 and 3:

    pass           0               1
    shards         B B | A A A A | A A A A | B B
    slices         1 1   1 1 1 2   2 2 2 3   3 3

When data is appended to a stream, the pass under way keeps its shards, and later passes read all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.sequence.permutation import Permutation, Permutations, drawn_keys, numbered_keys
from lightning_streaming.sequence.runs import RunLookup, write_runs

MOST_STEPS = 1 << 20
"""More than an epoch can have, so that the steps of all epochs can be numbered."""
_NO_IDS = np.empty(0, np.int64)
_PURPOSE = 3
"""Distinguishes these generators from those of other purposes, which ``blockwise`` counts from 0."""
_CHUNK = 1 << 16
"""Ids that are computed at once: as many as a processor's cache holds, which takes half the time of many more."""
_JOINED = 1 << 10
"""Samples of tiny passes that are shuffled as one run."""
_LONG_PART = 1 << 11
"""Samples from which a part of a shard has a separate call, and table."""


@dataclass(frozen=True, slots=True, eq=False)
class RequeuedSamples:
    """Samples of a stream that were drawn and, because of a cut, not read; they are read before all others."""

    ids: NDArray[np.int64]
    """Sample ids, those of a shard one after another."""
    stop: int
    """Samples of the stream's passes that were drawn: these samples count as the last of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedEpochs:
    """Passes that read only a stream's first shards: those that existed when they began."""

    shards: int
    """Number of these shards."""
    stop: int
    """End of the last of these passes: samples of all passes up to there."""


class StreamPasses:
    """The division of a stream's samples into passes.

    Args:
        sizes: Samples in each shard of the stream.
        shorter: Passes that do not read all shards, in order.
    """

    def __init__(self, sizes: NDArray[np.int64], shorter: Sequence[TruncatedEpochs] = ()) -> None:
        self._sizes = [*(sizes[: truncated.shards] for truncated in shorter), sizes]
        self._stops = np.asarray([truncated.stop for truncated in shorter], np.int64)
        self._starts = np.concatenate([[0], self._stops])
        self._totals = np.asarray([int(of.sum()) for of in self._sizes])
        self._first_passes = np.concatenate([[0], np.cumsum(np.diff(self._starts) // self._totals[:-1])])

    @property
    def size(self) -> int:
        """Number of samples of a pass that reads all shards."""
        return int(self._totals[-1])

    @property
    def last_start(self) -> int:
        """The sample from which on passes read all shards."""
        return int(self._starts[-1])

    @property
    def are_whole(self) -> bool:
        """True if shorter passes end where a pass ends."""
        spans = np.diff(self._starts)
        return bool((spans > 0).all() and not (spans % self._totals[:-1]).any())

    def numbers(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the pass of each sample, given by the number of samples before it."""
        at = np.searchsorted(self._stops, samples, side="right")
        passes: NDArray[np.int64] = self._first_passes[at] + (samples - self._starts[at]) // self._totals[at]
        return passes

    def count(self, samples: int) -> float:
        """Return the number of passes that so many samples are."""
        at = int(np.searchsorted(self._stops, samples, side="right"))
        return float(self._first_passes[at] + (samples - self._starts[at]) / self._totals[at])

    def next_beginning(self, samples: int) -> int:
        """Return the beginning of the next pass after so many samples."""
        at = int(np.searchsorted(self._stops, samples, side="right"))
        start, total = int(self._starts[at]), int(self._totals[at])
        return start - (start - samples) // total * total

    def position(self, number: int) -> tuple[int, int]:
        """Return the beginning of a pass, in samples of all passes, and its number of samples."""
        at = int(np.searchsorted(self._first_passes, number, side="right")) - 1
        total = int(self._totals[at])
        return int(self._starts[at]) + (number - int(self._first_passes[at])) * total, total

    def sizes_of(self, number: int) -> NDArray[np.int64]:
        """Return the samples of each shard that a pass reads."""
        return self._sizes[int(np.searchsorted(self._first_passes, number, side="right")) - 1]

    def equal(self, start: int, stop: int) -> Iterator[EqualPasses]:
        """Yield the slice ``[start, stop)`` in parts whose passes are equally long."""
        stops = [*self._stops.tolist(), stop]
        for at, (sizes, first) in enumerate(zip(self._sizes, self._starts.tolist(), strict=True)):
            begin, end = max(start, first), min(stop, stops[at])
            if begin < end:
                yield EqualPasses(sizes, begin - first, end - first, int(self._first_passes[at]))


class EqualPasses(NamedTuple):
    """A slice of passes over the same shards."""

    sizes: NDArray[np.int64]
    """Samples of each shard."""
    start: int
    """Its beginning, counted from the first of these passes."""
    stop: int
    """Its end, counted likewise."""
    first_pass: int
    """The number of the first of these passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSlice:
    """The position in a stream's passes at which a mixture step begins to read it."""

    stream: str
    """The stream's name, by which its passes differ from those of other streams."""
    first_id: int
    """Sample id at which the stream begins."""
    start: int
    """Samples of its passes before the slice, over all epochs."""
    shorter: tuple[TruncatedEpochs, ...] = ()
    """Passes that do not read all shards."""
    requeued: RequeuedSamples | None = None
    """Samples that an earlier cut has left, which are read first."""

    @property
    def facts(self) -> tuple[object, ...]:
        """All that its samples depend on, for a digest."""
        own = (
            self.stream,
            self.first_id,
            self.start,
            *((truncated.shards, truncated.stop) for truncated in self.shorter),
        )
        if self.requeued is None:
            return own
        ids = hashlib.blake2b(self.requeued.ids.astype("<i8").tobytes()).hexdigest()
        return *own, self.requeued.stop, ids


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SliceUnits:
    """Shards, and parts of shards, in no particular order."""

    first_ids: NDArray[np.int64]
    """Sample id at which the unit's shard starts."""
    shard_sizes: NDArray[np.int64]
    """Samples of that shard."""
    offsets: NDArray[np.int64]
    """Samples of the shard that the pass read before, in the order of the unit's key."""
    sizes: NDArray[np.int64]
    """Samples of the unit, at least one."""
    keys: NDArray[np.uint64]
    """Keys of the orders in which passes read shards; undefined for whole shards, and without shuffling."""
    are_parts: NDArray[np.bool_]
    """True where the unit is a part of its shard, which is read in the order of its key."""
    are_listed: NDArray[np.bool_]
    """True where the ids of the unit are those of ``listed`` from its offset on."""
    passes: NDArray[np.int64]
    """The pass of the stream that the unit belongs to."""
    streams: NDArray[np.int64]
    """The stream that the unit belongs to, by its number among the given ones."""
    listed: NDArray[np.int64]
    """Sample ids of some units."""

    def shuffled_runs(self) -> NDArray[np.int64]:
        """Return the sizes of the runs that a shuffle keeps together: units, or the units of several tiny passes.

        Without the latter a stream of one sample, read a million times, would be a million runs. As passes are put in
        order after the shuffle, their runs do not matter.
        """
        firsts = np.flatnonzero(np.diff(self.streams, prepend=-1))
        lasts = np.append(firsts[1:], len(self.streams)) - 1
        num_passes = self.passes[lasts] - self.passes[firsts] + 1
        are_tiny = (num_passes > 2) & (np.add.reduceat(self.sizes, firsts) < num_passes * (_JOINED // 2))
        begins = ~np.repeat(are_tiny, lasts - firsts + 1)
        begins |= np.diff((np.cumsum(self.sizes) - self.sizes) // _JOINED, prepend=-1) > 0
        begins[firsts] = True
        return np.add.reduceat(self.sizes, np.flatnonzero(begins))

    def write_ids(self, out: NDArray[np.integer[Any]]) -> None:
        """Fill an array, of length ``sizes.sum()``, with the sample ids of one unit after another."""
        write_runs(self.first_ids + self.offsets, self.sizes, out)
        if len(self.listed):
            listed = np.repeat(self.are_listed, self.sizes)
            out[listed] = self.listed[out[listed]]
        parts, places = np.flatnonzero(self.are_parts), np.cumsum(self.sizes) - self.sizes
        are_long = self.sizes[parts] >= np.maximum(2 * np.sqrt(self.shard_sizes[parts]), _LONG_PART)
        for unit in parts[are_long].tolist():
            permutation, first_id = Permutation(int(self.shard_sizes[unit]), self.keys[unit]), int(self.first_ids[unit])
            first, offset = int(places[unit]), int(self.offsets[unit])
            for start in range(0, size := int(self.sizes[unit]), _CHUNK):
                stop = min(start + _CHUNK, size)
                ids = out[first + start : first + stop]
                ids[:] = permutation.permuted(np.arange(offset + start, offset + stop))
                ids += first_id
        # Shorter parts are not worth a permutation of their shard for each.
        short = parts[~are_long]
        lookup, permutations = RunLookup(np.cumsum(self.sizes[short])), Permutations(self.shard_sizes)
        skipped = places[short] - (lookup.stops - self.sizes[short])
        for start in range(0, len(lookup), _CHUNK):
            at = np.arange(start, min(start + _CHUNK, len(lookup)))
            runs = lookup.find(at)
            at += skipped.take(runs)
            units = short.take(runs)
            indexes = at + (self.offsets - places).take(units)
            permuted = permutations.permuted(units, indexes, self.keys.take(units))
            out[at] = permuted + self.first_ids.take(units)


def slice_units(
    shard_sizes: Sequence[NDArray[np.int64]],
    counts: Sequence[int],
    slices: Sequence[StreamSlice],
    seed: int,
    *,
    is_shuffled: bool,
) -> SliceUnits:
    """Return the units of streams' slices, stream by stream.

    Args:
        shard_sizes: Samples in each shard, per stream.
        counts: Samples to take of each stream.
        slices: The beginning of the slice, per stream.
        seed: Seed of all passes.
        is_shuffled: Passes are shuffled, rather than in the order of the stored samples.
    """
    joined = []
    for stream, (sizes, count, taken) in enumerate(zip(shard_sizes, counts, slices, strict=True)):
        units = _of_stream(sizes, count, taken, seed, is_shuffled)
        joined.append(replace(units, streams=np.full(len(units.sizes), stream)))
    return _joined(joined)


def _of_stream(sizes: NDArray[np.int64], count: int, taken: StreamSlice, seed: int, is_shuffled: bool) -> SliceUnits:
    """Return the units of one stream, pass by pass."""
    start, stop, passes = taken.start, taken.start + count, StreamPasses(sizes, taken.shorter)
    units, requeued = list[SliceUnits](), taken.requeued
    if requeued is not None and start < requeued.stop:  # a unit for each run of one shard and pass
        until, first = min(stop, requeued.stop), requeued.stop - len(requeued.ids)
        ids, numbers = requeued.ids[start - first : until - first], passes.numbers(np.arange(start, until))
        shards = np.searchsorted(taken.first_id + np.cumsum(sizes), ids, side="right")
        starts = np.flatnonzero(np.diff(shards, prepend=-1) | np.diff(numbers, prepend=-1))
        units.append(
            _units(
                sizes=np.diff(starts, append=len(ids)),
                passes=numbers[starts],
                offsets=starts,
                are_listed=np.ones(len(starts), np.bool_),
                listed=ids,
            )
        )
        start = until
    for part in passes.equal(start, stop):
        total = int(part.sizes.sum())
        first_whole = -(-part.start // total)
        num_whole = max(part.stop // total - first_whole, 0)
        # The first whole pass represents all of them.
        for number in sorted({part.start // total, first_whole, (part.stop - 1) // total}):
            begin, end = max(part.start - number * total, 0), min(part.stop - number * total, total)
            if 0 < end - begin < total:
                key = (seed, part.first_pass + number)
                units.append(_part_of_pass(part.sizes, (begin, end), taken, key, is_shuffled))
            elif number == first_whole and num_whole:
                # These are shuffled with the rest of the step, so the orders of their shards do not matter.
                firsts = (taken.first_id + np.cumsum(part.sizes) - part.sizes)[part.sizes > 0]
                first_pass = part.first_pass + first_whole
                units.append(
                    _units(
                        sizes=np.tile(part.sizes[part.sizes > 0], num_whole),
                        passes=np.repeat(np.arange(first_pass, first_pass + num_whole), len(firsts)),
                        first_ids=np.tile(firsts, num_whole),
                    )
                )
    return _joined(units)


def _units(*, sizes: NDArray[np.int64], passes: NDArray[np.int64], **more: NDArray[Any]) -> SliceUnits:
    """Create units of one stream; by default they are whole shards."""
    zeros, no = np.zeros_like(sizes), np.zeros(len(sizes), np.bool_)
    defaults: dict[str, NDArray[Any]] = {
        **dict.fromkeys(("first_ids", "offsets", "streams"), zeros),
        **dict.fromkeys(("are_parts", "are_listed"), no),
        "shard_sizes": sizes,
        "keys": zeros.astype(np.uint64),
        "listed": _NO_IDS,
    }
    return SliceUnits(sizes=sizes, passes=passes, **{**defaults, **more})


def requeued_in_pass_order(
    left: NDArray[np.int64], passes: NDArray[np.int64], shard_stops: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the samples that a cut leaves of a stream, pass by pass, and in each pass shard by shard.

    Args:
        left: Sample ids that were drawn and not read, in the order in which they would have been read.
        passes: The pass of each of them.
        shard_stops: Sample id after each shard of the stream, the first id subtracted.

    Returns:
        The same ids; shards in the order of their first samples.
    """
    shards = np.searchsorted(shard_stops, left, side="right")
    _, firsts, of = np.unique(shards, return_index=True, return_inverse=True)
    ordered: NDArray[np.int64] = left[np.lexsort((left, firsts[of], passes))]
    return ordered


def in_pass_order(
    items: NDArray[np.integer[Any]],
    streams: NDArray[np.int64],
    passes: NDArray[np.int64],
    reading: NDArray[np.int64],
) -> None:
    """Exchange the items of each stream among each other, so that those of a pass are read before those of the next.

    Args:
        items: The item at each place of a step; changed in place.
        streams: The stream of each item.
        passes: The pass of each item.
        reading: All places, in the order in which they are read.
    """
    several = np.zeros(int(streams.max(initial=0)) + 1, np.bool_)
    firsts = np.full(len(several), np.iinfo(np.int64).max)
    np.minimum.at(firsts, streams, passes)
    later = passes - firsts[streams]
    several[streams[later > 0]] = True
    where = reading[several[streams[reading]]]
    of_stream = streams[where]
    kinds = of_stream * (int(later.max(initial=0)) + 1) + later[where]
    items[where[stable_argsort(of_stream)]] = items[where[stable_argsort(kinds)]]


def stable_argsort(numbers: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return ``np.argsort(numbers, kind="stable")`` of numbers from 0 on, in linear time: 16 bits at a time."""
    order, shift = np.argsort(numbers.astype(np.uint16), kind="stable"), 16
    while int(numbers.max(initial=0)) >> shift:
        order = order[np.argsort((numbers >> shift).astype(np.uint16)[order], kind="stable")]
        shift += 16
    return order


def _part_of_pass(
    sizes: NDArray[np.int64], part: tuple[int, int], taken: StreamSlice, key: tuple[int, int], is_shuffled: bool
) -> SliceUnits:
    """Return the units that a pass reads from one sample up to another, counted within it."""
    (start, stop), (seed, number) = part, key
    order, pass_key = pass_order(len(sizes), taken.stream, seed, number, is_shuffled=is_shuffled)
    stops = np.cumsum(sizes[order])
    starts = stops - sizes[order]
    first, last = np.searchsorted(stops, start, side="right"), np.searchsorted(starts, stop, side="left")
    starts, stops, shards = starts[first:last], stops[first:last], order[first:last]
    offsets = np.maximum(start - starts, 0)
    units = _units(
        passes=np.full(len(shards), number),
        first_ids=taken.first_id + (np.cumsum(sizes) - sizes)[shards],
        shard_sizes=sizes[shards],
        offsets=offsets,
        sizes=np.minimum(stops, stop) - starts - offsets,
        keys=numbered_keys(np.repeat(pass_key, len(shards)), shards),
        are_parts=(offsets > 0) | (stops > stop) if is_shuffled else np.zeros(len(shards), np.bool_),
    )
    kept = units.sizes > 0
    names = [field.name for field in fields(SliceUnits) if field.name != "listed"]
    return SliceUnits(**{name: getattr(units, name)[kept] for name in names}, listed=_NO_IDS)


def pass_order(
    num_shards: int, stream: str, seed: int, number: int, *, is_shuffled: bool
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the shards of a pass in the order in which it reads them, and the key of the order within each.

    Args:
        num_shards: Shards that the pass reads.
        stream: Name of the stream.
        seed: Seed of all passes.
        number: Number of the pass.
        is_shuffled: As for :func:`slice_units`.
    """
    name = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_PURPOSE, number, name)))
    order = generator.permutation(num_shards) if is_shuffled else np.arange(num_shards)
    return order, drawn_keys(generator, 1)


def _joined(several: Sequence[SliceUnits]) -> SliceUnits:
    if len(several) == 1:
        return several[0]
    first, moved = 0, []
    for units in several:
        moved.append(replace(units, offsets=units.offsets + first * units.are_listed) if first else units)
        first += len(units.listed)
    names = [field.name for field in fields(SliceUnits)]
    return SliceUnits(**{name: np.concatenate([getattr(units, name) for units in moved]) for name in names})
