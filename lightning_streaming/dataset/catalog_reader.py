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
from lightning_streaming.selection.catalog import Catalog, CatalogLengths
from lightning_streaming.selection.document_lengths import StreamLengths, document_lengths
from lightning_streaming.selection.evaluate import MissingIds, find_missing_ids, select_samples
from lightning_streaming.selection.id_index import index_ids
from lightning_streaming.selection.joins import JoinedDataset, Joins, JoinSource, StreamJoins, joined_label
from lightning_streaming.selection.scanning import ProgressFactory
from lightning_streaming.waits import ProgressDisplay, progress

RANDOM_READERS = 8
"""A reader by sample number may keep as much open as one of this many readers in order: it may rest for long."""


class CatalogReader:
    """Reads the catalog of all streams, from this node's cache or the stores.

    Creating one does no I/O. It may be sent to another process, which then reads the indexes itself; selections and
    lengths are not computed again.

    Args:
        caches: The cache of each stream, by stream name.
        allow_unsafe_types: Whether columns may be unpickled.
        columns: Names of the columns to decode; None for all.
        selections: Which samples of a stream are read; all, of streams without one.
        joins: The datasets that are joined with a stream, by its name and theirs.
        lengths: How to count the tokens of samples, if lengths are needed.

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
        """Bytes of the largest shard with those that are joined with it, in the latest catalog."""
        # Each with its key, once it is known: other processes read the selections of this one.
        self._selections: dict[str, tuple[SelectionConfig, str | None]] = {
            name: (selection, None) for name, selection in selections.items() if not selection.is_all
        }
        self._joins = {name: dict(joined) for name, joined in joins.items() if joined}
        # With the key of each stream's, once it is known: other processes read the lengths of this one.
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
        for name, cache in self.caches.items():  # an unnamed stream is the only one
            cache.label = place if list(self.caches) == ["0"] else f"stream {name!r} of {place}"
            for join, source in self._joins.get(name, {}).items():
                source.cache.label = joined_label(cache.label, join)

    def read(self, quota: CacheQuota, shown: ProgressDisplay, progress_of: ProgressFactory) -> Catalog:
        """Read the indexes, then select, join and count samples, unless that is cached.

        Args:
            quota: The directories of all caches.
            shown: Display of waits of readers of the catalog.
            progress_of: Reports the progress of reading selections, ids and lengths.

        Raises:
            ConfigError: As for :attr:`SampleSource.catalog`.
        """
        caches = list(self.all_caches())
        with progress(len(caches), "datasets", "reading indexes", by_all=True) as report:
            for cache in caches:
                cache.read_index()
                report(1)
        indexes = {name: cache.read_index() for name, cache in self.caches.items()}
        catalog = Catalog(indexes, joins=self._read_joins(indexes))
        self._check_columns(catalog)
        self._check_limit(catalog, quota)
        if self._selections or self._joins:
            catalog = self._select(catalog, quota, progress_of)
            for joined in catalog.joins or ():
                if joined.config.key is not None and joined.names:
                    label, words = joined.cache.label, joined.config.in_words()
                    with (
                        fields_of(f"join.{joined.name}"),
                        progress_of(label, words, joined.index.num_samples) as report,
                    ):
                        joined.ids = index_ids(joined.config.key, joined.index, joined.cache, quota, report)
            quota.forget_fixed_bytes()
            self._check_limit(catalog, quota)  # again: selections and indexes of ids take room too
        if self._lengths is not None:
            request, keys = self._lengths
            counted = dict[str, StreamLengths]()
            for name, index in zip(catalog.stream_names, catalog.indexes, strict=True):
                cache, key = self.caches[name], keys.get(name)
                counted[name] = document_lengths(request, index, cache, quota, watched=progress_of, key=key)
                keys[name] = counted[name].key
            catalog.lengths = CatalogLengths(catalog, counted, shown)
            quota.forget_fixed_bytes()
            self._check_limit(catalog, quota)
        return catalog

    def read_more(self, newer: Mapping[str, IndexCache], num_shards: Mapping[str, int]) -> None:
        """Read more shards of some streams into the next catalog; see :meth:`SampleSource.read_more`."""
        for stream, index in newer.items():
            self.caches[stream].adopt_index(index, num_shards[stream])
            if stream in self._selections:
                self._selections[stream] = self._selections[stream][0], None
            if self._lengths is not None:
                self._lengths[1].pop(stream, None)

    def missing_ids(self, catalog: Catalog, quota: CacheQuota, progress_of: ProgressFactory) -> Iterator[MissingIds]:
        """Yield, for each dataset that is joined by id, the ids of its stream's samples that it lacks, if any."""
        streams = {} if catalog.joins is None else catalog.joins.streams
        for stream, joins in streams.items():
            cache, index = self.caches[catalog.stream_names[stream]], catalog.indexes[stream]
            for joined in joins.read:
                if joined.config.key is None:
                    continue
                with progress_of(cache.label, joined.config.in_words(), index.num_samples) as report:
                    missing = find_missing_ids(index, cache, joined, catalog.selections[stream], quota, report)
                if missing is not None:
                    yield missing

    def _read_joins(self, indexes: Mapping[str, DatasetIndex]) -> Joins | None:
        """Return the joined datasets, without their ids."""
        if not self._joins:
            return None
        own_shards = sum(len(index.shards) for index in indexes.values())
        streams, first, next_shard = {}, 0, own_shards
        for place, (name, index) in enumerate(indexes.items()):
            joined = list[JoinedDataset]()
            for join, source in self._joins.get(name, {}).items():
                joined.append(JoinedDataset(join, source, source.cache.read_index(), next_shard, self.columns))
                next_shard += len(joined[-1].index.shards)
            if joined:
                streams[place] = StreamJoins(self.caches[name].label, index, first, joined, self.columns)
            first += len(index.shards)
        return Joins(own_shards, streams)

    def _select(self, catalog: Catalog, quota: CacheQuota, progress_of: ProgressFactory) -> Catalog:
        """Return the catalog with the selected samples only."""
        indexes = dict(zip(catalog.stream_names, catalog.indexes, strict=True))
        joins = {} if catalog.joins is None else catalog.joins.streams
        joined = {catalog.stream_names[stream]: joins_of.final_names() for stream, joins_of in joins.items()}
        selections = {}
        for name, (config, key) in self._selections.items():
            cache, index = self.caches[name], indexes[name]
            with progress_of(cache.label, config.in_words(), index.num_samples) as report:
                selected = select_samples(config, index, cache, quota, report, key, joined.get(name, ()))
            if not len(selected):
                raise ConfigError(
                    f"{cache.label} has {index.num_samples} samples, of which {config.in_words()} selects none",
                    hint="fix the condition, or leave the stream out",
                    option="selection.where",
                    stream=name,
                )
            selections[name] = selected
        self._selections = {name: (config, selections[name].key) for name, (config, _) in self._selections.items()}
        return Catalog(indexes, selections, catalog.joins)

    def _check_columns(self, catalog: Catalog) -> None:
        """Check the columns of every shard now, and not in the step that first needs a shard."""
        for place, info in catalog.examples():
            stream = int(catalog.stream_of_shard[place])
            joins = None if catalog.joins is None else catalog.joins.streams.get(stream)
            cache = self.caches[catalog.stream_names[stream]]
            columns, more = (self.columns, "") if joins is None else (joins.own_columns, joins.in_words())
            self._check_wanted(cache, info, columns, more)
        for joined in catalog.joins or ():
            for _, info in joined.index.shards.examples() if joined.names else ():
                self._check_wanted(joined.cache, info, joined.columns, join=joined.name)

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

    def _check_limit(self, catalog: Catalog, quota: CacheQuota) -> None:
        # A reader of a sample needs its shard and those that are joined with it.
        self.most_together = max(
            sum(
                largest_shard_bytes(index.shards, columns)
                for cache, index, columns in together
                if cache.needs_room(index)
            )
            for together in self._read_together(catalog)
        )
        check_limit(quota.limit, quota.fixed_bytes(), self.most_together, quota.limit_name)
        if quota.limit is not None:
            quota.expect(RANDOM_READERS, self.most_together)

    def _read_together(self, catalog: Catalog) -> Iterator[list[tuple[ShardCache, DatasetIndex, Sequence[str] | None]]]:
        """Yield each stream's dataset and those that are joined with it, with the columns that are read."""
        joins = {} if catalog.joins is None else catalog.joins.streams
        for place, (cache, index) in enumerate(zip(self.caches.values(), catalog.indexes, strict=True)):
            of_stream = joins.get(place)
            if of_stream is None:
                yield [(cache, index, self.columns)]
            else:
                joined = [(dataset.cache, dataset.index, dataset.columns) for dataset in of_stream.read]
                yield [(cache, index, of_stream.own_columns), *joined]
