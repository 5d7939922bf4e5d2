"""Samples by shard and index: fetches shards to this node, opens as many as allowed, and reads from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.eviction import coldest_first, reader_share
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.cache.shard_cache import FetchStatus, Miss, Misses
from lightning_streaming.cache.usage import CacheEntry
from lightning_streaming.dataset.catalog_reader import RANDOM_READERS, CatalogReader
from lightning_streaming.dataset.open_shards import CachePressure, OpenShards, ShardsAhead, raw_bytes
from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    FormatError,
    ObjectNotFoundError,
    ShardCorruptError,
    StreamingError,
)
from lightning_streaming.formats.encodings import register_encoding, registered_encodings
from lightning_streaming.formats.images.decode import DecodeImages, image_decoder
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.readers import ShardReader
from lightning_streaming.formats.shard import (
    SingleSampleReader,
    check_shard,
    has_single_samples,
    may_be_flat,
    name_in_index,
    narrowed,
    open_shard,
    table_part,
)
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.options.selection import SelectionConfig
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.selection.evaluate import MissingIds
from lightning_streaming.selection.joins import (
    JoinedAhead,
    JoinedDataset,
    JoinedReader,
    JoinSource,
    StreamJoins,
)
from lightning_streaming.selection.scanning import ProgressFactory, no_progress
from lightning_streaming.storage.downloads import share_connections
from lightning_streaming.waits import IN_LOG

_MOST_TABLES = 64
"""Shards whose offsets are remembered; four bytes for each of their samples."""
_SECONDS_BETWEEN_CHECKS = 5.0
"""Between two checks whether files that are mapped in place have changed."""

DecodeSample = Callable[[dict[str, Any], int, int], dict[str, Any]]
"""Makes the pictures of a sample what was asked for; is told its shard, and its index there."""


class SampleSource:
    """The shards of all streams of a dataset, fetched and opened when needed.

    Creating one does no I/O. It may be sent to another process, which then reads the indexes itself, from this node's
    cache.

    Args:
        caches: Where each stream's files are, by stream name.
        allow_unsafe_types: Return whether columns may be unpickled.
        columns: Names of the columns to decode; None for all.
        cache_limit: Most bytes that the directories of streams and joined datasets may hold together; None for no
            limit.
        selections: Which samples of a stream are read; all, of streams that are not there.
        joins: The datasets that are joined with a stream, by its name and theirs.
        lengths: What tells how many tokens samples have, where they are packed.
        decode: What columns of pictures give, by name.

    Raises:
        ConfigError: ``columns`` is not a list of names.
    """

    def __init__(
        self,
        caches: Mapping[str, ShardCache],
        allow_unsafe_types: bool,
        columns: Sequence[str] | None = None,
        cache_limit: int | None = None,
        selections: Mapping[str, SelectionConfig] = MappingProxyType({}),
        joins: Mapping[str, Mapping[str, JoinSource]] = MappingProxyType({}),
        lengths: LengthsRequest | None = None,
        decode: Mapping[str, str] | None = None,
    ) -> None:
        self._catalogs = CatalogReader(caches, allow_unsafe_types, columns, selections, joins, lengths)
        self._decode = decode or {}
        self._room = CacheQuota((cache.directory for cache in self._catalogs.all_caches()), cache_limit)
        self.known_catalog: Catalog | None = None  # as long as no index has been read
        self.shown = IN_LOG
        """How to show waits for what is read and worked out of indexes."""
        self._pressure = CachePressure(self._room)
        self._open = OpenShards(self._stamp_used)
        self._checks_at = 0.0
        self._ahead = ShardsAhead()
        self._offsets: OrderedDict[int, SingleSampleReader] = OrderedDict()

    @property
    def allow_unsafe_types(self) -> bool:
        """Return whether columns may be unpickled."""
        return self._catalogs.allow_unsafe_types

    @property
    def catalog(self) -> Catalog:
        """Return every shard and every selected sample; indexes are read, and selections evaluated, at first use.

        Raises:
            ConfigError: A stream holds no sample, or none is selected; a condition cannot be evaluated; a shard lacks a
                column that is to be read, or has one that is unsafe where that is not allowed; a dataset cannot be
                joined; or the cache limit is too small: the message says which would do.
        """
        if self.known_catalog is None:
            with self.shown.here():
                self.known_catalog = self._read_catalog(no_progress)
        return self.known_catalog

    def _read_catalog(self, watched: ProgressFactory) -> Catalog:
        catalog = self._catalogs.read(self._room, self.shown, watched)
        self._pressure.largest_shard = self._catalogs.most_together
        if self._room.limit is not None:
            self._pressure.shards_limit = max(0, self._room.limit - self._room.fixed_bytes())
            self._share_room(RANDOM_READERS)
        return catalog

    def current_index(self, stream: str) -> IndexCache:
        """Return the current index of a stream; see :meth:`ShardCache.index_anew`."""
        return self._catalogs.caches[stream].index_anew()

    def read_more(self, newer: Mapping[str, IndexCache], num_shards: Mapping[str, int]) -> None:
        """Read more shards of some streams from now on; call it between two passes.

        Args:
            newer: Their indexes as they are by now, by stream name.
            num_shards: How many shards to read of each.
        """
        self._open.close_all()
        self._offsets.clear()
        self._catalogs.go_on_with(newer, num_shards)
        self._room.forget_fixed_bytes()
        self.known_catalog = None

    def make_ahead(self, watched: ProgressFactory) -> None:
        """Read the catalog, and report the progress of selections and indexes of ids that are created."""
        self.known_catalog = self._read_catalog(watched)

    def missing_ids(self, watched: ProgressFactory) -> Iterator[MissingIds]:
        """Yield, for each dataset that is joined by id, the ids of its stream's samples that it lacks, if any.

        Args:
            watched: Looks on while the columns of ids are read.
        """
        return self._catalogs.missing_ids(self.catalog, self._room, watched)

    def has_all_columns(self) -> bool:
        """Return whether samples have all stored columns, as no option selects some."""
        return self._catalogs.columns is None

    def may_be_plain(self) -> bool:
        """Return whether all shards have the same columns, and their samples only numbers and arrays."""
        columns, is_touched = self._catalogs.columns, self._decode or self.catalog.joins is not None
        return not is_touched and self.catalog.may_be_plain(columns)

    def may_be_joined(self) -> bool:
        """Return whether arrays can be read from all shards at once, and nothing is joined with them."""
        return self.catalog.joins is None and all(may_be_flat(info) for _, info in self.catalog.examples())

    def info_of(self, shard: int) -> ShardInfo:
        """Return a shard, as its index describes it."""
        return self.catalog.shards[shard]

    @property
    def is_remote(self) -> bool:
        """Return whether any stream's shards may have to be fetched first."""
        return not all(cache.reads_in_place for cache in self._catalogs.all_caches())

    @property
    def cache_limit(self) -> int | None:
        """Return the most bytes that the streams' directories may hold together."""
        return self._room.limit

    def cache_usage(self) -> int:
        """Return the bytes that the streams' directories hold of fetched files, with downloads under way."""
        return self._room.usage()

    def fixed_bytes(self) -> int:
        """Return the bytes of these that are never evicted: indexes, selections, lengths."""
        return self._room.fixed_bytes()

    @property
    def readers(self) -> OrderedDict[int, ShardReader]:
        """Return the readers of open shards; see :class:`OpenShards`. :meth:`open` adds others."""
        return self._open.readers

    @property
    def is_in_pass(self) -> bool:
        """Return whether reads belong to a pass, which calls :meth:`rest` itself."""
        return self._open.is_in_pass

    @is_in_pass.setter
    def is_in_pass(self, is_in_pass: bool) -> None:
        self._open.is_in_pass = is_in_pass

    def set_label(self, place: str) -> None:
        """Set where the streams are configured, like ``data.val``, for errors."""
        self._room.limit_name = f"{place}.cache_limit"
        self._catalogs.set_label(place)

    def prepare(self) -> None:
        """Prepare for worker processes: import what fetching needs, and leave them the room in the cache."""
        for cache in self._catalogs.all_caches():
            cache.prepare()
        if self._room.limit is not None:
            self._open.close_all()

    @property
    def misses(self) -> Mapping[str, Misses]:
        """Return the notes of each stream's cache on files that were missing, by stream name."""
        return {name: cache.misses for name, cache in self._catalogs.caches.items()}

    def report_fetching(self, tell: Callable[[int, int], object] | None) -> None:
        """Set the callback for each shard that this process fetches; see :class:`Misses`."""
        for cache in self._catalogs.all_caches():
            cache.misses.tell = tell

    def begin_pass(self, readers: int) -> None:
        """Note that this process reads in order now, and shares the cache with the other readers of this node.

        Where the directories hold more than the limit, unused shards are removed; reading the catalog removes none.
        """
        self._open.forget_inherited()
        for cache in self._catalogs.joined_caches():  # those of streams are cleared by their meter
            cache.misses.clear()
        share_connections(readers)
        self._share_room(readers)
        self._room.trim()

    def fetch(self, shard: int, wait: bool = True) -> bool:
        """Fetch a shard to this node, unless it is there.

        Args:
            shard: Counted over all streams.
            wait: Whether to wait while another process fetches it, or until there is room.

        Returns:
            Whether it is here; False only if ``wait`` is False.
        """
        cache, info = self._checked(shard)
        if not wait:
            return cache.fetch_ahead(info, self._room) is None
        with cache.hold(info, self._room):
            return True

    def has(self, shard: int) -> bool:
        """Return whether a shard is on this node, with the columns that are read."""
        cache, info = self._cache_of(shard)
        return cache.has(info)

    def fetch_ahead(self, shard: int) -> bool:
        """Prefetch a shard that the reader will soon need, in a thread, without waiting for other processes.

        Returns:
            Whether to go on with the next one; False if there is no room until the reader has moved on.
        """
        cache, info = self._checked(shard)
        spare_since = self._ahead.spare_since(raw_bytes(info))
        self._ahead.begin(shard, raw_bytes(info))
        status: FetchStatus | None = FetchStatus.NO_ROOM
        try:
            status = cache.fetch_ahead(info, self._room, spare_since)
        finally:
            if status is not None or shard in self._open.readers:  # the reader was faster
                self._ahead.end(shard)
        return status is not FetchStatus.NO_ROOM

    def find_joined(self) -> Callable[[int, NDArray[np.int64]], list[int]]:
        """Return a function for threads of one pass: it finds the shards of datasets joined by id with samples.

        It takes the samples' shard and their indexes there.
        """
        ahead = JoinedAhead(self._room)

        def find(shard: int, indexes: NDArray[np.int64]) -> list[int]:
            joins = self._joins_of(shard)
            joined = [] if joins is None else [one for one in joins.read if one.config.key is not None]
            return ahead.shards(shard, indexes, self._cache_of(shard), joined)

        return find

    def read(self, shard: int, index: int, *, alone: bool = False, retry: int = 1) -> dict[str, Any]:
        """Return a decoded sample: column name to value.

        While it is read its shard cannot be evicted.

        Args:
            shard: Counted over all streams.
            index: Counted within the shard.
            alone: Whether to fetch only the sample's bytes if its shard is not here and has them uncompressed.
            retry: How often to fetch the shard again if it turns out to be damaged on this node, or to have vanished.

        Raises:
            FormatError: The shard or the sample is damaged; names the stream and the shard.
            StorageError: The shard could not be fetched.
        """
        sample = self._read_stored(shard, index, alone=alone, retry=retry)
        decode = self.decoder()
        if decode is None:
            return sample
        try:
            return decode(sample, shard, index)
        except FormatError as error:
            raise self.named(error, shard) from error

    def decoder(self) -> DecodeSample | None:
        """Return a function that decodes the images of a sample in place; None if ``decode`` is not set.

        It takes the sample, its shard, and its index there, and may be called by several threads. It raises
        EncodingError for damaged files, which names the sample, and ConfigError for columns without images.

        Raises:
            ConfigError: A column that was asked for is nowhere.
            MissingDependencyError: What decodes pictures is not installed.
        """
        return partial(self._decoded, self._decoder) if self._decode else None

    def _decoded(self, decode: DecodeImages, sample: dict[str, Any], shard: int, index: int) -> dict[str, Any]:
        try:
            return decode(sample)
        except EncodingError as error:
            _, info = self._cache_of(shard)
            file = info.raw_data.basename
            raise error.with_context(f"{file}, sample {index}", path=file, sample=index) from error

    @cached_property
    def _decoder(self) -> DecodeImages:
        known = {name for stream in self.catalog.columns_of_streams() for names in stream for name in names}
        lacking = [name for name in self._decode if name not in known]
        if lacking:
            raise ConfigError(
                f"decode names column {lacking[0]!r}, which no stream has",
                hint=f"there are {', '.join(sorted(known))}",
                option="decode.columns",
            )
        return image_decoder(self._decode)

    def _read_stored(self, shard: int, index: int, *, alone: bool = False, retry: int = 1) -> dict[str, Any]:
        """Return a sample as :meth:`read` does, with its images as the readers return them."""
        readers = self._open.readers
        reader = readers.get(shard)
        if reader is None:
            if alone and (found := self._read_alone(shard, index)) is not None:
                return found
            reader = self.open(shard, retry)
        else:
            readers.move_to_end(shard)
        try:
            sample = reader[index]
        except FormatError as error:
            raise self.named(error, shard) from error
        if not self.is_in_pass:
            self.rest()
        return sample

    def open(self, shard: int, retry: int = 1) -> ShardReader:
        """Open a shard that is not open; fetch it if necessary.

        Args:
            shard: Counted over all streams.
            retry: As for :meth:`read`.

        Raises:
            FormatError: It is damaged; names the stream and the shard.
            StorageError: It could not be fetched.
        """
        cache, info = self._checked(shard)
        self._open.forget_inherited()
        self.check_unchanged(self._open.make_room(info))
        self._pressure.look_next_time()
        self._ahead.end(shard)
        for attempts_left in range(retry, -1, -1):
            with cache.hold(info, self._room, self._open.close_all) as directory:
                try:
                    reader = self._reader_of(shard, info, directory)
                except (ShardCorruptError, ObjectNotFoundError) as error:
                    damage = error
                except StreamingError as error:
                    raise self.named(error, shard) from error
                else:
                    self._open.add(shard, info, reader)
                    return reader
            # Damaged or removed on this node since it was made present, unless it is read in place.
            if not attempts_left or not cache.discard(info):
                raise self.named(damage, shard) from damage
        raise AssertionError("the last attempt returns or raises")

    def _reader_of(self, shard: int, info: ShardInfo, directory: Path) -> ShardReader:
        columns = self._columns_of(shard)
        unsafe, as_files = self.allow_unsafe_types, self._as_files(shard)
        reader = open_shard(info, directory, allow_unsafe_types=unsafe, columns=columns, as_files=as_files)
        joins = self._joins_of(shard)
        return reader if joins is None else JoinedReader(reader, joins, shard, self._read_joined)

    def _read_joined(self, shard: int, index: int) -> dict[str, Any]:
        """Return a sample of a joined dataset."""
        readers = self._open.readers
        reader = readers.get(shard)
        if reader is None:
            reader = (self._open.opens or self.open)(shard)
        else:
            readers.move_to_end(shard)
        try:
            return reader[index]
        except FormatError as error:
            raise self.named(error, shard) from error

    @contextmanager
    def opened_by(self, opens: Callable[[int], ShardReader]) -> Iterator[None]:
        """Let a pass open the shards that samples need in addition to their own, instead of :meth:`open`."""
        self._open.opens = opens
        try:
            yield
        finally:
            self._open.opens = None

    def take_misses(self, shard: int) -> list[Miss]:
        """Return the noted files of a shard that were missing when they were needed, and forget them."""
        cache, info = self._cache_of(shard)
        return cache.misses.take(info)

    def release(self, shard: int) -> None:
        """Release a shard that this reader no longer needs in this pass."""
        self._open.close(shard)
        self._ahead.end(shard)
        self.check_unchanged([shard])

    def check_unchanged(self, shards: Iterable[int] | None = None) -> None:
        """Raise an error if files that are read in place have changed during the run.

        Args:
            shards: Of which shards. None: those that are open.

        Raises:
            IntegrityError: A file has.
        """
        for shard in tuple(self.readers) if shards is None else shards:
            cache, info = self._cache_of(shard)
            cache.check_unchanged(info)

    def find_changed(self) -> StreamingError | None:
        """Return the error of the first file read in place that has changed; None if none has. Inspects all files."""
        try:
            self.check_unchanged(range(len(self.catalog.shards)))
        except StreamingError as error:
            return error
        return None

    def finish(self, shard: int) -> None:
        """Note that no reader of this pass needs a shard any more: under a limit it is evicted before others."""
        cache, info = self._cache_of(shard)
        cache.note_use(info, finished=True)

    def rest(self) -> None:
        """Note that this process may pause, as when a batch is complete.

        If room is scarce nothing stays mapped meanwhile: the process that waits for room may be the one we wait for.

        Raises:
            IntegrityError: A file that is read in place has changed; its shard is checked every few seconds.
        """
        now = monotonic()
        if now >= self._checks_at:
            self._checks_at = now + _SECONDS_BETWEEN_CHECKS
            self.check_unchanged()
        share = self._open.most_bytes
        if (share is not None and share < self._pressure.largest_shard) or self._pressure.is_felt():
            self._open.close_all()

    def end_pass(self) -> None:
        """Note that nothing more is read in this pass."""
        self._ahead.clear()
        if self._room.limit is not None:
            self._open.close_all()
            self._share_room(RANDOM_READERS)

    def evict(self, shard: int) -> bool:
        """Remove a shard from this node, unless it is in use, or was not fetched by us.

        Returns:
            Whether files were removed.
        """
        self._open.close(shard)
        cache, info = self._cache_of(shard)
        return cache.evict(info)

    def evict_coldest(self) -> int:
        """Remove the least recently used shard of those that :meth:`evict` would remove.

        Returns:
            Its number.

        Raises:
            ConfigError: There is none.
        """
        for shard in self._coldest():
            if self.evict(shard):
                return shard
        raise ConfigError("no shard can be removed: none that was fetched to this node is unused")

    def close(self) -> None:
        """Unmap every shard. Samples read before stay valid."""
        self._open.close_all()

    def named(self, error: StreamingError, shard: int) -> StreamingError:
        """Return the error with the label of the stream and of the join."""
        own = self._catalogs.caches[self._stream_of(shard)] if shard < len(self.catalog.shards) else None
        # One of a joined dataset is named when it comes by way of the stream's own shard.
        cache = own or self._cache_of(shard)[0]
        return error.with_context(cache.label, stream=cache.stream)

    def __getstate__(self) -> dict[str, Any]:
        made_anew = {
            "known_catalog": None,
            "_checks_at": 0.0,
            "_offsets": OrderedDict(),
            "encodings": registered_encodings(),
        }
        return {**{name: value for name, value in self.__dict__.items() if name != "_decoder"}, **made_anew}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, encoding_class in state.pop("encodings").items():
            register_encoding(name, encoding_class)
        self.__dict__.update(state)

    def _share_room(self, readers: int) -> None:
        if self._room.limit is not None:
            self._room.expect(readers, self._pressure.largest_shard)
            self._open.most_bytes = self._ahead.most_bytes = reader_share(self._pressure.shards_limit, readers)

    def _read_alone(self, shard: int, index: int) -> dict[str, Any] | None:
        """Return a sample read by its bytes alone; None if its shard is here, or cannot be read that way."""
        cache, info = self._checked(shard)
        if not has_single_samples(info) or cache.has(info):
            return None
        columns = self._columns_of(shard)
        try:
            samples = self._offsets.get(shard)
            if samples is None:
                table = cache.read_bytes(*table_part(info))
                unsafe, as_files = self.allow_unsafe_types, self._as_files(shard)
                samples = SingleSampleReader(info, table, allow_unsafe_types=unsafe, columns=columns, as_files=as_files)
                self._offsets[shard] = samples
                if len(self._offsets) > _MOST_TABLES:
                    self._offsets.popitem(last=False)
            self._offsets.move_to_end(shard)
            sample = samples.decode(index, cache.read_bytes(*samples.part(index)))
        except FormatError as error:
            raise self.named(error, shard) from error
        joins = self._joins_of(shard)
        return sample if joins is None else joins.complete(sample, shard, index, partial(self._read_stored, alone=True))

    def _checked(self, shard: int) -> tuple[ShardCache, ShardInfo]:
        """Return a shard and its cache, checked before anything is downloaded."""
        cache, info = self._cache_of(shard)
        try:
            check_shard(info, allow_unsafe_types=self.allow_unsafe_types, columns=self._columns_of(shard))
        except StreamingError as error:
            raise self.named(error, shard) from error
        return cache, info

    def _cache_of(self, shard: int) -> tuple[ShardCache, ShardInfo]:
        if shard < len(self.catalog.shards):
            return self._catalogs.caches[self._stream_of(shard)], narrowed(
                self.catalog.shards[shard], self._columns_of(shard)
            )
        joined, info = self._joined(shard)
        return joined.cache, narrowed(info, joined.columns)

    def _columns_of(self, shard: int) -> Sequence[str] | None:
        """Return the columns of a shard that are decoded; None for all."""
        if shard >= len(self.catalog.shards):
            return self._joined(shard)[0].columns
        joins = self._joins_of(shard)
        return self._catalogs.columns if joins is None else joins.own_columns

    def _as_files(self, shard: int) -> frozenset[str]:
        """Return the columns of a shard whose images are decoded after reading."""
        if not self._decode or shard < len(self.catalog.shards):
            return frozenset(self._decode)
        return frozenset(name for name, final in self._joined(shard)[0].names.items() if final in self._decode)

    def _joins_of(self, shard: int) -> StreamJoins | None:
        """Return the datasets that are joined with a stream's shard."""
        catalog = self.catalog
        if catalog.joins is None or shard >= len(catalog.shards):
            return None
        return catalog.joins.streams.get(int(catalog.stream_of_shard[shard]))

    def _joined(self, shard: int) -> tuple[JoinedDataset, ShardInfo]:
        assert self.catalog.joins is not None, "or there would be no such shard"
        return self.catalog.joins.find(shard)

    def _coldest(self) -> Iterator[int]:
        """Return shards with fetched files on this node, the least recently used first."""
        files, owners = list[CacheEntry](), dict[str, int]()
        for stream, cache in enumerate(self._catalogs.caches.values()):
            found = cache.directory.scan().files
            start = len(f"{cache.directory.path}/")
            for shard, info in self.catalog.with_files(stream, {name_in_index(file.path[start:]) for file in found}):
                held = narrowed(info, self._columns_of(shard))
                owners.update(dict.fromkeys(map(str, cache.files_of(held)), shard))
            files += found
        named = (owners.get(file.path) for file in coldest_first(files, None))
        return iter(dict.fromkeys(shard for shard in named if shard is not None))

    def _stamp_used(self, shard: int) -> None:
        cache, info = self._cache_of(shard)
        cache.note_use(info, finished=False)

    def _stream_of(self, shard: int) -> str:
        return self.catalog.stream_names[int(self.catalog.stream_of_shard[shard])]
