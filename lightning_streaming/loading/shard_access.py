"""Stored samples by id, and the shards they are in: a dataset without its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.loading.source import SampleSource

SampleIndex = int | slice | Sequence[Any] | NDArray[np.integer[Any]]
"""What a dataset may be asked for in brackets: an id in ``[-size, size)``; or a slice, list or array of such."""


class ShardAccess:
    """What the streams of a dataset hold; :class:`~lightning_streaming.StreamingDataset` gives it an order.

    Args:
        source: The shards of all streams.
        on_demand: Whether ``dataset[i]`` reads a sample by its bytes alone where its shard is not here.
    """

    def __init__(self, source: SampleSource, on_demand: bool) -> None:
        self._source = source
        self._on_demand = on_demand

    @property
    def size(self) -> int:
        """Samples of all streams before weighting: the range of ``dataset[i]``."""
        return self._source.catalog.num_samples

    @property
    def num_shards(self) -> int:
        """Shards of all streams."""
        return len(self._source.catalog.shards)

    @property
    def cache_usage(self) -> int:
        """Bytes that this node keeps of these streams, files on their way included."""
        return self._source.cache_usage()

    def get_item(self, sample_id: int, retry: int = 1) -> Any:
        """One sample, decoded: a dict of column name to value. To be overridden where samples are to be read otherwise.

        While it is read its shard cannot be evicted.

        Args:
            sample_id: In ``[-size, size)``.
            retry: How often to fetch its shard again if that turns out to be damaged on this node, or to have vanished.

        Raises:
            SampleIndexError: The id is out of range.
            FormatError: The shard or the sample is damaged.
            StorageError: The shard could not be fetched.
        """
        shard, index = self._source.catalog.find(sample_id)
        return self._source.read(shard, index, alone=self._on_demand, retry=retry)

    def __getitem__(self, index: SampleIndex) -> Any:
        """Samples by id, as :meth:`get_item` gives them; a list of ``self[i]`` for a slice, list or array.

        Args:
            index: What is asked for.

        Raises:
            SampleIndexError: An id is out of range.
            ConfigError: The index is of another type.
        """
        if isinstance(index, (int, np.integer)):
            return self.get_item(int(index))
        return self._listed(index)

    def prepare_shard(self, shard: int, blocking: bool = True) -> bool:
        """Have a shard on this node, for example in ``prepare_data``.

        Args:
            shard: Counted over all streams, in ``[0, num_shards)``.
            blocking: Whether to wait while another process fetches it, or for room.

        Returns:
            Whether it is here.

        Raises:
            SampleIndexError: There is no such shard.
            StorageError: It could not be fetched.
        """
        return self._source.fetch(self._checked(shard), wait=blocking)

    def evict_shard(self, shard: int) -> bool:
        """Remove what this node keeps of a shard, unless it is in use or was not fetched by us.

        Args:
            shard: Counted over all streams, in ``[0, num_shards)``.

        Returns:
            Whether files were removed.

        Raises:
            SampleIndexError: There is no such shard.
        """
        return self._source.evict(self._checked(shard))

    def evict_coldest_shard(self) -> int:
        """Remove the shard of these streams that was used longest ago and is not in use.

        Returns:
            Which, counted over all streams.

        Raises:
            ConfigError: None can be removed.
        """
        return self._source.evict_coldest()

    def _listed(self, index: slice | Sequence[Any] | NDArray[np.integer[Any]]) -> list[Any]:
        if not isinstance(index, (slice, list, np.ndarray)):
            raise ConfigError(f"a sample index must be an int, slice, list or array, but got {type(index).__name__}")
        ids = range(*index.indices(self.size)) if isinstance(index, slice) else index
        try:
            return [self[one] for one in ids]
        except RecursionError as error:
            raise ConfigError(
                f"{type(self).__name__}.__getitem__ asks for a list or slice, which asks it again for each sample, "
                "without end; ask for one sample at a time there: [super().__getitem__(i) for i in ids]"
            ) from error

    def _checked(self, shard: int) -> int:
        if not 0 <= shard < self.num_shards:
            raise SampleIndexError(f"shard {shard} does not exist; the dataset has {self.num_shards} shards")
        return shard
