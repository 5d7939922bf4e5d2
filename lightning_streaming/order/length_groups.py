"""Groups of documents of about one length, for many windows at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LOOKED_AT = 64
"""Documents of a bucket that are looked at together: a group has some dozens."""


def grouped(
    lengths: NDArray[np.int64], window: int, tokens: int, buckets: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put documents into groups whose number of documents times their longest is within a budget.

    Buckets are ranges of length with about as many tokens in each, and so with about as many groups: the last group of
    a bucket, which ends early, costs each the same. Documents of one length are in one bucket.

    Args:
        lengths: Tokens of each document, none above ``tokens``, windows one after another; 0 leaves it out.
        window: Documents of each window; the last one may have fewer.
        tokens: The budget.
        buckets: Of each window, at most.

    Returns:
        The documents that are in groups, group by group: their places in ``lengths``; and which of them begin a group.
        No group has documents of two windows.
    """
    documents = np.flatnonzero(lengths)
    windows = documents // window
    chosen = _buckets(lengths[documents], windows, buckets)
    chosen += windows * buckets
    documents = documents[np.argsort(chosen, kind="stable")]
    sizes = np.bincount(chosen)
    sizes = sizes[sizes > 0]
    return documents, _group_starts(lengths[documents], np.cumsum(sizes), tokens)


def _buckets(lengths: NDArray[np.int64], windows: NDArray[np.int64], buckets: int) -> NDArray[np.int64]:
    """The bucket of each document in its window: by how many tokens of the window are in documents that are shorter."""
    if not lengths.size:
        return np.zeros(0, np.int64)
    rising = np.lexsort((lengths, windows))
    by_length, by_window = lengths[rising], windows[rising]
    before = np.cumsum(by_length) - by_length
    begins_window = np.diff(by_window, prepend=-1) != 0
    begins_length = begins_window | (np.diff(by_length, prepend=-1) != 0)
    first_before = before[begins_window]
    totals = np.diff(first_before, append=before[-1] + by_length[-1])
    of_window = np.cumsum(begins_window) - 1
    shorter = before[begins_length][np.cumsum(begins_length) - 1] - first_before[of_window]
    out = np.empty(len(lengths), np.int64)
    out[rising] = shorter * buckets // totals[of_window]
    return out


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
