"""The entry point of the cache: the index and the shards of a stream on this node, each fetched once for all processes.

    hold(shard)
      present?                            -> lock its files (shared), return their directory
      claim it                            one process fetches; others wait, or try again later
        present now?                      -> another process was faster
        reserve room under the quota      evict, wait, or report that there is none
        write the staging file, check it, publish it, turn its lock into a shared one

The states of a file are drawn in :mod:`~lightning_streaming.cache.file_states`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from time import monotonic, perf_counter_ns
from typing import Any, NamedTuple

from lightning_streaming.cache import shared_files
from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.file_states import CacheDirectory, HeldShard, Presence, StagingFile, claim, staging_path
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.quota import CacheQuota, Demand
from lightning_streaming.cache.records import find_entry, set_finished, set_used
from lightning_streaming.cache.sources import FilePartUnpacker, InPlaceSource, RemoteSource, takes_room_in_place, unpack
from lightning_streaming.errors import (
    DiskFullError,
    IndexFormatError,
    IntegrityError,
    LockTimeoutError,
    StorageError,
    StreamingError,
)
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import Identity, file_named_by, join_under
from lightning_streaming.formats.algorithms import check_algorithm
from lightning_streaming.formats.index import DatasetIndex, FileInfo, ShardInfo
from lightning_streaming.formats.shard_table import PART
from lightning_streaming.storage.retries import longest_series

_UNPACK_SECONDS = 60.0
"""Added to the timeout of a download without progress: for checks, decompression, or waiting for room."""
_SPENT_SECONDS = 60.0
"""For this time after a failed prefetch of a shard, a reader makes only one more attempt."""
_MOST_LISTED = 1024
"""Maximum number of shards in place that a run lists when it starts; of more, each process lists those it reads."""
_SWEEP_SECONDS = 5.0
"""More than any process needs to check whether the writer of a staging file is dead."""

_logger = package_logger(__name__)


class FetchStatus(enum.Enum):
    """Reasons why a shard is not here after one attempt."""

    FETCHED_ELSEWHERE = enum.auto()
    """Another process, or thread, is fetching it."""
    NO_ROOM = enum.auto()
    """There is no room for it."""
    REMOVED = enum.auto()
    """It was here, and was removed before it could be locked."""


class Miss(NamedTuple):
    """A cache miss: a raw file that was not on this node when this process requested it."""

    fetched_bytes: int = 0
    """Bytes that this process then fetched; 0 if another process did."""
    unpack_began: int = 0
    """Time when this process started to decompress it, by ``perf_counter_ns``; 0 if it did not."""
    unpack_ended: int = 0
    """Time when it had."""


class Misses(dict[str, Miss]):
    """The cache misses of one stream in this process: the latest of each raw file.

    Threads that prefetch add to it while the reader removes from it: each call is one atomic operation of a dict.
    """

    callback: Callable[[int, int], object] | None = None
    """Callback for each fetched shard, called with 1 and 0 at its start, and with 0 and its bytes at its end."""

    def take(self, shard: ShardInfo) -> list[Miss]:
        """Remove and return the misses of a shard's files."""
        taken = (self.pop(raw.basename, None) for raw, _ in shard.files)
        return [miss for miss in taken if miss is not None]


@dataclass(frozen=True, slots=True)
class _Request:
    """A request for a shard, of a reader or of a prefetch."""

    quota: CacheQuota
    """The quota that counts its room."""
    release: Callable[[], object] | None = None
    """Closes the open shards of a reader that needs this one to continue; None for a prefetch."""
    spare_since: int | None = None
    """For a prefetch: files used at this time or later are not removed for it, in nanoseconds."""


