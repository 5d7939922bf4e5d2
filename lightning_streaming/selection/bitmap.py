"""Bitmap of the selected samples of a stream: counts them, and finds the n-th selected sample.

A dataset numbers only the selected samples, so ids, lengths and orders are those of a smaller dataset. Keys of
samples stay those of the stored data.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_BLOCK_WORDS = 8
_BLOCK = 64 * _BLOCK_WORDS
"""Samples per block; a running count of 8 bytes is stored for each block."""
_COUNTED_AT_ONCE = 1 << 15
_MARKED = 2048
"""Selected samples between two marks; a mark is the block of its sample."""
_AT_ONCE = 1 << 16


class Selection:
    """Selected samples of a stream.

    Args:
        bits: One bit for each stored sample, the first in the lowest bit of the first byte; of shape (bytes,), where
            bytes is a multiple of 64, and zero beyond the samples. May be a file's, mapped into memory.
        num_stored: Samples of the stream.
        key: Name of the selection, from :meth:`SelectionConfig.key`; empty for none.
        cached_at: The file that is mapped; None for bits in memory.
    """

    def __init__(self, bits: NDArray[np.uint8], num_stored: int, key: str = "", cached_at: Path | None = None) -> None:
        self.num_stored = num_stored
        self.key = key
        self.cached_at = cached_at
        self._blocks = bits.view(np.uint64).reshape(-1, _BLOCK_WORDS)
        self._before = np.zeros(len(self._blocks) + 1, np.int64)
        for start in range(0, len(self._blocks), _COUNTED_AT_ONCE):
            blocks = self._blocks[start : start + _COUNTED_AT_ONCE]
            _ones(blocks).sum(axis=1, dtype=np.int64, out=self._before[start + 1 : start + 1 + len(blocks)])
        np.cumsum(self._before, out=self._before)
        # Searches for other samples are limited to the blocks between two marks.
        marks = np.arange(0, len(self), _MARKED)
        marked = np.searchsorted(self._before, marks, side="right") - 1
        self._marks: NDArray[np.int64] = np.append(marked, len(self._blocks) - 1)

    @classmethod
    def whole(cls, num_stored: int) -> Selection:
        """Return a selection of all samples of a stream."""
        bits = np.zeros(bitmap_bytes(num_stored), np.uint8)
        bits[: num_stored // 8] = 0xFF
        if num_stored % 8:  # otherwise this byte may not exist
            bits[num_stored // 8] = (1 << num_stored % 8) - 1
        return cls(bits, num_stored)

    def __len__(self) -> int:
        """Return the number of selected samples."""
        return int(self._before[-1])

    @cached_property
    def digest(self) -> str:
        """Digest of the selected samples, 16 hexadecimal digits."""
        return hashlib.blake2b(self._blocks.reshape(-1).data, digest_size=8).hexdigest()

    def before(self, stored: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the selected samples before each sample.

        Args:
            stored: Numbers of samples in ``[0, num_stored]``.
        """
        blocks, within = np.divmod(stored, _BLOCK)
        inside = np.minimum(blocks, len(self._before) - 2)
        rows = self._blocks.take(inside, axis=0)
        bits = (within + (blocks - inside) * _BLOCK)[:, None] - 64 * np.arange(_BLOCK_WORDS)
        full = np.where(
            bits >= 64, ~np.uint64(0), (np.uint64(1) << np.clip(bits, 0, 63).astype(np.uint64)) - np.uint64(1)
        )
        before: NDArray[np.int64] = self._before[inside] + _ones(rows & full).sum(axis=1, dtype=np.int64)
        return before

    def has(self, stored: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each of these samples is selected."""
        last = (self._blocks.reshape(-1)[stored // 64] >> (stored % 64).astype(np.uint64)) & np.uint64(1)
        selected: NDArray[np.bool_] = last == 1
        return selected

    def stored(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the stored samples that are the n-th selected samples.

        Args:
            numbers: In ``[0, len(self))``.
        """
        blocks = self._block_of(numbers)
        left = (numbers - self._before[blocks]).astype(np.uint16)
        rows = self._blocks.take(blocks, axis=0)
        counted = _ones(rows).T.astype(np.uint16)
        words = np.zeros(len(numbers), np.int64)
        for word in range(_BLOCK_WORDS - 1):
            words += counted[word] <= left
            counted[word + 1] += counted[word]
        places = np.arange(len(numbers))
        left -= np.where(words > 0, counted[words - 1, places], np.uint16(0))
        return blocks * _BLOCK + words * 64 + _nth_of_word(rows[places, words], left.astype(np.uint64))

    def _block_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the blocks of the n-th selected samples by binary search between two marks."""
        marks = numbers // _MARKED
        first, last = self._marks[marks], self._marks[marks + 1]
        widest = int((last - first).max(initial=0))
        for _ in range(widest.bit_length()):
            middle = (first + last + 1) >> 1
            fits = self._before[middle] <= numbers
            first, last = np.where(fits, middle, first), np.where(fits, last, middle - 1)
        return first

    def head(self, num_stored: int) -> Selection:
        """Return the selection of the first ``num_stored`` samples; its bits are a copy."""
        bits = self._blocks.reshape(-1).view(np.uint8)[: bitmap_bytes(num_stored)].copy()
        whole, left = divmod(num_stored, 8)
        if left:
            bits[whole] &= (1 << left) - 1
        bits[whole + bool(left) :] = 0
        return Selection(bits, num_stored)

    def without(self, stored: NDArray[np.int64]) -> Selection:
        """Return the selection without these samples; its bits are a copy."""
        bits = self._blocks.reshape(-1).view(np.uint8).copy()
        np.bitwise_and.at(bits, stored // 8, ~(np.uint8(1) << (stored % 8).astype(np.uint8)))
        return Selection(bits, self.num_stored)

    def per_shard(self, samples_per_shard: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the selected samples of each shard."""
        stops = np.cumsum(samples_per_shard)
        before = [self.before(stops[at : at + _AT_ONCE]) for at in range(0, len(stops), _AT_ONCE)]  # a block for each
        return np.diff(np.concatenate([np.zeros(1, np.int64), *before]))


def bits_of(wanted: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return the bits of a :class:`Selection` from a truth value for each sample."""
    bits = np.zeros(bitmap_bytes(len(wanted)), np.uint8)
    filled = np.packbits(wanted, bitorder="little")
    bits[: len(filled)] = filled
    return bits


def bitmap_bytes(num_samples: int) -> int:
    """Return the size of a bitmap in bytes, padded to whole blocks."""
    return max(1, -(-num_samples // _BLOCK)) * (_BLOCK // 8)


def _nth_of_word(words: NDArray[np.uint64], left: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the position of the n-th set bit of each word, by arithmetic on its eight bytes at once (Vigna, 2008)."""
    twos = words - ((words >> np.uint64(1)) & _EVERY_BYTE * np.uint64(0x55))
    fours = (twos & _EVERY_BYTE * np.uint64(0x33)) + ((twos >> np.uint64(2)) & _EVERY_BYTE * np.uint64(0x33))
    ones = (fours + (fours >> np.uint64(4))) & _EVERY_BYTE * np.uint64(0x0F)
    counted = ones * _EVERY_BYTE  # in each byte the set bits up to its end, at most 64
    # The top bit of a byte stays set where these are too few.
    top = _EVERY_BYTE << np.uint64(7)
    too_few = (((left * _EVERY_BYTE) | top) - counted) & top
    shift = (((too_few >> np.uint64(7)) * _EVERY_BYTE) >> np.uint64(56)) << np.uint64(3)
    byte = (words >> shift) & np.uint64(0xFF)
    before = ((counted << np.uint64(8)) >> shift) & np.uint64(0xFF)
    bits: NDArray[np.int64] = shift.astype(np.int64) + _NTH_BIT[byte.astype(np.int64), (left - before).astype(np.int64)]
    return bits


_EVERY_BYTE = np.uint64(0x0101010101010101)
_ONES_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
_NTH_BIT = np.stack(
    [np.argsort(1 - np.unpackbits(np.uint8(byte), bitorder="little"), kind="stable") for byte in range(256)]
).astype(np.int64)
"""For each byte, the positions of its set bits."""


def _ones(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Count the set bits of each word."""
    counts: NDArray[np.uint8]
    if hasattr(np, "bitwise_count"):  # since numpy 2.0
        counts = np.bitwise_count(words)
    else:
        eight = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 8)
        counts = _ONES_OF_BYTE[eight].sum(axis=-1, dtype=np.uint8)
    return counts
