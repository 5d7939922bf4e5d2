"""Makes a stream's index and shards present on this node, each fetched by one process and shared by all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_streaming.cache.arrival import claim, directory_gone, part_path
from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.fetching import Absence, Ask, Fetcher
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.locks import pauses
from lightning_streaming.cache.marks import OwnTimes
from lightning_streaming.cache.patience import Patience, identity
from lightning_streaming.cache.permissions import is_reachable
from lightning_streaming.cache.place import CachePlace
from lightning_streaming.cache.presence import Held, Presence
from lightning_streaming.cache.room import CacheRoom
from lightning_streaming.cache.scan import find_entry
from lightning_streaming.cache.sources import InPlaceSource, RemoteSource
from lightning_streaming.cache.stamps import stamp_finished, stamp_used
from lightning_streaming.errors import StorageError, StreamingError
from lightning_streaming.files import join_under
from lightning_streaming.formats.index import DatasetIndex, FileInfo, ShardInfo
from lightning_streaming.storage import prepare
from lightning_streaming.storage.retry import longest_series

_UNPACK_SECONDS = 60.0
"""Added to how long a download may be silent: for checking and decompressing what arrived, or for waiting for room."""


class ShardCache:
    """The files of one stream on this node.

    Making one touches nothing: directories, locks and downloads come with the first call that needs them. It may be
    pickled, forked and used by several threads.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self.label = f"stream {config.name!r}"
        """The stream, as errors call it."""
        self._index = IndexCache(config)
        self._source = _source_of(config)
        self.place = CachePlace(config.cache_directory(), self._own_times)
        """The directory for what is fetched or decompressed."""
        self._unlimited = CacheRoom([self.place])
        self._presence = Presence(self.place, self._source)
        self._fetcher = Fetcher(self.place, self._source, self._presence, config)
        self.misses = self._fetcher.misses
        """What was not on this node when it was asked for, until somebody takes note."""
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
        """Have a shard's raw files on this node, however long that takes, and nobody remove them before the block ends.

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
            LockTimeoutError: Another process is fetching the shard, and has shown no sign of life for too long.
        """
        with self._named():
            held = self._obtain(shard, Ask(room=room or self._unlimited, let_go=let_go or _let_go_of_nothing))
        assert isinstance(held, Held), "it waits"
        try:
            yield held.directory
        finally:
            held.close()

    def fetch_ahead(
        self, shard: ShardInfo, room: CacheRoom | None = None, spare_since: int | None = None
    ) -> Absence | None:
        """Have a shard's raw files on this node without waiting: not for who fetches it already, nor for room.

        With a limit they may be removed again as soon as this returns.

        Args:
            shard: An entry of this stream's index.
            room: Where room for it is counted; None for no limit.
            spare_since: Nothing used at this time or later is removed for it, in nanoseconds; None for no such time.

        Returns:
            Why they are not here; None if they are.

        Raises:
            StreamingError: As for :meth:`hold`.
        """
        with self._named():
            held = self._obtain(shard, Ask(room=room or self._unlimited, spare_since=spare_since))
        if isinstance(held, Absence):
            return held
        held.close()
        return None

    def has(self, shard: ShardInfo) -> bool:
        """Whether a shard's raw files are on this node now."""
        with self._named():
            if self._is_in_place(shard):
                return True
        held = self._presence.hold(shard) if is_reachable(self.place.directory) else None
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
        if not self._in_place.get(shard.raw_data.basename):
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
                self._in_place.pop(shard.raw_data.basename, None)
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

    def _obtain(self, shard: ShardInfo, ask: Ask) -> Held | Absence:
        """Try once; or, where a reader waits for it, until it is here."""
        if self._is_in_place(shard):
            assert isinstance(self._source, InPlaceSource)
            return Held(self._source.directory, [])
        self.place.prepare()
        patience = Patience(len(shard.files) * self._longest_download() + _UNPACK_SECONDS)
        for _ in pauses():
            held = self._presence.hold(shard) or self._fetch(shard, ask)
            if isinstance(held, Held):
                held.stamp()
                return held
            if ask.let_go is None and held is not Absence.REMOVED:
                return held
            patience.check(self._parts_of(shard))
        raise AssertionError("there is no end to that")

    def _fetch(self, shard: ShardInfo, ask: Ask) -> Held | Absence:
        part = claim(self.place.directory, shard.raw_data.basename)
        if part is None:
            self.misses.fetched_elsewhere(shard.raw_data.basename)
            return Absence.FETCHED_ELSEWHERE
        return self._fetcher.fetch(shard, part, ask)

    def _is_in_place(self, shard: ShardInfo) -> bool:
        if not isinstance(self._source, InPlaceSource):
            return False
        name = shard.raw_data.basename
        if name not in self._in_place:
            # Only of a compressed shard could raw files be another's.
            mark = self._index.mark_in_place() if shard.compression else None
            self._in_place[name] = self._source.holds_raw(shard, mark)
        return self._in_place[name]

    def _identities(self, shard: ShardInfo) -> list[tuple[int, int] | None]:
        """What tells the raw files from others that take their place."""
        return [identity(join_under(self.place.directory, raw.basename)) for raw, _ in shard.files]

    def _parts_of(self, shard: ShardInfo) -> list[Path]:
        """What its files are written to on their way; the lock of the first is the lock of the shard."""
        files = [file for file in chain(*shard.files) if file is not None and file is not shard.raw_data]
        return [part_path(self.place.directory, file.basename) for file in [shard.raw_data, *files]]

    def _longest_download(self) -> float:
        """Seconds without a byte after which whoever fetches a file must be done."""
        return longest_series(self._config.attempts, self._config.download_timeout)

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
            named = type(told)(f"{self.label}: {told}")
            raise named.with_traceback(error.__traceback__) from error.__cause__
        except OSError as error:  # another user's directory or file, a disk that fails
            raise StorageError(
                f"stream {self._config.name!r}: the system refuses: {error}; mend that, or choose another place"
            ) from error


def _source_of(config: CacheConfig) -> InPlaceSource | RemoteSource:
    source = config.source_directory()
    if source is not None:
        return InPlaceSource(directory=source, config=config)
    assert config.remote  # otherwise the source would be a directory
    return RemoteSource(remote=config.remote, config=config)


def _let_go_of_nothing() -> None:
    """Nothing is open."""
