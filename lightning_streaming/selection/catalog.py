"""Catalog of all shards and samples of a dataset, numbered across its streams, and the lengths of samples by id."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.shard import plain_kind
from lightning_streaming.formats.shard_table import column_names
from lightning_streaming.selection.bitmap import Selection
from lightning_streaming.selection.document_lengths import SUMMED_AT_ONCE, StreamLengths
from lightning_streaming.selection.joins import Joins
from lightning_streaming.sequence.runs import RunLookup
from lightning_streaming.waits import IN_LOG, ProgressDisplay

_SHARDS_AT_ONCE = 4096
"""Shards whose names are searched together."""
_IDS_AT_ONCE = 1 << 16
"""Sample ids that are looked up together, so that temporary arrays stay in the processor's cache."""


class SamplePlace(NamedTuple):
    """Location of a stored sample."""

    stream: int
    """Number of the stream in the dataset."""
    shard: int
    """Number of the shard, over all streams."""
    sample: int
    """Index of the sample in its shard."""


class CatalogView:
    """Shards and selected samples of each stream that an epoch reads.

    Args:
        indexes: The index of each stream, by name, in stream order.
        selections: Selected samples of each stream that is not read whole.
        first_ids: First sample id of each stream, where streams have more shards than these; None if their ids are
            consecutive.
        joins: Datasets joined with the streams, if any.

    Raises:
        ConfigError: A stream holds no sample.
    """

    def __init__(
        self,
        indexes: Mapping[str, DatasetIndex],
        selections: Mapping[str, Selection] = MappingProxyType({}),
        first_ids: Sequence[int] | None = None,
        joins: Joins | None = None,
    ) -> None:
        self.joins = joins
        self.lengths: CatalogLengths | None = None
        """Lengths of the documents, if they are needed."""
        self.stream_names = list(indexes)
        self.indexes = tuple(indexes.values())
        self.selections = tuple(selections.get(name) for name in indexes)
        self.shard_sizes_per_stream = tuple(
            index.samples_per_shard() if selection is None else selection.per_shard(index.samples_per_shard())
            for index, selection in zip(self.indexes, self.selections, strict=True)
        )
        self.samples_per_stream = [int(sizes.sum()) for sizes in self.shard_sizes_per_stream]
        for name, samples in zip(self.stream_names, self.samples_per_stream, strict=True):
            if not samples:
                raise ConfigError(
                    f"stream {name!r} has no samples", hint="write some to it or leave it out", stream=name
                )
        self.shards_per_stream = [len(sizes) for sizes in self.shard_sizes_per_stream]
        self.num_samples = sum(self.samples_per_stream)
        """Samples of all streams together, before weighting."""
        consecutive = list(accumulate(self.samples_per_stream, initial=0))[:-1]
        self.first_ids = tuple(consecutive if first_ids is None else first_ids)
        """First sample id of each stream."""
        self.leaves_gaps = list(self.first_ids) != consecutive
        """True if there are ids between two streams that are not read."""


