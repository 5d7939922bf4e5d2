"""Where one shard ends and the next begins."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_streaming.formats.index import MAX_RAW_BYTES
from lightning_streaming.formats.mds import check_shard_bytes
from lightning_streaming.writing.recipe import ShardRecipe


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
        self._samples = list(samples)
        self._size_of_none = recipe.raw_bytes(0, 0)
        self._size_of_one = recipe.raw_bytes(1, 0) - self._size_of_none  # beside its bytes
        self._size = recipe.raw_bytes(len(self._samples), sum(map(len, self._samples)))
        self._size_limit = recipe.settings.size_limit
        most = MAX_RAW_BYTES - recipe.uncounted_bytes
        self._unquestioned = most if self._size_limit is None else min(self._size_limit, most)

    @property
    def has_samples(self) -> bool:
        """Whether something is gathered."""
        return bool(self._samples)

    def add(self, data: bytes) -> list[bytes] | None:
        """Add an encoded sample.

        Returns:
            The samples of the shard before, if this one did not fit into it any more; None if it did. They are none
            where a dataset's very first sample is larger than the limit: the original writer stores an empty shard 0.

        Raises:
            ConfigError: The shard would have 4 GiB or more. The sample was not added.
        """
        size = self._size + self._size_of_one + len(data)
        before = None
        if size > self._unquestioned:
            is_cut = self._size_limit is not None and size > self._size_limit and (self.has_samples or self.number == 0)
            if is_cut:
                size = self._size_of_none + self._size_of_one + len(data)
            check_shard_bytes(size + self.recipe.uncounted_bytes)
            before = self.take() if is_cut else None
        self._samples.append(data)
        self._size = size
        return before

    def take(self) -> list[bytes]:
        """The samples gathered so far; the next shard begins."""
        samples, self._samples, self._size = self._samples, [], self._size_of_none
        self.number += 1
        return samples
