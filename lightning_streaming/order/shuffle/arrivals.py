"""Sorting samples by where they arrive, with room for few of them: none travels far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Piece = tuple[NDArray[np.float64], NDArray[np.integer[Any]]]
"""Arrivals and ids, of equal length."""

_SMALLEST_BUCKET = 1 << 14
"""Places that are sorted together: the sort stays within the processor's cache."""


def order_by_arrival(ids: NDArray[np.integer[Any]], windows: Iterable[NDArray[np.float64]], reach: float) -> None:
    """``ids[:] = ids[np.argsort(arrivals, kind="stable")]`` for arrivals that come in windows.

    Args:
        ids: To be put in order, in place.
        windows: Where each id arrives, in ``[0, len(ids))``, in consecutive pieces of equal length but for the last.
        reach: The largest distance between an arrival and the place of its id.
    """
    reach += 1  # for what rounding adds
    buckets: _Buckets | None = None
    read, written = 0, 0
    for arrivals in windows:
        if buckets is None:
            buckets = _Buckets(len(arrivals) + 2 * reach)
        buckets.add(arrivals, ids[read : read + len(arrivals)], max(read - reach, 0.0))
        read += len(arrivals)
        # What is written has been read before: no more can be final than has come.
        is_all = read == len(ids)
        for final in buckets.take_before(np.inf if is_all else read - reach):
            ids[written : written + len(final)] = final
            written += len(final)


class _Buckets:
    """Samples by the stretch of places in which they arrive, until no more can come.

    Args:
        widest: The largest difference between two arrivals that are added together.
    """

    def __init__(self, widest: float) -> None:
        width = max(_SMALLEST_BUCKET, widest / 250)  # so that a byte tells apart the buckets of one window
        self._width = 1 << (int(width) - 1).bit_length()  # a power of two, by which floats divide without rounding
        self._pieces: defaultdict[int, list[_Piece]] = defaultdict(list)
        self._next = 0

    def add(self, arrivals: NDArray[np.float64], ids: NDArray[np.integer[Any]], earliest: float) -> None:
        """Take samples that come after all those added before; none arrives before ``earliest``."""
        first = int(earliest / self._width)
        buckets = (arrivals * (1 / self._width) - first).astype(np.uint8)
        order = np.argsort(buckets, kind="stable")
        arrivals, ids = arrivals[order], ids[order]
        stop = 0
        for bucket, size in enumerate(np.bincount(buckets).tolist(), first):
            start, stop = stop, stop + size
            if size:
                self._pieces[bucket].append((arrivals[start:stop], ids[start:stop]))

    def take_before(self, place: float) -> Iterator[NDArray[np.integer[Any]]]:
        """Hand over, in order of arrival, the samples of all buckets that end before ``place``."""
        while self._pieces and (self._next + 1) * self._width <= place:
            pieces = self._pieces.pop(self._next, [])
            self._next += 1
            if pieces:
                arrivals, ids = (np.concatenate(column) for column in zip(*pieces, strict=True))
                yield ids[_argsort(arrivals, (self._next - 1) * self._width, self._width)]


def _argsort(values: NDArray[np.float64], low: int, width: int) -> NDArray[np.intp]:
    """``np.argsort(values, kind="stable")`` for values in ``[low, low + width)``, spread evenly.

    numpy sorts 16-bit integers in linear time, and what is nearly sorted almost so; ``width`` is a power of two, so
    nothing is rounded.
    """
    coarse = ((values - low) * (2.0**16 / width)).astype(np.uint16)
    order = np.argsort(coarse, kind="stable")
    return order[np.argsort(values[order], kind="stable")]
