"""Where one shard ends and the next begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lightning_streaming.formats.index import MAX_RAW_BYTES
from lightning_streaming.formats.mds import check_shard_bytes
from lightning_streaming.writing.recipe import ShardRecipe
from lightning_streaming.writing.shard_buffer import ShardBuffer, count_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SMALLEST_KEPT = 2**16


class Cutter:
    """Gathers encoded samples, and says when the next would pass the limit."""

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
        self._expected = self._size_limit or MAX_RAW_BYTES
        self._gathered = ShardBuffer(self._expected)
        for data in samples:
            self._gathered.append((data,))
        self._spare: deque[ShardBuffer] = deque()
        size_of_none = recipe.raw_bytes(0, 0)
        self._size_of_one = recipe.raw_bytes(1, 0) - size_of_none  # beside its bytes
        most = MAX_RAW_BYTES - recipe.uncounted_bytes
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
        size = self.recipe.raw_bytes(len(self._gathered) + 1, self._gathered.num_bytes + data_bytes)
        is_cut = self._size_limit is not None and size > self._size_limit and (self.has_samples or self.number == 0)
        if is_cut:
            size = self.recipe.raw_bytes(1, data_bytes)
        check_shard_bytes(size + self.recipe.uncounted_bytes)
        return not is_cut and self._gathered.append(parts)
