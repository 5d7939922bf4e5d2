"""The states of a shard file in a cache directory, and the transitions between them.

absent ── claim() ──▶ claimed ── write ──▶ staged ── publish() ──▶ present ── Presence.hold() ──▶ held
  ▲                      │                   │                     ▲     │                        │
  │                      └─────────┬─────────┘                     │     │                        │
  │                                │                               └─────┼── HeldShard.close() ───┘
  ├─── drop() by its writer; sweep() once its writer died                │
  └─── remove_unused(): evicted; remove(): differs from the index ───────┘

claimed, staged   A staging file in ``.arriving/``, locked (exclusive) by its one writer. Its lock is the lock of the
                  shard file that it will become: other processes wait, or try again later. A staging file whose lock is
                  free has lost its writer. It gets its final size, and is counted with it, before it is written.
present           The final name, the size in the index, and a tag of the directory as modification time
                  (:mod:`~lightning_streaming.cache.records`). No process holds a lock.
held              Present, and locked (shared) by each reader while its descriptor or map exists.
evicted           Absent again. A process that removes a file locks it (exclusive) meanwhile, and holds the usage lock.

A shard of two files has one claim, that of its raw data file. The steps between these states are in
:mod:`~lightning_streaming.cache.shard_cache`.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from lightning_streaming.cache import records, shared_files
from lightning_streaming.cache.config import STAGING_BASENAME
from lightning_streaming.cache.records import CacheEntry, OwnTags, UsageCount
from lightning_streaming.cache.sources import InPlaceSource, RemoteSource
from lightning_streaming.errors import IntegrityError, StorageError
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import PARTIAL_SUFFIX, Identity, join_under, open_regular
from lightning_streaming.formats.index import FileInfo, ShardInfo

_ABANDONED_SECONDS = 24 * 3600
"""After this time without a byte, a staging file of another machine counts as dead: its lock is invisible here."""
_BEAT_SECONDS = 1.0
"""Interval of the heartbeats of a writer, a small part of the timeout of processes that wait for it."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOST_TRIES = 100
"""Attempts to create a file in a directory that each last writer removes."""
_REMOVAL_SECONDS = 5.0
"""More than any process needs to remove a file that it has locked for that."""

_logger = package_logger(__name__)


# absent -> claimed


def claim(root: Path, basename: str) -> StagingFile | None:
    """Become the writer of a file, and take over the staging file of a dead one.

    Args:
        root: The cache directory.
        basename: The file's name there.

    Returns:
        The staging file to write to; None if another process, or thread, is writing it.

    Raises:
        StorageError: The cache directory is gone, or may not be written to.
    """
    path = staging_path(root, basename)
    while True:
        descriptor = _open(path, root)
        try:
            if not shared_files.try_lock(descriptor, shared=False):
                os.close(descriptor)
                return None
        except shared_files.LocksUnsupportedError:  # then each process writes a separate file
            os.close(descriptor)
            path.unlink(missing_ok=True)
            alone = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}{PARTIAL_SUFFIX}")
            return StagingFile(root, basename, alone, _open(alone, root))
        if _is_same_file(path, os.fstat(descriptor)):
            return StagingFile(root, basename, path, descriptor)
        # It was published, or removed, between opening and locking it.
        shared_files.unlock_and_close(descriptor)


def staging_path(root: Path, basename: str) -> Path:
    """Return the path at which this user of this machine writes a file before it is complete."""
    digest = hashlib.sha256(basename.encode()).hexdigest()[:24]
    return root / STAGING_BASENAME / f"{_host()}-{_boot()}-{os.getuid()}-{digest}{PARTIAL_SUFFIX}"


