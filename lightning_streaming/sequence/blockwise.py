"""The shuffle ``blockwise``: an order of any size, in which any place is worked out by itself and nothing is drawn.

    _DrawnUnits   the units to shuffle: shards repeated whole, and parts of shards
    _Pieces       place among a canonical node's shards, one after another  ->  sample id
    Blocks        place in the epoch's order  ->  place among a canonical node's shards, mixed within a block

Memory and set-up grow with shards and canonical nodes; a sample id costs the same at any place of any epoch.

Blocks are a canonical node's places cut into runs that are mixed each by itself. Its first block is shorter than its
others, by more from one canonical node to the next, so that they do not come to the ends of their blocks together and
ask for new shards all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.sequence.base import check_entries
from lightning_streaming.sequence.permutation import Permutations, drawn_keys, numbered_keys
from lightning_streaming.sequence.runs import RunLookup
from lightning_streaming.sequence.settings import ResolvedOrder
from lightning_streaming.sequence.shuffles import ShuffleTask, Spans, joined_spans, spans_per_canonical_node
from lightning_streaming.sequence.weights import StreamGroup

_LISTED = -2
_CHUNK = 16_384
"""Places worked on at once: few enough that all about them stays in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockwiseOrder:
    """An epoch's samples: canonical nodes one after another, each its shards in random order, mixed within blocks."""

    blocks: Blocks
    """How places are mixed."""
    pieces: _Pieces
    """The shards behind the places."""

    def __len__(self) -> int:
        """Places: the samples that the epoch draws."""
        return len(self.pieces)

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at these places, of the same shape.

        Raises:
            SampleIndexError: A place lies outside ``[0, len(self))``.
        """
        check_entries(places, len(self), called="places")
        flat = np.ascontiguousarray(places, np.int64).reshape(-1)
        ids = np.empty_like(flat)
        for start in range(0, len(flat), _CHUNK):
            chunk = flat[start : start + _CHUNK]
            ids[start : start + _CHUNK] = self.pieces.ids(self.blocks.mixed(chunk))
        return ids.reshape(places.shape)

    def units(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of which unit of its group the sample at each place is, in one dimension; of a step of a phase."""
        return self.pieces.units_at(self.blocks.mixed(places))


def blockwise_order(groups: Iterable[StreamGroup], settings: ResolvedOrder, epoch: int) -> BlockwiseOrder:
    """The order of one group of streams after another.

    Takes time and memory for each shard and canonical node, none for a sample.

    Args:
        groups: At least one. Their block size is about how many samples are mixed with each other; below 1 as 1.
        settings: Which shuffle it names does not matter here.
        epoch: Counts from 0.
    """
    orders: list[BlockwiseOrder] = []
    first_place = first_part = 0
    for group in groups:
        drawn = _taken_units(group, settings) if group.stream_slices else _draw_units(group, settings, epoch)
        generator = _generator_for(_RandomPurpose.MIXING, settings.shuffle_seed, epoch, group.first_id)
        task = ShuffleTask(
            units=drawn.sizes,
            num_canonical_nodes=settings.num_canonical_nodes,
            seed=settings.shuffle_seed,
            epoch=epoch,
            block_size=1,
        )
        spans = joined_spans(spans_per_canonical_node(task, generator))
        num_samples = sum(group.choose)
        blocks = cut_blocks(num_samples, settings.num_canonical_nodes, group.block_size, generator, first_place)
        orders.append(BlockwiseOrder(blocks, _pieces_of(drawn, spans, first_place, first_part)))
        first_place, first_part = first_place + num_samples, first_part + len(drawn.part_table.keys)
    joined: BlockwiseOrder = _joined(orders)
    return joined


def _joined(several: Sequence[Any]) -> Any:
    """Dataclasses of arrays as one of their kind, each array one after another."""
    kind = type(several[0])
    if kind is np.ndarray:
        return np.concatenate(several)
    return kind(*(_joined([getattr(one, field.name) for one in several]) for field in fields(kind)))


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


