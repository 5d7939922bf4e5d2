"""Makes a stream's index and shards present on this node, each fetched by one process and shared by all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_streaming.cache.arrival import claim, directory_gone, part_path
from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.fetching import Absence, Ask, Fetcher
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.locks import lock_owner, pauses
from lightning_streaming.cache.marks import OwnTimes
from lightning_streaming.cache.place import CachePlace
from lightning_streaming.cache.presence import Held, Presence
from lightning_streaming.cache.room import CacheRoom
from lightning_streaming.cache.scan import find_entry
from lightning_streaming.cache.sources import InPlaceSource, RemoteSource
from lightning_streaming.cache.stamps import stamp_finished, stamp_used
from lightning_streaming.errors import LockTimeoutError, StorageError, StreamingError
from lightning_streaming.files import join_under
from lightning_streaming.formats.index import DatasetIndex, FileInfo, ShardInfo
from lightning_streaming.storage import prepare
from lightning_streaming.storage.retry import longest_series

_UNPACK_SECONDS = 60.0
"""Added to how long a download may be silent: for checking and decompressing what arrived, or for waiting for room."""
_FOR_EVER = 1e9


class ShardCache:
    """The files of one stream on this node.

    Making one touches nothing: directories, locks and downloads come with the first call that needs them. It may be
    pickled, forked and used by several threads.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._index = IndexCache(config)
        self._source = _source_of(config)
        self.place = CachePlace(config.cache_directory(), self._own_times)
        """The directory for what is fetched or decompressed."""
        self._unlimited = CacheRoom([self.place])
        self._presence = Presence(self.place, self._source)
        self._fetcher = Fetcher(self.place, self._source, self._presence, config)
        # Raw data files that were found whole in a directory that is read in place.
        self._in_place: set[str] = set()

    def __repr__(self) -> str:
        return f"ShardCache({self._config!r})"

    def __getstate__(self) -> dict[str, Any]:
        # What was found whole here may be missing where this is unpickled.
        return {**self.__dict__, "_in_place": set()}

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
            return self._index.read()

    def needs_room(self, index: DatasetIndex) -> bool:
        """Whether shards of this stream's index take room in its cache directory: fetched, or decompressed."""
        return not self.reads_in_place or any(shard.compression for _, shard in index.shards.examples())

    @contextmanager
    def hold(
        self, shard: ShardInfo, room: CacheRoom | None = None, let_go: Callable[[], object] | None = None
    ) -> Iterator[Path]:
        """Have a shard's raw files on this node, and nobody remove them before the block ends.

        Whoever maps them within the block keeps them for longer: a map holds them by itself.

        Args:
            shard: An entry of this stream's index.
            room: Where room for it is counted; None for no limit.
            let_go: Closes what else the reader has open, if there is no room without that.

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
            LockTimeoutError: Another process has been fetching the shard without a byte arriving for too long.
        """
        with self._named():
            held = self._obtain(shard, Ask(room=room or self._unlimited, let_go=let_go or _let_go_of_nothing), True)
        assert isinstance(held, Held), "it waits"
        try:
            yield held.directory
        finally:
            held.close()

    def ensure(self, shard: ShardInfo, *, wait: bool = True, room: CacheRoom | None = None) -> Path | None:
        """Have a shard's raw files on this node; with a limit they may be removed again as soon as this returns.

        Args:
            shard: An entry of this stream's index.
            wait: Whether to wait while another process fetches this shard, or until there is room.
            room: Where room for it is counted; None for no limit.

        Returns:
            The directory that holds the raw files under their basenames; None if ``wait`` is false and another process
            is fetching the shard, or there is no room.

        Raises:
            StreamingError: As for :meth:`hold`.
        """
        if wait:
            with self.hold(shard, room) as directory:
                return directory
        found = self.fetch_ahead(shard, room or self._unlimited, None)
        return None if isinstance(found, Absence) else found

    def fetch_ahead(self, shard: ShardInfo, room: CacheRoom, spare_since: int | None) -> Path | Absence:
        """Have a shard's raw files on this node before anybody needs them; waits for nobody.

        Args:
            shard: An entry of this stream's index.
            room: Where room for it is counted.
            spare_since: Nothing used at this time or later is removed for it, in nanoseconds; None for no such time.

        Returns:
            The directory that holds them; or why they are not here.

        Raises:
            StreamingError: As for :meth:`hold`.
        """
        with self._named():
            held = self._obtain(shard, Ask(room=room, spare_since=spare_since), False)
        if isinstance(held, Absence):
            return held
        held.close()
        return held.directory

    def has(self, shard: ShardInfo) -> bool:
        """Whether a shard's raw files are on this node now."""
        with self._named():
            if self._is_in_place(shard):
                return True
        held = self._presence.hold(shard) if self.place.directory.is_dir() else None
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

    def stamp(self, shard: ShardInfo, *, finished: bool) -> None:
        """Say that a shard was used until now, or that this epoch needs it no more."""
        if shard.raw_data.basename not in self._in_place:
            for path in self.files_of(shard):
                (stamp_finished if finished else stamp_used)(path)

    def files_of(self, shard: ShardInfo) -> list[Path]:
        """Where this stream's directory has a shard's files, raw and compressed, if it has them."""
        files = (file for file in chain(*shard.files) if file is not None)
        return [join_under(self.place.directory, file.basename) for file in files]

    def evict(self, shard: ShardInfo) -> bool:
        """Remove a shard's files from our directory, unless somebody uses one, or we did not fetch them.

        Returns:
            Whether any were removed.
        """
        entries = [entry for entry in map(find_entry, self.files_of(shard)) if entry is not None]
        found = [entry for entry in entries if self.place.own.include(entry.modified)]
        if not found:
            return False
        with self._named(), self.place.held() as ledger:
            return ledger is not None and self.place.remove_unused(ledger, found)

    def discard(self, shard: ShardInfo) -> bool:
        """Remove a shard's files from our directory, because a raw one turned out to be damaged or has vanished.

        The next :meth:`hold` makes them anew. A compressed file that was kept goes too: the damage may come from it.
        Where a raw file has vanished, or another process is making one anew, nothing is removed.

        Returns:
            Whether that may help; False for raw files that are read in place, which are left alone.
        """
        with self._named():
            if self._is_in_place(shard):
                self._in_place.discard(shard.raw_data.basename)
                return False
        seen = self._identities(shard)
        with self._named():
            self.place.prepare()
            part = claim(self.place.directory, shard.raw_data.basename)
            if part is None:
                return True
            try:
                if None not in seen and self._identities(shard) == seen:
                    for path in self.files_of(shard):
                        self.place.remove(path)
            finally:
                self.place.drop([part])
        return True

    def _obtain(self, shard: ShardInfo, ask: Ask, wait: bool) -> Held | Absence:
        if self._is_in_place(shard):
            assert isinstance(self._source, InPlaceSource)
            return Held(self._source.directory, [])
        self.place.prepare()
        patience = None
        for _ in pauses(_FOR_EVER):
            held = self._presence.hold(shard) or self._fetch(shard, ask)
            if isinstance(held, Held):
                held.stamp()
                return held
            if not wait and held is not Absence.REMOVED:
                return held
            patience = patience or _Patience(self.place.directory, shard, self._patience(len(shard.files)))
            patience.check()
        raise AssertionError("there is no end to that")

    def _fetch(self, shard: ShardInfo, ask: Ask) -> Held | Absence:
        part = claim(self.place.directory, shard.raw_data.basename)
        return Absence.FETCHED_ELSEWHERE if part is None else self._fetcher.fetch(shard, part, ask)

    def _is_in_place(self, shard: ShardInfo) -> bool:
        if not isinstance(self._source, InPlaceSource):
            return False
        if shard.raw_data.basename not in self._in_place:
            if not self._source.holds_raw(shard):
                return False
            self._source.check_raw(shard)
            self._in_place.add(shard.raw_data.basename)
        return True

    def _identities(self, shard: ShardInfo) -> list[tuple[int, int] | None]:
        """What tells the raw files from others that take their place."""
        return [_identity(join_under(self.place.directory, raw.basename)) for raw, _ in shard.files]

    def _patience(self, num_files: int) -> float:
        """Seconds without a byte after which whoever fetches these files must be done."""
        return num_files * longest_series(self._config.attempts, self._config.download_timeout) + _UNPACK_SECONDS

    def _own_times(self) -> OwnTimes:
        return self._index.own

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say in every error which stream it is about."""
        try:
            yield
        except StreamingError as error:
            gone = isinstance(error, StorageError) and self.place.is_gone()
            told = directory_gone(self.place.directory) if gone else error
            named = type(told)(f"stream {self._config.name!r}: {told}")
            raise named.with_traceback(error.__traceback__) from error.__cause__


class _Patience:
    """Ends the wait for another process that is stopped; one that goes on, however slowly, is waited for."""

    def __init__(self, root: Path, shard: ShardInfo, seconds: float) -> None:
        self._lock = part_path(root, shard.raw_data.basename)
        self._parts = [part_path(root, file.basename) for file in chain(*shard.files) if file is not None]
        self._seconds = seconds
        self._seen: list[tuple[int, int] | None] = []
        self._since = time.monotonic()

    def check(self) -> None:
        """To be called while waiting.

        Raises:
            LockTimeoutError: Nothing has changed for too long.
        """
        seen = [_identity(part) for part in self._parts]
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        elif time.monotonic() > self._since + self._seconds:
            raise LockTimeoutError(
                f"waited {self._seconds:g} s for a byte of {self._lock}, which {lock_owner(self._lock)} is fetching"
            )


def _source_of(config: CacheConfig) -> InPlaceSource | RemoteSource:
    source = config.source_directory()
    if source is not None:
        return InPlaceSource(directory=source, config=config)
    assert config.remote  # otherwise the source would be a directory
    return RemoteSource(remote=config.remote, config=config)


def _identity(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced or written to; None if there is no such file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _let_go_of_nothing() -> None:
    """Nothing is open."""
