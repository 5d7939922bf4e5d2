"""A dataset directory as a map-style dataset of torch: by index, without order, streams or a place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from lightning_streaming.cache import ShardCache
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.loading.shard_access import ShardAccess
from lightning_streaming.loading.source import SampleSource
from lightning_streaming.loading.stream import Stream, StreamDefaults
from lightning_streaming.replaced_names import tells_unknown_arguments


@tells_unknown_arguments
class LocalDataset(ShardAccess, Dataset[Any]):
    """The samples of a directory by index, for torch's own ``DataLoader`` and samplers.

    Making one does no I/O: the index is read at the first ``len`` or ``[i]``. It saves no place and knows no ranks; for
    training use :class:`~lightning_streaming.StreamingDataset`.

    Args:
        local: The directory.
        split: Subdirectory of it, like "train".
        allow_unsafe_types: Whether columns may be unpickled. Unpickling runs code found in the data.
        columns: Names of the columns to read. None: all.

    Raises:
        ConfigError: ``columns`` is not a list of names.
    """

    def __init__(
        self,
        local: str | Path,
        split: str | None = None,
        *,
        allow_unsafe_types: bool = False,
        columns: Sequence[str] | None = None,
    ) -> None:
        self.local = local
        self.split = split or ""
        cache = ShardCache(Stream(local=str(local), split=split).cache_config("0", StreamDefaults()))
        super().__init__(SampleSource({"0": cache}, allow_unsafe_types, columns), on_demand=False)

    def __len__(self) -> int:
        """Samples of the directory."""
        return self.size

    @property
    def num_samples(self) -> int:
        """The same as ``len(dataset)``."""
        return self.size

    @property
    def shards(self) -> Sequence[ShardInfo]:
        """What the index says of each shard."""
        return self._source.catalog.shards

    def close(self) -> None:
        """Unmap every shard. The dataset may be used again; it then opens what it needs."""
        self._source.close()
