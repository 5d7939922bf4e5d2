"""Every shard and sample of a dataset, numbered across its streams."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.mds_samples import plain_schema
from lightning_streaming.order.runs import RunLookup

_AT_ONCE = 4096
"""Shards whose names are looked at together."""


class SamplePlace(NamedTuple):
    """Where one sample is stored."""

    stream: int
    """Stream, by its place in the dataset."""
    shard: int
    """Shard, counted over all streams."""
    sample: int
    """Sample, counted within its shard."""


class Catalog:
    """The shards of all streams in one numbering: stream 0's first, each in the order of its index.

    Args:
        indexes: The index of each stream, by name, in stream order.

    Raises:
        ConfigError: A stream holds no sample.
    """

    def __init__(self, indexes: Mapping[str, DatasetIndex]) -> None:
        self.stream_names = list(indexes)
        self.indexes = tuple(indexes.values())
        self.shard_sizes_per_stream = tuple(index.samples_per_shard() for index in indexes.values())
        self.samples_per_stream = [int(sizes.sum()) for sizes in self.shard_sizes_per_stream]
        for name, samples in zip(self.stream_names, self.samples_per_stream, strict=True):
            if not samples:
                raise ConfigError(f"stream {name!r} has no samples; write some to it or leave it out")
        self.samples_per_shard: NDArray[np.int64] = np.concatenate(self.shard_sizes_per_stream)
        self.shards_per_stream = [len(sizes) for sizes in self.shard_sizes_per_stream]
        self.stream_of_shard: NDArray[np.int64] = np.repeat(np.arange(len(indexes)), self.shards_per_stream)
        self._runs = RunLookup(np.cumsum(self.samples_per_shard))
        self.shards: Sequence[ShardInfo] = _AllShards(self.indexes)
        self.num_samples = sum(self.samples_per_stream)
        """Samples of all streams together, before weighting."""

    @cached_property
    def first_sample_of_shard(self) -> NDArray[np.int64]:
        """Sample id at which each shard starts."""
        return self._runs.stops - self.samples_per_shard

    @cached_property
    def mean_sample_bytes(self) -> NDArray[np.float32]:
        """Bytes of a sample as it is stored uncompressed, of each shard the mean."""
        data_bytes = np.concatenate([index.shards.data_bytes() for index in self.indexes])
        return (data_bytes / np.maximum(1, self.samples_per_shard)).astype(np.float32)

    def examples(self) -> Iterator[tuple[int, ShardInfo]]:
        """The first shard of each kind in each stream, with its number: for looking at what shards have in common.

        Shards of a kind have the same format, compression, columns and hashes.
        """
        first = 0
        for index in self.indexes:
            yield from ((first + place, shard) for place, shard in index.shards.examples())
            first += len(index.shards)

    def may_be_plain(self, columns: Sequence[str] | None) -> bool:
        """Whether all shards have the same columns, and these are nothing but numbers and arrays of them.

        Args:
            columns: The columns wanted, which every shard has; None for all.
        """
        schemas = {plain_schema(info, columns) for _, info in self.examples()}
        return len(schemas) == 1 and None not in schemas

    def with_files(self, stream: int, names: Set[str]) -> Iterator[tuple[int, ShardInfo]]:
        """Shards that have files of some names, with their numbers; the others are not made.

        Args:
            stream: Whose shards to look at.
            names: Names as they are in the index; those of other files are passed over.
        """
        table = self.indexes[stream].shards
        first = sum(self.shards_per_stream[:stream])
        for start in range(0, len(table), _AT_ONCE):
            texts = table.texts(start, min(start + _AT_ONCE, len(table)))
            if names.isdisjoint(texts):
                continue
            found = int(table.first_text[start]) + np.flatnonzero([text in names for text in texts])
            for place in np.unique(np.searchsorted(table.first_text, found, side="right") - 1).tolist():
                yield first + place, table[place]

    def shard_of(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The shard, counted over all streams, that holds each of these samples."""
        return self._runs.find(sample_ids)

    def places(self, sample_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shards, and indexes within them, of many samples at once."""
        shards = self.shard_of(sample_ids)
        return shards, sample_ids - self.first_sample_of_shard[shards]

    def place(self, sample_id: int) -> SamplePlace:
        """Where one sample is stored.

        Args:
            sample_id: In ``[-num_samples, num_samples)``; negative ids count from the end.

        Raises:
            SampleIndexError: The id is outside that range.
        """
        shard, sample = self.find(sample_id)
        return SamplePlace(int(self.stream_of_shard[shard]), shard, sample)

    def find(self, sample_id: int) -> tuple[int, int]:
        """Shard, and index within it, of one sample; otherwise as :meth:`place`."""
        wanted = sample_id + self.num_samples if sample_id < 0 else sample_id
        if not 0 <= wanted < self.num_samples:
            raise SampleIndexError(f"sample {sample_id} does not exist; the dataset has {self.num_samples} samples")
        return self._runs.find_one(wanted)


class _AllShards(Sequence[ShardInfo]):
    """The shards of several indexes as one sequence; each is made when it is asked for.

    Args:
        indexes: One after another.
    """

    def __init__(self, indexes: Sequence[DatasetIndex]) -> None:
        self._tables = [index.shards for index in indexes]
        self._stops = list(accumulate(map(len, self._tables)))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ShardInfo, ...]: ...

    def __getitem__(self, index: int | slice) -> ShardInfo | tuple[ShardInfo, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        place = range(len(self))[index]
        stream = bisect_right(self._stops, place)
        return self._tables[stream][place - self._stops[stream]]  # counted from the end of its table

    def __iter__(self) -> Iterator[ShardInfo]:
        return chain.from_iterable(self._tables)
