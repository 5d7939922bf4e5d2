"""Which stream fills each row: a run of positions that is of one stream, among those of the others in random order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.order.batching.sequence import EpochFacts
from lightning_streaming.order.draw import is_on_demand

_ROWS_TOGETHER = 1024
_ROWS_PER_STREAM = 4
"""Rows that are put in order together, at least; and at least so many for each stream."""


class RowOrigins(Protocol):
    """The stream of each row."""

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """The stream of each row, and how many rows that stream has filled before it; of the shape of ``rows``."""


def row_origins(facts: EpochFacts, rows_per_stream: Sequence[int], num_nodes: int) -> list[RowOrigins]:
    """Put the rows of all streams in random order, on each node by itself; each stream's rows keep theirs.

    Args:
        facts: The epoch.
        rows_per_stream: Rows that each stream fills on a node.
        num_nodes: Nodes.
    """
    if is_on_demand(facts.settings):
        return [FoundOrigins(rows_per_stream, (facts.batch_seed, node)) for node in range(num_nodes)]
    generator = np.random.default_rng(facts.batch_seed)  # one for all nodes
    return [drawn_origins(rows_per_stream, generator) for _ in range(num_nodes)]


@dataclass(frozen=True, slots=True, eq=False)
class DrawnOrigins:
    """All rows at hand, as the reference draws them; in few bytes, as every process has its own."""

    streams: NDArray[np.unsignedinteger[Any]]
    """Stream of each row."""
    ordinals: NDArray[np.unsignedinteger[Any]]
    """Counts the rows of that stream from 0."""

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """See :class:`RowOrigins`."""
        return self.streams[rows], self.ordinals[rows].astype(np.int64)


def drawn_origins(rows_per_stream: Sequence[int], generator: np.random.Generator) -> DrawnOrigins:
    """Shuffle the rows.

    For example with 2 rows of stream 0 and 1 of stream 1: streams 0 1 0, ordinals 0 0 1.
    """
    # What is shuffled does not change how.
    streams = np.repeat(
        np.arange(len(rows_per_stream), dtype=np.min_scalar_type(len(rows_per_stream))), rows_per_stream
    )
    generator.shuffle(streams)
    ordinals = np.empty(len(streams), np.min_scalar_type(len(streams)))
    ordinals[np.argsort(streams, kind="stable")] = np.concatenate([np.arange(rows) for rows in rows_per_stream])
    return DrawnOrigins(streams, ordinals)


class FoundOrigins:
    """Rows worked out a stretch at a time, for epochs of any size.

    Each stretch of about a thousand rows has every stream's share of them, and is shuffled by itself.

    Args:
        rows_per_stream: Rows that each stream fills.
        seed: Of all stretches.
    """

    def __init__(self, rows_per_stream: Sequence[int], seed: tuple[int, ...]) -> None:
        self._rows_per_stream = np.asarray(rows_per_stream, np.int64)
        self._seed = seed
        self._total = sum(rows_per_stream)
        stretch = max(_ROWS_TOGETHER, _ROWS_PER_STREAM * len(rows_per_stream))
        self._stretches = -(-self._total // stretch)

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """See :class:`RowOrigins`."""
        stretches = self._stretch_of(rows)
        streams, ordinals = np.empty_like(rows), np.empty_like(rows)
        for stretch in np.unique(stretches).tolist():
            ours = stretches == stretch
            before, after = self._rows_before(stretch), self._rows_before(stretch + 1)
            generator = np.random.default_rng((*self._seed, stretch))
            here, ordinals_here = drawn_origins((after - before).tolist(), generator).find(rows[ours] - before.sum())
            streams[ours], ordinals[ours] = here, before[here] + ordinals_here
        return streams, ordinals

    def _rows_before(self, stretch: int) -> NDArray[np.int64]:
        """Rows of each stream in the stretches before this one."""
        return self._rows_per_stream * stretch // self._stretches

    def _stretch_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        # Rounding down each stream's share lets a stretch begin up to a row per stream early, less than a stretch.
        guessed = rows * self._stretches // self._total
        first, last = int(guessed.min(initial=0)), int(guessed.max(initial=0)) + 2
        starts = np.asarray([self._rows_before(stretch).sum() for stretch in range(first, last)])
        return first - 1 + np.searchsorted(starts, rows, side="right")
