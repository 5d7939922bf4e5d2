"""Samples by their place: brings shards to this node and reads from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_streaming.cache import ShardCache
from lightning_streaming.errors import ConfigError, FormatError, ObjectNotFoundError, ShardCorruptError, StreamingError
from lightning_streaming.formats.columns import check_columns, check_selection
from lightning_streaming.formats.encodings import register_encoding, registered_encodings
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard import ShardReader, check_shard, open_shard
from lightning_streaming.loading.catalog import Catalog

_MOST_OPEN_FILES = 256
"""Shard files mapped at a time by one process; each holds a file descriptor, of which a process often may have 1024."""


class SampleSource:
    """The shards of all streams of a dataset, fetched and opened when needed.

    Making one does no I/O. It may be sent to another process, which then reads the indexes for itself, from this node's
    cache.

    Args:
        caches: Where each stream's files are, by stream name.
        allow_unsafe_types: Whether columns may be unpickled.
        columns: Names of the columns to decode; None for all.

    Raises:
        ConfigError: ``columns`` is not a list of names.
    """

    def __init__(
        self, caches: Mapping[str, ShardCache], allow_unsafe_types: bool, columns: Sequence[str] | None = None
    ) -> None:
        self._caches = dict(caches)
        self._allow_unsafe_types = allow_unsafe_types
        self._columns = check_selection(columns)
        self._catalog: Catalog | None = None
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._open_files = 0

    @property
    def catalog(self) -> Catalog:
        """Every shard and sample; the indexes are read, and if need be downloaded, at the first look.

        Raises:
            ConfigError: A stream holds no sample, or a shard lacks a column that is to be read.
        """
        if self._catalog is None:
            catalog = Catalog({name: cache.read_index() for name, cache in self._caches.items()})
            self._check_columns(catalog)
            self._catalog = catalog
        return self._catalog

    @property
    def is_remote(self) -> bool:
        """Whether any stream's shards may have to be fetched first."""
        return not all(cache.reads_in_place for cache in self._caches.values())

    def prepare(self) -> None:
        """Import what fetching needs, before worker processes are forked from this one."""
        for cache in self._caches.values():
            cache.prepare()

    def fetch(self, shard: int, wait: bool = True) -> bool:
        """Have a shard on this node.

        Args:
            shard: Counted over all streams.
            wait: Whether to wait while another process fetches it.

        Returns:
            Whether it is here; False only if ``wait`` is False and another process is fetching it.
        """
        return self._find(shard, wait) is not None

    def read(self, shard: int, index: int) -> dict[str, Any]:
        """One sample, decoded: column name to value.

        Raises:
            FormatError: The shard or the sample is damaged; names the stream and the shard.
            StorageError: The shard could not be fetched.
        """
        reader = self._reader(shard)
        try:
            return reader[index]
        except FormatError as error:
            raise self._named(error, shard) from error

    def close(self) -> None:
        """Unmap every shard. Samples read before stay valid."""
        while self._open:
            self._close_oldest()

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"_catalog": None, "_open": OrderedDict(), "_open_files": 0}
        return {**self.__dict__, **fresh, "encodings": registered_encodings()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, encoding_class in state.pop("encodings").items():
            register_encoding(name, encoding_class)
        self.__dict__.update(state)

    def _check_columns(self, catalog: Catalog) -> None:
        """Look at every shard now, rather than in the step that first needs one that lacks a column."""
        place = 0
        try:
            for place, info in enumerate(catalog.shards if self._columns else ()):  # noqa: B007  # the handler tells it
                check_columns(info, self._columns)
        except ConfigError as error:
            name = catalog.stream_names[int(catalog.stream_of_shard[place])]
            raise ConfigError(f"stream {name!r}: {error}") from None

    def _reader(self, shard: int) -> ShardReader:
        reader = self._open.get(shard)
        if reader is None:
            info = self.catalog.shards[shard]
            reader = self._open_shard(shard, info)
            self._open[shard] = reader
            self._open_files += len(info.files)
            while self._open_files > _MOST_OPEN_FILES:
                self._close_oldest()
        else:
            self._open.move_to_end(shard)
        return reader

    def _close_oldest(self) -> None:
        shard, reader = self._open.popitem(last=False)
        self._open_files -= len(self.catalog.shards[shard].files)
        reader.close()

    def _open_shard(self, shard: int, info: ShardInfo) -> ShardReader:
        cache = self._caches[self._stream_of(shard)]
        for attempt in ("first", "last"):
            directory = self._find(shard, wait=True)
            assert directory is not None, "it waits"
            try:
                return open_shard(info, directory, allow_unsafe_types=self._allow_unsafe_types, columns=self._columns)
            except (ShardCorruptError, ObjectNotFoundError) as error:
                # Damaged or removed on this node since it was made present, unless it is read in place.
                if attempt == "last" or not cache.discard(info):
                    raise self._named(error, shard) from error
            except StreamingError as error:
                raise self._named(error, shard) from error
        raise AssertionError("the last attempt returns or raises")

    def _find(self, shard: int, wait: bool) -> Path | None:
        info = self.catalog.shards[shard]
        try:
            # Before anything is downloaded.
            check_shard(info, allow_unsafe_types=self._allow_unsafe_types, columns=self._columns)
        except StreamingError as error:
            raise self._named(error, shard) from error
        return self._caches[self._stream_of(shard)].ensure(info, wait=wait)

    def _stream_of(self, shard: int) -> str:
        return self.catalog.stream_names[int(self.catalog.stream_of_shard[shard])]

    def _named(self, error: StreamingError, shard: int) -> StreamingError:
        return type(error)(f"stream {self._stream_of(shard)!r}: {error}")