def cut_blocks(
    num_samples: int, num_canonical_nodes: int, block_size: int, generator: np.random.Generator, first_place: int = 0
) -> Blocks:
    """Cut each canonical node ``c``, which owns places ``[n * c // C, n * (c + 1) // C)``, into blocks.

    Args:
        num_samples: Places in all, n.
        num_canonical_nodes: Canonical nodes, C.
        block_size: Places in a block, about.
        generator: Draws the keys, this epoch's.
        first_place: From which places are counted.
    """
    borders = first_place + num_samples * np.arange(num_canonical_nodes + 1) // num_canonical_nodes
    totals = np.diff(borders)
    firsts, counts = staggered_blocks(totals, max(min(block_size, num_samples), 1))
    small, larger = np.divmod(totals - firsts, np.maximum(counts, 1))
    sizes = np.column_stack([firsts, small + 1, small])
    starts = borders[:-1, np.newaxis] + np.column_stack([np.zeros_like(firsts), firsts, firsts + larger * (small + 1)])
    stops = np.append(starts.ravel()[1:], borders[-1])
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


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Units, or what a border between canonical nodes left of them, in the order in which they are laid out."""

    stops: NDArray[np.int64]
    """Place at which each piece ends (exclusive), rising; the first begins at 0."""
    id_minus_place: NDArray[np.int64]
    """From a place in the piece to a sample id; for a part of a shard, to an index in the shard's permutation."""
    parts: NDArray[np.int64]
    """Which of ``part_table`` each piece is of; -1 for whole shards, -2 for pieces of ``listed``."""
    part_table: _PartialShards
    """The shards that give a part of their samples."""
    listed: NDArray[np.int64]
    """Sample ids that no rule gives: what a cut phase left unread."""
    units: NDArray[np.int64]
    """Which unit each piece is of; in a step of a phase."""

    def __len__(self) -> int:
        """Places in all pieces."""
        return len(self._lookup)

    @cached_property
    def _lookup(self) -> RunLookup:
        return RunLookup(self.stops)

    @cached_property
    def _permutations(self) -> Permutations:
        return Permutations(self.part_table.shard_sizes)

    def units_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The unit at each place."""
        return self.units.take(self._lookup.find(places))

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at these places, in one dimension."""
        pieces = self._lookup.find(places)
        ids = places + self.id_minus_place.take(pieces)
        if len(self.part_table.keys):
            parts = self.parts.take(pieces)
            partial = np.flatnonzero(parts >= 0)
            ids[partial] = self._partial_ids(parts[partial], ids[partial])
        if len(self.listed):
            of_list = np.flatnonzero(self.parts.take(pieces) == _LISTED)
            ids[of_list] = self.listed[ids[of_list]]
        return ids

    def _partial_ids(self, parts: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.int64]:
        samples = self._permutations.permuted(parts, indexes, self.part_table.keys.take(parts))
        return self.part_table.first_ids.take(parts) + samples


def _pieces_of(drawn: _DrawnUnits, spans: Spans, first_place: int, first_part: int) -> _Pieces:
    """Lay out spans of the drawn units one after another.

    Args:
        drawn: The units.
        spans: Runs of places in the units, counted through all units in their order; none reaches across units.
        first_place: Where the first is laid.
        first_part: How many parts of shards there are before.
    """
    unit_stops = np.cumsum(drawn.sizes)
    units = RunLookup(unit_stops).find(spans.firsts)
    stops = first_place + np.cumsum(spans.sizes)
    parts = drawn.parts[units]
    skipped = spans.firsts - (unit_stops - drawn.sizes)[units]
    firsts = np.where(parts == -1, drawn.first_ids[units], drawn.offsets[units]) + skipped
    parts = np.where(parts < 0, parts, parts + first_part)
    units = units if drawn.of_phase else np.empty(0, np.int64)
    return _Pieces(stops, firsts - (stops - spans.sizes), parts, drawn.part_table, drawn.listed, units)


@dataclass(frozen=True, slots=True, eq=False)
class _PartialShards:
    """Parts of shards: of each, the first so many samples of the shard's permutation."""

    first_ids: NDArray[np.int64]
    """Sample id at which the shard starts."""
    shard_sizes: NDArray[np.int64]
    """Samples in the shard, drawn or not."""
    keys: NDArray[np.uint64]
    """Key of the shard's permutation."""


