"""The shuffle ``blockwise``: an order of any size, at random access, without drawing it.

    _DrawnUnits   the units to shuffle: shards repeated whole, and parts of shards
    _Pieces       place among a canonical node's shards, one after another  ->  sample id
    Blocks        place in the epoch's order  ->  place among a canonical node's shards, mixed within a block

Memory and set-up grow with shards and canonical nodes; a sample id costs the same at any place of any epoch.

Blocks are runs of a canonical node's places that are mixed separately. The first block is shorter than the others, by
more from one canonical node to the next, so that they do not reach the ends of their blocks at the same time and need
many new shards.
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
"""Places that are computed at once, so that temporary arrays stay in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockwiseOrder:
    """An epoch's samples: canonical nodes one after another, each its shards in random order, mixed within blocks."""

    blocks: Blocks
    """The blocks within which places are mixed."""
    pieces: _Pieces
    """The shards at the places."""

    def __len__(self) -> int:
        """Return the number of places: the samples that the epoch draws."""
        return len(self.pieces)

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids at places, of the same shape.

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
        """Return the unit in its group of the sample at each place, in one dimension; for a mixture step."""
        return self.pieces.units_at(self.blocks.mixed(places))


def blockwise_order(groups: Iterable[StreamGroup], settings: ResolvedOrder, epoch: int) -> BlockwiseOrder:
    """Return the order of one group of streams after another; its cost depends on shards and canonical nodes alone.

    Args:
        groups: At least one. Their block size is about the number of samples that are mixed; below 1 it counts as 1.
        settings: Settings; the name of the shuffle does not matter.
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
    """Concatenate dataclasses of arrays, array by array."""
    kind = type(several[0])
    if kind is np.ndarray:
        return np.concatenate(several)
    return kind(*(_joined([getattr(item, field.name) for item in several]) for field in fields(kind)))


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks in rows: the blocks of a row are consecutive, have the same size, and share a key.

    A canonical node has three rows: its first block, the blocks that are one place larger than the others, and the
    others. Any of them may be empty.
    """

    starts: NDArray[np.int64]
    """Place at which each row begins."""
    stops: NDArray[np.int64]
    """Place at which each row ends (exclusive), ascending."""
    sizes: NDArray[np.int64]
    """Places in each block of the row."""
    keys: NDArray[np.uint64]
    """A key for each row, from which those of its blocks are derived."""

    @cached_property
    def _rows(self) -> RunLookup:
        return RunLookup(self.stops)

    @cached_property
    def _permutations(self) -> Permutations:
        return Permutations(self.sizes)

    def mixed(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place that is read at each place of the order: one of the same block.

        Args:
            places: Places below the end of the last row, in one dimension.
        """
        rows = self._rows.find(places)
        offsets = places - self.starts.take(rows)
        # Unsigned division is faster.
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
        num_samples: Number of places, n.
        num_canonical_nodes: Canonical nodes, C.
        block_size: About the number of places in a block.
        generator: Generator of this epoch, which draws the keys.
        first_place: The first place.
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
    """Return the size of each canonical node's first block, and the number of blocks that share the rest.

    The number of blocks is rounded, so that a block is of ``block_size`` on average, and at most 5 / 3 of it. The first
    block of canonical node ``c`` of ``C`` is to the others as ``1 - c / (2 * C)`` to 1: 100 places in blocks of 30 are
    34, 33 and 33 in canonical node 0 of 2, and 28, 36 and 36 in canonical node 1.

    Args:
        totals: Places of each canonical node.
        block_size: About the number of places in a block; at least 1 and at most all places.
    """
    unit = 2 * len(totals)
    first_share = unit - np.arange(len(totals))
    counts: NDArray[np.int64] = np.maximum((2 * totals + block_size) // (2 * block_size), 1) - 1
    firsts: NDArray[np.int64] = -(-totals * first_share // (unit * counts + first_share))
    return firsts, counts


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Units, or parts of them at borders between canonical nodes, in the order in which they are laid out."""

    stops: NDArray[np.int64]
    """Place at which each piece ends (exclusive), ascending; the first begins at 0."""
    id_minus_place: NDArray[np.int64]
    """Sample id minus place in the piece; for a part of a shard, index in the shard's permutation minus place."""
    parts: NDArray[np.int64]
    """Entry of ``part_table`` of each piece; -1 for whole shards, -2 for pieces of ``listed``."""
    part_table: _PartialShards
    """The shards that give a part of their samples."""
    listed: NDArray[np.int64]
    """Sample ids without a rule: those that a cut left unread."""
    units: NDArray[np.int64]
    """The unit of each piece, in a mixture step."""

    def __len__(self) -> int:
        """Return the number of places in all pieces."""
        return len(self._lookup)

    @cached_property
    def _lookup(self) -> RunLookup:
        return RunLookup(self.stops)

    @cached_property
    def _permutations(self) -> Permutations:
        return Permutations(self.part_table.shard_sizes)

    def units_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the unit at each place."""
        return self.units.take(self._lookup.find(places))

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids at places, in one dimension."""
        pieces = self._lookup.find(places)
        ids = places + self.id_minus_place.take(pieces)
        if len(self.part_table.keys):
            parts = self.parts.take(pieces)
            partial = np.flatnonzero(parts >= 0)
            parts = parts[partial]
            samples = self._permutations.permuted(parts, ids[partial], self.part_table.keys.take(parts))
            ids[partial] = self.part_table.first_ids.take(parts) + samples
        if len(self.listed):
            of_list = np.flatnonzero(self.parts.take(pieces) == _LISTED)
            ids[of_list] = self.listed[ids[of_list]]
        return ids


def _pieces_of(drawn: _DrawnUnits, spans: Spans, first_place: int, first_part: int) -> _Pieces:
    """Lay out spans of the drawn units one after another.

    Args:
        drawn: The units.
        spans: Runs of places in the units, counted through all units in their order; none reaches across units.
        first_place: Place of the first span.
        first_part: Number of parts of shards before.
    """
    unit_stops = np.cumsum(drawn.sizes)
    units = RunLookup(unit_stops).find(spans.firsts)
    stops = first_place + np.cumsum(spans.sizes)
    parts = drawn.parts[units]
    skipped = spans.firsts - (unit_stops - drawn.sizes)[units]
    firsts = np.where(parts == -1, drawn.first_ids[units], drawn.offsets[units]) + skipped
    parts = np.where(parts < 0, parts, parts + first_part)
    units = units if drawn.of_step else np.empty(0, np.int64)
    return _Pieces(stops, firsts - (stops - spans.sizes), parts, drawn.part_table, drawn.listed, units)


@dataclass(frozen=True, slots=True, eq=False)
class _PartialShards:
    """Parts of shards: the first samples of each shard's permutation."""

    first_ids: NDArray[np.int64]
    """Sample id at which the shard starts."""
    shard_sizes: NDArray[np.int64]
    """Samples in the shard, drawn or not."""
    keys: NDArray[np.uint64]
    """Key of the shard's permutation."""


@dataclass(frozen=True, slots=True, eq=False)
class _DrawnUnits:
    """Units in the order of their shards: each full repeat of a shard, and each part of a shard."""

    sizes: NDArray[np.int64]
    """Samples in each unit, at least one."""
    first_ids: NDArray[np.int64]
    """Sample id at which the unit's shard starts."""
    offsets: NDArray[np.int64]
    """Beginning of the part in its shard's permutation, or of the run in ``listed``; 0 for whole shards."""
    parts: NDArray[np.int64]
    """Entry of ``part_table`` of each unit; -1 for whole shards, -2 for a run of ``listed``."""
    part_table: _PartialShards
    """The shards that give a part of their samples."""
    listed: NDArray[np.int64]
    """Sample ids without a rule."""
    of_step: bool = False
    """True for the units of a mixture step."""


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
    # A key for every shard, so that its samples do not depend on which other shards give a part.
    keys = drawn_keys(generator, len(sizes) if partial.size else 0)
    # Full repeats of a shard come before its part.
    copies = repeats + (rest > 0)
    unit_sizes = np.repeat(sizes, copies)
    parts = np.full(len(unit_sizes), -1, np.int64)
    last_units = (np.cumsum(copies) - 1)[partial]
    unit_sizes[last_units] = rest[partial]
    parts[last_units] = np.arange(len(last_units))
    return _DrawnUnits(
        unit_sizes,
        np.repeat(first_ids, copies),
        np.zeros_like(unit_sizes),
        parts,
        _PartialShards(first_ids[partial], sizes[partial], keys[partial]),
        np.empty(0, np.int64),
    )


def _taken_units(group: StreamGroup, settings: ResolvedOrder) -> _DrawnUnits:
    """Return the units that a mixture step takes of each stream."""
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
        of_step=True,
    )


