"""Samples by their place: brings shards to this node and reads from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.eviction import coldest_first
from lightning_streaming.cache.fetching import Absence
from lightning_streaming.cache.limits import check_limit, largest_shard_bytes, reader_share
from lightning_streaming.cache.room import CacheRoom
from lightning_streaming.cache.scan import Entry
from lightning_streaming.errors import ConfigError, FormatError, ObjectNotFoundError, ShardCorruptError, StreamingError
from lightning_streaming.formats.columns import check_selection
from lightning_streaming.formats.encodings import register_encoding, registered_encodings
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.lone_sample import LoneSamples
from lightning_streaming.formats.shard import ShardReader, check_shard, check_wanted, open_shard
from lightning_streaming.loading.ahead import ShardsAhead
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.lone_samples import LoneReader
from lightning_streaming.loading.open_shards import OpenShards, raw_bytes
from lightning_streaming.loading.scarcity import Scarcity
from lightning_streaming.storage.lanes import share_connections

_RANDOM_READERS = 8
"""Readers by sample number keep open what one of so many readers in order may: they rest for nobody knows how long."""


class SampleSource:
    """The shards of all streams of a dataset, fetched and opened when needed.

    Making one does no I/O. It may be sent to another process, which then reads the indexes for itself, from this node's
    cache.

    Args:
        caches: Where each stream's files are, by stream name.
        allow_unsafe_types: Whether columns may be unpickled.
        columns: Names of the columns to decode; None for all.
        cache_limit: Most bytes that the streams' directories may hold together; None for no limit.

    Raises:
        ConfigError: ``columns`` is not a list of names.
    """

    def __init__(
        self,
        caches: Mapping[str, ShardCache],
        allow_unsafe_types: bool,
        columns: Sequence[str] | None = None,
        cache_limit: int | None = None,
    ) -> None:
        self._caches = dict(caches)
        self.allow_unsafe_types = allow_unsafe_types
        self._columns = check_selection(columns)
        self._room = CacheRoom((cache.place for cache in self._caches.values()), cache_limit)
        self.known_catalog: Catalog | None = None  # as long as no index has been read
        self._shards_limit = 0  # without one, of no meaning
        self._scarcity = Scarcity(self._room)
        self._open = OpenShards(self._stamp_used)
        self._ahead = ShardsAhead()
        self._lone = LoneReader(self._lone_samples)
        self.is_in_pass = False  # then what is read is read for a pass, which says itself when it rests

    @property
    def catalog(self) -> Catalog:
        """Every shard and sample; the indexes are read, and if need be downloaded, at the first look.

        Raises:
            ConfigError: A stream holds no sample, a shard lacks a column that is to be read, or has one that is unsafe
                where that is not allowed, or the cache limit is too small; the message says which would do.
        """
        if self.known_catalog is None:
            catalog = Catalog({name: cache.read_index() for name, cache in self._caches.items()})
            self._check_columns(catalog)
            self._check_limit(catalog)
            self.known_catalog = catalog
        return self.known_catalog

    def may_be_plain(self) -> bool:
        """Whether all shards are alike, and their samples nothing but numbers and arrays."""
        return self.catalog.may_be_plain(self._columns)

    @property
    def is_remote(self) -> bool:
        """Whether any stream's shards may have to be fetched first."""
        return not all(cache.reads_in_place for cache in self._caches.values())

    @property
    def cache_limit(self) -> int | None:
        """Most bytes that the streams' directories may hold together."""
        return self._room.limit

    def cache_usage(self) -> int:
        """Bytes that the streams' directories hold of what we fetched, files on their way included."""
        return self._room.usage()

    @property
    def readers(self) -> OrderedDict[int, ShardReader]:
        """The readers of open shards; see :class:`OpenShards`. Others come with :meth:`open`."""
        return self._open.readers

    def say_whose(self, place: str) -> None:
        """Let errors say where the streams are configured, like ``data.val``."""
        for name, cache in self._caches.items():  # a stream without a name is the only one there
            cache.label = place if list(self._caches) == ["0"] else f"stream {name!r} of {place}"

    def prepare(self) -> None:
        """Make ready for worker processes: import what fetching needs, and leave them the room that there is."""
        for cache in self._caches.values():
            cache.prepare()
        if self._room.limit is not None:
            self._open.close_all()

    def begin_pass(self, readers: int) -> None:
        """Say that this process reads in order now, among so many of this node that do, and share with these."""
        self._open.forget_inherited()
        share_connections(readers)
        self._share_room(readers)

    def fetch(self, shard: int, wait: bool = True) -> bool:
        """Have a shard on this node.

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

    def fetch_ahead(self, shard: int) -> bool:
        """In a thread: have a shard on this node that the reader will soon need, but wait for nobody.

        Returns:
            Whether to go on with the next one; False if there is no room until the reader has moved on.
        """
        cache, info = self._checked(shard)
        spare_since = self._ahead.spare_since(raw_bytes(info))
        self._ahead.begin(shard, raw_bytes(info))
        absence: Absence | None = Absence.NO_ROOM
        try:
            absence = cache.fetch_ahead(info, self._room, spare_since)
        finally:
            if absence is not None or shard in self._open.readers:  # the reader was faster
                self._ahead.end(shard)
        return absence is not Absence.NO_ROOM

    def read(self, shard: int, index: int, *, alone: bool = False, retry: int = 1) -> dict[str, Any]:
        """One sample, decoded: column name to value.

        While it is read nobody can remove its shard.

        Args:
            shard: Counted over all streams.
            index: Counted within the shard.
            alone: Whether to fetch only the sample's bytes if its shard is not here and has them uncompressed.
            retry: How often to fetch the shard again if it turns out to be damaged on this node, or to have vanished.

        Raises:
            FormatError: The shard or the sample is damaged; names the stream and the shard.
            StorageError: The shard could not be fetched.
        """
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
        """Open a shard that is not open, fetched if need be.

        Args:
            shard: Counted over all streams.
            retry: As for :meth:`read`.

        Raises:
            FormatError: It is damaged; names the stream and the shard.
            StorageError: It could not be fetched.
        """
        cache, info = self._checked(shard)
        self._open.forget_inherited()
        self._open.make_room(info)
        self._scarcity.look_next_time()
        self._ahead.end(shard)
        for attempts_left in range(retry, -1, -1):
            with cache.hold(info, self._room, self._open.close_all) as directory:
                try:
                    reader = open_shard(
                        info, directory, allow_unsafe_types=self.allow_unsafe_types, columns=self._columns
                    )
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

    def let_go(self, shard: int) -> None:
        """Say that this reader needs a shard no more in this pass."""
        self._open.close(shard)
        self._ahead.end(shard)

    def finish(self, shard: int) -> None:
        """Say that this pass needs a shard no more, whoever reads: under a limit it goes before others."""
        cache, info = self._cache_of(shard)
        cache.stamp(info, finished=True)

    def rest(self) -> None:
        """Say that this process may not read on for long, as when a batch is complete.

        Where room is scarce nothing stays mapped meanwhile: whoever waits for room might be who we wait for.
        """
        share = self._open.most_bytes
        if (share is not None and share < self._scarcity.largest_shard) or self._scarcity.is_felt():
            self._open.close_all()

    def end_pass(self) -> None:
        """Say that nothing more is read in this pass."""
        self._ahead.clear()
        if self._room.limit is not None:
            self._open.close_all()
            self._share_room(_RANDOM_READERS)

    def evict(self, shard: int) -> bool:
        """Remove what this node keeps of a shard, unless somebody uses it, or we did not fetch it.

        Returns:
            Whether files were removed.
        """
        self._open.close(shard)
        cache, info = self._cache_of(shard)
        return cache.evict(info)

    def evict_coldest(self) -> int:
        """Remove the shard that was used longest ago of those that :meth:`evict` would remove.

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
        """The same error, saying which stream it is about."""
        return type(error)(f"{self._caches[self._stream_of(shard)].label}: {error}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "known_catalog": None, "encodings": registered_encodings()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, encoding_class in state.pop("encodings").items():
            register_encoding(name, encoding_class)
        self.__dict__.update(state)

    def _check_columns(self, catalog: Catalog) -> None:
        """Look at every shard now, rather than in the step that first needs one that lacks a column, or is unsafe."""
        place = 0
        try:
            for place, info in catalog.examples():  # noqa: B007  # the handler tells it
                check_wanted(info, allow_unsafe_types=self.allow_unsafe_types, columns=self._columns)
        except ConfigError as error:
            name = catalog.stream_names[int(catalog.stream_of_shard[place])]
            raise ConfigError(f"{self._caches[name].label}: {error}") from None

    def _check_limit(self, catalog: Catalog) -> None:
        indexes = zip(self._caches.values(), catalog.indexes, strict=True)
        fetched = [index for cache, index in indexes if cache.needs_room(index)]
        largest = self._scarcity.largest_shard = max(
            (largest_shard_bytes(index.shards) for index in fetched), default=0
        )
        index_bytes = self._room.fixed_bytes()
        check_limit(self._room.limit, index_bytes, largest)
        if self._room.limit is not None:
            self._shards_limit = max(0, self._room.limit - index_bytes)
            self._share_room(_RANDOM_READERS)

    def _share_room(self, readers: int) -> None:
        if self._room.limit is not None:
            self._room.expect(readers, self._scarcity.largest_shard)
            self._open.most_bytes = self._ahead.most_bytes = reader_share(self._shards_limit, readers)

    def _read_alone(self, shard: int, index: int) -> dict[str, Any] | None:
        """One sample by its bytes alone; None where its shard is here, or cannot be read like that."""
        cache, info = self._checked(shard)
        if info.compression is not None or cache.has(info):
            return None
        try:
            return self._lone.read(shard, info, index, lambda part: cache.read_bytes(*part))
        except FormatError as error:
            raise self.named(error, shard) from error

    def _lone_samples(self, info: ShardInfo, table: bytes) -> LoneSamples:
        return LoneSamples(info, table, allow_unsafe_types=self.allow_unsafe_types, columns=self._columns)

    def _checked(self, shard: int) -> tuple[ShardCache, ShardInfo]:
        """A shard and its cache, looked at before anything is downloaded."""
        cache, info = self._cache_of(shard)
        try:
            check_shard(info, allow_unsafe_types=self.allow_unsafe_types, columns=self._columns)
        except StreamingError as error:
            raise self.named(error, shard) from error
        return cache, info

    def _cache_of(self, shard: int) -> tuple[ShardCache, ShardInfo]:
        return self._caches[self._stream_of(shard)], self.catalog.shards[shard]

    def _coldest(self) -> Iterator[int]:
        """Shards that have files of ours on this node, the one used longest ago first."""
        files, owners = list[Entry](), dict[str, int]()
        for stream, cache in enumerate(self._caches.values()):
            found = cache.place.scan().files
            start = len(f"{cache.place.directory}/")
            for shard, info in self.catalog.with_files(stream, {file.path[start:] for file in found}):
                owners.update(dict.fromkeys(map(str, cache.files_of(info)), shard))
            files += found
        named = (owners.get(file.path) for file in coldest_first(files, None))
        return iter(dict.fromkeys(shard for shard in named if shard is not None))

    def _stamp_used(self, shard: int) -> None:
        cache, info = self._cache_of(shard)
        cache.stamp(info, finished=False)

    def _stream_of(self, shard: int) -> str:
        return self.catalog.stream_names[int(self.catalog.stream_of_shard[shard])]
