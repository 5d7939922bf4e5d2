"""Joined datasets: match their samples with those of a stream, and add their columns.

Their shards are numbered after those of all streams, and are fetched, opened and released in the same way.

JoinSource      options of a join, and the shard cache of its dataset
JoinedDataset   a joined dataset with its index
StreamJoins     the joined datasets of one stream
Joins           the joined datasets of all streams, with their shards
JoinedReader    reader of a stream's shard that adds joined columns
JoinedAhead     prefetch of the shards that samples joined by id need
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.errors import ConfigError, StorageError
from lightning_streaming.formats.columns import ColumnValues, read_columns
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.shard_format import ShardReader
from lightning_streaming.formats.shard_table import column_names
from lightning_streaming.options.groups import fields_of
from lightning_streaming.options.storage import JoinConfig
from lightning_streaming.selection.id_index import IdIndex, check_ids
from lightning_streaming.sequence.runs import RunLookup

_MOST_SHARDS = 64
"""Shards of a stream whose needed shards are remembered: four bytes for each sample and join."""
_MOST_RETURNED = 64
"""Returned shards that are remembered if shards may be evicted: older ones may be gone, and are returned again."""

ReadSample = Callable[[int, int], dict[str, Any]]
"""Reads a sample by the number of its shard over all datasets, and its index there."""


class JoinSource(NamedTuple):
    """Options of a join, and the shard cache of its dataset."""

    config: JoinConfig
    cache: ShardCache


def joined_label(stream: str, join: str) -> str:
    """Return the label of a joined dataset in errors, from that of its stream."""
    return f"{stream}, join {join!r}"


class JoinedDataset:
    """One dataset that is joined with a stream.

    Args:
        name: Name of the join.
        source: Options and shard cache.
        index: Index of the dataset.
        first_shard: Number of its first shard.
        wanted: The columns that are added to samples, by their names there; None for all of the join.

    Raises:
        ConfigError: The join names an unknown column.
    """

    def __init__(
        self, name: str, source: JoinSource, index: DatasetIndex, first_shard: int, wanted: Iterable[str] | None
    ) -> None:
        self.name = name
        self.config, self.cache = source
        self.index = index
        self.first_shard = first_shard
        self.ids: IdIndex | None = None
        """Index of the ids, if samples are joined by id; set before samples are read."""
        finals = None if wanted is None else set(wanted)
        with fields_of(f"join.{name}"):
            self.all_names = _final_names(self.config, index, self.cache)
        self.names = {column: final for column, final in self.all_names.items() if finals is None or final in finals}
        """Names of its columns in samples, by their names in the dataset."""
        self._runs = RunLookup(np.cumsum(index.samples_per_shard()))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are decoded."""
        on = self.config.key
        return tuple(self.names) if on is None or on in self.names else (*self.names, on)

    def shards_at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shards of the samples with these numbers."""
        return self.first_shard + self._runs.find(numbers)

    def shards_of_ids(self, values: ColumnValues) -> NDArray[np.int32]:
        """Return the shards of the samples with these ids, -1 where there is none."""
        assert self.ids is not None, "it is built with the catalog"
        places = self.ids.places(values)
        shards = np.full(len(places), -1, np.int32)
        shards[places >= 0] = self.shards_at(places[places >= 0])
        return shards

    def put_into(self, sample: dict[str, Any], number: int, read: ReadSample) -> None:
        """Add the columns of the matching sample to a sample of the stream.

        Args:
            sample: Sample of the stream.
            number: Number of the sample in the stream.
            read: Reads samples of this dataset.

        Raises:
            ConfigError: The dataset has no such id.
            StorageError: The index of ids is damaged.
        """
        on = self.config.key
        shard, index = self._runs.find_single(number if on is None else self._place_of(sample[on], number))
        partner = read(self.first_shard + shard, index)
        if on is not None and partner[on] != sample[on]:
            self.check_index_of_ids()
            raise ConfigError(
                f"{self.cache.label}: the sample that had {on}={sample[on]!r} when ids were indexed now has "
                f"{partner[on]!r}",
                hint="shards changed, but index.json did not: write the dataset again, with hashes",
                option=f"join.{self.name}.key",
                stream=self.cache.stream,
            )
        for column, final in self.names.items():
            sample[final] = partner[column]

    def _place_of(self, value: Any, number: int) -> int:
        assert self.ids is not None, "it is built with the catalog"
        place = self.ids.place(value)
        if place < 0:
            self.check_index_of_ids()
            raise ConfigError(
                f"{self.cache.label}: no sample has {self.config.key}={value!r} of sample {number} of the stream",
                hint="add it to the joined dataset, or exclude such samples of the stream with selection",
                option=f"join.{self.name}.key",
                stream=self.cache.stream,
                sample=number,
            )
        return place

    def check_index_of_ids(self) -> None:
        """Check the index of ids for damage.

        Raises:
            StorageError: It is damaged.
        """
        if self.ids is not None and not self.ids.is_whole():
            raise StorageError(
                f"{self.cache.label}: {self.ids.cached_at} is damaged",
                hint="remove it, and start the run again",
                stream=self.cache.stream,
                path=str(self.ids.cached_at),
            )


def _final_names(config: JoinConfig, index: DatasetIndex, cache: ShardCache) -> dict[str, str]:
    """Return the names of a joined dataset's columns in samples, by their names in the dataset."""
    there = dict.fromkeys(name for _, info in index.shards.examples() for name in column_names(info))
    missing = [name for name in config.columns or () if name not in there]
    if missing:
        raise ConfigError(
            f"{cache.label}: unknown column {missing[0]!r}; the dataset has {', '.join(map(repr, there))}",
            option="columns",
            stream=cache.stream,
        )
    taken = config.columns or [name for name in there if name != config.key]
    return {name: f"{config.prefix}{name}" for name in taken}


