"""Looking up positions that are filled from several streams."""

from __future__ import annotations

from collections.abc import Callable
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
