"""The samples of one shard, gathered back to back in memory that later shards use again."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSamples:
    """Samples as bytes, to be looked at while their buffer lends them."""

    data: memoryview
    """All of them, back to back; of unsigned bytes."""
    ends: NDArray[np.int64]
    """Where each ends in the data; of shape (samples,)."""

    def __len__(self) -> int:
        return len(self.ends)


class ShardBuffer:
    """Takes the bytes of samples, each copied once.

    To touch memory for the first time costs more than to fill it, because of the page fault every 4 KiB. So memory is
    asked for in huge pages, where the system has them, and :meth:`clear` keeps it for the next shard.
    """

    def __init__(self, room: int) -> None:
        """Set addresses aside; memory is taken as it is filled.

        Args:
            room: Bytes that are expected. More may come.
        """
        self._memory = _memory(max(room, mmap.PAGESIZE))
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

    def append(self, parts: Sequence[Buffer]) -> int:
        """Add a sample, whole or not at all.

        Args:
            parts: What it is made of; contiguous in memory, and of any type of values.

        Returns:
            Bytes of all samples.
        """
        try:
            return self._write(parts)
        except ValueError:  # is how a map says that there is no room
            self._make_room(sum(memoryview(part).nbytes for part in parts))
            return self._write(parts)

    def pop(self) -> bytes:
        """Take the last sample out."""
        stop = self._ends.pop()
        start = self.num_bytes
        self._memory.seek(start)
        return self._memory[start:stop]

    @contextmanager
    def samples(self) -> Iterator[EncodedSamples]:
        """Lend what is gathered. In the block nothing may be added."""
        with memoryview(self._memory)[: self.num_bytes] as data:
            yield EncodedSamples(data=data, ends=np.array(self._ends, np.int64))

    def clear(self) -> None:
        """Hold no samples; keep the memory."""
        self._memory.seek(0)
        del self._ends[:]

    def _write(self, parts: Sequence[Buffer]) -> int:
        memory = self._memory
        try:
            for part in parts:
                memory.write(part)
            stop = memory.tell()
            self._ends.append(stop)
        except BaseException:
            memory.seek(self.num_bytes)
            raise
        return stop

    def _make_room(self, more: int) -> None:
        memory = _memory(max(self.num_bytes + more, 2 * self.room))
        with memoryview(self._memory)[: self.num_bytes] as data:
            memory.write(data)
        self._memory = memory


def _memory(num_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there are no {num_bytes} bytes of memory to gather a shard in") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
