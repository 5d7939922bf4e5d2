"""The front of the cache: makes a stream's index and shards present on this node, each fetched once for all.

    hold(shard)
      present?                            -> lock its files (shared), give their directory
      claim it                            one process fetches; others wait, or come back later
        present now?                      -> somebody else was faster
        reserve room under the quota      evict, wait, or say that there is none
        write the staging file, check it, publish it, turn its lock into a shared one

The states that this leads through are drawn in :mod:`~lightning_streaming.cache.file_states`.
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
from lightning_streaming.cache.sources import FilePartUnpacker, InPlaceSource, RemoteSource, takes_room_in_place, unpack
from lightning_streaming.cache.usage import find_entry, set_finished, set_used
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
from lightning_streaming.formats.compression import check_algorithm
from lightning_streaming.formats.index import DatasetIndex, FileInfo, ShardInfo
from lightning_streaming.formats.shard_table import PART
from lightning_streaming.storage.retries import longest_series

_UNPACK_SECONDS = 60.0
"""Added to how long a download may be silent: for checking and decompressing what arrived, or for waiting for room."""
_SPENT_SECONDS = 60.0
"""For so long after fetching a shard ahead has failed, a reader makes only one attempt more."""
_MOST_LISTED = 1024
"""The most shards in place whose files a run lists when it begins; of more, each process lists what it reads."""
_SWEEP_SECONDS = 5.0
"""More than anybody needs to find out whether a staging file is dead."""

_logger = package_logger(__name__)


class FetchStatus(enum.Enum):
    """Why a shard is not here after one try."""

    FETCHED_ELSEWHERE = enum.auto()
    """Another process, or thread, is fetching it."""
    NO_ROOM = enum.auto()
    """There is no room for it."""
    REMOVED = enum.auto()
    """It was here, and was removed before it could be held."""


class Miss(NamedTuple):
    """A raw file that was not on this node when this process asked for it."""

    fetched_bytes: int = 0
    """Bytes that this process then fetched; 0 where another process did."""
    unpack_began: int = 0
    """When this process began to decompress it, by ``perf_counter_ns``; 0 where it did not."""
    unpack_ended: int = 0
    """When it had."""


class Misses(dict[str, Miss]):
    """What was not on this node when it was wanted, of one stream in this process: of each raw file the latest.

    Threads that fetch ahead add to it while the reader takes from it: each call is one step of a dict.
    """

    tell: Callable[[int, int], object] | None = None
    """Is told of each shard that is fetched: 1 and 0 when that begins, 0 and its bytes when it is here."""

    def take(self, shard: ShardInfo) -> list[Miss]:
        """What was noted of a shard's files."""
        taken = (self.pop(raw.basename, None) for raw, _ in shard.files)
        return [miss for miss in taken if miss is not None]


@dataclass(frozen=True, slots=True)
class _Request:
    """Who wants a shard, and what may be done for it."""

    quota: CacheQuota
    """Where room for it is counted."""
    release: Callable[[], object] | None = None
    """Closes what a reader has open that cannot go on without the shard; None where nobody waits for it."""
    spare_since: int | None = None
    """Where nobody waits for it: nothing used at this time or later is removed for it, in nanoseconds."""


