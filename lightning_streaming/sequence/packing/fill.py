"""The pack of its window that each document goes into.

*Best fit* takes documents longest first, and puts each into the pack with the least room that is enough, or into a new
one. This is best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973; Johnson, Demers, Ullman, Garey
and Graham, "Worst-case performance bounds for simple one-dimensional packing algorithms", 1974); it needs at most 11/9
of the fewest possible packs, and a few more. Of packs with the same room it takes the one that got this room last: any
other rule gives as many packs with the same rooms. It exists twice with the same result: in Python, and as a function
that numba compiles.

*Groups* of documents of similar length are for a budget of tokens; many windows are grouped at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import MissingDependencyError

Fill = Callable[[NDArray[np.int32], int, int], NDArray[np.uint16]]
"""A function like :func:`fill_windows_in_python`."""
ANY_NUMBER = 1 << 16
"""A limit that no number of documents in a pack exceeds."""
_WORD_BITS = 5
_MODULUS = 37
"""All powers of two below 2**32 have different remainders modulo this number, so a remainder identifies the power."""
_BIT_NUMBERS = np.zeros(_MODULUS, np.int64)
_BIT_NUMBERS[[2**bit % _MODULUS for bit in range(1 << _WORD_BITS)]] = np.arange(1 << _WORD_BITS)
_SIGNATURE = (
    "void(int32[:,::1], int64, int64, uint16[:,::1], int64[::1], int64[::1], int32[::1], int32[::1], int32[::1], "
    "int64[::1])"
)
"""Signature of :func:`fill_windows`: with it numba compiles at once, rather than in whichever thread calls first."""

_BATCH_OF_DOCUMENTS = 64
"""Documents of a bucket that are grouped in one step; a group has some dozens."""
_SLICE_BITS = 3
"""Base-two logarithm of the slices in which lengths between two powers of two are counted; finer ones gain nothing."""
_NUM_SLICES = 32 << _SLICE_BITS
_WIDTHS = np.maximum(1 << np.arange(32), 1 << _SLICE_BITS).repeat(1 << _SLICE_BITS) >> _SLICE_BITS
"""The number of lengths in each slice."""


def fill_windows_in_python(lengths: NDArray[np.int32], capacity: int, most: int = ANY_NUMBER) -> NDArray[np.uint16]:
    """Put documents into packs by best fit. A document takes about half a microsecond.

    Args:
        lengths: Tokens, of shape (windows, documents): each window longest first, then zeros where it has fewer. At
            most 65,536 documents.
        capacity: Tokens that a pack holds; no document is longer.
        most: Documents that a pack holds; a pack that has them gets no more.

    Returns:
        The number of each document's pack in its window, of the same shape; undefined where the length is 0. Packs
        count from 0 in the order in which they are begun.
    """
    packs = np.zeros(lengths.shape, np.uint16)
    for window, counts in zip(packs, lengths, strict=True):
        rooms, packs_of_room = [capacity], defaultdict[int, list[int]](list)
        chosen, num_packs, held = list[int](), 0, [0] * len(counts)
        for length in counts[: np.count_nonzero(counts)].tolist():
            at = bisect_left(rooms, length)
            room = rooms[at]
            if room == capacity:
                pack = num_packs
                num_packs += 1
            else:
                same_room = packs_of_room[room]
                pack = same_room.pop()
                if not same_room:
                    del rooms[at]
            chosen.append(pack)
            room -= length
            held[pack] += 1
            if room and held[pack] < most:
                same_room = packs_of_room[room]
                if not same_room:
                    insort(rooms, room)
                same_room.append(pack)
        window[: len(chosen)] = chosen
    return packs


def has_compiler() -> bool:
    """Return whether numba is installed; it is not imported."""
    return find_spec("numba") is not None


def compiled_fill() -> Fill:
    """Compile best fit, for use from several threads at once; takes a second or two.

    Raises:
        MissingDependencyError: numba is not installed.
    """
    try:
        import numba
    except ImportError as error:
        raise MissingDependencyError(
            f"to plan packs in compiled code needs numba ({error})",
            hint="install lightning-streaming[pack], or leave it out",
        ) from error
    return filled_by(numba.njit(_SIGNATURE, nogil=True)(fill_windows))


def filled_by(compiled: Callable[..., None]) -> Fill:
    """Return a function like :func:`fill_windows_in_python` that calls :func:`fill_windows`, compiled or not."""

    def fill(lengths: NDArray[np.int32], capacity: int, most: int = ANY_NUMBER) -> NDArray[np.uint16]:
        packs = np.zeros(lengths.shape, np.uint16)
        sizes = [(capacity >> _WORD_BITS) + 1]
        while sizes[-1] > 1:
            sizes.append((sizes[-1] >> _WORD_BITS) + 1)
        levels = np.cumsum([0, *sizes], dtype=np.int64)
        words = np.zeros(levels[-1], np.int64)
        first_packs = np.zeros(capacity + 1, np.int32)
        next_packs, held = np.zeros((2, lengths.shape[1]), np.int32)
        compiled(lengths, capacity, most, packs, words, levels[:-1], first_packs, next_packs, held, _BIT_NUMBERS)
        return packs

    return fill


def fill_windows(
    lengths: Any,
    capacity: Any,
    most: Any,
    packs: Any,
    words: Any,
    levels: Any,
    first_packs: Any,
    next_packs: Any,
    held: Any,
    bits: Any,
) -> None:
    """Fill windows one after another, in a form that numba can compile.

    A bit for each room says whether a pack has that room; a bit for each word of these bits says whether the word is
    not zero, and so on up to a single word. So the least room that is enough takes a step or two per level. The packs
    of a room are a linked list, the latest first; packs that are not begun yet have all room, lowest number first.
    Numbers are signed and words have 32 bits, because numba converts a mix of signed and unsigned to floats. ``words``
    holds the words of all levels, which begin at ``levels``. ``held`` counts the documents of
    packs; one with ``most`` of them is in no list.
    """
    num_documents = lengths.shape[1]
    for window in range(lengths.shape[0]):
        words[:] = 0
        held[:] = 0
        for pack in range(num_documents):
            next_packs[pack] = min(pack + 1, num_documents - 1)
        first_packs[capacity] = 0
        number = capacity
        for level in range(len(levels)):
            words[levels[level] + (number >> 5)] |= 1 << (number & 31)
            number >>= 5
        for document in range(num_documents):
            length = lengths[window, document]
            if length == 0:
                break
            number, level = length >> 5, 0
            word = words[number] & (-1 << (length & 31))
            while word == 0:  # up, until a word has a number that is large enough
                wanted, level = number + 1, level + 1
                number = wanted >> 5
                word = words[levels[level] + number] & (-1 << (wanted & 31))
            room = (number << 5) + bits[(word & -word) % 37]
            while level > 0:  # and down to the lowest there
                level -= 1
                word = words[levels[level] + room]
                room = (room << 5) + bits[(word & -word) % 37]
            pack = first_packs[room]
            packs[window, document] = pack
            first_packs[room] = next_packs[pack]
            is_last, number, level = next_packs[pack] == pack, room, 0
            while is_last and level < len(levels):
                words[levels[level] + (number >> 5)] &= ~(1 << (number & 31))
                is_last, number, level = words[levels[level] + (number >> 5)] == 0, number >> 5, level + 1
            held[pack] += 1
            if held[pack] >= most:
                continue
            number = room - length
            next_packs[pack] = first_packs[number] if words[number >> 5] >> (number & 31) & 1 else pack
            first_packs[number] = pack
            for level in range(len(levels)):
                words[levels[level] + (number >> 5)] |= 1 << (number & 31)
                number >>= 5


def grouped(
    lengths: NDArray[np.int64], window: int, tokens: int, buckets: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Put documents into groups, where the number of documents times the longest is within a budget.

    Buckets are ranges of length, with borders chosen for each window so that each needs about as much padding.
    Documents of one length are in one bucket.

    Args:
        lengths: Tokens of each document, none above ``tokens``, windows one after another; 0 leaves it out.
        window: Documents of each window; the last one may have fewer.
        tokens: The budget.
        buckets: Most buckets of a window.

    Returns:
        The documents that are in groups, group by group, as indexes into ``lengths``; and which of them begin a group.
        No group has documents of two windows.
    """
    documents = np.flatnonzero(lengths).astype(np.int64, copy=False)
    chosen = _buckets(lengths[documents], documents // window, buckets)
    sizes = np.bincount(chosen)
    # numpy sorts small numbers faster.
    documents = documents[np.argsort(chosen.astype(np.uint16 if len(sizes) <= 1 << 16 else np.int64), kind="stable")]
    sizes = sizes[sizes > 0]
    return documents, _group_starts(lengths[documents], np.cumsum(sizes), tokens)


def _buckets(lengths: NDArray[np.int64], windows: NDArray[np.int64], buckets: int) -> NDArray[np.int64]:
    """Return the bucket of each document in its window.

    Where ``count`` documents are spread over slices of ``width`` lengths, and the border of a bucket lies in every
    n-th slice, about ``count * width * n**2 / 2`` tokens pad them. To have as much in each bucket, borders divide the
    sum of ``sqrt(count * width)`` over all slices into equal shares.
    """
    # The slice of a length is the exponent and the first bits of it as a floating-point number.
    slices: NDArray[np.int64] = lengths.astype(np.float64).view(np.int64)
    slices >>= 52 - _SLICE_BITS
    slices -= 1023 << _SLICE_BITS
    slices += windows * _NUM_SLICES
    num_windows = int(windows[-1]) + 1 if windows.size else 0
    counts = np.bincount(slices, minlength=num_windows * _NUM_SLICES).reshape(num_windows, _NUM_SLICES)
    shares = np.cumsum(np.sqrt(counts * _WIDTHS), axis=1)
    totals = np.maximum(shares[:, -1:], 1)  # a window may be empty
    shorter = np.concatenate([np.zeros((num_windows, 1)), shares[:, :-1]], axis=1)
    of_slices: NDArray[np.int64] = np.minimum((shorter * buckets / totals).astype(np.int64), buckets - 1)
    of_slices += np.arange(num_windows)[:, None] * buckets
    return of_slices.reshape(-1).take(slices)


def _group_starts(lengths: NDArray[np.int64], bucket_stops: NDArray[np.int64], tokens: int) -> NDArray[np.bool_]:
    """Return which documents begin a group, for all buckets in parallel, some documents of each at a time."""
    begins = np.zeros(len(lengths), np.bool_)
    at = np.concatenate([[0], bucket_stops[:-1]]) if bucket_stops.size else np.zeros(0, np.int64)
    stops = bucket_stops
    begins[at] = True
    counts, longest = np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
    while at.size:
        ahead = at[:, None] + np.arange(_BATCH_OF_DOCUMENTS)
        inside = ahead < stops[:, None]
        here = lengths[np.minimum(ahead, len(lengths) - 1)]
        here[:, 0] = np.maximum(here[:, 0], longest)
        here = np.maximum.accumulate(here, axis=1)
        fits = here * (counts[:, None] + np.arange(1, _BATCH_OF_DOCUMENTS + 1)) <= tokens
        taken = (fits & inside).sum(axis=1)
        at = at + taken
        continues = taken == _BATCH_OF_DOCUMENTS
        counts, longest = np.where(continues, counts + taken, 0), np.where(continues, here[:, -1], 0)
        left = at < stops
        at, stops, counts, longest, continues = (array[left] for array in (at, stops, counts, longest, continues))
        begins[at[~continues]] = True
    return begins
