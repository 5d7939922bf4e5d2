"""Samples by shard and index: fetches shards to this node, opens as many as allowed, and reads from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.eviction import coldest_first, reader_share
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.quota import CacheQuota
from lightning_streaming.cache.records import CacheEntry
from lightning_streaming.cache.shard_cache import FetchStatus, Miss
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
from lightning_streaming.formats.images import DecodeImages, image_decoder
from lightning_streaming.formats.index import ShardInfo
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
from lightning_streaming.formats.shard_format import ShardReader
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.options.selection import SelectionConfig
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.selection.joins import (
    JoinedAhead,
    JoinedReader,
    JoinSource,
    StreamJoins,
)
from lightning_streaming.selection.scanning import ProgressFactory, no_progress
from lightning_streaming.storage.downloads import share_connections
from lightning_streaming.tokenizing.documents import DocumentTokenizer
from lightning_streaming.waits import IN_LOG

_MOST_TABLES = 64
"""Shards whose offsets are cached; four bytes for each of their samples."""
_SECONDS_BETWEEN_CHECKS = 5.0
"""Between two checks whether files that are mapped in place have changed."""

DecodeSample = Callable[[dict[str, Any], int, int], dict[str, Any]]
"""Decodes the images of a sample; takes its shard, and its index there."""


class _Shard(NamedTuple):
    """A shard of a stream, or of a joined dataset."""

    cache: ShardCache
    info: ShardInfo
    """Its entry in the index, with only those files that the columns need."""
    columns: Sequence[str] | None
    """Columns that are decoded; None for all."""
    as_files: frozenset[str]
    """Columns of images that are decoded after reading."""
    joins: StreamJoins | None
    """Datasets that are joined with it."""


class SampleSource:
    """The shards of all streams of a dataset, fetched and opened when needed.

    Creating one does no I/O. It may be sent to another process, which then reads the indexes itself, from this node's
    cache.

    Args:
        caches: The cache of each stream, by stream name.
        allow_unsafe_types: Whether columns may be unpickled.
        columns: Names of the columns to decode; None for all.
        cache_limit: Most bytes that the directories of streams and joined datasets may hold together; None for no
            limit.
        selections: Which samples of a stream are read; all, of streams without one.
        joins: The datasets that are joined with a stream, by its name and theirs.
        lengths: How to count the tokens of samples, if lengths are needed.
        decode: What columns of images are decoded to, by name.
        tokenize: Tokenizes texts or conversations of samples; None leaves them.

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
        tokenize: DocumentTokenizer | None = None,
    ) -> None:
        self.catalogs = CatalogReader(caches, allow_unsafe_types, columns, selections, joins, lengths)
        self.quota = CacheQuota((cache.directory for cache in self.catalogs.all_caches()), cache_limit)
        self.known_catalog: Catalog | None = None
        """The catalog, once the indexes were read."""
        self.shown = IN_LOG
        """Display of waits for reading indexes and for what is computed from them."""
        self.open_shards = OpenShards(self.note_use)
        self._decode = decode or {}
        self._tokenize = tokenize
        self._pressure = CachePressure(self.quota)
        self._checks_at = 0.0
        self._ahead = ShardsAhead()
        self._offsets: OrderedDict[int, SingleSampleReader] = OrderedDict()

    @property
    def catalog(self) -> Catalog:
        """Return every shard and every selected sample; indexes are read, and selections evaluated, at first use.

        Raises:
            ConfigError: A stream holds no sample, or none is selected; a condition cannot be evaluated; a shard lacks a
                column, or has one that is unsafe where that is not allowed; a dataset cannot be
                joined; or the cache limit is too small: the message names one that is large enough.
        """
        if self.known_catalog is None:
            with self.shown.here():
                self.read_catalog(no_progress)
            assert self.known_catalog is not None, "just read"
        return self.known_catalog

    def read_catalog(self, progress: ProgressFactory) -> None:
        """Read the catalog, and report the progress of selections and of indexes of ids that are created."""
        catalog = self.catalogs.read(self.quota, self.shown, progress)
        self._pressure.largest_shard = self.catalogs.most_together
        if self.quota.limit is not None:
            self._pressure.shards_limit = max(0, self.quota.limit - self.quota.fixed_bytes())
            self._share_quota(RANDOM_READERS)
        self.known_catalog = catalog

    def read_more(self, newer: Mapping[str, IndexCache], num_shards: Mapping[str, int]) -> None:
        """Read more shards of some streams from now on; call it between two passes.

        Args:
            newer: Their current indexes, by stream name.
            num_shards: How many shards to read of each.
        """
        self.open_shards.close_all()
        self._offsets.clear()
        self.catalogs.read_more(newer, num_shards)
        self.quota.forget_fixed_bytes()
        self.known_catalog = None

    def may_be_plain(self) -> bool:
        """Return whether all shards have the same columns, and their samples only numbers and arrays."""
        is_changed = self._decode or self._tokenize is not None or self.catalog.joins is not None
        return not is_changed and self.catalog.may_be_plain(self.catalogs.columns)

    def may_be_joined(self) -> bool:
        """Return whether arrays can be read from all shards at once, and nothing is joined with them."""
        is_changed = self._tokenize is not None or self.catalog.joins is not None
        return not is_changed and all(may_be_flat(info) for _, info in self.catalog.examples())

    def only_tokenizes(self) -> DocumentTokenizer | None:
        """Return the tokenizer of samples that are changed by nothing else, and joined with nothing."""
        return None if self._decode or self.catalog.joins is not None else self._tokenize

    @property
    def is_remote(self) -> bool:
        """Return whether any stream's shards may have to be fetched first."""
        return not all(cache.reads_in_place for cache in self.catalogs.all_caches())

    def set_label(self, place: str) -> None:
        """Set where the streams are configured, like ``data.val``, for errors."""
        self.quota.limit_name = f"{place}.cache_limit"
        self.catalogs.set_label(place)

    def prepare(self) -> None:
        """Prepare for worker processes: import what fetching needs, and leave the cache limit to them."""
        for cache in self.catalogs.all_caches():
            cache.prepare()
        if self.quota.limit is not None:
            self.open_shards.close_all()

    def report_fetching(self, callback: Callable[[int, int], object] | None) -> None:
        """Set the callback for each shard that this process fetches; see :class:`Misses`."""
        for cache in self.catalogs.all_caches():
            cache.misses.callback = callback

    def begin_pass(self, readers: int) -> None:
        """Note that this process reads in order now, and shares the cache with the other readers of this node.

        Where the directories hold more than the limit, unused shards are removed; reading the catalog removes none.
        """
        self.open_shards.forget_inherited()
        for cache in self.catalogs.joined_caches():  # those of streams are cleared by their meter
            cache.misses.clear()
        share_connections(readers)
        self._share_quota(readers)
        self.quota.trim()

    def end_pass(self) -> None:
        """Note that nothing more is read in this pass."""
        self.open_shards.opens = None
        self._ahead.clear()
        if self.quota.limit is not None:
            self.open_shards.close_all()
            self._share_quota(RANDOM_READERS)

    def _share_quota(self, readers: int) -> None:
        if self.quota.limit is not None:
            self.quota.expect(readers, self._pressure.largest_shard)
            self.open_shards.most_bytes = self._ahead.most_bytes = reader_share(self._pressure.shards_limit, readers)

    def fetch(self, shard: int, wait: bool = True) -> bool:
        """Fetch a shard to this node, unless it is there.

        Args:
            shard: Counted over all streams.
            wait: Whether to wait while another process fetches it, or until there is room.

        Returns:
            Whether it is here; False only if ``wait`` is False.
        """
        checked = self._checked(shard)
        if not wait:
            return checked.cache.fetch_ahead(checked.info, self.quota) is None
        with checked.cache.hold(checked.info, self.quota):
            return True

    def has(self, shard: int) -> bool:
        """Return whether a shard is on this node, with the columns that are read."""
        cache, info, *_ = self._shard(shard)
        return cache.has(info)

    def fetch_ahead(self, shard: int) -> bool:
        """Prefetch a shard that the reader will soon need, in a thread, without waiting for other processes.

        Returns:
            Whether to continue with the next one; False if there is no room until the reader has moved on.
        """
        cache, info, *_ = self._checked(shard)
        spare_since = self._ahead.spare_since(raw_bytes(info))
        self._ahead.begin(shard, raw_bytes(info))
        status: FetchStatus | None = FetchStatus.NO_ROOM
        try:
            status = cache.fetch_ahead(info, self.quota, spare_since)
        finally:
            if status is not None or shard in self.open_shards.readers:  # the reader was faster
                self._ahead.end(shard)
        return status is not FetchStatus.NO_ROOM

    def find_joined(self) -> Callable[[int, NDArray[np.int64]], list[int]]:
        """Return a function for threads of one pass: it finds the shards of datasets joined by id with samples.

        It takes the samples' shard and their indexes there.
        """
        ahead = JoinedAhead(self.quota)

        def find(shard: int, indexes: NDArray[np.int64]) -> list[int]:
            cache, info, _, _, joins = self._shard(shard)
            by_id = [] if joins is None else [joined for joined in joins.read if joined.config.key is not None]
            return ahead.shards(shard, indexes, (cache, info), by_id)

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
        """Return a function that decodes the images of a sample in place, and tokenizes it; None if neither is set.

        It takes the sample, its shard, and its index there, and may be called by several threads. It raises
        EncodingError, which names the sample, for damaged files and for texts that cannot be tokenized, and ConfigError
        for columns without images.

        Raises:
            ConfigError: No stream has a column that ``decode`` names.
            MissingDependencyError: The package that decodes images is not installed.
        """
        decode_images = self._decode_images if self._decode else None
        tokenize = self._tokenize
        if decode_images is None and tokenize is None:
            return None

        def decode(sample: dict[str, Any], shard: int, index: int) -> dict[str, Any]:
            try:
                sample = sample if decode_images is None else decode_images(sample)
                return sample if tokenize is None else tokenize.tokenized(sample)
            except EncodingError as error:
                file = self._shard(shard).info.raw_data.basename
                raise error.with_context(f"{file}, sample {index}", path=file, sample=index) from error

        return decode

    @cached_property
    def _decode_images(self) -> DecodeImages:
        known = {name for stream in self.catalog.columns_of_streams() for names in stream for name in names}
        missing = [name for name in self._decode if name not in known]
        if missing:
            raise ConfigError(
                f"decode names column {missing[0]!r}, which no stream has",
                hint=f"the columns are {', '.join(sorted(known))}",
                option="decode.columns",
            )
        return image_decoder(self._decode)

    def _read_stored(self, shard: int, index: int, *, alone: bool = False, retry: int = 1) -> dict[str, Any]:
        """Return a sample as :meth:`read` does, with its images as the readers return them."""
        readers = self.open_shards.readers
        reader = readers.get(shard)
        if reader is None:
            if alone and (sample := self._read_alone(shard, index)) is not None:
                return sample
            reader = self.open(shard, retry)
        else:
            readers.move_to_end(shard)
        try:
            sample = reader[index]
        except FormatError as error:
            raise self.named(error, shard) from error
        if not self.open_shards.is_in_pass:
            self.rest()
        return sample

    def _read_alone(self, shard: int, index: int) -> dict[str, Any] | None:
        """Return a sample that is read without its shard; None if that is here, or cannot be read that way."""
        cache, info, columns, as_files, joins = self._checked(shard)
        if not has_single_samples(info) or cache.has(info):
            return None
        try:
            samples = self._offsets.get(shard)
            if samples is None:
                table, unsafe = cache.read_bytes(*table_part(info)), self.catalogs.allow_unsafe_types
                samples = SingleSampleReader(info, table, allow_unsafe_types=unsafe, columns=columns, as_files=as_files)
                self._offsets[shard] = samples
                if len(self._offsets) > _MOST_TABLES:
                    self._offsets.popitem(last=False)
            self._offsets.move_to_end(shard)
            sample = samples.decode(index, cache.read_bytes(*samples.part(index)))
        except FormatError as error:
            raise self.named(error, shard) from error
        return sample if joins is None else joins.complete(sample, shard, index, partial(self._read_stored, alone=True))

    def open(self, shard: int, retry: int = 1) -> ShardReader:
        """Open a shard that is not open; fetch it if necessary.

        Args:
            shard: Counted over all streams.
            retry: As for :meth:`read`.

        Raises:
            FormatError: It is damaged; names the stream and the shard.
            StorageError: It could not be fetched.
        """
        cache, info, columns, as_files, joins = self._checked(shard)
        unsafe = self.catalogs.allow_unsafe_types
        self.open_shards.forget_inherited()
        self.check_unchanged(self.open_shards.make_room(info))
        self._pressure.check_next_time()
        self._ahead.end(shard)
        for attempts_left in range(retry, -1, -1):
            with cache.hold(info, self.quota, self.open_shards.close_all) as directory:
                try:
                    reader = open_shard(info, directory, allow_unsafe_types=unsafe, columns=columns, as_files=as_files)
                    if joins is not None:
                        reader = JoinedReader(reader, joins, shard, self._read_joined)
                except (ShardCorruptError, ObjectNotFoundError) as error:
                    damage = error
                except StreamingError as error:
                    raise self.named(error, shard) from error
                else:
                    self.open_shards.add(shard, info, reader)
                    return reader
            # Damaged or removed on this node since it became present, unless it is read in place.
            if not attempts_left or not cache.discard(info):
                raise self.named(damage, shard) from damage
        raise AssertionError("the last attempt returns or raises")

    def _read_joined(self, shard: int, index: int) -> dict[str, Any]:
        """Return a sample of a joined dataset."""
        readers = self.open_shards.readers
        reader = readers.get(shard)
        if reader is None:
            reader = (self.open_shards.opens or self.open)(shard)
        else:
            readers.move_to_end(shard)
        try:
            return reader[index]
        except FormatError as error:
            raise self.named(error, shard) from error

    def take_misses(self, shard: int) -> list[Miss]:
        """Return the noted files of a shard that were missing when they were needed, and forget them."""
        cache, info, *_ = self._shard(shard)
        return cache.misses.take(info)

    def stream_of(self, shard: int) -> str:
        """Return the name of a shard's stream; for a joined dataset, that of the stream it is joined with."""
        return self._shard(shard).cache.stream

    def release(self, shard: int) -> None:
        """Release a shard that this reader no longer needs in this pass."""
        self.open_shards.close(shard)
        self._ahead.end(shard)
        self.check_unchanged([shard])

    def check_unchanged(self, shards: Iterable[int] | None = None) -> None:
        """Raise an error if files that are read in place have changed during the run.

        Args:
            shards: The shards to check. None: those that are open.

        Raises:
            IntegrityError: A file has.
        """
        for shard in tuple(self.open_shards.readers) if shards is None else shards:
            cache, info, *_ = self._shard(shard)
            cache.check_unchanged(info)

    def note_use(self, shard: int, *, finished: bool = False) -> None:
        """Note that a shard was used: under a limit, a finished one is evicted before others.

        Args:
            shard: Counted over all streams.
            finished: Whether no reader of this pass needs it again.
        """
        cache, info, *_ = self._shard(shard)
        cache.record_use(info, finished=finished)

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
        share = self.open_shards.most_bytes
        if (share is not None and share < self._pressure.largest_shard) or self._pressure.is_scarce():
            self.open_shards.close_all()

    def evict(self, shard: int) -> bool:
        """Remove a shard from this node, unless it is in use, or was not fetched by us.

        Returns:
            Whether files were removed.
        """
        self.open_shards.close(shard)
        cache, info, *_ = self._shard(shard)
        return cache.evict(info)

    def evict_coldest(self) -> int:
        """Remove the least recently used shard of those that :meth:`evict` would remove.

        Returns:
            Its number.

        Raises:
            ConfigError: There is none.
        """
        files, owners = list[CacheEntry](), dict[str, int]()
        for stream, cache in enumerate(self.catalogs.caches.values()):
            entries = cache.directory.scan().files
            start = len(f"{cache.directory.path}/")
            for shard, _ in self.catalog.with_files(stream, {name_in_index(file.path[start:]) for file in entries}):
                owners.update(dict.fromkeys(map(str, cache.files_of(self._shard(shard).info)), shard))
            files += entries
        shards = dict.fromkeys(owners.get(file.path) for file in coldest_first(files, None))
        for coldest in shards:
            if coldest is not None and self.evict(coldest):
                return coldest
        raise ConfigError("no shard can be removed: none that was fetched to this node is unused")

    def close(self) -> None:
        """Unmap every shard. Samples read before stay valid."""
        self.open_shards.close_all()

    def named(self, error: StreamingError, shard: int) -> StreamingError:
        """Return the error with the label of the stream or the joined dataset."""
        cache = self._shard(shard).cache
        return error.with_context(cache.label, stream=cache.stream)

    def _checked(self, shard: int) -> _Shard:
        """Return a shard and its cache, checked before anything is downloaded."""
        checked = self._shard(shard)
        try:
            check_shard(checked.info, allow_unsafe_types=self.catalogs.allow_unsafe_types, columns=checked.columns)
        except StreamingError as error:
            raise self.named(error, shard) from error
        return checked

    def _shard(self, shard: int) -> _Shard:
        """Return a shard by number: those of joined datasets follow those of all streams."""
        catalog, columns = self.catalog, self.catalogs.columns
        if shard < len(catalog.shards):
            stream = int(catalog.stream_of_shard[shard])
            joins = None if catalog.joins is None else catalog.joins.streams.get(stream)
            columns = columns if joins is None else joins.own_columns
            cache = self.catalogs.caches[catalog.stream_names[stream]]
            return _Shard(cache, narrowed(catalog.shards[shard], columns), columns, frozenset(self._decode), joins)
        assert catalog.joins is not None, "there is such a shard"
        joined, info = catalog.joins.find(shard)
        as_files = frozenset(name for name, final in joined.names.items() if final in self._decode)
        return _Shard(joined.cache, narrowed(info, joined.columns), joined.columns, as_files, None)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_decode_images"}
        fresh: dict[str, Any] = {"known_catalog": None, "_checks_at": 0.0, "_offsets": OrderedDict()}
        return {**state, **fresh, "encodings": registered_encodings()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, encoding_class in state.pop("encodings").items():
            register_encoding(name, encoding_class)
        self.__dict__.update(state)
