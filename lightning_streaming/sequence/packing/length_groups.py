"""Groups of documents of about one length, for many windows at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LOOKED_AT = 64
"""Documents of a bucket that are looked at together: a group has some dozens."""
_SLICE_BITS = 3
"""Lengths from one power of two to the next are counted in so many slices, as a power of two: no finer than buckets are
worth it."""
_NUM_SLICES = 32 << _SLICE_BITS
_WIDTHS = np.maximum(1 << np.arange(32), 1 << _SLICE_BITS).repeat(1 << _SLICE_BITS) >> _SLICE_BITS
"""How many lengths each slice has."""


def grouped(
    lengths: NDArray[np.int64], window: int, tokens: int, buckets: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Put documents into groups whose number of documents times their longest is within a budget.

    Buckets are ranges of length, with borders chosen for each window so that about as many tokens pad each. Documents
    of one length are in one bucket.

    Args:
        lengths: Tokens of each document, none above ``tokens``, windows one after another; 0 leaves it out.
        window: Documents of each window; the last one may have fewer.
        tokens: The budget.
        buckets: Of each window, at most.

    Returns:
        The documents that are in groups, group by group: their places in ``lengths``; and which of them begin a group.
        No group has documents of two windows.
    """
    documents = np.flatnonzero(lengths).astype(np.int64, copy=False)
    windows = documents // window
    chosen = _buckets(lengths[documents], windows, buckets)
    sizes = np.bincount(chosen)
    # numpy sorts small numbers sooner.
    documents = documents[np.argsort(chosen.astype(np.uint16 if len(sizes) <= 1 << 16 else np.int64), kind="stable")]
    sizes = sizes[sizes > 0]
    return documents, _group_starts(lengths[documents], np.cumsum(sizes), tokens)


def _buckets(lengths: NDArray[np.int64], windows: NDArray[np.int64], buckets: int) -> NDArray[np.int64]:
    """The bucket of each document in its window.

    Where ``count`` documents are spread over slices of ``width`` lengths, and the border of a bucket lies in every
    n-th slice, about ``count * width * n**2 / 2`` tokens pad them. To have as much in each bucket, borders divide the
    sum of ``sqrt(count * width)`` over all slices into equal shares.
    """
    slices = _slices(lengths)
    slices += windows * _NUM_SLICES
    num_windows = int(windows[-1]) + 1 if windows.size else 0
    counts = np.bincount(slices, minlength=num_windows * _NUM_SLICES).reshape(num_windows, _NUM_SLICES)
    shares = np.cumsum(np.sqrt(counts * _WIDTHS), axis=1)
    totals = np.maximum(shares[:, -1:], 1)  # a window may be empty
    shorter = np.concatenate([np.zeros((num_windows, 1)), shares[:, :-1]], axis=1)
    of_slices: NDArray[np.int64] = np.minimum((shorter * buckets / totals).astype(np.int64), buckets - 1)
    of_slices += np.arange(num_windows)[:, None] * buckets
    return of_slices.reshape(-1).take(slices)


def _slices(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slice of each length: exponent and first bits of it as a floating-point number."""
    slices: NDArray[np.int64] = lengths.astype(np.float64).view(np.int64)
    slices >>= 52 - _SLICE_BITS
    slices -= 1023 << _SLICE_BITS
    return slices


def _group_starts(lengths: NDArray[np.int64], bucket_stops: NDArray[np.int64], tokens: int) -> NDArray[np.bool_]:
    """Which documents begin a group; all buckets in step, some documents of each at a time."""
    begins = np.zeros(len(lengths), np.bool_)
    at = np.concatenate([[0], bucket_stops[:-1]]) if bucket_stops.size else np.zeros(0, np.int64)
    stops = bucket_stops
    begins[at] = True
    counts, longest = np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
    while at.size:
        looked_at = at[:, None] + np.arange(_LOOKED_AT)
        inside = looked_at < stops[:, None]
        here = lengths[np.minimum(looked_at, len(lengths) - 1)]
        here[:, 0] = np.maximum(here[:, 0], longest)
        here = np.maximum.accumulate(here, axis=1)
        fits = here * (counts[:, None] + np.arange(1, _LOOKED_AT + 1)) <= tokens
        taken = (fits & inside).sum(axis=1)
        at = at + taken
        goes_on = taken == _LOOKED_AT
        counts, longest = np.where(goes_on, counts + taken, 0), np.where(goes_on, here[:, -1], 0)
        left = at < stops
        at, stops, counts, longest, goes_on = (one[left] for one in (at, stops, counts, longest, goes_on))
        begins[at[~goes_on]] = True
    return begins
