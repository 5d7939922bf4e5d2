"""Which samples of a stream are read: what a user asks for, and the outcome as one bit for each sample.

SplitSlice       the part of a split like "train[:98%]"
SelectionRequest what is asked of one stream: where, split, split_by, select
Selection        the outcome: a bitmap that counts, and finds the n-th selected sample at once

A dataset numbers the samples that are selected, so that ids, lengths and orders are those of a smaller dataset. Keys of
samples stay those of the stored data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError
from lightning_streaming.loading.column_functions import WHERE, function_name
from lightning_streaming.units import store_whole

Where = str | Callable[..., Any]
"""A condition: SQL over the columns, or a function whose parameters are named like columns."""
Select = Sequence[int] | Sequence[bool] | str | os.PathLike[str] | NDArray[Any]
"""Numbers of samples of a stream, or a truth value for each; or the ``.npy`` file that holds them."""

_VERSION = 2
"""Of how conditions are evaluated; part of the name of what is kept. 2: the time zone of SQL is pinned."""
_SPLIT = re.compile(r"(?P<name>[^\[\]]*)(\[(?P<start>[^:\[\]]*):(?P<stop>[^:\[\]]*)\])?")
_PERCENT = re.compile(r"(\d{1,9}(\.\d{1,99})?)%")
_BARE_SLICE = re.compile(r"(?P<slice>[\d.]+%:[\d.%]*|:[\d.]+%|[\d.]+%|^[\d.]*:[\d.]*)$")
"""What a slice without its brackets ends with; names of directories may have colons and percent signs elsewhere."""
_BLOCK_WORDS = 8
_BLOCK = 64 * _BLOCK_WORDS
"""Samples that are counted together: 8 bytes for each so many."""
_COUNTED_AT_ONCE = 1 << 15
_MARKED = 2048
"""Of so many selected samples one is marked by its block."""
_AT_ONCE = 1 << 16


class SplitSlice(NamedTuple):
    """A part of a stream, by hash: the samples whose hash, as a fraction of all there are, lies in [start, stop)."""

    start: Fraction
    stop: Fraction

    def __str__(self) -> str:
        return f"[{_percent(self.start)}:{_percent(self.stop)}]"

    def thresholds(self) -> tuple[int, int]:
        """The same range as whole numbers in [0, 2**64]. Slices that share a border share its threshold."""
        return int(self.start * 2**64), int(self.stop * 2**64)


def parse_split(split: str | None) -> tuple[str | None, SplitSlice | None]:
    """The subdirectory that a split names, and its slice.

    >>> parse_split("train"), parse_split("[98%:]")[1] == SplitSlice(Fraction(98, 100), Fraction(1))
    (('train', None), True)

    Raises:
        ConfigError: It is written in another way.
    """
    if split is not None:
        _check_text("split", split, "a subdirectory like 'train', or a slice like '[:98%]'")
    if split is None or "[" not in split:
        if split is not None and (bare := _BARE_SLICE.search(split)):
            slice_of = bare["slice"] if ":" in bare["slice"] else f":{bare['slice']}"
            raise ConfigError(
                f"split={split!r} would be a subdirectory; a slice stands in brackets: "
                f"'{split[: bare.start('slice')]}[{slice_of}]'"
            )
        return split, None
    found = _SPLIT.fullmatch(split)
    borders = None if found is None else [_border(found[side], at) for side, at in (("start", 0), ("stop", 1))]
    if found is None or borders is None or None in borders:
        raise ConfigError(
            f"split={split!r} must be a subdirectory, a slice in percent, or both, like 'train', '[:98%]' or "
            "'train[10%:20%]'; slices are drawn by hash, so they cannot be told in samples"
        )
    start, stop = (Fraction(border or 0) for border in borders)
    if not 0 <= start < stop <= 1:
        raise ConfigError(
            f"split={split!r} goes from {_percent(start)} to {_percent(stop)}; a slice must begin before it ends, "
            "between 0% and 100%"
        )
    return found["name"] or None, SplitSlice(start, stop)


def _check_text(option: str, value: object, expected: str) -> None:
    """Raise ConfigError for anything that is not a text, or that no file name and no program could hold."""
    try:
        is_text = isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        is_text = False
    if not is_text:
        raise ConfigError(f"{option} must be {expected}, but got {value!r}")


def _border(text: str, default: int) -> Fraction | None:
    if not text.strip():
        return Fraction(default)
    found = _PERCENT.fullmatch(text.strip())
    return None if found is None else Fraction(found[1]) / 100


def _percent(part: Fraction) -> str:
    return f"{float(100 * part):g}%"


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionOptions:
    """Which samples of a stream are read, as a user writes it; None for what every stream of the dataset does.

    Args:
        split: Subdirectory of both ``remote`` and ``local``, like "train"; or the part of it that is read, drawn by
            hash, like "train[:98%]" or "[98%:]". Such parts stay what they are when data is appended.
        where: Which samples are read: a condition in SQL over columns, like "score >= 0.8 and lang == 'en'", or, in
            Python only, a function whose parameters are named like columns. "" for all. Evaluated once; see
            docs/mixtures.md.
        split_by: Column whose value decides in which part of a split a sample is, so that samples of one value stay
            together. "": each sample is drawn by itself.
        split_seed: Key of the hash that draws the parts.
        select: Numbers of the samples that are read, counted in the stream; a truth value for each; or a ``.npy`` file
            of either.
    """

    split: str | None = None
    where: Where | None = None
    split_by: str | None = None
    split_seed: int | None = None
    select: Select | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionRequest:
    """Which samples of one stream are wanted: those that meet every condition.

    Raises:
        ConfigError: A condition cannot be one, or one lacks its other half.
    """

    where: Where | None = None
    part: SplitSlice | None = None
    split_by: str | None = None
    split_seed: int = 0
    select: Select | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.where, str) and not self.where.strip():
            raise ConfigError(
                'where is empty; give a condition over columns, like where="score >= 0.8", or leave it out'
            )
        if self.where is not None and not callable(self.where):
            _check_text("where", self.where, 'a condition in SQL, like "score >= 0.8", or a function of columns')
        if self.split_by is not None and (not isinstance(self.split_by, str) or not self.split_by):
            raise ConfigError(f"split_by must be the name of a column, but is {self.split_by!r}")
        store_whole(self, "split_seed", -(2**63), 2**63 - 1)
        if self.select is not None and not isinstance(self.select, str):
            as_numbers(self.select)

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return self.where is None and self.part is None and self.select is None

    def in_words(self) -> str:
        """The conditions as a message shows them."""
        where = repr(self.where) if isinstance(self.where, str) else function_name(self.where)
        told = (
            None if self.where is None else f"where={where}",
            None if self.part is None else f"split={str(self.part)!r}",
            f"split_by={self.split_by!r}" if self.part is not None and self.split_by is not None else None,
            None if self.select is None else "select",
        )
        return ", ".join(one for one in told if one)

    def key(self, data_version: str, selected: NDArray[np.bool_] | NDArray[np.int64] | None) -> str:
        """A name of the outcome: 32 hexadecimal digits.

        Args:
            data_version: Of the stream; see :meth:`ShardCache.data_version`.
            selected: What :attr:`select` holds, read.
        """
        where = self.where if self.where is None or isinstance(self.where, str) else WHERE.facts(self.where)
        part = (
            None if self.part is None else [str(self.part.start), str(self.part.stop), self.split_by, self.split_seed]
        )
        chosen = None if selected is None else [str(selected.dtype), hashlib.blake2b(selected.tobytes()).hexdigest()]
        facts = json.dumps(["selection", _VERSION, data_version, where, part, chosen])
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def as_numbers(select: Select) -> NDArray[np.bool_] | NDArray[np.int64]:
    """Numbers of samples, or truth values, as an array.

    Raises:
        ConfigError: They are neither.
    """
    try:
        values = np.asarray(select)
    except ValueError:  # lists of different lengths
        values = np.empty((0, 0))
    if values.dtype == np.bool_ and values.ndim == 1:
        return values.astype(np.bool_)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise ConfigError(
            "select must be a list of sample numbers, or a truth value for each sample, but has shape "
            f"{values.shape} and dtype {values.dtype}"
        )
    return values.astype(np.int64)


class Selection:
    """Which samples of a stream are selected.

    Args:
        bits: One bit for each stored sample, the first in the lowest bit of the first byte; of shape (bytes,), where
            bytes is a multiple of 64, and zero beyond the samples. May be a file's, mapped into memory.
        num_stored: Samples of the stream.
        key: What :meth:`SelectionRequest.key` calls it; empty for none.
        kept_at: The file that is mapped; None for bits in memory.
    """

    def __init__(self, bits: NDArray[np.uint8], num_stored: int, key: str = "", kept_at: Path | None = None) -> None:
        self.num_stored = num_stored
        self.key = key
        self.kept_at = kept_at
        self._blocks = bits.view(np.uint64).reshape(-1, _BLOCK_WORDS)
        self._before = np.zeros(len(self._blocks) + 1, np.int64)
        for start in range(0, len(self._blocks), _COUNTED_AT_ONCE):
            blocks = self._blocks[start : start + _COUNTED_AT_ONCE]
            _ones(blocks).sum(axis=1, dtype=np.int64, out=self._before[start + 1 : start + 1 + len(blocks)])
        np.cumsum(self._before, out=self._before)
        # The blocks that hold every so many-th one, and the last block: between two of them others are looked for.
        marks = np.arange(0, len(self), _MARKED)
        found = np.searchsorted(self._before, marks, side="right") - 1
        self._marks: NDArray[np.int64] = np.append(found, len(self._blocks) - 1)

    @classmethod
    def whole(cls, num_stored: int) -> Selection:
        """All samples of a stream."""
        bits = np.zeros(packed_bytes(num_stored), np.uint8)
        bits[: num_stored // 8] = 0xFF
        if num_stored % 8:  # else there may be no byte more
            bits[num_stored // 8] = (1 << num_stored % 8) - 1
        return cls(bits, num_stored)

    def __len__(self) -> int:
        """Selected samples."""
        return int(self._before[-1])

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits: a name of the samples that are selected."""
        return hashlib.blake2b(self._blocks.reshape(-1).data, digest_size=8).hexdigest()

    def before(self, stored: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many are selected of those before each sample.

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
        """Whether each of these samples is selected."""
        last = (self._blocks.reshape(-1)[stored // 64] >> (stored % 64).astype(np.uint64)) & np.uint64(1)
        found: NDArray[np.bool_] = last == 1
        return found

    def stored(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The stored samples that are the n-th selected ones.

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
        """The blocks that hold the n-th selected samples: those with the most before them that are not too many."""
        marks = numbers // _MARKED
        first, last = self._marks[marks], self._marks[marks + 1]
        widest = int((last - first).max(initial=0))
        for _ in range(widest.bit_length()):
            middle = (first + last + 1) >> 1
            fits = self._before[middle] <= numbers
            first, last = np.where(fits, middle, first), np.where(fits, last, middle - 1)
        return first

    def head(self, num_stored: int) -> Selection:
        """What is selected of the first ``num_stored`` samples; its bits are a copy."""
        bits = self._blocks.reshape(-1).view(np.uint8)[: packed_bytes(num_stored)].copy()
        whole, left = divmod(num_stored, 8)
        if left:
            bits[whole] &= (1 << left) - 1
        bits[whole + bool(left) :] = 0
        return Selection(bits, num_stored)

    def without(self, stored: NDArray[np.int64]) -> Selection:
        """What is selected but for these samples; its bits are a copy."""
        bits = self._blocks.reshape(-1).view(np.uint8).copy()
        np.bitwise_and.at(bits, stored // 8, ~(np.uint8(1) << (stored % 8).astype(np.uint8)))
        return Selection(bits, self.num_stored)

    def per_shard(self, samples_per_shard: NDArray[np.int64]) -> NDArray[np.int64]:
        """Selected samples of each shard."""
        stops = np.cumsum(samples_per_shard)
        before = [self.before(stops[at : at + _AT_ONCE]) for at in range(0, len(stops), _AT_ONCE)]  # a block for each
        return np.diff(np.concatenate([np.zeros(1, np.int64), *before]))


def pack(wanted: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The bits of a :class:`Selection` from a truth value for each sample."""
    bits = np.zeros(packed_bytes(len(wanted)), np.uint8)
    packed = np.packbits(wanted, bitorder="little")
    bits[: len(packed)] = packed
    return bits


def packed_bytes(num_samples: int) -> int:
    """Bytes of the bits of so many samples, filled up to whole blocks."""
    return max(1, -(-num_samples // _BLOCK)) * (_BLOCK // 8)


def _nth_of_word(words: NDArray[np.uint64], left: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Which bit of each word is its n-th one, by arithmetic on its eight bytes at once (Vigna, 2008)."""
    twos = words - ((words >> np.uint64(1)) & _EVERY_BYTE * np.uint64(0x55))
    fours = (twos & _EVERY_BYTE * np.uint64(0x33)) + ((twos >> np.uint64(2)) & _EVERY_BYTE * np.uint64(0x33))
    ones = (fours + (fours >> np.uint64(4))) & _EVERY_BYTE * np.uint64(0x0F)
    counted = ones * _EVERY_BYTE  # in each byte the ones up to its end, at most 64
    # The top bit of a byte stays set where those are not enough.
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
"""Of each byte, which bit is its n-th one."""


def _ones(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """How many bits of each word are set."""
    counts: NDArray[np.uint8]
    if hasattr(np, "bitwise_count"):  # since numpy 2.0
        counts = np.bitwise_count(words)
    else:
        eight = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 8)
        counts = _ONES_OF_BYTE[eight].sum(axis=-1, dtype=np.uint8)
    return counts
