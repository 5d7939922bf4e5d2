"""Best fit once more, in code that numba compiles: the same packs as ``best_fit``, sooner.

What is compiled is :func:`fill_windows`, which is plain Python too. For each window it is known which rooms there are,
one bit for each; which words of these bits have any, in words of their own; and so on up to a single word. So the least
room that is enough takes a step or two for each level. The packs of a room are a chain, the last to come first. Packs
that are not begun yet are those with all room, lowest number first. All numbers are whole and signed, with 32 bits to a
word, because numba makes a floating-point number of what is signed and what is not together.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import MissingDependencyError

Fill = Callable[[NDArray[np.int32], int], NDArray[np.uint16]]
"""What ``best_fit.fill_windows_plainly`` is."""
_WORD_BITS = 5
_POWERS_APART = 37
"""The powers of two below 2**32 leave different rests when divided by it: so the rest tells which power it is."""
_BIT_NUMBERS = np.zeros(_POWERS_APART, np.int64)
_BIT_NUMBERS[[2**bit % _POWERS_APART for bit in range(1 << _WORD_BITS)]] = np.arange(1 << _WORD_BITS)
_SIGNATURE = "void(int32[:,::1], int64, uint16[:,::1], int64[::1], int64[::1], int32[::1], int32[::1], int64[::1])"
"""Of :func:`fill_windows`: so it is compiled at once, and not by whichever threads come first."""


def has_compiler() -> bool:
    """Whether numba is installed; it is not imported."""
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


def filled_by(filling: Callable[..., None]) -> Fill:
    """The same as ``best_fit.fill_windows_plainly``, by :func:`fill_windows` or what was compiled of it."""

    def fill(lengths: NDArray[np.int32], capacity: int) -> NDArray[np.uint16]:
        packs = np.zeros(lengths.shape, np.uint16)
        sizes = [(capacity >> _WORD_BITS) + 1]
        while sizes[-1] > 1:
            sizes.append((sizes[-1] >> _WORD_BITS) + 1)
        levels = np.cumsum([0, *sizes], dtype=np.int64)
        words = np.zeros(levels[-1], np.int64)
        first_packs = np.zeros(capacity + 1, np.int32)
        next_packs = np.zeros(lengths.shape[1], np.int32)
        filling(lengths, capacity, packs, words, levels[:-1], first_packs, next_packs, _BIT_NUMBERS)
        return packs

    return fill


def fill_windows(
    lengths: Any, capacity: Any, packs: Any, words: Any, levels: Any, first_packs: Any, next_packs: Any, bits: Any
) -> None:
    """Fill windows one after another; ``words`` of all levels lie one after another from ``levels`` on."""
    num_documents = lengths.shape[1]
    for window in range(lengths.shape[0]):
        words[:] = 0
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
            while word == 0:  # up, until a word has a number that is not below
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
            number = room - length
            next_packs[pack] = first_packs[number] if words[number >> 5] >> (number & 31) & 1 else pack
            first_packs[number] = pack
            for level in range(len(levels)):
                words[levels[level] + (number >> 5)] |= 1 << (number & 31)
                number >>= 5
