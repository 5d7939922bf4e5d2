"""Rows: runs of positions that are filled from one stream each, in random order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import SampleIndexError


def check_positions(positions: NDArray[np.int64], length: int) -> None:
    """Refuse positions outside ``[0, length)``.

    Raises:
        SampleIndexError: There is one.
    """
    if positions.size and not (positions.min() >= 0 and positions.max() < length):
        raise SampleIndexError(
            f"positions must be in [0, {length}), but range from {positions.min()} to {positions.max()}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowOrigins:
    """Which stream fills each row, and how many it has filled before; in few bytes, as every process has its own."""

    streams: NDArray[np.unsignedinteger[Any]]
    """Stream of each row."""
    ordinals: NDArray[np.unsignedinteger[Any]]
    """Counts the rows of that stream from 0."""


def shuffled_origins(rows_per_stream: Sequence[int], generator: np.random.Generator) -> RowOrigins:
    """Put the rows of all streams in random order; each stream's rows keep theirs.

    For example with 2 rows of stream 0 and 1 of stream 1: streams 0 1 0, ordinals 0 0 1.
    """
    # What is shuffled does not change how.
    streams = np.repeat(
        np.arange(len(rows_per_stream), dtype=np.min_scalar_type(len(rows_per_stream))), rows_per_stream
    )
    generator.shuffle(streams)
    ordinals = np.empty(len(streams), np.min_scalar_type(len(streams)))
    ordinals[np.argsort(streams, kind="stable")] = np.concatenate([np.arange(rows) for rows in rows_per_stream])
    return RowOrigins(streams, ordinals)


def places_by_stream(
    streams: NDArray[np.integer[Any]],
    entries: NDArray[np.int64],
    places_of: Callable[[int, NDArray[np.int64]], NDArray[np.int64]],
) -> NDArray[np.int64]:
    """Look up entries of several streams at once, stream by stream.

    Args:
        streams: Stream of each entry.
        entries: Entries in that stream, of the same shape.
        places_of: Gives the places of one stream's entries.
    """
    by_stream = np.argsort(streams, axis=None, kind="stable")
    in_turn, ours = streams.ravel()[by_stream], entries.ravel()[by_stream]
    bounds = [0, *(np.flatnonzero(in_turn[1:] != in_turn[:-1]) + 1).tolist(), len(ours)]
    places = np.empty_like(ours)
    for first, stop in pairwise(bounds):
        if first < stop:
            places[by_stream[first:stop]] = places_of(int(in_turn[first]), ours[first:stop])
    return places.reshape(entries.shape)