@dataclass(frozen=True, slots=True, eq=False)
class _DrawnUnits:
    """Units in the order of their shards: each full repeat of a shard, and each part of one."""

    sizes: NDArray[np.int64]
    """Samples in each unit, at least one."""
    first_ids: NDArray[np.int64]
    """Sample id at which the unit's shard starts."""
    offsets: NDArray[np.int64]
    """Where in its shard's permutation the part begins, or in ``listed`` the run; 0 for whole shards."""
    parts: NDArray[np.int64]
    """Which of ``part_table`` each unit is; -1 for whole shards, -2 for a run of ``listed``."""
    part_table: _PartialShards
    """The shards that give a part of their samples."""
    listed: NDArray[np.int64]
    """Sample ids that no rule gives."""
    of_phase: bool = False
    """Whether these are the units of a step of a phase."""


def _draw_units(group: StreamGroup, settings: ResolvedOrder, epoch: int) -> _DrawnUnits:
    """Draw ``choose[s]`` samples from each stream ``s``."""
    seed, first_id = settings.shuffle_seed, group.first_id
    sizes = np.concatenate(group.shard_sizes)
    count_epoch = epoch if settings.redraws_shards else 0
    counts = np.concatenate(
        [
            shard_counts(
                stream_sizes,
                wanted,
                settings.sampling_granularity,
                _generator_for(_RandomPurpose.COUNTS, seed, count_epoch, first_id, stream),
            )
            for stream, (stream_sizes, wanted) in enumerate(zip(group.shard_sizes, group.choose, strict=True))
        ]
    )
    repeats, rest = np.divmod(counts, np.maximum(sizes, 1))
    first_ids = first_id + np.cumsum(sizes) - sizes
    partial = np.flatnonzero(rest)
    part_epoch = epoch if settings.sampling_method == "balanced" else 0
    generator = _generator_for(_RandomPurpose.PARTS, seed, part_epoch, first_id)
    # A key for every shard, so that which samples it gives does not hang on which other shards give a part.
    keys = drawn_keys(generator, len(sizes) if partial.size else 0)
    unit_sizes, unit_first_ids, parts = _units(sizes, first_ids, repeats, rest)
    return _DrawnUnits(
        unit_sizes,
        unit_first_ids,
        np.zeros_like(unit_sizes),
        parts,
        _PartialShards(first_ids[partial], sizes[partial], keys[partial]),
        np.empty(0, np.int64),
    )


def _taken_units(group: StreamGroup, settings: ResolvedOrder) -> _DrawnUnits:
    """What a step of a phase takes of each stream."""
    units = group.slice_units(settings.shuffle_seed, is_shuffled=True)
    partial = np.flatnonzero(units.are_parts)
    parts = np.where(units.are_listed, _LISTED, -1)
    parts[partial] = np.arange(len(partial))
    return _DrawnUnits(
        units.sizes,
        units.first_ids,
        units.offsets,
        parts,
        _PartialShards(units.first_ids[partial], units.shard_sizes[partial], units.keys[partial]),
        units.listed,
        of_phase=True,
    )


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
        counts += _partial_counts(sizes, rest, granularity, generator)
    return counts


def _partial_counts(
    sizes: NDArray[np.int64], rest: int, granularity: int, generator: np.random.Generator
) -> NDArray[np.int64]:
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


class _RandomPurpose(IntEnum):
    """What a generator is for; the numbers are part of every run in progress."""

    COUNTS = 0
    """How many samples each shard of one stream gives."""
    PARTS = 1
    """Which samples a shard gives that gives a part of them."""
    MIXING = 2
    """In which order shards and samples are read."""


def _generator_for(
    purpose: _RandomPurpose, seed: int, epoch: int, first_id: int, stream: int = 0
) -> np.random.Generator:
    """A fresh generator that no other purpose, epoch, group or stream has.

    Args:
        purpose: What it is for.
        seed: The run's.
        epoch: 0 for what stays the same in all epochs.
        first_id: Tells groups of streams that are drawn together from other groups.
        stream: Tells streams of a group from each other.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, epoch, first_id, stream)))