class ShardCache:
    """The files of one stream on this node.

    Making one touches nothing: directories, locks and downloads come with the first call that needs them. It may be
    pickled, forked and used by several threads.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self.label = f"stream {config.name!r}"
        """The stream, as errors call it."""
        self.stream = config.name
        """Its name."""
        self._index = IndexCache(config)
        self._num_shards: int | None = None  # as many as ranks have agreed to read of it
        self._num_listed = 0  # shards of a directory that is read in place whose files were listed
        source = config.source_directory()
        self._source: InPlaceSource | RemoteSource = (
            RemoteSource(config) if source is None else InPlaceSource(source, config)
        )
        self.directory = CacheDirectory(config.cache_directory(), self._index.own_tags)
        """The directory for what is fetched or decompressed."""
        self._unlimited = CacheQuota([self.directory])
        self._presence = Presence(self.directory, self._source)
        self._fetcher = _Fetcher(self.directory, self._source, self._presence, keep_zip=config.keep_zip)
        self.misses = self._fetcher.misses
        """What was not on this node when it was asked for, until somebody takes note."""
        self._data_versions = dict[str, str]()  # by the digest of the index's data: files are inspected once
        # Of a directory that is read in place: whether a shard's raw files are used there, by their data file.
        self._in_place: dict[str, bool] = {}

    def __repr__(self) -> str:
        return f"ShardCache({self._config!r})"

    def __getstate__(self) -> dict[str, Any]:
        # What was found whole here may be missing where this is unpickled.
        return {**self.__dict__, "_in_place": {}}

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
            self._config.location.prepare()

    def read_index(self) -> DatasetIndex:
        """Read the stream's index, fetching it if this node does not have it or has a damaged one.

        Raises:
            IndexFormatError: The index cannot be used.
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

    def index_anew(self) -> IndexCache:
        """The stream's index as it is by now, read; whoever goes on with it says so to :meth:`go_on_with`.

        Raises:
            StreamingError: As for :meth:`read_index`.
        """
        newer = self._index.anew()
        with self._named():
            newer.read()
        return newer

    def go_on_with(self, newer: IndexCache, num_shards: int) -> None:
        """Read so many shards of that index from now on: all that there were, and more."""
        self._index.go_on_with(newer)
        self._num_shards = num_shards
        self._data_versions.clear()

    def data_version(self, index: DatasetIndex) -> str:
        """Return a name of the stream's data; files that are derived from the data are kept under it.

        Of a remote, it covers the index's digest of the data, and the versions of its files where they are known. Of
        data that is read in place, it also covers size, modification time and change time of each file of which the
        index has no hash: such a file may be rewritten without a change of the index. These are read once.

        Args:
            index: The stream's index, or the head of it.
        """
        digest = index.data_digest
        if digest not in self._data_versions:
            self._data_versions[digest] = self._source.data_version(index)
        return self._data_versions[digest]

    def needs_room(self, index: DatasetIndex) -> bool:
        """Whether shards of this stream's index take room in its cache directory: fetched, or decompressed."""
        return not self.reads_in_place or any(takes_room_in_place(shard) for _, shard in index.shards.examples())

    @contextmanager
    def hold(
        self, shard: ShardInfo, quota: CacheQuota | None = None, release: Callable[[], object] | None = None
    ) -> Iterator[Path]:
        """Have a shard's raw files on this node, however long that takes, and nobody remove them before the block ends.

        Whoever maps them within the block keeps them for longer: a map holds them by itself.

        Args:
            shard: An entry of this stream's index.
            quota: Where room for it is counted; None for no limit.
            release: Closes what else the reader has open, if there is no room without that.

        Yields:
            The directory that holds the raw files under their basenames.

        Raises:
            IntegrityError: What arrives is not what the index promises, time after time.
            ShardCorruptError: A file that is read in place is not what the index promises.
            ObjectNotFoundError: A file does not exist.
            DiskFullError: The disk is full of what we may not remove.
            StorageError: A file could not be fetched, or the cache directory was removed.
            ConfigError: ``validate_hash`` names a hash that the index does not record, or the filesystem has no locks
                to keep a limit by.
            LockTimeoutError: Another process is fetching the shard, and has shown no sign of life for too long.
        """
        with self._named():
            held = self._obtain(shard, _Request(quota or self._unlimited, release=release or (lambda: None)))
        assert isinstance(held, HeldShard), "it waits"
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
        """Have a shard's raw files on this node without waiting: not for who fetches it already, nor for room.

        With a limit they may be removed again as soon as this returns.

        Args:
            shard: An entry of this stream's index.
            quota: Where room for it is counted; None for no limit.
            spare_since: Nothing used at this time or later is removed for it, in nanoseconds; None for no such time.

        Returns:
            Why they are not here; None if they are.

        Raises:
            StreamingError: As for :meth:`hold`.
        """
        with self._named():
            held = self._obtain(shard, _Request(quota or self._unlimited, spare_since=spare_since))
        if isinstance(held, FetchStatus):
            return held
        held.close()
        return None

    def has(self, shard: ShardInfo) -> bool:
        """Whether a shard's raw files are on this node now."""
        with self._named():
            if self._is_in_place(shard):
                return True
        held = self._presence.hold(shard) if shared_files.is_reachable(self.directory.path) else None
        if held is None:
            return False
        held.close()
        return True

    def read_bytes(self, file: FileInfo, start: int, stop: int) -> bytes:
        """Some bytes of a raw file that the remote has uncompressed, straight from there; nothing is kept.

        Raises:
            StorageError: They could not be fetched.
        """
        assert isinstance(self._source, RemoteSource), "otherwise the file is here"
        with self._named():
            return self._source.read_bytes(file, start, stop)

    def note_use(self, shard: ShardInfo, *, finished: bool) -> None:
        """Set when a shard was last used: now, or so that it goes first, because this epoch needs it no more."""
        if not self._in_place.get(shard.raw_data.basename):
            for path in self.files_of(shard):
                (set_finished if finished else set_used)(path)

    def files_of(self, shard: ShardInfo) -> list[Path]:
        """Where this stream's directory has a shard's files, raw and compressed, if it has them."""
        files = (file for file in chain(*shard.files) if file is not None)
        return [join_under(self.directory.path, file.basename) for file in files]

    def evict(self, shard: ShardInfo) -> bool:
        """Remove a shard's files from our directory, unless somebody uses one, or we did not fetch them.

        Returns:
            Whether any were removed.
        """
        entries = [entry for entry in map(find_entry, self.files_of(shard)) if entry is not None]
        found = [entry for entry in entries if self.directory.own.include(entry.modified)]
        if not found:
            return False
        with self._named(), self.directory.locked() as count:
            return count is not None and self.directory.remove_unused(count, found, "asked for")

    def discard(self, shard: ShardInfo) -> bool:
        """Remove a shard's files from our directory, because a raw one turned out to be damaged or has vanished.

        The next :meth:`hold` makes them anew. A compressed file that was kept goes too: the damage may come from it.
        Where a raw file has vanished, or another process is making one anew, nothing is removed.

        Returns:
            Whether that may help; False for raw files that are read in place, which are left alone.
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
                    _logger.info("%s is damaged, so it is made anew", shard.raw_data.basename)
                    for path in self.files_of(shard):
                        self.directory.remove(path)
            finally:
                self.directory.drop([staging])
        return True

    def _obtain(self, shard: ShardInfo, request: _Request) -> HeldShard | FetchStatus:
        """Try once; or, where a reader waits for it, until it is here."""
        if self._is_in_place(shard):
            assert isinstance(self._source, InPlaceSource)
            self._source.check_versions(shard)
            return HeldShard(self._source.directory)
        self.directory.prepare()
        # Seconds without a byte after which whoever fetches a file must be done.
        longest_download = longest_series(self._config.attempts, self._config.download_timeout)
        stall = shared_files.StallTimeout(len(shard.files) * longest_download + _UNPACK_SECONDS)
        for _ in shared_files.pauses():
            held = self._presence.hold(shard) or self._fetcher.fetch(shard, request)
            if isinstance(held, HeldShard):
                held.set_used()
                return held
            if request.release is None and held is not FetchStatus.REMOVED:
                return held
            stall.check(self._staging_paths(shard))
        raise AssertionError("there is no end to that")

    def _is_in_place(self, shard: ShardInfo) -> bool:
        if not isinstance(self._source, InPlaceSource):
            return False
        name = shard.raw_data.basename
        if name not in self._in_place:
            # Only of a compressed shard could raw files be another's.
            tag = self._index.tag_in_place() if shard.compression else None
            self._in_place[name] = self._source.holds_raw(shard, tag)
        return self._in_place[name]

    def _identities(self, shard: ShardInfo) -> list[Identity | None]:
        """What tells the raw files from others that take their place."""
        return [shared_files.file_identity(join_under(self.directory.path, raw.basename)) for raw, _ in shard.files]

    def _staging_paths(self, shard: ShardInfo) -> list[Path]:
        """What its files are written to; the lock of the first is the claim of the shard."""
        files = [file for file in chain(*shard.files) if file is not None and file is not shard.raw_data]
        return [staging_path(self.directory.path, file.basename) for file in [shard.raw_data, *files]]

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say in every error which stream it is about."""
        try:
            yield
        except StreamingError as error:
            gone = isinstance(error, StorageError) and self.directory.is_gone()
            shown = shared_files.directory_gone(self.directory.path) if gone else error
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
    """One raw file to make."""

    shard: ShardInfo
    """The shard that it is of."""
    raw: FileInfo
    compressed: FileInfo | None
    staging: StagingFile
    """What becomes the raw file."""
    compressed_staging: StagingFile | None
    """What the compressed file is fetched into; None where there is none, or it is here."""
    source: InPlaceSource | RemoteSource
    """Where it comes from."""

    def demands(self) -> list[Demand]:
        """The staging files, with the bytes that each will have."""
        found = [(self.staging, self.raw.bytes)]
        if self.compressed_staging is not None and self.compressed is not None:
            found.append((self.compressed_staging, self.compressed.bytes))
        return found