def _open(path: Path, root: Path) -> int:
    try:
        for _ in range(_MOST_TRIES):
            with suppress(FileNotFoundError):
                return shared_files.open_no_link(path, os.O_RDWR)
            try:
                descriptor = shared_files.open_no_link(path, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:
                shared_files.make_directories(path.parent, root)
                continue
            try:
                shared_files.adopt_file(descriptor, root)
            except OSError:
                os.close(descriptor)
                raise
            return descriptor
    except OSError as error:
        raise shared_files.unwritable(root, error) from error
    raise StorageError(f"{path.parent} is created and removed again and again", path=str(path.parent))


# claimed -> staged -> present


class StagingFile:
    """A file that this process writes, and has locked; :meth:`CacheDirectory.drop` ends it, published or not."""

    def __init__(self, root: Path, basename: str, path: Path, descriptor: int) -> None:
        self.path = path
        self._root = root
        self._basename = basename
        self._descriptor = descriptor

    @property
    def size(self) -> int:
        """The bytes that are counted for it."""
        return os.fstat(self._descriptor).st_size

    def resize(self, size: int) -> None:
        """Set its final size before it is written, so that it is counted in full; it takes no room on the disk yet."""
        os.ftruncate(self._descriptor, size)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Update its time regularly, so that waiting processes see that this one lives, also while no bytes arrive."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(_BEAT_SECONDS):
                with suppress(OSError):  # the writer reports errors of the disk
                    os.utime(self._descriptor)

        thread = threading.Thread(target=beat, name="lightning-streaming-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def publish(self, tag: int) -> bool:
        """Sync the file to the disk, set its tag, and rename it to its final name.

        Args:
            tag: Its modification time from now on, in nanoseconds.

        Returns:
            Whether it was renamed; False if a file of another user has the name, and may not be replaced.

        Raises:
            DiskFullError: The disk is full.
            StorageError: The directory is gone, or may not be written to.
        """
        final = join_under(self._root, self._basename)
        try:
            os.fdatasync(self._descriptor)
            shared_files.make_directories(final.parent, self._root)
            os.utime(self._descriptor, ns=(time.time_ns(), tag))
            os.replace(self.path, final)
        except OSError as error:
            if isinstance(error, PermissionError) and final.exists():
                return False
            raise shared_files.unwritable(self._root, error) from error
        return True

    def is_unpublished(self) -> bool:
        """Return whether it still exists as a staging file."""
        return self._descriptor >= 0 and _is_same_file(self.path, os.fstat(self._descriptor))

    def keep_shared(self) -> None:
        """After publishing: share the lock, so that others can read the file, and none can remove it."""
        with suppress(shared_files.LocksUnsupportedError):
            shared_files.try_lock(self._descriptor, shared=True)

    def close(self) -> None:
        """Release the lock; the file stays."""
        if self._descriptor >= 0:
            shared_files.unlock_and_close(self._descriptor)
            self._descriptor = -1


# present -> held, and the checks of present files


class HeldShard:
    """Files that are present, and locked until :meth:`close`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        """Their directory."""
        self._descriptors: list[int] = []

    def add(self, path: Path) -> os.stat_result | None:
        """Lock another file, and return its status; None if there is none that may be read."""
        try:
            descriptor = open_regular(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError, PermissionError, StorageError):
            return None
        self._descriptors.append(descriptor)
        with suppress(shared_files.LocksUnsupportedError):
            # A process with an exclusive lock is about to remove it.
            any(shared_files.try_lock(descriptor, shared=True) for _ in shared_files.pauses(_REMOVAL_SECONDS))
        return os.fstat(descriptor)

    def set_used(self) -> None:
        """Set the time of their last use to now."""
        for descriptor in self._descriptors:
            records.set_used(descriptor)

    def close(self) -> None:
        """Release the locks."""
        while self._descriptors:
            shared_files.unlock_and_close(self._descriptors.pop())


class Presence:
    """Checks of the files in a cache directory that have the names of a stream's shards."""

    def __init__(self, directory: CacheDirectory, source: InPlaceSource | RemoteSource) -> None:
        self._directory = directory
        self._source = source
        # Correct files whose tag could not be set, by basename.
        self._accepted: dict[str, Identity] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_accepted": {}}

    def hold(self, shard: ShardInfo) -> HeldShard | None:
        """Lock a shard's raw files if they are present, complete and checked; return None if one is not."""
        held = HeldShard(self._directory.path)
        with ExitStack() as stack:
            stack.callback(held.close)
            for raw, compressed in shard.files:
                status = held.add(self._path(raw))
                if status is None or not self._is_right(raw, compressed, status):
                    return None
            stack.pop_all()
        return held

    def hold_compressed(self, compressed: FileInfo) -> HeldShard | None:
        """Lock a compressed file that was kept, if it is correct; remove a wrong one.

        Must be called while holding the claim of its shard.
        """
        held = HeldShard(self._directory.path)
        status = held.add(self._path(compressed)) if self.is_here(compressed, None) else None
        if status is not None and status.st_nlink:
            return held
        held.close()
        return None

    def is_here(self, file: FileInfo, compressed: FileInfo | None) -> bool:
        """Return whether a file is present and correct; remove a wrong one.

        A file that another program put there, or changed, is checked by its hash, and then gets a tag. Without a
        recorded hash it counts as wrong, as another dataset may have a file of the same size; except for a stored file
        that was copied here together with this index. Must be called while holding the claim of its shard.

        Args:
            file: A raw file, or a compressed one that was kept.
            compressed: The compressed file of the raw one, if the shards are compressed.

        Raises:
            ConfigError: The hash to check is not recorded.
            StorageError: A wrong one may not be removed.
        """
        path = self._path(file)
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        if os.access(path, os.R_OK):
            if self._is_right(file, compressed, status):
                return True
            if status.st_size == file.bytes and self._is_verified(path, file, is_stored=compressed is None):
                return True
        self._directory.remove(path)
        if _is_same_file(path, status):
            raise StorageError(
                f"{path} differs from the index, or may not be read, and belongs to user {status.st_uid}, whose file "
                "may not be removed",
                hint="ask that user to remove it, or choose another directory",
                path=str(path),
            )
        return False

    def _path(self, file: FileInfo) -> Path:
        return join_under(self._directory.path, file.basename)

    def _is_right(self, file: FileInfo, compressed: FileInfo | None, status: os.stat_result) -> bool:
        if status.st_size != file.bytes or not status.st_nlink:
            return False
        if self._source.knows_tag(status.st_mtime_ns, self._directory.own, compressed):
            return True
        return self._accepted.get(file.basename) == Identity.of(status)

    def _is_verified(self, path: Path, file: FileInfo, *, is_stored: bool) -> bool:
        if isinstance(self._source, InPlaceSource):
            return False  # decompressed from a file that has changed since
        own = self._directory.own
        try:
            if not self._source.check(file, path) and not (is_stored and own.came_with_index):
                _logger.info("%s is fetched again: it did not come with this index, and has no recorded hash", path)
                return False
        except FileNotFoundError:  # removed just now
            return False
        except IntegrityError as error:
            _logger.warning("%s differs from the index, so it is fetched again: %s", path, error)
            return False
        with suppress(OSError):  # another user's
            status = path.stat()
            os.utime(path, ns=(status.st_atime_ns, own.confirmed(status.st_mtime_ns)))
        identity = shared_files.file_identity(path)
        if identity is not None:
            self._accepted[file.basename] = identity
        return True


def _is_same_file(path: Path, status: os.stat_result) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), status)
    return False


