"""What a step of a phase takes of a stream: a slice of its passes, as units of whole shards and parts of shards.

A stream's passes follow each other without end; each reads all of its samples, shard by shard in an order of its own,
and each shard in an order of its own. Slices that follow each other share no sample of a pass and leave none out.
For example two passes over shards of 4 and 2 samples, and three slices of 5, 4 and 3:

    pass           0               1
    shards         B B | A A A A | A A A A | B B
    slices         1 1   1 1 1 2   2 2 2 3   3 3

Where data is appended to a stream, the pass under way keeps its shards, and those after it read all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
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
"""Tells these generators from those of other purposes, which ``blockwise`` counts from 0."""
_CHUNK = 1 << 16
"""Ids that are worked out at once: as many as a processor's cache holds, which takes half of the time of many more."""
_JOINED = 1 << 10
"""Samples of tiny passes that are shuffled as one run."""
_LONG_PART = 1 << 11
"""Samples of a part of a shard that are worth a call, and a table, of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class RequeuedSamples:
    """Samples of a stream that were drawn and, because a phase was cut, not read: they are read before all others."""

    ids: NDArray[np.int64]
    """Sample ids, those of a shard one after another."""
    stop: int
    """Up to where the stream's passes were drawn: these samples count as those before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedEpochs:
    """Passes that read only a stream's first shards: those that were there when they began."""

    shards: int
    """How many."""
    stop: int
    """Where the last of these passes ends: samples of all passes before."""


