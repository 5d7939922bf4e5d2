"""From a place among the canonical nodes' units, one after another, to a sample id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.blockwise.drawn import Drawn, Parts
from lightning_streaming.order.blockwise.permutation import Permutations
from lightning_streaming.order.runs import RunLookup
from lightning_streaming.order.shuffle.spans import Spans


@dataclass(frozen=True, eq=False)
class Pieces:
    """Units, or what a border between canonical nodes left of them, in the order in which they are laid out."""

    stops: NDArray[np.int64]
    """Place at which each piece ends (exclusive), rising; the first begins at 0."""
    id_minus_place: NDArray[np.int64]
    """From a place in the piece to a sample id; for a part of a shard, to an index in the shard's permutation."""
    parts: NDArray[np.int64]
    """Which of ``part_table`` each piece is of; -1 for whole shards."""
    part_table: Parts
    """The shards that give a part of their samples."""

    def __len__(self) -> int:
        """Places in all pieces."""
        return len(self._lookup)

    @cached_property
    def _lookup(self) -> RunLookup:
        return RunLookup(self.stops)

    @cached_property
    def _permutations(self) -> Permutations:
        return Permutations(self.part_table.shard_sizes)

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at these places, in one dimension."""
        pieces = self._lookup.find(places)
        ids = places + self.id_minus_place.take(pieces)
        if len(self.part_table.keys):
            parts = self.parts.take(pieces)
            partial = np.flatnonzero(parts >= 0)
            ids[partial] = self._partial_ids(parts[partial], ids[partial])
        return ids

    def _partial_ids(self, parts: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.int64]:
        samples = self._permutations.permuted(parts, indexes, self.part_table.keys.take(parts))
        return self.part_table.first_ids.take(parts) + samples


def pieces_of(drawn: Drawn, spans: Spans) -> Pieces:
    """Lay out spans of the drawn units one after another.

    Args:
        drawn: The units.
        spans: Runs of places in the units, counted through all units in their order; none reaches across units.
    """
    unit_stops = np.cumsum(drawn.sizes)
    units = RunLookup(unit_stops).find(spans.firsts)
    stops = np.cumsum(spans.sizes)
    parts = drawn.parts[units]
    skipped = spans.firsts - (unit_stops - drawn.sizes)[units]
    firsts = np.where(parts < 0, drawn.first_ids[units], 0) + skipped
    return Pieces(stops, firsts - (stops - spans.sizes), parts, drawn.part_table)


def joined_pieces(several: Sequence[Pieces]) -> Pieces:
    """One after another."""
    lengths = np.asarray([len(pieces) for pieces in several], np.int64)
    first_places = (np.cumsum(lengths) - lengths).tolist()
    table_sizes = np.asarray([len(pieces.part_table.keys) for pieces in several], np.int64)
    first_parts = (np.cumsum(table_sizes) - table_sizes).tolist()
    return Pieces(
        np.concatenate([pieces.stops + first for pieces, first in zip(several, first_places, strict=True)]),
        np.concatenate([pieces.id_minus_place - first for pieces, first in zip(several, first_places, strict=True)]),
        np.concatenate(
            [
                np.where(pieces.parts < 0, -1, pieces.parts + first)
                for pieces, first in zip(several, first_parts, strict=True)
            ]
        ),
        Parts(
            np.concatenate([pieces.part_table.first_ids for pieces in several]),
            np.concatenate([pieces.part_table.shard_sizes for pieces in several]),
            np.concatenate([pieces.part_table.keys for pieces in several]),
        ),
    )
