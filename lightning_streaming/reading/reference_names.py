"""Read-only properties of a dataset, by the names of MosaicML Streaming."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache.quota import largest_shard_bytes
from lightning_streaming.dataset.sample_access import KeyedAccess
from lightning_streaming.dataset.stream import DatasetStreams
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.resume.run_state import RunState
from lightning_streaming.sequence.settings import (
    BatchingMethod,
    OrderSettings,
    PartitionAlgo,
    SamplingMethod,
    ShuffleAlgo,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_Value = TypeVar("_Value")


class readonly_property(Generic[_Value]):  # noqa: N801 a decorator, like property
    """A property that may only be set to its value, as subclasses do that store their arguments."""

    def __init__(self, read: Callable[[Any], _Value]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> _Value: ...

    def __get__(self, instance: object | None, owner: type) -> Self | _Value:
        return self if instance is None else self._read(instance)

    def __set__(self, instance: object, value: object) -> None:
        if "_source" not in vars(instance):  # before the __init__ of the dataset, which sets it
            return
        name = self._read.__name__
        arguments = vars(instance)["_arguments"]
        if not ((name in arguments and _is_same(value, arguments[name])) or _is_same(value, self._read(instance))):
            raise AttributeError(
                f"{name} is an argument of the dataset and read-only, so it cannot be set to {value!r}; "
                "pass it when you create the dataset"
            )


def _is_same(value: object, other: object) -> bool:
    return np.array_equal(np.asarray(value, object), np.asarray(other, object))


class ReferenceNames(KeyedAccess):
    """Options of a dataset, and the numbering of its samples, shards and streams.

    Properties that depend on the data read the indexes at first use. Do not modify the arrays.
    """

    streams: DatasetStreams
    _run_state: RunState
    _arguments: Mapping[str, Any]
    """Arguments of the constructor, as they were passed: "10gb" and None too."""

    if TYPE_CHECKING:

        def __len__(self) -> int: ...

    @property
    def _order_settings(self) -> OrderSettings:
        return self._run_state.settings

    @readonly_property
    def shuffle(self) -> bool:
        """Whether epochs are shuffled."""
        return self._order_settings.shuffle

    @readonly_property
    def shuffle_algo(self) -> ShuffleAlgo:
        """Shuffle algorithm, if epochs are shuffled."""
        return self._order_settings.shuffle_algo

    @readonly_property
    def shuffle_seed(self) -> int:
        """Seed of the order; after a resume that of the checkpoint."""
        return self._order_settings.shuffle_seed

    @readonly_property
    def shuffle_block_size(self) -> int | None:
        """Number of samples within which blocks are mixed; None before the first pass if it is the default."""
        return self._order_settings.shuffle_block_size

    @readonly_property
    def num_canonical_nodes(self) -> int | None:
        """Number of slices of the sample space; None before the first pass if it is the default."""
        return self._order_settings.num_canonical_nodes

    @readonly_property
    def initial_physical_nodes(self) -> int | None:
        """Number of nodes of the first start of the run; None before a pass begins or a state is loaded."""
        return self._run_state.initial_nodes

    @readonly_property
    def sampling_method(self) -> SamplingMethod:
        """Whether each epoch draws partial repeats again."""
        return self._order_settings.sampling_method

    @readonly_property
    def sampling_granularity(self) -> int:
        """Number of samples drawn from a shard at a time."""
        return self._order_settings.sampling_granularity

    @readonly_property
    def partition_algo(self) -> PartitionAlgo:
        """Algorithm that divides an epoch among nodes."""
        return self._order_settings.partition_algo

    @readonly_property
    def batching_method(self) -> BatchingMethod:
        """Method that chooses the samples of a batch."""
        return self._order_settings.batching_method

    @readonly_property
    def epoch_seed_change(self) -> bool:
        """Whether each epoch is drawn and shuffled with another seed."""
        settings = self._order_settings
        return settings.shuffle and settings.sampling_method == "balanced"

    @readonly_property
    def cache_limit(self) -> int | None:
        """Limit of the bytes in the cache directories of this node."""
        return self._source.quota.limit

    @readonly_property
    def allow_unsafe_types(self) -> bool:
        """Whether columns may be unpickled."""
        return self._source.catalogs.allow_unsafe_types

    @readonly_property
    def num_samples(self) -> int:
        """Number of samples of all streams before weighting; the same as ``size``."""
        return self.size

    @readonly_property
    def length(self) -> int:
        """Length, as ``len(dataset)``."""
        return len(self)

    @readonly_property
    def num_streams(self) -> int:
        """Number of streams."""
        return len(self.streams)

    @readonly_property
    def shards(self) -> Sequence[ShardInfo]:
        """Entries of the indexes, one for each shard of all streams."""
        return self._source.catalog.shards

    @readonly_property
    def samples_per_shard(self) -> NDArray[np.int64]:
        """Number of samples of each shard; shape (shards,)."""
        return self._source.catalog.samples_per_shard

    @readonly_property
    def sample_offset_per_shard(self) -> NDArray[np.int64]:
        """Id of each shard's first sample; shape (shards,)."""
        return self._source.catalog.first_sample_of_shard

    @readonly_property
    def stream_per_shard(self) -> NDArray[np.int64]:
        """Number of the stream of each shard; shape (shards,)."""
        return self._source.catalog.stream_of_shard

    @readonly_property
    def samples_per_stream(self) -> NDArray[np.int64]:
        """Number of samples of each stream before weighting; shape (streams,)."""
        return np.asarray(self._source.catalog.samples_per_stream, np.int64)

    @readonly_property
    def shards_per_stream(self) -> NDArray[np.int64]:
        """Number of shards of each stream; shape (streams,)."""
        return np.asarray(self._source.catalog.shards_per_stream, np.int64)

    @readonly_property
    def sample_offset_per_stream(self) -> NDArray[np.int64]:
        """Id of each stream's first sample; shape (streams,)."""
        return _sums_before(self._source.catalog.samples_per_stream)

    @readonly_property
    def shard_offset_per_stream(self) -> NDArray[np.int64]:
        """Number of each stream's first shard; shape (streams,)."""
        return _sums_before(self._source.catalog.shards_per_stream)

    @readonly_property
    def max_shard_size_across_all_streams(self) -> int:
        """Bytes of the largest shard, compressed and raw together."""
        return max(largest_shard_bytes(index.shards) for index in self._source.catalog.indexes)


def _sums_before(of_streams: Sequence[int]) -> NDArray[np.int64]:
    counts = np.asarray(of_streams, np.int64)
    return np.cumsum(counts) - counts