# present -> evicted, staged -> absent


class CacheDirectory:
    """The cache directory of a stream: created once, swept once per process, never created again.

    The constructor does no I/O. Instances may be pickled, forked and shared by threads.

    Args:
        directory: Its path.
        find_own: Function that returns the tags of files that are ours there, and creates a missing directory.
    """

    def __init__(self, directory: Path, find_own: Callable[[], OwnTags]) -> None:
        self.path = directory
        self._find_own = find_own
        self._own: OwnTags | None = None
        self._prepared_in: int | None = None
        self._fixed_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared_in": None}

    @property
    def own(self) -> OwnTags:
        """The tags of files that are ours."""
        if self._own is None:
            self._own = self._find_own()
        return self._own

    def prepare(self) -> None:
        """Create the directory, and remove staging files of dead writers, the first time in each process.

        Raises:
            StorageError: The directory cannot be created.
        """
        if self._prepared_in == os.getpid():
            return
        shared_files.make_cache_directory(self.path)
        _ = self.own
        self._prepared_in = os.getpid()
        if os.access(self.path, os.W_OK) and any(True for _ in records.staging_files(self.path)):
            with self.locked() as count:
                if count is not None:
                    self.sweep(count)

    def was_removed(self) -> bool:
        """Return whether the directory was removed since this process prepared it."""
        return self._prepared_in == os.getpid() and not shared_files.is_reachable(self.path)

    @contextmanager
    def locked(self) -> Iterator[UsageCount | None]:
        """Hold the usage lock, see :func:`locked_usage`; without locks yield None, and count nothing."""
        with ExitStack() as stack:
            try:
                count = stack.enter_context(records.locked_usage(self.path, lambda: self.scan().bytes))
            except shared_files.LocksUnsupportedError:
                count = None
            yield count

    def scan(self) -> records.Scan:
        """Scan the directory."""
        self._fixed_bytes = records.fixed_bytes(self.path)
        return records.scan(self.path, self.own)

    def usage(self) -> int:
        """Return the counted bytes of files that are ours; 0 if there never were any."""
        counted = records.read_usage(self.path)
        if counted is None:
            return self.scan().bytes + self._fixed_bytes if shared_files.is_reachable(self.path) else 0
        return counted + self.fixed_bytes()

    def fixed_bytes(self) -> int:
        """Return the bytes of the index and of selections, which are never evicted."""
        if not self._fixed_bytes:
            self._fixed_bytes = records.fixed_bytes(self.path)
        return self._fixed_bytes

    def forget_fixed_bytes(self) -> None:
        """Count them again at the next call."""
        self._fixed_bytes = 0

    def remove_unused(self, count: UsageCount, files: Sequence[CacheEntry], why: str) -> bool:
        """Remove files of ours unless one of them is in use. Must be called while holding the usage lock.

        Args:
            count: The count of the directory.
            files: The files, of which all or none are removed.
            why: Reason for the log.

        Returns:
            Whether they were removed; False if none was.
        """
        descriptors: list[int] = []
        try:
            for file in files:
                descriptors.append(shared_files.open_to_lock(file.path))
                status = os.fstat(descriptors[-1])
                same = (status.st_size, status.st_mtime_ns) == (file.size, file.modified)
                if not same or not shared_files.try_lock(descriptors[-1], shared=False):
                    return False
            _logger.debug("evicted: %s (%s)", ", ".join(file.path for file in files), why)
            return sum(_unlink(count, file.path, file.size) for file in files) == len(files)
        except OSError:  # gone, another user's, or a filesystem without locks
            return False
        finally:
            for descriptor in descriptors:
                shared_files.unlock_and_close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a wrong file."""
        with self.locked() as count, suppress(FileNotFoundError):
            status = path.stat()
            _logger.debug("removed: %s", path)
            _unlink(count, str(path), status.st_size if self.own.include(status.st_mtime_ns) else 0)

    def drop(self, files: Iterable[StagingFile]) -> None:
        """Remove staging files; of those that were published, only release the locks."""
        files = list(files)
        try:
            unpublished = [file for file in files if file.is_unpublished()]
            if unpublished:
                with self.locked() as count:
                    for file in unpublished:
                        _unlink(count, str(file.path), file.size)
        finally:
            for file in files:
                file.close()

    def sweep(self, count: UsageCount) -> int:
        """Remove staging files of dead writers; return their number. Must be called while holding the usage lock."""
        swept = 0
        for entry in records.staging_files(self.path):
            descriptor = lock_if_dead(Path(entry.path))
            if descriptor is not None:
                _logger.debug("left by a writer that died: %s", entry.path)
                swept += _unlink(count, entry.path, os.fstat(descriptor).st_size)
                shared_files.unlock_and_close(descriptor)
        return swept


def _unlink(count: UsageCount | None, path: str, size: int) -> int:
    """Remove a file and subtract its bytes from the count; return the number of removed files."""
    try:
        os.unlink(path)  # noqa: PTH108  thousands of them in a row
    except OSError:  # gone, or not ours to remove
        return 0
    if count is not None:
        count.used -= size
    return 1


# Detection of dead writers


def lock_if_dead(path: Path) -> int | None:
    """Lock the staging file of a writer that died.

    Returns:
        Its locked descriptor, which the caller closes; None if a process writes it, or may do so.
    """
    try:
        descriptor = shared_files.open_to_lock(path)
    except OSError:  # gone, or of another user
        return None
    try:
        is_dead = shared_files.try_lock(descriptor, shared=False) and has_dead_writer(path.name, descriptor)
    except shared_files.LocksUnsupportedError:
        is_dead = _is_abandoned(descriptor)
    if is_dead and _is_same_file(path, os.fstat(descriptor)):
        return descriptor
    shared_files.unlock_and_close(descriptor)
    return None


def is_written(path: Path) -> bool:
    """Return whether the writer of a staging file lives, or may do so."""
    descriptor = lock_if_dead(path)
    if descriptor is not None:
        shared_files.unlock_and_close(descriptor)
    return descriptor is None


def has_dead_writer(name: str, descriptor: int) -> bool:
    """Return whether the writer of a file is dead, if no process holds its lock.

    A free lock proves it for a writer of this machine, since its start or before: the name of a staging file, for
    example ``5e1f0a9b-8c07d2e4-0-1f0c3a5e7b9d28465e1f0a9b.part``, has its host, boot and user, and a digest.

    Args:
        name: Name of the staging file whose lock the writer held.
        descriptor: The file.
    """
    host, boot, _ = name.split("-", 2) if name.count("-") > 1 else ("", "", "")
    if boot == _boot():  # perhaps of a container with another name
        return True
    if host == _host() and os.fstat(descriptor).st_mtime < _boot_time():  # a later one is of another machine
        return True
    return _is_abandoned(descriptor)


def _is_abandoned(descriptor: int) -> bool:
    return os.fstat(descriptor).st_mtime < time.time() - _ABANDONED_SECONDS


def _boot_time() -> float:
    """Return the time when this machine was started, by its current clock; 0 if it is unknown."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0


@cache
def _boot() -> str:
    """Return a digest of the boot of this machine, with which its locks end; of its hostname, if it reports none."""
    try:
        return _digest(_BOOT.read_text())
    except OSError:
        return _host()


@cache
def _host() -> str:
    """Return a digest of the hostname."""
    return _digest(socket.gethostname())


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]
