"""The catalog of a dataset: indexes of all streams, joins, selections and lengths, read into one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.eviction import check_limit
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.quota import CacheQuota, largest_shard_bytes
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.shard import check_wanted
from lightning_streaming.formats.shard_table import check_selection
from lightning_streaming.options.groups import fields_of
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.options.selection import SelectionConfig
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.selection.counting import document_lengths
from lightning_streaming.selection.document_lengths import CatalogLengths, StreamLengths
from lightning_streaming.selection.evaluate import MissingIds, find_missing_ids, select_samples
from lightning_streaming.selection.id_index import index_ids
from lightning_streaming.selection.joins import JoinedDataset, Joins, JoinSource, StreamJoins, joined_label
from lightning_streaming.selection.scanning import ProgressFactory
from lightning_streaming.waits import ProgressDisplay, progress

RANDOM_READERS = 8
"""Readers by sample number keep open what one of so many readers in order may: they rest for nobody knows how long."""


class CatalogReader:
    """Reads the catalog of all streams, from this node's cache or the stores.

    Creating one does no I/O. It may be sent to another process, which then reads the indexes itself; selections and
    lengths are not computed again.

    Args:
        caches: Where each stream's files are, by stream name.
        allow_unsafe_types: Whether columns may be unpickled.
        columns: Names of the columns to decode; None for all.
        selections: Which samples of a stream are read; all, of streams that are not there.
        joins: The datasets that are joined with a stream, by its name and theirs.
        lengths: What tells how many tokens samples have, where they are packed.

    Raises:
        ConfigError: ``columns`` is not a list of names.
    """

    def __init__(
        self,
        caches: Mapping[str, ShardCache],
        allow_unsafe_types: bool,
        columns: Sequence[str] | None = None,
        selections: Mapping[str, SelectionConfig] = MappingProxyType({}),
        joins: Mapping[str, Mapping[str, JoinSource]] = MappingProxyType({}),
        lengths: LengthsRequest | None = None,
    ) -> None:
        self.caches = dict(caches)
        self.columns = check_selection(columns)
        self.allow_unsafe_types = allow_unsafe_types
        self.most_together = 0
        """Bytes of the largest shard with those that are joined with it, as the last catalog had them."""
        # Each with its key, once it is known: other processes read what was selected here.
        self._selections: dict[str, tuple[SelectionConfig, str | None]] = {
            name: (one, None) for name, one in selections.items() if not one.is_all
        }
        self._joins = {name: dict(joined) for name, joined in joins.items() if joined}
        # With the key of each stream's, once it is known: other processes read what was counted here.
        self._lengths: tuple[LengthsRequest, dict[str, str]] | None = None if lengths is None else (lengths, {})

    def all_caches(self) -> Iterator[ShardCache]:
        """Return the caches of streams and of joined datasets."""
        yield from self.caches.values()
        yield from self.joined_caches()

    def joined_caches(self) -> Iterator[ShardCache]:
        """Return the caches of joined datasets."""
        for joined in self._joins.values():
            yield from (source.cache for source in joined.values())

    def set_label(self, place: str) -> None:
        """Set where the streams are configured, like ``data.val``, for errors."""
        for name, cache in self.caches.items():  # a stream without a name is the only one there
            cache.label = place if list(self.caches) == ["0"] else f"stream {name!r} of {place}"
            for join, source in self._joins.get(name, {}).items():
                source.cache.label = joined_label(cache.label, join)

    def read(self, room: CacheQuota, shown: ProgressDisplay, watched: ProgressFactory) -> Catalog:
        """Read the indexes, and select, join and count what is not yet selected, joined and counted.

        Args:
            room: The directories of all caches.
            shown: How to show what readers of the catalog wait for later.
            watched: Looks on while selections, ids and lengths are read.

        Raises:
            ConfigError: As for :attr:`SampleSource.catalog`.
        """
        indexes = self._read_indexes()
        catalog = Catalog(indexes, joins=self._read_joins(indexes))
        self._check_columns(catalog)
        self._check_limit(catalog, room)
        if self._selections or self._joins:
            catalog = self._selected_of(catalog, room, watched)
            self._index_ids(catalog, room, watched)
            room.forget_fixed_bytes()
            self._check_limit(catalog, room)  # again: what was made just now takes room too
        if self._lengths is not None:
            counted = self._count_tokens(catalog, *self._lengths, room, watched)
            catalog.lengths = CatalogLengths(catalog, counted, shown)
            room.forget_fixed_bytes()
            self._check_limit(catalog, room)
        return catalog

    def go_on_with(self, newer: Mapping[str, IndexCache], num_shards: Mapping[str, int]) -> None:
        """Read more shards of some streams into the next catalog; see :meth:`SampleSource.read_more`."""
        for stream, index in newer.items():
            self.caches[stream].go_on_with(index, num_shards[stream])
            if stream in self._selections:
                self._selections[stream] = self._selections[stream][0], None
            if self._lengths is not None:
                self._lengths[1].pop(stream, None)

    def missing_ids(self, catalog: Catalog, room: CacheQuota, watched: ProgressFactory) -> Iterator[MissingIds]:
        """Yield, for each dataset that is joined by id, the ids of its stream's samples that it lacks, if any."""
        joins = {} if catalog.joins is None else catalog.joins.streams
        for stream, of_stream in joins.items():
            cache, index = self.caches[catalog.stream_names[stream]], catalog.indexes[stream]
            for one in of_stream.read:
                if one.config.key is None:
                    continue
                with watched(cache.label, one.config.in_words(), index.num_samples) as tell:
                    found = find_missing_ids(index, cache, one, catalog.selections[stream], room, tell)
                if found is not None:
                    yield found

    def _read_indexes(self) -> dict[str, DatasetIndex]:
        """Read the indexes of streams, and those of joined datasets at the same time."""
        caches = list(self.all_caches())
        with progress(len(caches), "datasets", "reading indexes", by_all=True) as tell:
            for cache in caches:
                cache.read_index()
                tell(1)
        return {name: cache.read_index() for name, cache in self.caches.items()}

    def _read_joins(self, indexes: Mapping[str, DatasetIndex]) -> Joins | None:
        """Return the joined datasets, without their ids."""
        if not self._joins:
            return None
        own_shards = sum(len(index.shards) for index in indexes.values())
        streams, first, following = {}, 0, own_shards
        for place, (name, index) in enumerate(indexes.items()):
            joined = []
            for join, source in self._joins.get(name, {}).items():
                one = JoinedDataset(join, source, source.cache.read_index(), following, self.columns)
                joined.append(one)
                following += len(one.index.shards)
            if joined:
                streams[place] = StreamJoins(self.caches[name].label, index, first, joined, self.columns)
            first += len(index.shards)
        return Joins(own_shards, streams)

    def _selected_of(self, catalog: Catalog, room: CacheQuota, watched: ProgressFactory) -> Catalog:
        """Return the catalog with the selected samples only."""
        indexes = dict(zip(catalog.stream_names, catalog.indexes, strict=True))
        joins = {} if catalog.joins is None else catalog.joins.streams
        joined = {catalog.stream_names[stream]: one.final_names() for stream, one in joins.items()}
        selections = {}
        for name, (asked, key) in self._selections.items():
            cache = self.caches[name]
            with watched(cache.label, asked.in_words(), indexes[name].num_samples) as tell:
                selected = select_samples(asked, indexes[name], cache, room, tell, key, joined.get(name, ()))
            selections[name] = selected
            if not len(selected):
                raise ConfigError(
                    f"{cache.label} has {indexes[name].num_samples} samples, of which {asked.in_words()} selects none",
                    hint="mend the condition, or leave the stream out",
                    option="selection.where",
                    stream=name,
                )
        self._selections = {name: (asked, selections[name].key) for name, (asked, _) in self._selections.items()}
        return Catalog(indexes, selections, catalog.joins)

    def _index_ids(self, catalog: Catalog, room: CacheQuota, watched: ProgressFactory) -> None:
        for one in catalog.joins or ():
            if one.config.key is not None and one.names:
                described = one.config.in_words()
                with fields_of(f"join.{one.name}"), watched(one.cache.label, described, one.index.num_samples) as tell:
                    one.ids = index_ids(one.config.key, one.index, one.cache, room, tell)

    def _count_tokens(
        self, catalog: Catalog, asked: LengthsRequest, keys: dict[str, str], room: CacheQuota, watched: ProgressFactory
    ) -> dict[str, StreamLengths]:
        """Return how many tokens the samples of each stream have."""
        streams = {}
        for name, index in zip(catalog.stream_names, catalog.indexes, strict=True):
            cache = self.caches[name]
            streams[name] = document_lengths(asked, index, cache, room, watched=watched, key=keys.get(name))
            keys[name] = streams[name].key
        return streams

    def _check_columns(self, catalog: Catalog) -> None:
        """Check the columns of every shard now, and not in the step that first needs a shard."""
        for place, info in catalog.examples():
            stream = int(catalog.stream_of_shard[place])
            joins = None if catalog.joins is None else catalog.joins.streams.get(stream)
            cache = self.caches[catalog.stream_names[stream]]
            columns, more = (self.columns, "") if joins is None else (joins.own_columns, joins.in_words())
            self._check_wanted(cache, info, columns, more)
        for one in catalog.joins or ():
            for _, info in one.index.shards.examples() if one.names else ():
                self._check_wanted(one.cache, info, one.columns, join=one.name)

    def _check_wanted(
        self, cache: ShardCache, info: ShardInfo, columns: Sequence[str] | None, more: str = "", join: str | None = None
    ) -> None:
        try:
            check_wanted(info, allow_unsafe_types=self.allow_unsafe_types, columns=columns)
        except ConfigError as error:
            known = {**error.fields, "stream": cache.stream}
            if join is not None and error.option == "columns":
                known["option"] = f"join.{join}.columns"
            raise ConfigError(f"{cache.label}: {error.args[0]}{more}", **known) from None

    def _check_limit(self, catalog: Catalog, room: CacheQuota) -> None:
        # Whoever reads a sample needs its shard and those that are joined with it.
        self.most_together = max(
            sum(
                largest_shard_bytes(index.shards, columns)
                for cache, index, columns in together
                if cache.needs_room(index)
            )
            for together in self._read_together(catalog)
        )
        check_limit(room.limit, room.fixed_bytes(), self.most_together, room.limit_name)
        if room.limit is not None:
            room.expect(RANDOM_READERS, self.most_together)

    def _read_together(self, catalog: Catalog) -> Iterator[list[tuple[ShardCache, DatasetIndex, Sequence[str] | None]]]:
        """Yield each stream's dataset and those that are joined with it, with the columns that are read."""
        joins = {} if catalog.joins is None else catalog.joins.streams
        for place, (cache, index) in enumerate(zip(self.caches.values(), catalog.indexes, strict=True)):
            found = joins.get(place)
            joined = [] if found is None else [(one.cache, one.index, one.columns) for one in found.read]
            yield [(cache, index, self.columns if found is None else found.own_columns), *joined]
