"""Best fit: into which pack each document of a window goes, for many windows in step.

Documents come longest first, and each goes into the pack with the least room that is enough, or into a new one. This is
best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973; Johnson, Demers, Ullman, Garey and Graham,
"Worst-case performance bounds for simple one-dimensional packing algorithms", 1974); it makes at most 11/9 of the
fewest packs that are possible, and a few more. Of packs with the same room the one is taken that came to have it last:
any other rule gives as many packs with the same rooms, and this one costs the same whatever the lengths are.

For each window it is known which rooms there are, one bit for each; which words of these bits have any, in words of
their own; and so on up to a single word. So the least room that is enough takes a step or two for each level. The packs
of a room are a chain, the last to come first. Packs that are not begun yet are those with all room, lowest number
first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_STATE_BYTES = 24 << 20
"""About what the windows in step may need for what is known of them: little enough to stay in a processor's cache."""
_FEWEST_LANES = 2
_ALL = np.uint64(2**64 - 1)
_ONE = np.uint64(1)
_BITS = np.int64(63)
_EXPONENT = np.int64(52)
_EXPONENT_OF_ONE = np.int64(1023)


def fill_in_step(lengths: NDArray[np.int32], capacity: int) -> NDArray[np.uint16]:
    """Put documents into packs.

    Args:
        lengths: Tokens, of shape (windows, documents): each window longest first, then zeros where it has fewer. At
            most 65,536 documents.
        capacity: Tokens that a pack holds; no document is longer.

    Returns:
        The number of each document's pack in its window, of the same shape; where the length is 0 it means nothing.
        Packs count from 0 in the order in which they are begun.
    """
    num_windows, num_documents = lengths.shape
    packs = np.empty(lengths.shape, np.uint16)
    lanes = lanes_in_step(num_documents, capacity)
    for start in range(0, num_windows, lanes):
        of = slice(start, min(start + lanes, num_windows))
        in_turn = np.ascontiguousarray(lengths[of].T)
        chosen = np.empty(in_turn.shape, np.uint16)
        rooms = _Rooms(in_turn.shape[1], num_documents, capacity)
        for one, wanted in enumerate(in_turn):
            chosen[one] = rooms.place(wanted.astype(np.int64))
        packs[of] = chosen.T
    return packs


def lanes_in_step(num_documents: int, capacity: int) -> int:
    """How many windows are filled in step."""
    return max(_STATE_BYTES // (2 * (capacity + 1) + capacity // 8 + 2 * num_documents), _FEWEST_LANES)


def level_sizes(capacity: int) -> list[int]:
    """Words of each level that says which rooms there are; the last one has a single word."""
    sizes = [(capacity >> 6) + 1]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] >> 6) + 1)
    return sizes


class _Rooms:
    """The packs of many windows by the room that they have left. A lane is a window."""

    def __init__(self, num_lanes: int, num_documents: int, capacity: int) -> None:
        lanes = np.arange(num_lanes, dtype=np.int64)
        sizes = level_sizes(capacity)
        self._levels = [np.zeros(num_lanes * size, np.uint64) for size in sizes]
        self._bases = [lanes * size for size in sizes]
        self._first_packs = np.zeros(num_lanes * (capacity + 1), np.uint16)
        """The chain of each room, where its bit is set."""
        self._room_bases = lanes * (capacity + 1)
        chain = np.minimum(np.arange(1, num_documents + 1), num_documents - 1).astype(np.uint16)
        self._next_packs = np.tile(chain, num_lanes)
        """The next pack of the same chain; itself, where there is none."""
        self._pack_bases = lanes * num_documents
        self._add(np.full(num_lanes, capacity))

    def place(self, lengths: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Put one document of each window into a pack, and say which."""
        rooms = self._least(0, lengths, slice(None))
        at = self._room_bases + rooms
        packs = self._first_packs.take(at)
        at_packs = self._pack_bases + packs
        following = self._next_packs.take(at_packs)
        self._first_packs[at] = following
        last = np.flatnonzero(following == packs)
        if last.size:
            self._remove(last, rooms.take(last))

        rooms -= lengths
        at = self._room_bases + rooms
        is_there = self._add(rooms)
        self._next_packs[at_packs] = np.where(is_there, self._first_packs.take(at), packs)
        self._first_packs[at] = packs
        return packs

    def _least(self, level: int, wanted: NDArray[np.int64], lanes: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        """The lowest number of a level that is set and not below the wanted one; there is one in each lane."""
        bases, words = self._bases[level][lanes], self._levels[level]
        numbers = wanted >> 6
        masks = _ALL << (wanted & _BITS).view(np.uint64)
        masks &= words.take(bases + numbers)
        missing = np.flatnonzero(masks == 0)
        if missing.size:
            numbers_up = numbers.take(missing)
            numbers_up += 1
            lanes_up = missing if isinstance(lanes, slice) else lanes.take(missing)
            found = self._least(level + 1, numbers_up, lanes_up)
            numbers[missing] = found
            masks[missing] = words.take(bases.take(missing) + found)
        numbers <<= 6
        numbers += _lowest_bits(masks)
        return numbers

    def _add(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Set one room of each lane; says which were set before."""
        was_set: NDArray[np.bool_] | None = None
        for bases, words in zip(self._bases, self._levels, strict=True):
            bits = _ONE << (numbers & _BITS).view(np.uint64)
            numbers = numbers >> 6
            at = bases + numbers
            before = words.take(at)
            if was_set is None:
                was_set = (before & bits) != 0
            before |= bits
            words[at] = before
        assert was_set is not None
        return was_set

    def _remove(self, lanes: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Unset one room of each of these lanes."""
        for bases, words in zip(self._bases, self._levels, strict=True):
            bits = _ONE << (numbers & _BITS).view(np.uint64)
            numbers = numbers >> 6
            at = bases.take(lanes) + numbers
            left = words.take(at)
            left &= ~bits
            words[at] = left
            empty = np.flatnonzero(left == 0)
            if not empty.size:
                return
            lanes, numbers = lanes.take(empty), numbers.take(empty)


def _lowest_bits(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The number of the lowest bit set in each word: the exponent of that bit as a floating-point number."""
    lowest = words & (~words + _ONE)
    exponents: NDArray[np.int64] = lowest.astype(np.float64).view(np.int64)
    exponents >>= _EXPONENT
    exponents -= _EXPONENT_OF_ONE
    return exponents
