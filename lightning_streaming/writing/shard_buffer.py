"""The samples of one shard, gathered back to back in memory that later shards use again."""

from __future__ import annotations

import mmap
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FIRST_ROOM = 2**16
_HUGE_PAGES_FROM = 2**22
"""Room from which pages of 2 MB are asked for; less would be mostly empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSamples:
    """Samples as bytes, to be looked at while their buffer lends them."""

    data: memoryview
    """All of them, back to back; of unsigned bytes."""
    ends: NDArray[np.int64]
    """Where each ends in the data; of shape (samples,)."""
    memory: mmap.mmap
    """What the data begins; the rest is room."""

    def __len__(self) -> int:
        return len(self.ends)

    def behind(self, head: bytes) -> bytes | memoryview:
        """All of them behind ``head``, in one piece. They are moved to where it ends: ``data`` is void afterwards."""
        size = len(head) + len(self.data)
        if size > len(self.memory):
            return b"".join((head, self.data))
        self.memory.move(len(head), 0, len(self.data))
        self.memory[: len(head)] = head
        return memoryview(self.memory)[:size]


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
        f"the system refuses {size} bytes of memory to gather a shard in; choose a smaller size_limit or max_workers, "
        "or have fewer writers at a time"
    )
