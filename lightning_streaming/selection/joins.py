"""Joined datasets: which of their samples belong to a stream's, and samples that have the columns of both.

Their shards are numbered after those of all streams, so that they are fetched, opened and let go of like these.

JoinSource      a dataset to join, and where its files are on this node
JoinedDataset   such a dataset, its index read
StreamJoins     those of one stream
Joins           those of all streams: their shards, and the place of each sample in them
JoinedReader    the reader of a stream's shard, whose samples have the columns of all
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.errors import ConfigError, StorageError
from lightning_streaming.formats.columns import ColumnValues
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.readers import ShardReader
from lightning_streaming.formats.shard_table import column_names
from lightning_streaming.options.groups import fields_of
from lightning_streaming.options.join import JoinConfig
from lightning_streaming.selection.id_index import IdIndex, check_ids
from lightning_streaming.selection.saved_join import SavedJoin
from lightning_streaming.sequence.runs import RunLookup

ReadSample = Callable[[int, int], dict[str, Any]]
"""Reads a sample by its shard, in the numbering of all, and its index there."""


class JoinSource(NamedTuple):
    """A dataset to join with a stream."""

    asked: JoinConfig
    cache: ShardCache


def joined_label(stream: str, join: str) -> str:
    """What errors call a joined dataset, by what they call its stream."""
    return f"{stream}, join {join!r}"


class JoinedDataset:
    """One dataset that is joined with a stream.

    Args:
        name: Of the join.
        source: What was asked for, and where its files are.
        index: Its index.
        first_shard: The number of its first shard.
        wanted: The columns that are put into samples, by their names there; None for all that the join has.

    Raises:
        ConfigError: The join names a column that is not there.
    """

    def __init__(
        self, name: str, source: JoinSource, index: DatasetIndex, first_shard: int, wanted: Iterable[str] | None
    ) -> None:
        self.name = name
        self.asked, self.cache = source
        self.index = index
        self.first_shard = first_shard
        self.ids: IdIndex | None = None
        """Finds samples by id, where these are joined so; to be set before one is looked for."""
        kept = None if wanted is None else set(wanted)
        with fields_of(f"join.{name}"):
            self.all_names = _final_names(self.asked, index, self.cache)
        self.names = {column: final for column, final in self.all_names.items() if kept is None or final in kept}
        """What its columns are called in samples, by their names here."""
        self._runs = RunLookup(np.cumsum(index.samples_per_shard()))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are decoded."""
        on = self.asked.key
        return tuple(self.names) if on is None or on in self.names else (*self.names, on)

    def facts(self) -> SavedJoin:
        """Return what a saved position depends on: which data it is, and which samples of it belong to the stream's."""
        return SavedJoin(samples=self.index.num_samples, digest=self.index.data_digest, key=self.asked.key)

    def began_as(self, saved: SavedJoin) -> bool:
        """Return whether the dataset is what a saved position depends on, or has only become longer since.

        Args:
            saved: What :meth:`facts` returned then, as it was read from a state.
        """
        counted = np.cumsum(self.index.samples_per_shard())
        # Shards without samples may follow; how many there were, a state does not hold.
        ends = {int(np.searchsorted(counted, saved.samples, side)) + (side == "left") for side in ("left", "right")}
        heads = (self.index.head(shards) for shards in ends if 0 < shards <= len(counted))
        return any(
            saved == SavedJoin(samples=head.num_samples, digest=head.data_digest, key=self.asked.key) for head in heads
        )

    def shards_at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The shards of its samples with these numbers."""
        return self.first_shard + self._runs.find(numbers)

    def shards_of_ids(self, values: ColumnValues) -> NDArray[np.int32]:
        """The shards of its samples with these ids, -1 where there is none."""
        assert self.ids is not None, "it is made with the catalog"
        places = self.ids.places(values)
        shards = np.full(len(places), -1, np.int32)
        shards[places >= 0] = self.shards_at(places[places >= 0])
        return shards

    def put_into(self, sample: dict[str, Any], number: int, read: ReadSample) -> None:
        """Add the columns of the sample that belongs to the stream's.

        Args:
            sample: The stream's.
            number: How many are stored in the stream before it.
            read: Reads this dataset's.

        Raises:
            ConfigError: Its id is not here.
            StorageError: The index of ids is damaged.
        """
        on = self.asked.key
        shard, index = self._runs.find_one(number if on is None else self._place_of(sample[on], number))
        found = read(self.first_shard + shard, index)
        if on is not None and found[on] != sample[on]:
            self.check_index_of_ids()
            raise ConfigError(
                f"{self.cache.label}: the sample that had {on}={sample[on]!r} when ids were looked at has "
                f"{found[on]!r} by now",
                hint="shards that change need another index.json: write that anew, with hashes",
                option=f"join.{self.name}.key",
                stream=self.cache.stream,
            )
        for column, final in self.names.items():
            sample[final] = found[column]

    def _place_of(self, value: Any, number: int) -> int:
        assert self.ids is not None, "it is made with the catalog"
        place = self.ids.place(value)
        if place < 0:
            self.check_index_of_ids()
            raise ConfigError(
                f"{self.cache.label}: no sample has {self.asked.key}={value!r}, which sample {number} of the stream "
                "has",
                hint="add it there, or leave such samples of the stream out with selection",
                option=f"join.{self.name}.key",
                stream=self.cache.stream,
                sample=number,
            )
        return place

    def check_index_of_ids(self) -> None:
        """Refuse an index of ids that does not find what is there.

        Raises:
            StorageError: It is damaged.
        """
        if self.ids is not None and not self.ids.is_whole():
            raise StorageError(
                f"{self.cache.label}: {self.ids.kept_at} is damaged",
                hint="remove it, and start again",
                stream=self.cache.stream,
                path=str(self.ids.kept_at),
            )


def _final_names(asked: JoinConfig, index: DatasetIndex, cache: ShardCache) -> dict[str, str]:
    """What a joined dataset's columns are called in samples, by their names there."""
    there = dict.fromkeys(name for _, info in index.shards.examples() for name in column_names(info))
    missing = [name for name in asked.columns or () if name not in there]
    if missing:
        raise ConfigError(
            f"{cache.label}: columns names {missing[0]!r}, but there are {', '.join(map(repr, there))}",
            option="columns",
            stream=cache.stream,
        )
    taken = asked.columns or [name for name in there if name != asked.key]
    return {name: f"{asked.prefix}{name}" for name in taken}