class StreamJoins:
    """The datasets that are joined with one stream.

    Args:
        label: Label of the stream in errors.
        index: Index of the stream.
        first_shard: Number of the stream's first shard.
        joined: The joined datasets.
        wanted: Columns of samples that are read, by their final names; None for all.

    Raises:
        ConfigError: A dataset has another number of samples, or two have a column of the same name.
    """

    def __init__(
        self,
        label: str,
        index: DatasetIndex,
        first_shard: int,
        joined: Sequence[JoinedDataset],
        wanted: Sequence[str] | None,
    ) -> None:
        self.all = tuple(joined)
        self._label = label
        own = dict.fromkeys(name for _, info in index.shards.examples() for name in column_names(info))
        _check_counts(label, index, joined)
        for dataset in joined:
            if dataset.config.key is not None:
                try:
                    with fields_of(f"join.{dataset.name}"):
                        check_ids(dataset.config.key, (label, index), (dataset.cache.label, dataset.index))
                except ConfigError as error:
                    raise error.with_context(stream=dataset.cache.stream) from None
        _check_names(label, own, joined)
        theirs = {final for dataset in joined for final in dataset.all_names.values()}
        self.read = tuple(dataset for dataset in joined if dataset.names)
        """The joined datasets of which a column is read."""
        ids = dict.fromkeys(dataset.config.key for dataset in self.read if dataset.config.key is not None)
        own_wanted = None if wanted is None else [name for name in wanted if name not in theirs]
        not_wanted = () if own_wanted is None else tuple(name for name in ids if name not in own_wanted)
        self.own_columns = None if own_wanted is None else (*own_wanted, *not_wanted)
        """The columns of the stream's own shards that are decoded; None for all."""
        self._not_wanted = not_wanted
        sizes = index.samples_per_shard()
        self._first_shard, self._samples_before = first_shard, np.cumsum(sizes) - sizes

    def in_words(self) -> str:
        """Return the joined columns, to append to an error that lists the stream's own columns."""
        return f"; joined columns are {', '.join(map(repr, self.final_names()))}"

    def final_names(self) -> list[str]:
        """Return the names of all joined columns in samples."""
        return [final for dataset in self.all for final in dataset.all_names.values()]

    def numbers(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each sample in the stream."""
        numbers: NDArray[np.int64] = self._samples_before[shards - self._first_shard] + indexes
        return numbers

    def complete(self, sample: dict[str, Any], shard: int, index: int, read: ReadSample) -> dict[str, Any]:
        """Add the joined columns to a sample, and remove columns that were read only for joining.

        Args:
            sample: The stream's columns, decoded; changed in place.
            shard: Shard of the sample.
            index: Index of the sample in its shard.
            read: Reads samples of joined datasets.
        """
        number = int(self._samples_before[shard - self._first_shard]) + index
        for dataset in self.read:
            dataset.put_into(sample, number, read)
        for name in self._not_wanted:
            del sample[name]
        return sample


def _check_counts(label: str, index: DatasetIndex, joined: Sequence[JoinedDataset]) -> None:
    for dataset in joined:
        if dataset.config.key is None and dataset.index.num_samples != index.num_samples:
            raise ConfigError(
                f"{label} has {index.num_samples} samples, but join {dataset.name!r} has {dataset.index.num_samples}",
                hint="samples are joined by position, so both need the same number: write one for each, or pass a "
                "column that both have as key=",
                option=f"join.{dataset.name}.key",
                stream=dataset.cache.stream,
            )


def _check_names(label: str, own: Iterable[str], joined: Sequence[JoinedDataset]) -> None:
    owners = dict.fromkeys(own, label)
    for dataset in joined:
        for final in dataset.all_names.values():
            if final in owners:
                raise ConfigError(
                    f"column {final!r} is in both {owners[final]} and {dataset.cache.label}",
                    hint=f"list columns= of the join without it, or set prefix=, like {dataset.name + '_'!r}",
                    option=f"join.{dataset.name}.columns",
                )
            owners[final] = dataset.cache.label


class Joins:
    """The datasets that are joined with the streams of a dataset.

    Args:
        num_shards: Number of shards of all streams.
        streams: Joins of each stream that has any, by the number of the stream.
    """

    def __init__(self, num_shards: int, streams: Mapping[int, StreamJoins]) -> None:
        self.streams = streams
        self._own_shards = num_shards
        self._datasets = [dataset for stream in streams.values() for dataset in stream.all]
        self._runs = RunLookup(np.cumsum([len(dataset.index.shards) for dataset in self._datasets], dtype=np.int64))
        self._by_position = {
            place: [dataset for dataset in stream.read if dataset.config.key is None]
            for place, stream in streams.items()
        }
        self.by_id = [place for place, stream in streams.items() if any(dataset.config.key for dataset in stream.read)]
        """Streams with datasets that are joined by id and read."""
        self.most_by_position = max(map(len, self._by_position.values()), default=0)
        """Largest number of datasets that are joined with a stream by position and read."""

    @property
    def num_shards(self) -> int:
        """Number of shards of streams and joined datasets."""
        return self._own_shards + len(self._runs)

    def __iter__(self) -> Iterator[JoinedDataset]:
        """Yield all joined datasets."""
        return iter(self._datasets)

    def find(self, shard: int) -> tuple[JoinedDataset, ShardInfo]:
        """Return the joined dataset that has a shard, and the shard's entry in its index."""
        place, index = self._runs.find_single(shard - self._own_shards)
        return self._datasets[place], self._datasets[place].index.shards[index]

    def shards_at(
        self, streams: NDArray[np.int64], shards: NDArray[np.int64], indexes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the shards of datasets joined by position that samples need.

        Args:
            streams: Number of the stream of each sample, of shape (samples,).
            shards: Shard of each sample.
            indexes: Index of each sample in its shard.

        Returns:
            Array of shape (samples, joins), -1 where there is none.
        """
        needed = np.full((len(shards), self.most_by_position), -1, np.int64)
        for place, joined in self._by_position.items():
            here = np.flatnonzero(streams == place)
            if len(joined) and len(here):
                numbers = self.streams[place].numbers(shards[here], indexes[here])
                for column, dataset in enumerate(joined):
                    needed[here, column] = dataset.shards_at(numbers)
        return needed


class JoinedReader:
    """Reader of a stream's shard that adds the columns of joined datasets.

    Args:
        own: Reader of the stream's columns.
        joins: Joins of the stream.
        shard: Number of the shard.
        read: Reads samples of joined datasets. It may close this reader, which is then not used again.
    """

    def __init__(self, own: ShardReader, joins: StreamJoins, shard: int, read: ReadSample) -> None:
        self._own = own
        self._joins = joins
        self._shard = shard
        self._read = read

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._own)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read a sample.

        Raises:
            ConfigError: A joined dataset has no matching sample.
        """
        return self._joins.complete(self._own[index], self._shard, index, self._read)

    def close(self) -> None:
        """Close the stream's shard; shards of joined datasets have other readers."""
        self._own.close()


class JoinedAhead:
    """Lookup of the joined shards that a worker's next samples need; may be used by several threads.

    Args:
        quota: Quota that fetched bytes count against.
    """

    def __init__(self, quota: CacheQuota) -> None:
        self._quota = quota
        self._lock = Lock()
        self._needed: OrderedDict[int, list[NDArray[np.int32]]] = OrderedDict()
        self._returned: OrderedDict[int, None] = OrderedDict()

    def shards(
        self,
        shard: int,
        indexes: NDArray[np.int64],
        stored: tuple[ShardCache, ShardInfo],
        joined: Sequence[JoinedDataset],
    ) -> list[int]:
        """Return the shards that some samples need, without those that were returned before.

        Args:
            shard: Number of the stream's shard that has the samples.
            indexes: Indexes of the samples there.
            stored: Shard cache of the stream, and the shard's entry in the index.
            joined: Datasets that are joined by id.

        Raises:
            StreamingError: The shard could not be fetched, or is damaged.
        """
        cache, info = stored
        limited = self._quota.limit is not None
        if limited and not cache.has(info):  # waiting for space would block the reader
            return []
        with cache.hold(info, self._quota) as directory:
            with self._lock:
                of_shard = self._needed.get(shard)
            if of_shard is None:  # without the lock: other threads read other shards meanwhile
                names = list(dict.fromkeys(str(dataset.config.key) for dataset in joined))
                values: dict[str, Any] = dict(read_columns(info, directory, names))
                of_shard = [dataset.shards_of_ids(values[str(dataset.config.key)]) for dataset in joined]
        with self._lock:
            self._needed[shard] = of_shard
            self._needed.move_to_end(shard)
            if len(self._needed) > _MOST_SHARDS:
                self._needed.popitem(last=False)
            needed = np.concatenate([of[indexes] for of in of_shard])
            new = [number for number in dict.fromkeys(needed.tolist()) if number >= 0 and number not in self._returned]
            self._returned.update(dict.fromkeys(new))
            while limited and len(self._returned) > _MOST_RETURNED:
                self._returned.popitem(last=False)
        return new
