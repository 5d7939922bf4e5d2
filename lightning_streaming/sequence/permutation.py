"""Keyed permutations of any size, at random access, and the keys that identify a permutation.

A Feistel network over two halves ``Z_a x Z_b``: an index is split into a left half below ``a`` and a right half below
``b``, and in each round one half is rotated by a hash of the other. That can be undone, so the network permutes
``[0, a * b)`` for any hash. Sizes ``a`` and ``b`` near the square root leave less than ``a`` indexes outside the
requested size; these pass through the network again until they are inside (cycle walking), which gives a permutation of
exactly that size. The method is from Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002); here
it serves to mix, not to hide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_SIZE = 2**60
"""Halves of larger sizes would not fit the 32-bit arithmetic below."""

_ROUNDS = 6
_SMALL_SIZE = 1024
_SMALL_ROUNDS = 32
"""Rounds for sizes below ``_SMALL_SIZE``: the smaller a half, the less a hash of it distinguishes two indexes."""

_HALF_BITS = np.uint64(32)
_SPREAD = np.uint32(0x9E3779B1)
_FIRST_SHIFT, _FIRST_FACTOR = np.uint32(16), np.uint32(0x85EBCA6B)
_SECOND_SHIFT, _SECOND_FACTOR = np.uint32(13), np.uint32(0xC2B2AE35)


class Permutations:
    """Permutations of a table of sizes, as many of each as there are keys.

    Args:
        sizes: Each from 0 to :data:`LARGEST_SIZE`; a size of 0 has no index.
    """

    def __init__(self, sizes: NDArray[np.int64]) -> None:
        self._sizes = sizes
        self._lefts, self._rights = _halves(sizes)
        self._some_small = bool(((sizes > 0) & (sizes < _SMALL_SIZE)).any())

    def permuted(
        self, entries: NDArray[np.int64], indexes: NDArray[np.int64], keys: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """Return the image of each index in the permutation of its size and key.

        Args:
            entries: The size of each index, as an entry of the table, in one dimension.
            indexes: Indexes in ``[0, size)``, of the same shape.
            keys: The key of each index, of the same shape.

        Returns:
            Indexes of the same shape, each in ``[0, size)``.
        """
        small = self._sizes.take(entries) < _SMALL_SIZE if self._some_small else np.zeros(0, np.bool_)
        if not small.any():
            return self._walked(entries, indexes, keys, _ROUNDS)
        out = np.empty_like(indexes)
        for lanes, rounds in ((np.flatnonzero(small), _SMALL_ROUNDS), (np.flatnonzero(~small), _ROUNDS)):
            if lanes.size:
                out[lanes] = self._walked(entries[lanes], indexes[lanes], keys[lanes], rounds)
        return out

    def _walked(
        self, entries: NDArray[np.int64], indexes: NDArray[np.int64], keys: NDArray[np.uint64], rounds: int
    ) -> NDArray[np.int64]:
        """Pass indexes through the network until all are inside their sizes."""
        out = _network(indexes, self._lefts.take(entries), self._rights.take(entries), keys, rounds)
        outside = np.flatnonzero(out >= self._sizes.take(entries))
        if outside.size:
            out[outside] = self._walked(entries[outside], out[outside], keys[outside], rounds)
        return out


class Permutation:
    """A single permutation, with the rotations of its halves in a table: faster for many indexes.

    Args:
        size: From 1 to :data:`LARGEST_SIZE`.
        key: The key of the permutation.
    """

    def __init__(self, size: int, key: np.uint64) -> None:
        self._size = size
        lefts, rights = _halves(np.asarray([size]))
        (self._left,), (self._right,) = lefts.astype(np.uint32), rights.astype(np.uint32)
        # 4 bytes if they hold all results of the network, which takes half of the time.
        self._wide = np.dtype(np.uint32 if int(lefts[0] * rights[0]) < 1 << 32 else np.uint64)
        tweak, step = (of.astype(np.uint32) for of in (np.asarray([key]), np.asarray([key]) >> _HALF_BITS))
        rounds = np.arange(_SMALL_ROUNDS if size < _SMALL_SIZE else _ROUNDS, dtype=np.uint32)
        tweaks = (tweak + rounds * (step | np.uint32(1)))[:, np.newaxis]
        every_left, every_right = (
            np.tile(np.arange(half, dtype=np.uint32), (len(rounds) // 2, 1)) for half in (self._left, self._right)
        )
        self._left_turns = _scaled(_hashed(every_right, tweaks[::2]), lefts)
        self._right_turns = _scaled(_hashed(every_left, tweaks[1::2]), rights)

    def permuted(self, indexes: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
        """Return the image of each index: see :meth:`Permutations.permuted`."""
        out = self._once(indexes.astype(self._wide))
        outside = np.flatnonzero(out >= self._size)
        while outside.size:
            out[outside] = self._once(out[outside])
            outside = outside[out[outside] >= self._size]
        return out

    def _once(self, indexes: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
        left, right = (half.astype(np.uint32) for half in np.divmod(indexes, self._wide.type(self._right)))
        for left_turns, right_turns in zip(self._left_turns, self._right_turns, strict=True):
            left += left_turns.take(right)
            np.minimum(left, left - self._left, out=left)
            right += right_turns.take(left)
            np.minimum(right, right - self._right, out=right)
        out: NDArray[np.integer[Any]] = left.astype(self._wide)
        out *= self._wide.type(self._right)
        out += right
        return out


def _halves(sizes: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return two factors near the square root, whose product reaches the size and exceeds it by less than the first.

    The first is even: a rotation of an odd number of elements is always an even permutation, so that with two odd
    factors half of all permutations would never occur.
    """
    lefts = np.maximum(np.ceil(np.sqrt(sizes) / 2).astype(np.int64) * 2, 2)
    rights = np.maximum(-(-sizes // lefts), 1)
    return lefts.astype(np.uint64), rights.astype(np.uint64)


def _network(
    indexes: NDArray[np.int64],
    lefts: NDArray[np.uint64],
    rights: NDArray[np.uint64],
    keys: NDArray[np.uint64],
    rounds: int,
) -> NDArray[np.int64]:
    """Pass each index once through the network over ``Z_lefts x Z_rights``."""
    quotients, remainders = np.divmod(indexes.astype(np.uint64), rights)
    left, right = quotients.astype(np.uint32), remainders.astype(np.uint32)
    lefts_short, rights_short = lefts.astype(np.uint32), rights.astype(np.uint32)

    tweak = keys.astype(np.uint32)
    # Odd, so that no two rounds of a key are the same.
    tweak_step = (keys >> _HALF_BITS).astype(np.uint32) | np.uint32(1)
    for _ in range(rounds // 2):
        left = _turned(left, lefts_short, lefts, _hashed(right, tweak))
        tweak += tweak_step
        right = _turned(right, rights_short, rights, _hashed(left, tweak))
        tweak += tweak_step
    rights *= left
    rights += right
    return rights.view(np.int64)


def _hashed(half: NDArray[np.uint32], tweak: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return 32 bits, the high ones of which depend on all of a half and its tweak.

    This is the finaliser of MurmurHash3 (Appleby, public domain) without its last step, which only improves low bits.
    """
    mixed: NDArray[np.uint32] = half * _SPREAD
    mixed += tweak
    mixed ^= mixed >> _FIRST_SHIFT
    mixed *= _FIRST_FACTOR
    mixed ^= mixed >> _SECOND_SHIFT
    mixed *= _SECOND_FACTOR
    return mixed


def _turned(
    half: NDArray[np.uint32],
    modulus: NDArray[np.uint32],
    wide_modulus: NDArray[np.uint64],
    hashed: NDArray[np.uint32],
) -> NDArray[np.uint32]:
    """Add a hash, scaled to the modulus, to a half below the modulus; all modulo the modulus."""
    turned = _scaled(hashed, wide_modulus)
    turned += half
    # For a sum below the modulus the difference wraps around to a large number.
    wrapped: NDArray[np.uint32] = np.minimum(turned, turned - modulus)
    return wrapped


def _scaled(hashed: NDArray[np.uint32], wide_modulus: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return hashes as numbers below a modulus."""
    scaled = hashed.astype(np.uint64)
    scaled *= wide_modulus
    scaled >>= _HALF_BITS
    return scaled.astype(np.uint32)


_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST_KEY_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_KEY_FACTOR = np.uint64(0x94D049BB133111EB)


def drawn_keys(generator: np.random.Generator, count: int) -> NDArray[np.uint64]:
    """Draw keys, each of 64 random bits."""
    return generator.integers(2**64, size=count, dtype=np.uint64)


def numbered_keys(keys: NDArray[np.uint64], numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a separate key for every number, derived from one key; nothing is stored.

    This is the generator SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014),
    started at the key: its output of that number.

    Args:
        keys: Keys in one dimension, equal or not.
        numbers: Numbers from 0 on, of the same shape.
    """
    state: NDArray[np.uint64] = numbers.astype(np.uint64) + np.uint64(1)
    state *= _STEP
    state += keys
    state ^= state >> np.uint64(30)
    state *= _FIRST_KEY_FACTOR
    state ^= state >> np.uint64(27)
    state *= _SECOND_KEY_FACTOR
    state ^= state >> np.uint64(31)
    return state