class StreamJoins:
    """The datasets that are joined with one stream.

    Args:
        label: What errors call the stream.
        index: The stream's.
        first_shard: The number of its first shard.
        joined: Those datasets.
        wanted: Columns of samples that are asked for, by their final names; None for all.

    Raises:
        ConfigError: A dataset has another number of samples; two have a column of one name.
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
        for one in joined:
            if one.asked.key is not None:
                try:
                    with fields_of(f"join.{one.name}"):
                        check_ids(one.asked.key, (label, index), (one.cache.label, one.index))
                except ConfigError as error:
                    raise error.with_context(stream=one.cache.stream) from None
        _check_names(label, own, joined)
        theirs = {final for one in joined for final in one.all_names.values()}
        self.read = tuple(one for one in joined if one.names)
        """Those of which a column is wanted."""
        ids = dict.fromkeys(one.asked.key for one in self.read if one.asked.key is not None)
        asked = None if wanted is None else [name for name in wanted if name not in theirs]
        self.own_columns = None if asked is None else (*asked, *(name for name in ids if name not in asked))
        """The columns of the stream's own shards that are decoded; None for all."""
        self._not_wanted = () if asked is None else tuple(name for name in ids if name not in asked)
        sizes = index.samples_per_shard()
        self._first_shard, self._samples_before = first_shard, np.cumsum(sizes) - sizes

    def in_words(self) -> str:
        """What an error adds that lists the stream's own columns."""
        return f"; joined with it are {', '.join(map(repr, self.final_names()))}"

    def final_names(self) -> list[str]:
        """What the columns of all joined datasets are called in samples."""
        return [final for one in self.all for final in one.all_names.values()]

    def numbers(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many samples are stored in the stream before each of these."""
        numbers: NDArray[np.int64] = self._samples_before[shards - self._first_shard] + indexes
        return numbers

    def complete(self, sample: dict[str, Any], shard: int, index: int, read: ReadSample) -> dict[str, Any]:
        """The sample with all columns that are wanted.

        Args:
            sample: The stream's columns, decoded; is added to.
            shard: Its shard.
            index: Its index there.
            read: Reads samples of joined datasets.
        """
        number = int(self._samples_before[shard - self._first_shard]) + index
        for one in self.read:
            one.put_into(sample, number, read)
        for name in self._not_wanted:
            del sample[name]
        return sample


def _check_counts(label: str, index: DatasetIndex, joined: Sequence[JoinedDataset]) -> None:
    for one in joined:
        if one.asked.key is None and one.index.num_samples != index.num_samples:
            raise ConfigError(
                f"{label} has {index.num_samples} samples, but join {one.name!r} has {one.index.num_samples}",
                hint="samples are joined by position, so both must have as many: write one for each, or give a column "
                "that both have as key=",
                option=f"join.{one.name}.key",
                stream=one.cache.stream,
            )


def _check_names(label: str, own: Iterable[str], joined: Sequence[JoinedDataset]) -> None:
    owners = dict.fromkeys(own, label)
    for one in joined:
        for final in one.all_names.values():
            if final in owners:
                raise ConfigError(
                    f"column {final!r} is in both {owners[final]} and {one.cache.label}",
                    hint=f"say columns= of the join without it, or prefix=, like {one.name + '_'!r}",
                    option=f"join.{one.name}.columns",
                )
            owners[final] = one.cache.label


class Joins:
    """The datasets that are joined with the streams of a dataset.

    Args:
        num_shards: Shards of all streams.
        streams: Of each stream its joins, by its place; streams without any are not there.
    """

    def __init__(self, num_shards: int, streams: Mapping[int, StreamJoins]) -> None:
        self.streams = streams
        self._own_shards = num_shards
        self._datasets = [one for stream in streams.values() for one in stream.all]
        self._runs = RunLookup(np.cumsum([len(one.index.shards) for one in self._datasets], dtype=np.int64))
        self._by_position = {
            place: [one for one in stream.read if one.asked.key is None] for place, stream in streams.items()
        }
        self.by_id = [place for place, stream in streams.items() if any(one.asked.key for one in stream.read)]
        """Streams with which datasets are joined by id, and read."""
        self.most_by_position = max(map(len, self._by_position.values()), default=0)
        """Datasets that are joined with one stream by position, and read; at most."""

    @property
    def num_shards(self) -> int:
        """Shards of streams and joined datasets."""
        return self._own_shards + len(self._runs)

    def __iter__(self) -> Iterator[JoinedDataset]:
        """All joined datasets."""
        return iter(self._datasets)

    def find(self, shard: int) -> tuple[JoinedDataset, ShardInfo]:
        """The joined dataset that has a shard, and what its index says of it."""
        place, index = self._runs.find_one(shard - self._own_shards)
        return self._datasets[place], self._datasets[place].index.shards[index]

    def shards_at(
        self, streams: NDArray[np.int64], shards: NDArray[np.int64], indexes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The shards of joined datasets that samples need, as far as positions tell.

        Args:
            streams: The stream of each sample, by its place; of shape (samples,).
            shards: Its shard.
            indexes: Its index there.

        Returns:
            Array of shape (samples, joins), -1 where there is none.
        """
        found = np.full((len(shards), self.most_by_position), -1, np.int64)
        for place, joined in self._by_position.items():
            here = np.flatnonzero(streams == place)
            if len(joined) and len(here):
                numbers = self.streams[place].numbers(shards[here], indexes[here])
                for column, one in enumerate(joined):
                    found[here, column] = one.shards_at(numbers)
        return found


class JoinedReader:
    """Reads a stream's shard; its samples have the columns of joined datasets too.

    Args:
        own: Reads the stream's columns.
        joins: Of the stream.
        shard: Which shard it is.
        read: Reads samples of joined datasets. It may close this reader, which then is not used any more.
    """

    def __init__(self, own: ShardReader, joins: StreamJoins, shard: int, read: ReadSample) -> None:
        self._own = own
        self._joins = joins
        self._shard = shard
        self._read = read

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._own)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample, as of any reader of shards.

        Raises:
            ConfigError: A joined dataset has no sample for it.
        """
        return self._joins.complete(self._own[index], self._shard, index, self._read)

    def close(self) -> None:
        """Let go of the stream's shard; those of joined datasets have readers of their own."""
        self._own.close()
