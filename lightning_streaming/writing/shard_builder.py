"""Gathers encoded samples in memory that is used again, and says where one shard ends and the next begins."""

from __future__ import annotations

import mmap
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import MAX_RAW_BYTES
from lightning_streaming.formats.mds.shard import check_shard_bytes
from lightning_streaming.writing.shard_encoders import EncodedSamples, ShardEncoder

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FIRST_ROOM = 2**16
_HUGE_PAGES_FROM = 2**22
"""Room from which pages of 2 MB are asked for; less would be mostly empty."""
_SMALLEST_KEPT = 2**16


class ShardBuilder:
    """Gathers encoded samples, and says when the next would pass the limit."""

    def __init__(self, encoder: ShardEncoder, *, number: int = 0) -> None:
        """Begin with an empty shard.

        Args:
            encoder: What the shards have in common.
            number: The shard that is gathered first.
        """
        self.encoder = encoder
        self.number = number
        """The shard that is gathered."""
        self._size_limit = encoder.settings.size_limit
        self._expected = self._size_limit or MAX_RAW_BYTES
        self._gathered = ShardBuffer(self._expected)
        self._spare: deque[ShardBuffer] = deque()
        size_of_none = encoder.raw_bytes(0, 0)
        self._size_of_one = encoder.raw_bytes(1, 0) - size_of_none  # beside its bytes
        most = MAX_RAW_BYTES - encoder.uncounted_bytes
        self._unquestioned = (most if self._size_limit is None else min(self._size_limit, most)) - size_of_none

    @property
    def has_samples(self) -> bool:
        """Whether something is gathered."""
        return len(self._gathered) > 0

    def add(self, parts: Sequence[Buffer]) -> bool:
        """Add an encoded sample, in parts, which are copied. If it raises, the sample was not added.

        Returns:
            Whether it was added; if not, the shard ends before it: it goes into what :meth:`following` gives.

        Raises:
            ConfigError: The shard would have 4 GiB or more, or the system has no memory for it.
        """
        return self._gathered.append(parts, self._unquestioned, self._size_of_one) or self._add_large(parts)

    def following(self, parts: Sequence[Buffer]) -> ShardBuffer:
        """What comes after the shard that is gathered: its first sample. Nothing is changed yet."""
        following = self._spare.pop() if self._spare else ShardBuffer(self._expected)
        following.append(parts)
        return following

    def cut(self, following: ShardBuffer) -> ShardBuffer:
        """Go on with what :meth:`following` gave.

        Returns:
            The samples of the shard before. They are none where a dataset's very first sample is larger than the limit:
            the original writer stores an empty shard 0.
        """
        gathered, self._gathered = self._gathered, following
        self.number += 1
        return gathered

    def last(self) -> ShardBuffer:
        """The samples gathered so far, to be the last shard; nothing may be added any more."""
        return self._gathered

    def use_again(self, stored: ShardBuffer) -> None:
        """Take back what was given away, once it is stored; in any thread."""
        if stored.room <= max(2 * self._expected, _SMALLEST_KEPT):  # else a huge sample was in it
            stored.clear()
            self._spare.append(stored)

    def _add_large(self, parts: Sequence[Buffer]) -> bool:
        """Add a sample that passes the limit, if it must be alone in its shard, or say that the shard ends before."""
        data_bytes = count_bytes(parts)
        size = self.encoder.raw_bytes(len(self._gathered) + 1, self._gathered.num_bytes + data_bytes)
        is_cut = self._size_limit is not None and size > self._size_limit and (self.has_samples or self.number == 0)
        if is_cut:
            size = self.encoder.raw_bytes(1, data_bytes)
        check_shard_bytes(size + self.encoder.uncounted_bytes)
        return not is_cut and self._gathered.append(parts)