class ShardCache:
    """The files of one stream on this node.

    The constructor does no I/O: directories, locks and downloads come with the first call that needs them. Instances
    may be pickled, forked and used by several threads.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self.label = f"stream {config.name!r}"
        """The name of the stream in errors."""
        self.stream = config.name
        """The name of the stream."""
        self._index = IndexCache(config)
        self._num_shards: int | None = None  # the number that ranks have agreed to read
        self._num_listed = 0  # shards of a directory that is read in place whose files were listed
        source = config.source_directory()
        self._source: InPlaceSource | RemoteSource = (
            RemoteSource(config) if source is None else InPlaceSource(source, config)
        )
        self.directory = CacheDirectory(config.cache_directory(), self._index.own_tags)
        """The directory for fetched or decompressed files."""
        self._unlimited = CacheQuota([self.directory])
        self._presence = Presence(self.directory, self._source)
        self._fetcher = _Fetcher(self.directory, self._source, self._presence, keep_zip=config.keep_zip)
        self.misses = self._fetcher.misses
        """The cache misses that were not taken yet."""
        self._data_versions = dict[str, str]()  # by the digest of the index's data: files are inspected once
        # Of a directory that is read in place: whether a shard's raw files are used there, by their data file.
        self._in_place: dict[str, bool] = {}

    def __repr__(self) -> str:
        return f"ShardCache({self._config!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Files that are complete here may be missing where this is unpickled.
        return {**self.__dict__, "_in_place": {}}

    @property
    def reads_in_place(self) -> bool:
        """Whether the directory of the dataset is read, so that there is nothing to prefetch."""
        return isinstance(self._source, InPlaceSource)

    def prepare(self) -> None:
        """Import the package that serves the remote; call it before threads or forks.

        Raises:
            ConfigError: No filesystem serves the remote's scheme.
            MissingDependencyError: The package that serves it is not installed.
        """
        if isinstance(self._source, RemoteSource):
            self._config.location.prepare()

    def read_index(self) -> DatasetIndex:
        """Read the index of the stream; fetch it if this node has none, or a damaged one.

        Raises:
            IndexFormatError: The index is invalid.
            ObjectNotFoundError: There is none.
            StorageError: It could not be fetched.
            LockTimeoutError: Another process has been fetching it for too long.
        """
        with self._named():
            index = self._index.read()
        if self._num_shards is not None:
            index = index.head(self._num_shards)
        if isinstance(self._source, InPlaceSource) and self._num_listed != len(index.shards) <= _MOST_LISTED:
            self._source.list_versions(index.shards)
            self._num_listed = len(index.shards)
        return index

    def latest_index(self) -> IndexCache:
        """Read the current index of the stream, without switching to it; :meth:`adopt_index` does.

        Raises:
            StreamingError: :meth:`read_index` raises it.
        """
        newer = self._index.refreshed()
        with self._named():
            newer.read()
        return newer

    def adopt_index(self, newer: IndexCache, num_shards: int) -> None:
        """Read this number of shards of a newer index from now on: all of the current one, and more."""
        self._index.adopt(newer)
        self._num_shards = num_shards
        self._data_versions.clear()

    def data_version(self, index: DatasetIndex) -> str:
        """Return a version of the stream's data, in the names of files that are derived from the data.

        Of a remote, it covers the index's digest of the data, and the versions of its files where they are known. Of
        data that is read in place, it also covers size, modification time and change time of each file without a hash
        in the index: such a file may be rewritten without a change of the index. These are read once.

        Args:
            index: The stream's index, or the head of it.
        """
        digest = index.data_digest
        if digest not in self._data_versions:
            self._data_versions[digest] = self._source.data_version(index)
        return self._data_versions[digest]

    def needs_room(self, index: DatasetIndex) -> bool:
        """Return whether shards of an index take room in the cache directory, fetched or decompressed."""
        return not self.reads_in_place or any(takes_room_in_place(shard) for _, shard in index.shards.examples())

    @contextmanager
    def hold(
        self, shard: ShardInfo, quota: CacheQuota | None = None, release: Callable[[], object] | None = None
    ) -> Iterator[Path]:
        """Make a shard's raw files available, however long that takes, and lock them until the block ends.

        A map that is created within the block holds its file for longer.

        Args:
            shard: An entry of this stream's index.
            quota: The quota that counts its room; None for no limit.
            release: Closes the other open shards of the reader, if there is no room without that.

        Yields:
            The directory that holds the raw files under their basenames.

        Raises:
            IntegrityError: The fetched files differ from the index, time after time.
            ShardCorruptError: A file that is read in place differs from the index.
            ObjectNotFoundError: A file does not exist.
            DiskFullError: The disk is full, and no more files may be removed.
            StorageError: A file could not be fetched, or the cache directory was removed.
            ConfigError: ``validate_hash`` names a hash that the index does not record, or the filesystem has no locks,
                which a limit needs.
            LockTimeoutError: Another process is fetching the shard, and has made no progress for too long.
        """
        with self._named():
            held = self._obtain(shard, _Request(quota or self._unlimited, release=release or (lambda: None)))
        assert isinstance(held, HeldShard), "a reader waits"
        try:
            yield held.directory
        finally:
            held.close()
        self.check_unchanged(shard)

    def check_unchanged(self, shard: ShardInfo) -> None:
        """Raise an error for a shard that is read in place and has changed during the run.

        Raises:
            IntegrityError: A file of it was replaced or written to since the run listed it, or first read it.
        """
        if isinstance(self._source, InPlaceSource):
            with self._named():
                if self._is_in_place(shard):
                    self._source.check_versions(shard)

    def fetch_ahead(
        self, shard: ShardInfo, quota: CacheQuota | None = None, spare_since: int | None = None
    ) -> FetchStatus | None:
        """Prefetch a shard's raw files without waiting for another process that fetches them, or for room.

        With a limit they may be removed again as soon as this returns.

        Args:
            shard: An entry of this stream's index.
            quota: The quota that counts its room; None for no limit.
            spare_since: Files used at this time or later are not removed for it, in nanoseconds; None for no such time.

        Returns:
            The reason why they are not here; None if they are.

        Raises:
            StreamingError: :meth:`hold` raises it.
        """
        with self._named():
            held = self._obtain(shard, _Request(quota or self._unlimited, spare_since=spare_since))
        if isinstance(held, FetchStatus):
            return held
        held.close()
        return None

    def has(self, shard: ShardInfo) -> bool:
        """Return whether a shard's raw files are on this node now."""
        with self._named():
            if self._is_in_place(shard):
                return True
        held = self._presence.hold(shard) if shared_files.is_reachable(self.directory.path) else None
        if held is None:
            return False
        held.close()
        return True

    def read_bytes(self, file: FileInfo, start: int, stop: int) -> bytes:
        """Fetch a range of a raw file that is stored uncompressed, without caching it.

        Raises:
            StorageError: The range could not be fetched.
        """
        assert isinstance(self._source, RemoteSource), "otherwise the file is here"
        with self._named():
            return self._source.read_bytes(file, start, stop)

    def record_use(self, shard: ShardInfo, *, finished: bool) -> None:
        """Set the last use of a shard to now, or mark it as finished, so that it is evicted first."""
        if not self._in_place.get(shard.raw_data.basename):
            for path in self.files_of(shard):
                (set_finished if finished else set_used)(path)

    def files_of(self, shard: ShardInfo) -> list[Path]:
        """Return the paths of a shard's files in the cache directory, raw and compressed, whether they exist or not."""
        files = (file for file in chain(*shard.files) if file is not None)
        return [join_under(self.directory.path, file.basename) for file in files]

    def evict(self, shard: ShardInfo) -> bool:
        """Remove a shard's files from the cache directory, unless one is in use, or another program put it there.

        Returns:
            Whether any were removed.
        """
        entries = [entry for entry in map(find_entry, self.files_of(shard)) if entry is not None]
        own = [entry for entry in entries if self.directory.own.include(entry.modified)]
        if not own:
            return False
        with self._named(), self.directory.locked() as count:
            return count is not None and self.directory.remove_unused(count, own, "requested")

    def discard(self, shard: ShardInfo) -> bool:
        """Remove a shard's files from the cache directory, because a raw one is damaged or has vanished.

        The next :meth:`hold` fetches them again. A compressed file that was kept is removed, too: the damage may come
        from it. If a raw file has vanished, or another process is fetching one again, nothing is removed.

        Returns:
            Whether a retry may help; False for raw files that are read in place, which are not changed.
        """
        with self._named():
            if self._is_in_place(shard):
                self._in_place.pop(shard.raw_data.basename, None)
                return False
        seen = self._identities(shard)
        with self._named():
            self.directory.prepare()
            staging = claim(self.directory.path, shard.raw_data.basename)
            if staging is None:
                return True
            try:
                if None not in seen and self._identities(shard) == seen:
                    _logger.info("%s is damaged, so it is fetched again", shard.raw_data.basename)
                    for path in self.files_of(shard):
                        self.directory.remove(path)
            finally:
                self.directory.drop([staging])
        return True

    def _obtain(self, shard: ShardInfo, request: _Request) -> HeldShard | FetchStatus:
        """Try once to get and lock a shard; for a reader, until it is here."""
        if self._is_in_place(shard):
            assert isinstance(self._source, InPlaceSource)
            self._source.check_versions(shard)
            return HeldShard(self._source.directory)
        self.directory.prepare()
        # Seconds without a byte after which its writer must be done.
        longest_download = longest_series(self._config.attempts, self._config.download_timeout)
        stall = shared_files.StallTimeout(len(shard.files) * longest_download + _UNPACK_SECONDS)
        others = [file for file in chain(*shard.files) if file is not None and file is not shard.raw_data]
        for _ in shared_files.pauses():
            held = self._presence.hold(shard) or self._fetcher.fetch(shard, request)
            if isinstance(held, HeldShard):
                held.set_used()
                return held
            if request.release is None and held is not FetchStatus.REMOVED:
                return held
            # The lock of the first is the claim of the shard.
            stall.check([staging_path(self.directory.path, file.basename) for file in (shard.raw_data, *others)])
        raise AssertionError("pauses without end")

    def _is_in_place(self, shard: ShardInfo) -> bool:
        if not isinstance(self._source, InPlaceSource):
            return False
        name = shard.raw_data.basename
        if name not in self._in_place:
            # Only the raw files of a compressed shard could be those of another dataset.
            tag = self._index.tag_in_place() if shard.compression else None
            self._in_place[name] = self._source.holds_raw(shard, tag)
        return self._in_place[name]

    def _identities(self, shard: ShardInfo) -> list[Identity | None]:
        """Return values that change when the raw files are replaced or written to."""
        return [shared_files.file_identity(join_under(self.directory.path, raw.basename)) for raw, _ in shard.files]

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the stream to every error of the block."""
        try:
            yield
        except StreamingError as error:
            was_removed = isinstance(error, StorageError) and self.directory.was_removed()
            shown = shared_files.directory_removed(self.directory.path) if was_removed else error
            named = shown.with_context(self.label, stream=self.stream)
            raise named.with_traceback(error.__traceback__) from error.__cause__
        except OSError as error:  # another user's directory or file, a disk that fails
            raise StorageError(
                f"stream {self._config.name!r}: {error}",
                hint="fix the permissions, or set another local=",
                stream=self._config.name,
                path=file_named_by(error),
            ) from error


@dataclass(frozen=True, slots=True)
class _RawFile:
    """A raw file to create."""

    shard: ShardInfo
    raw: FileInfo
    compressed: FileInfo | None
    """The stored file; None if that is the raw one."""
    staging: StagingFile
    """The staging file of the raw file."""
    compressed_staging: StagingFile | None
    """The staging file of the compressed file; None if there is none, or it is here."""
    source: InPlaceSource | RemoteSource

    def demands(self) -> list[Demand]:
        """Return the staging files, with the bytes that each will have."""
        demands = [(self.staging, self.raw.bytes)]
        if self.compressed_staging is not None and self.compressed is not None:
            demands.append((self.compressed_staging, self.compressed.bytes))
        return demands


class _Fetcher:
    """Fetches the shards of a stream into its cache directory, each while this process holds its claim."""

    def __init__(
        self, directory: CacheDirectory, source: InPlaceSource | RemoteSource, presence: Presence, *, keep_zip: bool
    ) -> None:
        self._directory = directory
        self._source = source
        self._presence = presence
        self._keep_zip = keep_zip
        self._stored = FilePartUnpacker()
        # Time of the last failed prefetch of a shard, by its raw data file, until the reader that needs it tries.
        self._failed_ahead = dict[str, float]()
        self.misses = Misses()

    def fetch(self, shard: ShardInfo, request: _Request) -> HeldShard | FetchStatus:
        """Create the missing files of a shard, unless another process is doing so, and lock the shard.

        Args:
            shard: The shard.
            request: The request for it.

        Raises:
            IntegrityError: The fetched files differ from the index, time after time.
            ShardCorruptError: A compressed file that is read in place differs from the index.
            StorageError: A file could not be fetched.
            IndexFormatError: Two files of the shard have the same name.
            ConfigError: The hash to check is not recorded, or a limit is not possible here.
        """
        claimed = claim(self._directory.path, shard.raw_data.basename)
        if claimed is None:
            self.misses.setdefault(shard.raw_data.basename, Miss())  # a thread of this process records more
            return FetchStatus.FETCHED_ELSEWHERE
        claims = [claimed]
        held: HeldShard | FetchStatus = FetchStatus.REMOVED
        try:
            with ExitStack() as stack:
                stack.callback(self._directory.drop, claims)
                held = self._fetch(shard, claims, request, stack)
        except BaseException:
            if isinstance(held, HeldShard):
                held.close()
            raise
        return held

    def _fetch(
        self, shard: ShardInfo, claims: list[StagingFile], request: _Request, stack: ExitStack
    ) -> HeldShard | FetchStatus:
        names = [file.basename for file in chain(*shard.files) if file is not None]
        if len(set(names)) < len(names):
            raise IndexFormatError(
                f"the files of a shard must have different names, but are {', '.join(names)}", path=names[0]
            )
        source = self._source
        if request.release is not None and isinstance(source, RemoteSource):
            failed = self._failed_ahead.pop(shard.raw_data.basename, -math.inf)
            if monotonic() - failed < _SPENT_SECONDS:  # the prefetch has left one attempt
                source = replace(source, spent=True)
        try:
            return self._fetch_from(source, shard, claims, request, stack)
        except (StorageError, IntegrityError):
            if request.release is None:  # recorded before a reader that waits can claim the shard
                self._failed_ahead[shard.raw_data.basename] = monotonic()
            raise

    def _fetch_from(
        self,
        source: InPlaceSource | RemoteSource,
        shard: ShardInfo,
        claims: list[StagingFile],
        request: _Request,
        stack: ExitStack,
    ) -> HeldShard | FetchStatus:
        files = []
        for raw, compressed in [pair for pair in shard.files if not self._presence.is_here(*pair)]:
            staging = claims[0] if raw is shard.raw_data else self._claim(raw, claims)
            compressed_staging = None
            if compressed is not None and shard.compression != PART and isinstance(self._source, RemoteSource):
                kept = self._presence.hold_compressed(compressed)
                if kept is not None:
                    stack.callback(kept.close)
                else:
                    compressed_staging = self._claim(compressed, claims)
            files.append(_RawFile(shard, raw, compressed, staging, compressed_staging, source))
        demands = [demand for file in files for demand in file.demands()]
        if demands and not request.quota.reserve(
            self._directory, demands, release=request.release, spare_since=request.spare_since
        ):
            return FetchStatus.NO_ROOM
        if not all(self._create_with_space(file, request) for file in files):
            return FetchStatus.NO_ROOM
        # Before the claims are released, so that no other process removes it in between.
        return self._presence.hold(shard) or FetchStatus.REMOVED

    def _claim(self, file: FileInfo, claims: list[StagingFile]) -> StagingFile:
        """Claim a file that only the holder of the shard's claim writes; others may just check for a dead writer."""
        for _ in shared_files.pauses(_SWEEP_SECONDS):
            staging = claim(self._directory.path, file.basename)
            if staging is not None:
                claims.append(staging)
                return staging
        raise LockTimeoutError(
            f"the staging file of {file.basename} in {self._directory.path} is locked, but no process is fetching it",
            path=str(self._directory.path),
        )

    def _create_with_space(self, file: _RawFile, request: _Request) -> bool:
        """Create a file; return False if the disk is full, and no reader waits for it."""
        full: DiskFullError | None = None

        def attempt() -> bool:
            nonlocal full
            try:
                self._create(file)
            except DiskFullError as error:
                _logger.info("the disk is full, so other shards are removed: %s", error)
                full = error
                return False
            return True

        if attempt() or request.quota.retry_with_space(
            self._directory, file.demands(), attempt, release=request.release, spare_since=request.spare_since
        ):
            return True
        if request.release is not None and full is not None:
            raise DiskFullError(
                f"{file.raw.basename}: {full.args[0]}",
                hint=f"{full.hint}, or set a cache_limit that fits",
                path=full.path,
            ) from full
        return False

    def _create(self, file: _RawFile) -> None:
        is_download = file.raw is file.shard.raw_data and isinstance(self._source, RemoteSource)
        callback = self.misses.callback if is_download else None
        if callback is not None:
            callback(1, 0)
        with file.staging.beating():
            tag = self._write(file)
        if callback is not None:
            callback(0, self.misses.get(file.raw.basename, Miss()).fetched_bytes)
        if not file.staging.publish(tag):
            # Another user, who has separate claims, was faster; or that file is wrong, and this raises the error.
            self._presence.is_here(file.raw, file.compressed)
        file.staging.keep_shared()
        if file.compressed_staging is not None:
            self._directory.drop([file.compressed_staging])

    def _write(self, file: _RawFile) -> int:
        """Write a raw file to its staging file, and return its tag."""
        raw, algorithm, source = file.raw, file.shard.compression, file.source
        if algorithm == PART:
            assert file.compressed is not None, "it is a part of it"
            is_local = isinstance(source, InPlaceSource)
            tag = source.tag_of(file.compressed) if isinstance(source, InPlaceSource) else self._directory.own.of_remote
            stored, version = source.stored(file.compressed), file.compressed.version or str(tag)
            done = self._stored.unpack(file.shard, stored, file.staging.path, version=version)
            self.misses[raw.basename] = Miss(0 if is_local else done.num_bytes, done.read_until, perf_counter_ns())
            return tag
        if isinstance(source, InPlaceSource):
            assert file.compressed is not None, "otherwise it is read in place"
            assert algorithm is not None, "or the index was refused"
            started = perf_counter_ns()
            tag = source.unpack_raw(raw, file.compressed, algorithm, file.staging.path)
            self.misses[raw.basename] = Miss(0, started, perf_counter_ns())
            return tag
        tag = self._directory.own.of_remote
        if file.compressed is None or algorithm is None:
            source.fetch(raw, file.staging.path)
            self.misses[raw.basename] = Miss(raw.bytes)
        else:
            check_algorithm(algorithm)
            self._unpack_fetched(source, file, file.compressed, algorithm, tag)
        return tag

    def _unpack_fetched(
        self, source: RemoteSource, file: _RawFile, compressed: FileInfo, algorithm: str, tag: int
    ) -> None:
        def unpack_from(path: Path, fetched_bytes: int = compressed.bytes) -> None:
            started = perf_counter_ns()
            unpack(path, source.shown(compressed), file.raw, algorithm, file.staging.path)
            self.misses[file.raw.basename] = Miss(fetched_bytes, started, perf_counter_ns())

        # An earlier attempt may have kept it, without room for its raw file.
        staging = file.compressed_staging
        if staging is not None and staging.is_unpublished():
            source.fetch(compressed, staging.path, unpack_from)
            if self._keep_zip:
                staging.publish(tag)
            return
        kept = join_under(self._directory.path, compressed.basename)
        try:
            unpack_from(kept, fetched_bytes=0)
        except IntegrityError as error:
            # No recorded hash has detected the damage; the next attempt fetches it.
            _logger.info("%s is removed, to be fetched again: %s", kept, error)
            self._directory.remove(kept)
            raise