class Catalog(CatalogView):
    """The shards of all streams in one numbering: stream 0's first, each in the order of its index.

    Only selected samples have ids and are counted.

    Args:
        indexes: The index of each stream, by name, in stream order.
        selections: Selected samples of each stream that is not read whole.
        joins: Datasets joined with the streams, if any.

    Raises:
        ConfigError: A stream holds no sample.
    """

    def __init__(
        self,
        indexes: Mapping[str, DatasetIndex],
        selections: Mapping[str, Selection] = MappingProxyType({}),
        joins: Joins | None = None,
    ) -> None:
        super().__init__(indexes, selections, joins=joins)
        self.samples_per_shard: NDArray[np.int64] = np.concatenate(self.shard_sizes_per_stream)
        self.stream_of_shard: NDArray[np.int64] = np.repeat(np.arange(len(indexes)), self.shards_per_stream)
        self._runs = RunLookup(np.cumsum(self.samples_per_shard))
        self.shards: Sequence[ShardInfo] = _AllShards(self.indexes)
        self._selected = _SelectedPlaces(self) if any(bits is not None for bits in self.selections) else None
        self._heads: dict[tuple[int, int], tuple[DatasetIndex, Selection | None]] = {}
        self._views: dict[tuple[tuple[int, int], ...], CatalogView] = {}

    def head(self, shards: Mapping[int, int]) -> CatalogView:
        """Return a view in which only the first shards of some streams are read; sample ids stay the same.

        Args:
            shards: Number of shards, by the number of the stream; other streams are read whole.

        Raises:
            ConfigError: None of their samples is selected.
        """
        key = tuple(sorted(shards.items()))
        if key and key not in self._views:
            indexes, selections = dict(zip(self.stream_names, self.indexes, strict=True)), {}
            for stream, name in enumerate(self.stream_names):
                selection = self.selections[stream]
                if (count := shards.get(stream)) is not None:
                    if (stream, count) not in self._heads:  # the index caches its digest
                        index = self.indexes[stream].head(count)
                        head = None if selection is None else selection.head(index.num_samples)
                        self._heads[stream, count] = index, head
                    indexes[name], selection = self._heads[stream, count]
                if selection is not None:
                    selections[name] = selection
            view = self._views[key] = CatalogView(indexes, selections, self.first_ids, self.joins)
            view.lengths = self.lengths
        return self._views[key] if key else self

    @cached_property
    def first_sample_of_shard(self) -> NDArray[np.int64]:
        """First sample id of each shard."""
        return self._runs.stops - self.samples_per_shard

    @cached_property
    def mean_sample_bytes(self) -> NDArray[np.float32]:
        """Mean uncompressed size of a sample in bytes, for each shard."""
        data_bytes: NDArray[np.int64] = np.concatenate([index.shards.data_bytes() for index in self.indexes])
        stored: NDArray[np.int64] = np.concatenate([index.samples_per_shard() for index in self.indexes])
        return (data_bytes / np.maximum(1, stored)).astype(np.float32)

    def examples(self) -> Iterator[tuple[int, ShardInfo]]:
        """Yield the number and the first shard of each kind in each stream, to check what all shards have.

        Shards of a kind have the same format, compression, columns and hashes.
        """
        first = 0
        for index in self.indexes:
            yield from ((first + place, shard) for place, shard in index.shards.examples())
            first += len(index.shards)

    def columns_of_streams(self) -> list[list[tuple[str, ...]]]:
        """Return the columns of each stream's samples, including joins; several where its shards differ."""
        columns = []
        for place, (index, sizes) in enumerate(zip(self.indexes, self.shard_sizes_per_stream, strict=True)):
            table, joins = index.shards, None if self.joins is None else self.joins.streams.get(place)
            more = () if joins is None else joins.final_names()
            kinds, firsts = np.unique(table.kind_of_shard[sizes > 0], return_index=True)
            shards = np.flatnonzero(sizes > 0)[np.sort(firsts)] if len(kinds) else np.zeros(0, np.int64)
            sets = {frozenset(names): names for names in (column_names(table[shard]) for shard in shards.tolist())}
            columns.append([(*names, *more) for names in sets.values()])
        return columns

    def may_be_plain(self, columns: Sequence[str] | None) -> bool:
        """Return whether all shards have the same columns, of numbers and arrays of numbers only.

        Args:
            columns: The columns that are read, which every shard has; None for all.
        """
        schemas = {plain_kind(info, columns) for _, info in self.examples()}
        return len(schemas) == 1 and None not in schemas

    def with_files(self, stream: int, names: Set[str]) -> Iterator[tuple[int, ShardInfo]]:
        """Yield the number and the shard for shards that have files of some names; other shards are not constructed.

        Args:
            stream: Number of the stream.
            names: File names as the index has them; unknown names are ignored.
        """
        table = self.indexes[stream].shards
        first = self.first_shard(stream)
        for start in range(0, len(table), _SHARDS_AT_ONCE):
            texts = table.texts(start, min(start + _SHARDS_AT_ONCE, len(table)))
            if names.isdisjoint(texts):
                continue
            matches = int(table.first_text[start]) + np.flatnonzero([text in names for text in texts])
            for place in np.unique(np.searchsorted(table.first_text, matches, side="right") - 1).tolist():
                yield first + place, table[place]

    def first_shard(self, stream: int) -> int:
        """Return the number of the first shard of a stream."""
        return sum(self.shards_per_stream[:stream])

    def shard_of(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the shard of each sample."""
        return self._runs.find(sample_ids)

    def places(self, sample_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard of each sample, and its index there."""
        shards = self.shard_of(sample_ids)
        indexes = sample_ids - self.first_sample_of_shard[shards]
        return shards, indexes if self._selected is None else self._selected.stored(shards, indexes)

    def joined_shards(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the shards of datasets joined by position that some samples need.

        Returns:
            Array of shape (samples, joins), -1 for none; None if no dataset is joined by position.
        """
        if self.joins is None or not self.joins.most_by_position:
            return None
        return self.joins.shards_at(self.stream_of_shard[shards], shards, indexes)

    def ids(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids of selected samples: the inverse of :meth:`places`."""
        within = indexes if self._selected is None else self._selected.numbers(shards, indexes)
        return self.first_sample_of_shard[shards] + within

    def id_of(self, shard: int, index: int) -> int | None:
        """Return the id of a stored sample; None if it is not selected."""
        shards, indexes = np.array([shard]), np.array([index])
        if self._selected is not None and not self._selected.has(shards, indexes)[0]:
            return None
        return int(self.ids(shards, indexes)[0])

    def place(self, sample_id: int) -> SamplePlace:
        """Return the location of a sample.

        Args:
            sample_id: In ``[-num_samples, num_samples)``; negative ids count from the end.

        Raises:
            SampleIndexError: The id is outside that range.
        """
        shard, sample = self.find(sample_id)
        return SamplePlace(int(self.stream_of_shard[shard]), shard, sample)

    def find(self, sample_id: int) -> tuple[int, int]:
        """Return the shard of a sample and its index there; otherwise as :meth:`place`."""
        positive_id = sample_id + self.num_samples if sample_id < 0 else sample_id
        if not 0 <= positive_id < self.num_samples:
            raise SampleIndexError(
                f"sample {sample_id} does not exist",
                hint=f"the dataset has {self.num_samples} samples",
                sample=sample_id,
            )
        shard, index = self._runs.find_single(positive_id)
        if self._selected is not None:
            index = int(self._selected.stored(np.array([shard]), np.array([index]))[0])
        return shard, index


class _SelectedPlaces:
    """Conversion between selected and stored samples of shards.

    Args:
        catalog: Catalog with the shards and selections.
    """

    def __init__(self, catalog: Catalog) -> None:
        stored = [index.samples_per_shard() for index in catalog.indexes]
        self._selections = {stream: bits for stream, bits in enumerate(catalog.selections) if bits is not None}
        self._stream_of_shard = catalog.stream_of_shard
        # For each shard, the samples of its stream before it: stored and selected.
        self._stored_before, self._selected_before = (
            np.concatenate([np.cumsum(of_stream) - of_stream for of_stream in sizes])
            for sizes in (stored, catalog.shard_sizes_per_stream)
        )

    def stored(self, shards: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indexes of the n-th selected samples of these shards."""
        indexes: NDArray[np.int64] = numbers.copy()
        for selection, here, of in self._by_stream(shards):
            indexes[here] = selection.stored(self._selected_before[of] + numbers[here]) - self._stored_before[of]
        return indexes

    def numbers(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the selected samples of its shard before each of these."""
        numbers: NDArray[np.int64] = indexes.copy()
        for selection, here, of in self._by_stream(shards):
            numbers[here] = selection.before(self._stored_before[of] + indexes[here]) - self._selected_before[of]
        return numbers

    def has(self, shards: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each of these stored samples is selected."""
        selected = np.ones(len(shards), np.bool_)
        for selection, here, of in self._by_stream(shards):
            selected[here] = selection.has(self._stored_before[of] + indexes[here])
        return selected

    def _by_stream(self, shards: NDArray[np.int64]) -> Iterator[tuple[Selection, NDArray[np.bool_], NDArray[np.int64]]]:
        """Yield each stream's selection, a mask of the samples that are its own, and their shards."""
        streams: NDArray[np.int64] = self._stream_of_shard[shards]
        for stream in np.unique(streams).tolist():
            if stream in self._selections:
                here = streams == stream
                yield self._selections[stream], here, shards[here]


class _AllShards(Sequence[ShardInfo]):
    """Lazy sequence of the shards of several indexes.

    Args:
        indexes: Indexes to concatenate.
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
        return self._tables[stream][place - self._stops[stream]]  # negative: from the end of its table

    def __iter__(self) -> Iterator[ShardInfo]:
        return chain.from_iterable(self._tables)


class CatalogLengths:
    """Number of tokens of samples, by sample id.

    Args:
        catalog: Catalog that maps ids to stored samples.
        streams: The lengths of each stream, by name.
        shown: How waits for computations over the lengths are shown.

    Raises:
        ConfigError: A stream has no lengths, or another number of lengths than of stored samples.
    """

    def __init__(self, catalog: Catalog, streams: Mapping[str, StreamLengths], shown: ProgressDisplay = IN_LOG) -> None:
        for name, index in zip(catalog.stream_names, catalog.indexes, strict=True):
            if name not in streams or len(streams[name]) != index.num_samples:
                known = f"{len(streams[name])} lengths" if name in streams else "no lengths"
                raise ConfigError(f"stream {name!r} stores {index.num_samples} samples, but has {known}", stream=name)
        self.streams = tuple(streams[name] for name in catalog.stream_names)
        self._selections = catalog.selections
        self._firsts, self._samples = catalog.first_ids, catalog.samples_per_stream
        self._gathered: dict[int, NDArray[np.uint32]] = {}
        self.shown = shown

    def gather(self) -> None:
        """Copy the lengths of selected samples into memory, 4 bytes each, for streams with a selection.

        This pays if most of them are looked up: a lookup is then as fast as without a selection. Streams without a
        selection stay mapped.
        """
        for stream, selection in enumerate(self._selections):
            if selection is not None and stream not in self._gathered:
                gathered, filled = np.empty(len(selection), np.uint32), 0
                for some in self._selected(stream):
                    gathered[filled : filled + len(some)] = some
                    filled += len(some)
                self._gathered[stream] = gathered

    def release(self) -> None:
        """Free the lengths that :meth:`gather` copied."""
        self._gathered = {}

    def __call__(self, sample_ids: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the lengths of some samples.

        Args:
            sample_ids: Each in ``[0, catalog.num_samples)``; of shape (samples,).

        Returns:
            Tokens, of the same shape.
        """
        if len(self.streams) == 1 and self._selections[0] is None:
            return self.streams[0].values.take(sample_ids)
        lengths = np.empty(len(sample_ids), np.uint32)
        for start in range(0, len(sample_ids), _IDS_AT_ONCE):
            self._look_up(sample_ids[start : start + _IDS_AT_ONCE], lengths[start : start + _IDS_AT_ONCE])
        return lengths

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of the lengths of all stored samples of each stream, 16 hexadecimal digits."""
        return tuple(lengths.digest for lengths in self.streams)

    @cached_property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of the selected samples of each stream."""
        return tuple(
            lengths.num_tokens
            if selection is None
            else sum(int(some.sum(dtype=np.int64)) for some in self._selected(stream))
            for stream, (lengths, selection) in enumerate(zip(self.streams, self._selections, strict=True))
        )

    def _selected(self, stream: int) -> Iterator[NDArray[np.uint32]]:
        """Yield the lengths of a stream's selected samples in order, in chunks."""
        lengths, selection = self.streams[stream].values, self._selections[stream]
        assert selection is not None, "the stream has a selection"
        for first in range(0, len(lengths), SUMMED_AT_ONCE):
            some = lengths[first : first + SUMMED_AT_ONCE]
            yield some[selection.has(np.arange(first, first + len(some)))]

    def _look_up(self, sample_ids: NDArray[np.int64], lengths: NDArray[np.uint32]) -> None:
        smallest, largest = int(sample_ids.min()), int(sample_ids.max())
        for stream, (first, samples) in enumerate(zip(self._firsts, self._samples, strict=True)):
            if largest < first or smallest >= first + samples:
                continue
            here: Any = slice(None)
            if smallest < first or largest >= first + samples:
                here = np.flatnonzero((sample_ids >= first) & (sample_ids < first + samples))
            numbers, selection = sample_ids[here] - first, self._selections[stream]
            if stream in self._gathered:
                lengths[here] = self._gathered[stream].take(numbers)
            else:
                stored = numbers if selection is None else selection.stored(numbers)
                lengths[here] = self.streams[stream].values.take(stored)