class ShardBuffer:
    """Takes the bytes of samples, each copied once.

    To touch memory for the first time costs more than to fill it, because of the page fault every 4 KiB. So memory is
    asked for in huge pages, where the system has them, and :meth:`clear` keeps it for the next shard.
    """

    def __init__(self, expected: int = 0) -> None:
        """Take little memory; more as samples come.

        Args:
            expected: Bytes that may well come. Up to there the room is doubled when it is full, and no more is made
                than what is needed beyond.
        """
        self._expected = expected
        self._memory = _first_memory()
        self._ends = array("Q")

    def __len__(self) -> int:
        """Samples that it holds."""
        return len(self._ends)

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples."""
        return self._ends[-1] if self._ends else 0

    @property
    def room(self) -> int:
        """Bytes that it could hold, and that may have been touched."""
        return len(self._memory)

    def append(self, parts: Sequence[Buffer], most: int = sys.maxsize, each: int = 0) -> bool:
        """Add a sample, whole or not at all, if so much may be here. If it raises, the sample is not here.

        Args:
            parts: What it is made of; contiguous in memory, and of any type of values.
            most: Bytes that all samples may have.
            each: Bytes that count for each beside its own.

        Returns:
            Whether it was added.

        Raises:
            ConfigError: The system has no memory for it.
        """
        ends = self._ends
        count = len(ends)
        try:
            memory = self._memory
            memory.seek(ends[-1] if count else 0)  # an interrupted one may have left it anywhere
            try:
                for part in parts:
                    memory.write(part)
            except ValueError:  # is how a map says that there is no room
                if not self._make_room(parts, most - each * (count + 1)):
                    return False
            stop = self._memory.tell()
            if stop + each * (count + 1) > most:
                return False
            ends.append(stop)
        except BaseException:  # of a signal, which may be noticed as late as when the last call returns
            del ends[count:]
            raise
        return True

    @contextmanager
    def samples(self) -> Iterator[EncodedSamples]:
        """Lend what is gathered. In the block nothing may be added."""
        with memoryview(self._memory)[: self.num_bytes] as data:
            yield EncodedSamples(data=data, ends=np.array(self._ends, np.int64), memory=self._memory)

    def clear(self) -> None:
        """Hold no samples; keep the memory."""
        del self._ends[:]

    def _make_room(self, parts: Sequence[Buffer], most: int) -> bool:
        """Write a sample for which there was no room, unless it passes the limit, which is seen before it is copied."""
        needed = self.num_bytes + count_bytes(parts)
        if needed > most:
            return False
        if needed > self.room:
            self._memory = _grown(self._memory, self.num_bytes, needed, min(2 * self.room, self._expected))
        self._memory.seek(self.num_bytes)
        for part in parts:
            self._memory.write(part)
        return True


def count_bytes(parts: Sequence[Buffer]) -> int:
    """Bytes of a sample."""
    return sum(memoryview(part).nbytes for part in parts)


def _grown(memory: mmap.mmap, used: int, needed: int, wished: int) -> mmap.mmap:
    """Memory with more room: as much as is wished for, or as is needed where that is refused."""
    for size in sorted({needed, max(needed, wished)}, reverse=True):
        with suppress(OSError, MemoryError):
            return _resized(memory, used, size)
    raise _refused(needed)


def _resized(memory: mmap.mmap, used: int, size: int) -> mmap.mmap:
    try:
        memory.resize(size)  # its pages get other addresses; nothing is copied
    except SystemError:  # the system cannot do that
        larger = _mapped(size)
        with memoryview(memory)[:used] as data:
            larger.write(data)
        return larger
    _ask_for_huge_pages(memory)
    return memory


def _first_memory() -> mmap.mmap:
    try:
        return _mapped(_FIRST_ROOM)
    except (OSError, MemoryError):
        raise _refused(_FIRST_ROOM) from None


def _mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _ask_for_huge_pages(memory)
    return memory


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE") and len(memory) >= _HUGE_PAGES_FROM:
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def _refused(size: int) -> ConfigError:
    return ConfigError(
        f"the system refuses {size} bytes of memory to gather a shard in",
        hint="choose a smaller size_limit or max_workers, or have fewer writers at a time",
        option="size_limit",
    )
