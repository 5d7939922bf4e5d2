"""Samples by their place: brings shards to this node and reads from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_streaming.cache import ShardCache
from lightning_streaming.errors import FormatError, ObjectNotFoundError, ShardCorruptError, StreamingError
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard import ShardReader, check_shard, open_shard
from lightning_streaming.loading.catalog import Catalog

_MOST_OPEN_SHARDS = 256
"""Shards mapped at a time by one process; each holds one file descriptor, of which a process often may have 1024."""


class SampleSource:
    """The shards of all streams of a dataset, fetched and opened when needed.

    Making one does no I/O. It may be sent to another process, which then reads the indexes for itself, from this node's
    cache.

    Args:
        caches: Where each stream's files are, by stream name.
        allow_unsafe_types: Whether columns may be unpickled.
    """

    def __init__(self, caches: Mapping[str, ShardCache], allow_unsafe_types: bool) -> None:
        self._caches = dict(caches)
        self._allow_unsafe_types = allow_unsafe_types
        self._catalog: Catalog | None = None
        self._open: OrderedDict[int, ShardReader] = OrderedDict()

    @property
    def catalog(self) -> Catalog:
        """Every shard and sample; the indexes are read, and if need be downloaded, at the first look."""
        if self._catalog is None:
            self._catalog = Catalog({name: cache.read_index() for name, cache in self._caches.items()})
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
            self._open.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_catalog": None, "_open": OrderedDict()}

    def _reader(self, shard: int) -> ShardReader:
        reader = self._open.get(shard)
        if reader is None:
            info = self.catalog.shards[shard]
            reader = self._open_shard(shard, info)
            self._open[shard] = reader
            if len(self._open) > _MOST_OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(shard)
        return reader

    def _open_shard(self, shard: int, info: ShardInfo) -> ShardReader:
        cache = self._caches[self._stream_of(shard)]
        for attempt in ("first", "last"):
            directory = self._find(shard, wait=True)
            assert directory is not None, "it waits"
            try:
                return open_shard(info, directory, allow_unsafe_types=self._allow_unsafe_types)
            except (ShardCorruptError, ObjectNotFoundError) as error:
                if attempt == "last" or cache.reads_in_place:
                    raise self._named(error, shard) from error
                cache.discard(info)  # damaged or removed on this node since it was fetched
            except StreamingError as error:
                raise self._named(error, shard) from error
        raise AssertionError("the last attempt returns or raises")

    def _find(self, shard: int, wait: bool) -> Path | None:
        info = self.catalog.shards[shard]
        try:
            check_shard(info, allow_unsafe_types=self._allow_unsafe_types)  # before anything is downloaded
        except StreamingError as error:
            raise self._named(error, shard) from error
        return self._caches[self._stream_of(shard)].ensure(info, wait=wait)

    def _stream_of(self, shard: int) -> str:
        return self.catalog.stream_names[int(self.catalog.stream_of_shard[shard])]

    def _named(self, error: StreamingError, shard: int) -> StreamingError:
        return type(error)(f"stream {self._stream_of(shard)!r}: {error}")
