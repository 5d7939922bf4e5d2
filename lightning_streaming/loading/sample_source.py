"""Samples by shard and index: brings shards to this node, opens as many as it may, and reads from them."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.util import register_after_fork
from types import MappingProxyType
from typing import Any

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.quota import CacheQuota, check_limit, coldest_first, largest_shard_bytes, reader_share
from lightning_streaming.cache.shard_cache import Absence
from lightning_streaming.cache.usage import FINISHED_BEFORE, CacheEntry
from lightning_streaming.errors import ConfigError, FormatError, ObjectNotFoundError, ShardCorruptError, StreamingError
from lightning_streaming.formats.encodings import register_encoding, registered_encodings
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard import (
    LoneSamples,
    ShardReader,
    check_shard,
    check_wanted,
    open_shard,
    table_part,
)
from lightning_streaming.formats.shard_table import check_selection
from lightning_streaming.loading.catalog import Catalog
from lightning_streaming.loading.selecting import select_samples
from lightning_streaming.loading.selection import SelectionRequest
from lightning_streaming.storage.downloads import share_connections

_RANDOM_READERS = 8
"""Readers by sample number keep open what one of so many readers in order may: they rest for nobody knows how long."""
_MOST_TABLES = 64
"""Shards whose offsets are remembered; four bytes for each of their samples."""
_MOST_FILES = 256
"""Shard files mapped at a time; each holds a file descriptor, of which a process often may have 1024."""
_SECONDS_BETWEEN_LOOKS = 0.005
"""For each directory: small batches come faster than it pays to look."""
_SHARDS_LEFT = 2
"""A disk with room for fewer of the largest is as good as full. Whoever maps a shard looks before it rests, so all who
rest leave as much to a reader who goes on, however many they are."""


class SampleSource:
    """The shards of all streams of a dataset, fetched and opened when needed.

    Making one does no I/O. It may be sent to another process, which then reads the indexes for itself, from this node's
    cache.

    Args:
        caches: Where each stream's files are, by stream name.
        allow_unsafe_types: Whether columns may be unpickled.
        columns: Names of the columns to decode; None for all.
        cache_limit: Most bytes that the streams' directories may hold together; None for no limit.
        selections: Which samples of a stream are read; all, of streams that are not there.

    Raises:
        ConfigError: ``columns`` is not a list of names.
    """

    def __init__(
        self,
        caches: Mapping[str, ShardCache],
        allow_unsafe_types: bool,
        columns: Sequence[str] | None = None,
        cache_limit: int | None = None,
        selections: Mapping[str, SelectionRequest] = MappingProxyType({}),
    ) -> None:
        self._caches = dict(caches)
        self.allow_unsafe_types = allow_unsafe_types
        self._columns = check_selection(columns)
        # Each with its key, once it is known: other processes read what was selected here.
        self._selections: dict[str, tuple[SelectionRequest, str | None]] = {
            name: (one, None) for name, one in selections.items() if not one.is_all
        }
        self._room = CacheQuota((cache.directory for cache in self._caches.values()), cache_limit)
        self.known_catalog: Catalog | None = None  # as long as no index has been read
        self._shards_limit = 0  # without one, of no meaning
        self._room_watch = _RoomWatch(self._room)
        self._open = OpenShards(self._stamp_used)
        self._ahead = ShardsAhead()
        self._offsets: OrderedDict[int, LoneSamples] = OrderedDict()
        self.is_in_pass = False  # then what is read is read for a pass, which says itself when it rests

    @property
    def catalog(self) -> Catalog:
        """Every shard, and every sample that is selected; the indexes are read, and if need be downloaded, and
        selections evaluated, at the first look.

        Raises:
            ConfigError: A stream holds no sample, or none is selected; a condition cannot be evaluated; a shard lacks a
                column that is to be read, or has one that is unsafe where that is not allowed; or the cache limit is
                too small: the message says which would do.
        """
        if self.known_catalog is None:
            catalog = Catalog({name: cache.read_index() for name, cache in self._caches.items()})
            self._check_columns(catalog)
            self._check_limit(catalog)
            if self._selections:
                selected = self._selected_of(catalog)
                self._room.forget_fixed_bytes()
                self._check_limit(catalog)  # again: what was selected just now takes room too
                catalog = selected
            self.known_catalog = catalog
        return self.known_catalog

    def _selected_of(self, catalog: Catalog) -> Catalog:
        """The samples of a catalog that are selected."""
        indexes = dict(zip(catalog.stream_names, catalog.indexes, strict=True))
        selections = {}
        for name, (asked, key) in self._selections.items():
            cache = self._caches[name]
            selected = selections[name] = select_samples(asked, indexes[name], cache, self._room, key=key)
            if not len(selected):
                raise ConfigError(
                    f"{cache.label} has {indexes[name].num_samples} samples, of which {asked.in_words()} selects none; "
                    "mend the condition, or leave the stream out"
                )
        self._selections = {name: (asked, selections[name].key) for name, (asked, _) in self._selections.items()}
        return Catalog(indexes, selections)

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
        self._room_watch.look_next_time()
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
        cache.note_use(info, finished=True)

    def rest(self) -> None:
        """Say that this process may not read on for long, as when a batch is complete.

        Where room is scarce nothing stays mapped meanwhile: whoever waits for room might be who we wait for.
        """
        share = self._open.most_bytes
        if (share is not None and share < self._room_watch.largest_shard) or self._room_watch.is_felt():
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
        return {**self.__dict__, "known_catalog": None, "_offsets": OrderedDict(), "encodings": registered_encodings()}

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
        largest = self._room_watch.largest_shard = max(
            (largest_shard_bytes(index.shards) for index in fetched), default=0
        )
        index_bytes = self._room.fixed_bytes()
        check_limit(self._room.limit, index_bytes, largest)
        if self._room.limit is not None:
            self._shards_limit = max(0, self._room.limit - index_bytes)
            self._share_room(_RANDOM_READERS)

    def _share_room(self, readers: int) -> None:
        if self._room.limit is not None:
            self._room.expect(readers, self._room_watch.largest_shard)
            self._open.most_bytes = self._ahead.most_bytes = reader_share(self._shards_limit, readers)

    def _read_alone(self, shard: int, index: int) -> dict[str, Any] | None:
        """One sample by its bytes alone; None where its shard is here, or cannot be read like that."""
        cache, info = self._checked(shard)
        if info.compression is not None or cache.has(info):
            return None
        try:
            samples = self._offsets.get(shard)
            if samples is None:
                table = cache.read_bytes(*table_part(info))
                samples = LoneSamples(info, table, allow_unsafe_types=self.allow_unsafe_types, columns=self._columns)
                self._offsets[shard] = samples
                if len(self._offsets) > _MOST_TABLES:
                    self._offsets.popitem(last=False)
            self._offsets.move_to_end(shard)
            return samples.decode(index, cache.read_bytes(*samples.part(index)))
        except FormatError as error:
            raise self.named(error, shard) from error

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
        files, owners = list[CacheEntry](), dict[str, int]()
        for stream, cache in enumerate(self._caches.values()):
            found = cache.directory.scan().files
            start = len(f"{cache.directory.path}/")
            for shard, info in self.catalog.with_files(stream, {file.path[start:] for file in found}):
                owners.update(dict.fromkeys(map(str, cache.files_of(info)), shard))
            files += found
        named = (owners.get(file.path) for file in coldest_first(files, None))
        return iter(dict.fromkeys(shard for shard in named if shard is not None))

    def _stamp_used(self, shard: int) -> None:
        cache, info = self._cache_of(shard)
        cache.note_use(info, finished=False)

    def _stream_of(self, shard: int) -> str:
        return self.catalog.stream_names[int(self.catalog.stream_of_shard[shard])]


class OpenShards:
    """Readers of mapped shards. A copy in another process, or in a forked child, starts with none.

    Args:
        on_close: Called with each shard after it was closed.
        most_bytes: Raw bytes mapped at a time, though never less than one shard; None for no limit.
    """

    def __init__(self, on_close: Callable[[int], object], most_bytes: int | None = None) -> None:
        self.most_bytes = most_bytes
        self.readers: OrderedDict[int, ShardReader] = OrderedDict()
        """The reader of each open shard, the one used longest ago first. To be looked into before each sample: whoever
        reads other samples meanwhile may close any. Whoever uses one moves it to the end."""
        self._on_close = on_close
        self._sizes: dict[int, tuple[int, int]] = {}
        self._num_files = 0
        self._num_bytes = 0
        self._process = os.getpid()
        # Else a worker that never reads would hold what its parent had open, and its locks, for as long as it lives.
        register_after_fork(self, OpenShards.forget_inherited)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._on_close, self.most_bytes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def make_room(self, info: ShardInfo) -> None:
        """Close what was used longest ago, so that one more shard may be opened."""
        most_bytes = self.most_bytes
        while self.readers and (
            self._num_files + len(info.files) > _MOST_FILES
            or (most_bytes is not None and self._num_bytes + raw_bytes(info) > most_bytes)
        ):
            self.close(next(iter(self.readers)))

    def add(self, shard: int, info: ShardInfo, reader: ShardReader) -> None:
        """Keep the reader of a shard that was opened."""
        self.readers[shard] = reader
        self._sizes[shard] = num_files, num_bytes = len(info.files), raw_bytes(info)
        self._num_files += num_files
        self._num_bytes += num_bytes

    def close(self, shard: int) -> None:
        """Unmap a shard, if it is open."""
        reader = self.readers.pop(shard, None)
        if reader is not None:
            num_files, num_bytes = self._sizes.pop(shard)
            self._num_files -= num_files
            self._num_bytes -= num_bytes
            reader.close()
            self._on_close(shard)

    def close_all(self) -> None:
        """Unmap every shard."""
        while self.readers:
            self.close(next(iter(self.readers)))

    def forget_inherited(self) -> None:
        """In a forked child: unmap what the parent had open, whose locks would last as long as the child.

        Processes of ``multiprocessing`` do so when they start; after a bare ``os.fork`` it is for who begins to read.
        """
        if self._process == os.getpid():
            return
        while self.readers:
            self.readers.popitem()[1].close()
        self._sizes.clear()
        self._num_files = self._num_bytes = 0
        self._process = os.getpid()


class ShardsAhead:
    """What one reader's threads have fetched and it has not begun to read. May be used by several threads."""

    def __init__(self) -> None:
        self.most_bytes: int | None = None
        """Bytes that may be fetched ahead at the cost of other shards; None for no limit."""
        self._lock = threading.Lock()
        self._fetched: dict[int, tuple[int, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"most_bytes": self.most_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.most_bytes = state["most_bytes"]

    def spare_since(self, size: int) -> int | None:
        """What one more shard of so many bytes must not push out: what was used since then; None if anything may go.

        Beyond this reader's part of the room, only what nobody needs any more this epoch may go.
        """
        with self._lock:
            since = min((time for time, _ in self._fetched.values()), default=None)
            ahead = sum(size for _, size in self._fetched.values())
        if self.most_bytes is not None and ahead + size > self.most_bytes:
            return FINISHED_BEFORE
        return since

    def begin(self, shard: int, size: int) -> None:
        """Say that a shard is being fetched."""
        with self._lock:
            self._fetched[shard] = (time.time_ns(), size)

    def end(self, shard: int) -> None:
        """Say that a shard has found its reader, or could not be fetched."""
        with self._lock:
            self._fetched.pop(shard, None)

    def clear(self) -> None:
        """Say that nobody will read what was fetched."""
        with self._lock:
            self._fetched.clear()


class _RoomWatch:
    """What one reader knows of the room there is.

    Args:
        room: The directories that shards are fetched into.
    """

    def __init__(self, room: CacheQuota) -> None:
        self._room = room
        self._looks_at = 0.0
        self._is_scarce = False
        self.largest_shard = 0
        """Bytes of the largest shard, raw and compressed; 0 where none is fetched, and there is nothing to look at."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_looks_at": 0.0}

    def look_next_time(self) -> None:
        """Say that one more shard is mapped, so that what was seen before counts no more."""
        self._looks_at = 0.0

    def is_felt(self) -> bool:
        """Whether somebody waits for room, or would have to if all who rest kept what they have."""
        if not self.largest_shard:
            return False
        now = time.monotonic()
        if now >= self._looks_at:
            self._looks_at = now + _SECONDS_BETWEEN_LOOKS * self._room.num_directories
            self._is_scarce = self._room.is_scarce(_SHARDS_LEFT * self.largest_shard)
        return self._is_scarce


def raw_bytes(info: ShardInfo) -> int:
    """Bytes of a shard's raw files."""
    return sum(raw.bytes for raw, _ in info.files)