class _Fetcher:
    """Brings the files of a stream's shards into its cache directory, each shard by whoever holds its claim."""

    def __init__(
        self, directory: CacheDirectory, source: InPlaceSource | RemoteSource, presence: Presence, *, keep_zip: bool
    ) -> None:
        self._directory = directory
        self._source = source
        self._presence = presence
        self._keep_zip = keep_zip
        self._stored = FilePartUnpacker()
        # When fetching a shard ahead last failed, by its raw data file; until the reader that needs it tries, too.
        self._failed_ahead = dict[str, float]()
        self.misses = Misses()

    def fetch(self, shard: ShardInfo, request: _Request) -> HeldShard | FetchStatus:
        """Make what is missing of a shard, unless somebody else is at it, and hold the shard.

        Args:
            shard: The shard.
            request: Who wants it.

        Raises:
            IntegrityError: What arrives is not what the index promises, time after time.
            ShardCorruptError: A compressed file that is read in place is not what the index promises.
            StorageError: A file could not be fetched.
            IndexFormatError: Two files of the shard have one name.
            ConfigError: The hash to check by is not recorded, or a limit cannot be kept here.
        """
        claimed = claim(self._directory.path, shard.raw_data.basename)
        if claimed is None:
            self.misses.setdefault(shard.raw_data.basename, Miss())  # if it is a thread of ours, it tells more
            return FetchStatus.FETCHED_ELSEWHERE
        claims = [claimed]
        held: HeldShard | FetchStatus = FetchStatus.REMOVED
        try:
            with ExitStack() as stack:
                stack.callback(self._directory.drop, claims)
                _check_names(shard)
                held = self._fetch(shard, claims, request, stack)
        except BaseException:
            if isinstance(held, HeldShard):
                held.close()
            raise
        return held

    def _source_for(self, shard: ShardInfo, request: _Request) -> InPlaceSource | RemoteSource:
        """Return the source of a shard: for a reader with the one attempt that threads ahead of it have left."""
        source = self._source
        if request.release is None or isinstance(source, InPlaceSource):
            return source
        failed = self._failed_ahead.pop(shard.raw_data.basename, -math.inf)
        return replace(source, spent=True) if monotonic() - failed < _SPENT_SECONDS else source

    def _fetch(
        self, shard: ShardInfo, claims: list[StagingFile], request: _Request, stack: ExitStack
    ) -> HeldShard | FetchStatus:
        source = self._source_for(shard, request)
        try:
            return self._fetch_from(source, shard, claims, request, stack)
        except (StorageError, IntegrityError):
            if request.release is None:  # noted before a reader that waits can claim the shard
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
        if not all(self._make_with_space(file, request) for file in files):
            return FetchStatus.NO_ROOM
        # Before the claims are let go of, so that nobody comes in between.
        return self._presence.hold(shard) or FetchStatus.REMOVED

    def _claim(self, file: FileInfo, claims: list[StagingFile]) -> StagingFile:
        """Claim what only holders of the shard's claim ask for; but others look whether its writer is dead."""
        for _ in shared_files.pauses(_SWEEP_SECONDS):
            staging = claim(self._directory.path, file.basename)
            if staging is not None:
                claims.append(staging)
                return staging
        raise LockTimeoutError(
            f"the part of {file.basename} in {self._directory.path} is locked, but no process is fetching it",
            path=str(self._directory.path),
        )

    def _make_with_space(self, file: _RawFile, request: _Request) -> bool:
        """Whether a file was made; False if the disk is full, and nobody waits for it."""
        full: DiskFullError | None = None

        def attempt() -> bool:
            nonlocal full
            try:
                self._make(file)
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

    def _make(self, file: _RawFile) -> None:
        tell = self.misses.tell if file.raw is file.shard.raw_data and isinstance(self._source, RemoteSource) else None
        if tell is not None:
            tell(1, 0)
        with file.staging.beating():
            tag = self._write(file)
        if tell is not None:
            tell(0, self.misses.get(file.raw.basename, Miss()).fetched_bytes)
        if not file.staging.publish(tag):
            # Another user, whose claims are not ours, was faster; or it is wrong, and this says that it must stay.
            self._presence.is_here(file.raw, file.compressed)
        file.staging.keep_shared()
        if file.compressed_staging is not None:
            self._directory.drop([file.compressed_staging])

    def _write(self, file: _RawFile) -> int:
        """Write a raw file to its staging file; gives the tag that it is to have."""
        raw, algorithm, source = file.raw, file.shard.compression, file.source
        if algorithm == PART:
            return self._unpack_part(file)
        if isinstance(source, InPlaceSource):
            assert file.compressed is not None, "otherwise it is used where it is"
            assert algorithm is not None, "or the index was refused"
            began = perf_counter_ns()
            tag = source.unpack_raw(raw, file.compressed, algorithm, file.staging.path)
            self.misses[raw.basename] = Miss(0, began, perf_counter_ns())
            return tag
        tag = self._directory.own.of_remote
        if file.compressed is None or algorithm is None:
            source.fetch(raw, file.staging.path)
            self.misses[raw.basename] = Miss(raw.bytes)
        else:
            check_algorithm(algorithm)
            self._unpack_fetched(source, file, file.compressed, algorithm, tag)
        return tag

    def _unpack_part(self, file: _RawFile) -> int:
        """Make a raw file of a part of a stored one; gives the tag that it is to have."""
        assert file.compressed is not None, "it is a part of it"
        source = file.source
        tag = source.tag_of(file.compressed) if isinstance(source, InPlaceSource) else self._directory.own.of_remote
        stored, version = source.stored(file.compressed), file.compressed.version or str(tag)
        done = self._stored.unpack(file.shard, stored, file.staging.path, version=version)
        fetched = 0 if isinstance(source, InPlaceSource) else done.num_bytes
        self.misses[file.raw.basename] = Miss(fetched, done.read_until, perf_counter_ns())
        return tag

    def _unpack_fetched(
        self, source: RemoteSource, file: _RawFile, compressed: FileInfo, algorithm: str, tag: int
    ) -> None:
        def unpack_from(path: Path, fetched_bytes: int = compressed.bytes) -> None:
            began = perf_counter_ns()
            unpack(path, source.shown(compressed), file.raw, algorithm, file.staging.path)
            self.misses[file.raw.basename] = Miss(fetched_bytes, began, perf_counter_ns())

        # It may have been kept by an earlier try, for whose raw file there was no room.
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
            # No hash was recorded that would have told; the next try fetches it.
            _logger.info("%s is removed, to be fetched again: %s", kept, error)
            self._directory.remove(kept)
            raise


def _check_names(shard: ShardInfo) -> None:
    names = [file.basename for file in chain(*shard.files) if file is not None]
    if len(set(names)) < len(names):
        raise IndexFormatError(
            f"the files of a shard must have different names, but are {', '.join(names)}", path=names[0]
        )