def shard_counts(
    sizes: NDArray[np.int64], choose: int, granularity: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Divide the ``choose`` samples to draw from a stream among its shards.

    All samples of a shard are drawn as often as the whole stream is repeated. Of the remainder, each shard gives a part
    near its share, in picks of ``granularity`` samples; so a granularity as large as the shards picks whole shards.

    Args:
        sizes: Samples in each shard; at least one in all.
        choose: Samples to draw.
        granularity: Samples per pick; the last pick of a shard may be shorter.
        generator: Generator, used only if the stream is not repeated as a whole.

    Returns:
        Samples to draw from each shard; sums to ``choose``. The samples of a shard differ by at most one in how often
        they are drawn.
    """
    repeats, rest = divmod(choose, int(sizes.sum()))
    counts = sizes * repeats
    if not rest:
        return counts
    order = generator.permutation(len(sizes))
    sizes = sizes[order]
    granularity = min(granularity, int(sizes.max()))
    picks = -(-sizes // granularity)
    # Systematic sampling: of all picks in one line, each is taken at which ``start + share * (picks so far)`` passes a
    # whole number. So each shard's share of picks is rounded up or down, and the shards together have the share.
    share, start = rest / int(sizes.sum()), generator.random()
    passed = np.floor(np.cumsum(picks) * share + start).astype(np.int64)
    taken = np.minimum(np.diff(passed, prepend=0), picks)
    # The short pick of a shard is taken as likely as any other pick.
    with_short = generator.random(len(sizes)) * picks < taken
    drawn = taken * granularity - with_short * (picks * granularity - sizes)

    # The first shards are filled up, or reduced, until the parts sum to ``rest``.
    missing = rest - int(drawn.sum())
    room = sizes - drawn if missing > 0 else drawn
    room_before = np.cumsum(room) - room
    counts[order] += drawn + np.sign(missing) * np.clip(abs(missing) - room_before, 0, room)
    return counts


class _RandomPurpose(IntEnum):
    """Purpose of a generator; the numbers are part of every run in progress."""

    COUNTS = 0
    """The number of samples of each shard of one stream."""
    PARTS = 1
    """The samples of a shard that gives a part of them."""
    MIXING = 2
    """The order in which shards and samples are read."""


def _generator_for(
    purpose: _RandomPurpose, seed: int, epoch: int, first_id: int, stream: int = 0
) -> np.random.Generator:
    """Return a new generator, separate for each purpose, epoch, group and stream.

    Args:
        purpose: Its purpose.
        seed: The seed of the run.
        epoch: The epoch; 0 for draws that are the same in all epochs.
        first_id: The first id of the group of streams that are drawn together.
        stream: The stream in its group.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, epoch, first_id, stream)))