class StreamPasses:
    """How the samples of a stream are counted off in passes.

    Args:
        sizes: Samples in each of its shards.
        shorter: The passes that do not read all of them, in their order.
    """

    def __init__(self, sizes: NDArray[np.int64], shorter: Sequence[TruncatedEpochs] = ()) -> None:
        self._sizes = [*(sizes[: one.shards] for one in shorter), sizes]
        self._stops = np.asarray([one.stop for one in shorter], np.int64)
        self._starts = np.concatenate([[0], self._stops])
        self._totals = np.asarray([int(one.sum()) for one in self._sizes])
        self._first_passes = np.concatenate([[0], np.cumsum(np.diff(self._starts) // self._totals[:-1])])

    @property
    def size(self) -> int:
        """Samples of a pass that reads all shards."""
        return int(self._totals[-1])

    @property
    def are_whole(self) -> bool:
        """Whether no shorter passes end within one."""
        spans = np.diff(self._starts)
        return bool((spans > 0).all() and not (spans % self._totals[:-1]).any())

    def numbers(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The pass of each sample, by how many samples come before it."""
        at = np.searchsorted(self._stops, samples, side="right")
        found: NDArray[np.int64] = self._first_passes[at] + (samples - self._starts[at]) // self._totals[at]
        return found

    def count(self, samples: int) -> float:
        """How many passes so many samples are."""
        at = int(np.searchsorted(self._stops, samples, side="right"))
        return float(self._first_passes[at] + (samples - self._starts[at]) / self._totals[at])

    def next_beginning(self, samples: int) -> int:
        """Where a pass begins next, for who has read so many samples."""
        at = int(np.searchsorted(self._stops, samples, side="right"))
        start, total = int(self._starts[at]), int(self._totals[at])
        return start - (start - samples) // total * total

    def equal(self, start: int, stop: int) -> Iterator[EqualPasses]:
        """A slice of the passes, in parts of passes that are equally long."""
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
    """Where it begins, counted from the first of these passes."""
    stop: int
    """Where it ends, too."""
    first_pass: int
    """The number of that pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSlice:
    """Where in a stream's passes a step begins to read it."""

    stream: str
    """Its name, by which its passes differ from those of other streams."""
    first_id: int
    """Sample id at which it begins."""
    start: int
    """Samples of its passes before, over all epochs."""
    shorter: tuple[TruncatedEpochs, ...] = ()
    """Passes that do not read all of its shards."""
    requeued: RequeuedSamples | None = None
    """What comes first, as a cut has left it."""

    @property
    def facts(self) -> tuple[object, ...]:
        """All that its samples depend on, for a digest."""
        own = self.stream, self.first_id, self.start, *((one.shards, one.stop) for one in self.shorter)
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
    """Samples of the shard that the pass has read before, in the order of the unit's key."""
    sizes: NDArray[np.int64]
    """Samples of the unit, at least one."""
    keys: NDArray[np.uint64]
    """Of the order in which the pass reads the shard; of no meaning where the unit is the whole shard, or in order."""
    are_parts: NDArray[np.bool_]
    """Whether the unit is a part of its shard, which is read in the order of its key."""
    are_listed: NDArray[np.bool_]
    """Whether the ids of the unit are those of ``listed`` from its offset on."""
    passes: NDArray[np.int64]
    """Of which pass of its stream the unit is."""
    streams: NDArray[np.int64]
    """Of which stream it is, by its place among those given."""
    listed: NDArray[np.int64]
    """Sample ids of some units."""

    def shuffled_runs(self) -> NDArray[np.int64]:
        """Sizes of what a shuffle keeps together: units, and of streams whose passes are tiny, those of some passes.

        Else a stream of one sample, read a million times, would be a million runs. As passes are put in order after
        the shuffle, it plays no part in which run they were.
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
        self._write_short_parts(parts[~are_long], places, out)

    def _write_short_parts(
        self, parts: NDArray[np.int64], places: NDArray[np.int64], out: NDArray[np.integer[Any]]
    ) -> None:
        """Those of which each alone is not worth a table."""
        lookup, permutations = RunLookup(np.cumsum(self.sizes[parts])), Permutations(self.shard_sizes)
        skipped = places[parts] - (lookup.stops - self.sizes[parts])
        for start in range(0, len(lookup), _CHUNK):
            at = np.arange(start, min(start + _CHUNK, len(lookup)))
            runs = lookup.find(at)
            at += skipped.take(runs)
            units = parts.take(runs)
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
    """The units of some streams' slices, stream by stream.

    Args:
        shard_sizes: Samples in each shard, per stream.
        counts: Samples to take of each stream.
        slices: Where they begin, per stream.
        seed: Of all passes.
        is_shuffled: Whether a pass has an order of its own, rather than that of the stored samples.
    """
    asked = enumerate(zip(shard_sizes, counts, slices, strict=True))
    found = ((stream, _of_stream(sizes, count, one, seed, is_shuffled)) for stream, (sizes, count, one) in asked)
    return _joined([replace(one, streams=np.full(len(one.sizes), stream)) for stream, one in found])


def _of_stream(sizes: NDArray[np.int64], count: int, taken: StreamSlice, seed: int, is_shuffled: bool) -> SliceUnits:
    """The units of one stream, pass by pass."""
    start, stop, passes, found = (
        taken.start,
        taken.start + count,
        StreamPasses(sizes, taken.shorter),
        [],
    )
    if taken.requeued is not None and start < taken.requeued.stop:
        ids, shard_stops = taken.requeued.ids, taken.first_id + np.cumsum(sizes)
        until, first = (
            min(stop, taken.requeued.stop),
            taken.requeued.stop - len(taken.requeued.ids),
        )
        found.append(
            _listed_units(ids[start - first : until - first], shard_stops, passes.numbers(np.arange(start, until)))
        )
        start = until
    for part in passes.equal(start, stop):
        found += _of_equal_passes(part, taken, seed, is_shuffled)
    return _joined(found)


def _of_equal_passes(part: EqualPasses, taken: StreamSlice, seed: int, is_shuffled: bool) -> Iterator[SliceUnits]:
    sizes, start, stop, first_pass = part
    total = int(sizes.sum())
    whole = range(-(-start // total), max(stop // total, -(-start // total)))
    ends = {start // total, whole.start, (stop - 1) // total}  # of the whole passes one stands for all
    for begin, end in _by_pass(start, stop, total, ends):
        number = begin // total
        if end - begin < total:
            within = (begin - number * total, end - number * total)
            yield _part_of_pass(sizes, within, taken, (seed, first_pass + number), is_shuffled)
        elif number == whole.start:
            yield _whole_passes(sizes, range(first_pass + whole.start, first_pass + whole.stop), taken.first_id)


def _by_pass(start: int, stop: int, total: int, passes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The part of ``[start, stop)`` in some passes.

    For example from 3 to 14 in the passes 0 to 2 of 5 samples: 3 to 5, 5 to 10, 10 to 14.
    """
    for number in sorted(passes):
        begin, end = max(start, number * total), min(stop, (number + 1) * total)
        if begin < end:
            yield begin, end


def _listed_units(ids: NDArray[np.int64], shard_stops: NDArray[np.int64], passes: NDArray[np.int64]) -> SliceUnits:
    """Of ids, and the pass of each, a unit for each run of one shard and pass."""
    shards = np.searchsorted(shard_stops, ids, side="right")
    starts = np.flatnonzero(np.diff(shards, prepend=-1) | np.diff(passes, prepend=-1))
    sizes, are_listed = np.diff(starts, append=len(ids)), np.ones(len(starts), np.bool_)
    return _units(sizes=sizes, offsets=starts, are_listed=are_listed, passes=passes[starts], listed=ids)


def _units(*, sizes: NDArray[np.int64], passes: NDArray[np.int64], **more: NDArray[Any]) -> SliceUnits:
    """Units of which some things are said, of one stream; unless said otherwise they are whole shards."""
    zeros, no = np.zeros_like(sizes), np.zeros(len(sizes), np.bool_)
    unsaid: dict[str, NDArray[Any]] = {
        **dict.fromkeys(("first_ids", "offsets", "streams"), zeros),
        **dict.fromkeys(("are_parts", "are_listed"), no),
        "shard_sizes": sizes,
        "keys": zeros.astype(np.uint64),
        "listed": _NO_IDS,
    }
    return SliceUnits(sizes=sizes, passes=passes, **{**unsaid, **more})


def requeued_in_pass_order(
    left: NDArray[np.int64], passes: NDArray[np.int64], shard_stops: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The samples that a cut leaves of a stream, pass by pass, and in each shard by shard.

    Args:
        left: Sample ids that were drawn and not read, in the order in which they would have been read.
        passes: Of which pass each of them is.
        shard_stops: Sample id after each shard of the stream, the first id subtracted.

    Returns:
        The same ids; shards in the order in which they come first.
    """
    shards = np.searchsorted(shard_stops, left, side="right")
    _, firsts, of = np.unique(shards, return_index=True, return_inverse=True)
    found: NDArray[np.int64] = left[np.lexsort((left, firsts[of], passes))]
    return found


def in_pass_order(
    items: NDArray[np.integer[Any]],
    streams: NDArray[np.int64],
    passes: NDArray[np.int64],
    reading: NDArray[np.int64],
) -> None:
    """Exchange the items of each stream among each other, so that those of a pass are read before those of the next.

    Args:
        items: What lies at each place of a step; changed in place.
        streams: Of which stream each item is.
        passes: Of which pass of it.
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
    items[where[_stable_argsort(of_stream)]] = items[where[_stable_argsort(kinds)]]


def _stable_argsort(numbers: NDArray[np.int64]) -> NDArray[np.intp]:
    """``np.argsort(numbers, kind="stable")`` of numbers from 0 on, in linear time: by 16 bits at once, lowest first."""
    order, shift = np.argsort(numbers.astype(np.uint16), kind="stable"), 16
    while int(numbers.max(initial=0)) >> shift:
        order = order[np.argsort((numbers >> shift).astype(np.uint16)[order], kind="stable")]
        shift += 16
    return order


def _whole_passes(sizes: NDArray[np.int64], passes: range, first_id: int) -> SliceUnits:
    """As they are shuffled with all else of the step, the orders of their shards play no part."""
    firsts = (first_id + np.cumsum(sizes) - sizes)[sizes > 0]
    sizes, numbers = sizes[sizes > 0], np.repeat(np.arange(passes.start, passes.stop), len(firsts))
    return _units(sizes=np.tile(sizes, len(passes)), first_ids=np.tile(firsts, len(passes)), passes=numbers)


def _part_of_pass(
    sizes: NDArray[np.int64], part: tuple[int, int], taken: StreamSlice, key: tuple[int, int], is_shuffled: bool
) -> SliceUnits:
    """What a pass reads from one sample up to another, counted within it."""
    (start, stop), (seed, number) = part, key
    name = int.from_bytes(hashlib.blake2b(taken.stream.encode(), digest_size=8).digest(), "little")
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_PURPOSE, number, name)))
    order = generator.permutation(len(sizes)) if is_shuffled else np.arange(len(sizes))
    pass_key = drawn_keys(generator, 1)
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
    of_units = {one.name: getattr(units, one.name)[kept] for one in fields(SliceUnits) if one.name != "listed"}
    return SliceUnits(**of_units, listed=_NO_IDS)


def _joined(several: Sequence[SliceUnits]) -> SliceUnits:
    if len(several) == 1:
        return several[0]
    first, moved = 0, []
    for one in several:
        moved.append(replace(one, offsets=one.offsets + first * one.are_listed) if first else one)
        first += len(one.listed)
    return SliceUnits(
        **{field.name: np.concatenate([getattr(one, field.name) for one in moved]) for field in fields(SliceUnits)}
    )
