"""Where one shard ends and the next begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lightning_streaming.formats.index import MAX_RAW_BYTES
from lightning_streaming.formats.mds import check_shard_bytes
from lightning_streaming.writing.recipe import ShardRecipe
from lightning_streaming.writing.shard_buffer import ShardBuffer

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SMALLEST_ROOM = 2**16
_LARGEST_FIRST_ROOM = 2**27
"""Systems may refuse to set more addresses aside than they have memory."""


class Cutter:
    """Gathers encoded samples, and gives them away when the next would pass the limit."""

    def __init__(self, recipe: ShardRecipe, *, number: int = 0, samples: Iterable[bytes] = ()) -> None:
        """Begin anywhere.

        Args:
            recipe: What the shards have in common.
            number: The shard that is gathered first.
            samples: What it has already.
        """
        self.recipe = recipe
        self.number = number
        """The shard that is gathered."""
        self._size_limit = recipe.settings.size_limit
        twice = 2 * (self._size_limit or MAX_RAW_BYTES)  # a full shard, and the sample that is too much
        self._room = min(max(twice, _SMALLEST_ROOM), _LARGEST_FIRST_ROOM)
        self._most_room = max(2 * twice, self._room)
        self._gathered = ShardBuffer(self._room)
        for data in samples:
            self._gathered.append((data,))
        self._spare: deque[ShardBuffer] = deque()
        self._size_of_none = recipe.raw_bytes(0, 0)
        self._size_of_one = recipe.raw_bytes(1, 0) - self._size_of_none  # beside its bytes
        most = MAX_RAW_BYTES - recipe.uncounted_bytes
        self._unquestioned = (most if self._size_limit is None else min(self._size_limit, most)) - self._size_of_none

    @property
    def has_samples(self) -> bool:
        """Whether something is gathered."""
        return len(self._gathered) > 0

    def add(self, parts: Sequence[Buffer]) -> ShardBuffer | None:
        """Add an encoded sample, in parts, which are copied.

        Returns:
            The samples of the shard before, if this one did not fit into it any more; None if it did. They are none
            where a dataset's very first sample is larger than the limit: the original writer stores an empty shard 0.

        Raises:
            ConfigError: The shard would have 4 GiB or more. The sample was not added.
        """
        gathered = self._gathered
        num_bytes = gathered.append(parts)
        if num_bytes + self._size_of_one * len(gathered) <= self._unquestioned:
            return None
        return self._cut(gathered.pop())

    def take(self) -> ShardBuffer:
        """The samples gathered so far; the next shard begins."""
        return self._replace(self._empty())

    def use_again(self, stored: ShardBuffer) -> None:
        """Take back what was given away, once it is stored; in any thread."""
        if stored.room <= self._most_room:  # else a huge sample was in it, and it would stay that large
            stored.clear()
            self._spare.append(stored)

    def _cut(self, data: bytes) -> ShardBuffer | None:
        """Add a sample that may be too much."""
        size = self.recipe.raw_bytes(len(self._gathered) + 1, self._gathered.num_bytes + len(data))
        is_cut = self._size_limit is not None and size > self._size_limit and (self.has_samples or self.number == 0)
        if is_cut:
            size = self.recipe.raw_bytes(1, len(data))
        check_shard_bytes(size + self.recipe.uncounted_bytes)
        if not is_cut:
            self._gathered.append((data,))
            return None
        following = self._empty()
        following.append((data,))  # first: should it fail, nothing is lost
        return self._replace(following)

    def _replace(self, following: ShardBuffer) -> ShardBuffer:
        gathered, self._gathered = self._gathered, following
        self.number += 1
        return gathered

    def _empty(self) -> ShardBuffer:
        return self._spare.pop() if self._spare else ShardBuffer(self._room)
