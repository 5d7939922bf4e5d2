"""Makes a stream's index and shards present on this node, each fetched by one process and shared by all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.layout import ORIGIN_BASENAME, lock_path, origin_of
from lightning_streaming.cache.sources import InPlaceSource, RemoteSource
from lightning_streaming.cache.verify import find_identity, find_size
from lightning_streaming.errors import ConfigError, IndexFormatError, LockTimeoutError, StreamingError
from lightning_streaming.files import appears_whole, hold_lock, join_under, remove_partials
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, parse_index
from lightning_streaming.storage import join_url, mask_url, prepare
from lightning_streaming.storage.retry import longest_series

_UNPACK_SECONDS = 10.0
"""Added to what a download may take, for checking and decompressing what arrived."""


class ShardCache:
    """The files of one stream on this node.

    Making one touches nothing: directories, locks and downloads come with the first call that needs them. It may be
    pickled, forked and used by several threads.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._directory = config.cache_directory()
        self._source = _source_of(config)
        # Raw data file of a shard that was found whole -> the directory it is in.
        self._verified: dict[str, Path] = {}

    def __repr__(self) -> str:
        return f"ShardCache({self._config!r})"

    def __getstate__(self) -> dict[str, Any]:
        # What was found whole here may be missing where this is unpickled.
        return {**self.__dict__, "_verified": {}}

    @property
    def reads_in_place(self) -> bool:
        """Whether the stream's own directory is read, so that there is nothing to fetch ahead."""
        return isinstance(self._source, InPlaceSource)

    def prepare(self) -> None:
        """Import the package that serves the remote; to be done before threads or forks.

        Raises:
            ConfigError: No filesystem serves the remote's scheme.
            MissingDependencyError: The package that does is not installed.
        """
        if isinstance(self._source, RemoteSource):
            prepare(self._source.remote)

    def read_index(self) -> DatasetIndex:
        """Read the stream's index, fetching it if this node does not have it or has a damaged one.

        Raises:
            IndexFormatError: The index cannot be used.
            ObjectNotFoundError: There is none.
            StorageError: It could not be fetched.
            LockTimeoutError: Another process has been fetching it for too long.
        """
        with self._named():
            if isinstance(self._source, InPlaceSource):
                return parse_index(self._source.read_index(), str(self._source.directory / INDEX_BASENAME))
            index = self._cached_index(self._source)
            return self._fetch_index(self._source) if index is None else index

    def ensure(self, shard: ShardInfo, *, wait: bool = True) -> Path | None:
        """Make a shard's raw files present, each of the size that the index promises.

        Fetched files are also checked by hash; files that were present before are not.

        Args:
            shard: An entry of this stream's index.
            wait: Whether to wait while another process fetches this shard.

        Returns:
            The directory that holds the raw files under their basenames; None if another process is fetching the shard
            and ``wait`` is false.

        Raises:
            IntegrityError: What arrives is not what the index promises, time after time.
            ShardCorruptError: A file that is read in place is not what the index promises.
            ObjectNotFoundError: A file does not exist.
            StorageError: A file could not be fetched.
            ConfigError: ``validate_hash`` names a hash that the index does not record.
            LockTimeoutError: Another process has been fetching the shard for too long.
        """
        key = shard.raw_data.basename
        directory = self._verified.get(key)
        if directory is None:
            with self._named():
                directory = self._find(shard) or self._fetch(shard, wait)
            if directory is not None:
                self._verified[key] = directory
        return directory

    def discard(self, shard: ShardInfo) -> bool:
        """Remove a shard's files from our directory, because a raw one turned out to be damaged or has vanished.

        The next :meth:`ensure` makes them anew. A compressed file that was kept goes too: the damage may come from it.
        Where a raw file has vanished, or another process has made one anew while this one waited, nothing is removed.

        Returns:
            Whether that may help; False for raw files that are read in place, which are left alone.
        """
        directory = self._verified.pop(shard.raw_data.basename, None)
        if isinstance(self._source, InPlaceSource) and directory != self._directory:
            return False
        damaged = self._identities(shard)
        with self._named(), self._lock(shard.raw_data.basename, self._patience(len(shard.files))):
            if None not in damaged and self._identities(shard) == damaged:
                for file in chain(*shard.files):
                    if file is not None:
                        join_under(self._directory, file.basename).unlink(missing_ok=True)
        return True

    def _identities(self, shard: ShardInfo) -> list[tuple[int, int] | None]:
        return [find_identity(join_under(self._directory, raw.basename)) for raw, _ in shard.files]

    def _cached_index(self, source: RemoteSource) -> DatasetIndex | None:
        path = self._directory / INDEX_BASENAME
        self._check_origin(source)
        try:
            return parse_index(path.read_bytes(), str(path))
        except (FileNotFoundError, IndexFormatError):
            # One that cannot be used was cut short by a crash, or is the remote's own, and then fetching it says so.
            return None

    def _fetch_index(self, source: RemoteSource) -> DatasetIndex:
        path = self._directory / INDEX_BASENAME
        with self._lock(INDEX_BASENAME, self._patience(1)):
            index = self._cached_index(source)
            if index is None:
                data = source.read_index()
                index = parse_index(data, mask_url(join_url(source.remote, INDEX_BASENAME)))
                path.parent.mkdir(parents=True, exist_ok=True)
                remove_partials(path)
                with appears_whole(path.with_name(ORIGIN_BASENAME)) as partial:
                    partial.write_bytes(origin_of(source.remote, self._config.storage_options))
                with appears_whole(path) as partial:
                    partial.write_bytes(data)
            return index

    def _check_origin(self, source: RemoteSource) -> None:
        path = self._directory / ORIGIN_BASENAME
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            return
        if found != origin_of(source.remote, self._config.storage_options):
            raise ConfigError(
                f"{self._directory} holds shards of another remote than {mask_url(source.remote)}; give this stream "
                "a directory of its own with local=, or remove that one"
            )

    def _find(self, shard: ShardInfo) -> Path | None:
        """The directory that holds all raw files of a shard; None if there is none yet."""
        if isinstance(self._source, InPlaceSource) and self._source.holds_raw(shard):
            self._source.check_raw(shard)
            return self._source.directory
        present = all(self._is_present(raw, compressed) for raw, compressed in shard.files)
        return self._directory if present else None

    def _is_present(self, raw: FileInfo, compressed: FileInfo | None) -> bool:
        path = join_under(self._directory, raw.basename)
        if find_size(path) != raw.bytes:
            return False
        return not isinstance(self._source, InPlaceSource) or self._source.is_current(path, compressed)

    def _fetch(self, shard: ShardInfo, wait: bool) -> Path | None:
        seconds = self._patience(len(shard.files)) if wait else 0
        try:
            with self._lock(shard.raw_data.basename, seconds):
                for raw, compressed in shard.files:
                    if not self._is_present(raw, compressed):
                        self._write(raw, compressed, shard.compression)
        except LockTimeoutError:
            if wait:
                raise
            return None
        return self._directory

    def _write(self, raw: FileInfo, compressed: FileInfo | None, algorithm: str | None) -> None:
        """Make one raw file appear in our directory. Must be called while holding the lock of its shard."""
        path = join_under(self._directory, raw.basename)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(path)
        with appears_whole(path) as partial:
            self._source.write_raw(raw, compressed, algorithm, partial)

    def _lock(self, basename: str, seconds: float) -> AbstractContextManager[None]:
        return hold_lock(lock_path(self._directory, basename), seconds, f"fetch {basename} into {self._directory}")

    def _patience(self, num_files: int) -> float:
        """Seconds after which whoever fetches these files must be done."""
        series = longest_series(self._config.download_retry, self._config.download_timeout)
        return num_files * (series + _UNPACK_SECONDS)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say in every error which stream it is about."""
        try:
            yield
        except StreamingError as error:
            named = type(error)(f"stream {self._config.name!r}: {error}")
            raise named.with_traceback(error.__traceback__) from error.__cause__


def _source_of(config: CacheConfig) -> InPlaceSource | RemoteSource:
    source = config.source_directory()
    if source is not None:
        return InPlaceSource(directory=source, config=config)
    assert config.remote  # otherwise the source would be a directory
    return RemoteSource(remote=config.remote, directory=config.cache_directory(), config=config)
