"""The state of a shard file in a cache directory, and everything that moves it to another.

absent ── claim() ──▶ claimed ── write ──▶ staged ── publish() ──▶ present ── Presence.hold() ──▶ held
  ▲                      │                   │                     ▲     │                        │
  │                      └─────────┬─────────┘                     │     │                        │
  │                                │                               └─────┼── HeldShard.close() ───┘
  ├─── drop() by its writer; sweep() once its writer died                │
  └─── remove_unused(): evicted; remove(): not what the index promises ──┘

claimed, staged   A staging file in ``.arriving/``, locked (exclusive) by its one writer. Its lock is the lock of the
                  shard file that it will become: others wait, or come back later. A staging file whose lock can be
                  taken has lost its writer. It has its final size, and is counted with it, before it is written.
present           The final name, the size that the index promises, and a tag of ours as modification time
                  (:mod:`~lightning_streaming.cache.manifest`). Nobody holds a lock.
held              Present, and locked (shared) by each reader for as long as its descriptor or map lives.
evicted           Absent again. Who removes a file locks it (exclusive) for that moment, and holds the usage lock.

A shard of two files has one claim, that of its raw data file. What goes on between these steps, and why, is in
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

from lightning_streaming.cache import shared_files, usage
from lightning_streaming.cache.config import STAGING_BASENAME
from lightning_streaming.cache.manifest import OwnTags
from lightning_streaming.cache.sources import InPlaceSource, RemoteSource
from lightning_streaming.cache.usage import CacheEntry, UsageCount
from lightning_streaming.errors import IntegrityError, StorageError
from lightning_streaming.escaping import package_logger
from lightning_streaming.files import PARTIAL_SUFFIX, Identity, join_under, open_regular
from lightning_streaming.formats.index import FileInfo, ShardInfo

_ABANDONED_SECONDS = 24 * 3600
"""After this long without a byte, a staging file of another machine is taken to be dead: its lock says nothing here."""
_BEAT_SECONDS = 1.0
"""Between two signs of life of a writer, a small part of what anybody waits for one."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOST_TRIES = 100
"""To make a file in a directory that each writer removes when it was the last: every try lost is a file of another."""
_REMOVAL_SECONDS = 5.0
"""More than anybody needs to remove a file that is locked for that."""

_logger = package_logger(__name__)


# absent -> claimed


def claim(root: Path, basename: str) -> StagingFile | None:
    """Become the one who writes a file. What a dead writer left of it is taken over.

    Args:
        root: The cache directory.
        basename: The file's name there.

    Returns:
        The staging file to write to; None if another process, or thread, is at it.

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
        except shared_files.LocksUnsupportedError:  # then everybody writes a file of their own
            os.close(descriptor)
            path.unlink(missing_ok=True)
            alone = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}{PARTIAL_SUFFIX}")
            return StagingFile(root, basename, alone, _open(alone, root))
        if _is_still(path, os.fstat(descriptor)):
            return StagingFile(root, basename, path, descriptor)
        # It was published, or removed, between opening and locking it.
        shared_files.unlock_and_close(descriptor)


def staging_path(root: Path, basename: str) -> Path:
    """Where this user of this machine writes a file before it is whole."""
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
    raise StorageError(f"{path.parent} is made and removed again and again", path=str(path.parent))


# claimed -> staged -> present


class StagingFile:
    """A file on its way, locked by this process; to be ended by :meth:`CacheDirectory.drop`, published or not."""

    def __init__(self, root: Path, basename: str, path: Path, descriptor: int) -> None:
        self.path = path
        self._root = root
        self._basename = basename
        self._descriptor = descriptor

    @property
    def size(self) -> int:
        """Bytes it counts for."""
        return os.fstat(self._descriptor).st_size

    def resize(self, size: int) -> None:
        """Give it its final size before it is written, so that it is counted in full; the disk takes no room yet."""
        os.ftruncate(self._descriptor, size)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show those who wait for it that this process lives, also while nothing arrives: its time goes on."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(_BEAT_SECONDS):
                with suppress(OSError):  # the disk's own trouble is told by who writes
                    os.utime(self._descriptor)

        thread = threading.Thread(target=beat, name="lightning-streaming-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def publish(self, tag: int) -> bool:
        """Let it appear under its own name, whole, and on disk: its tag says that it was checked, after a reset too.

        Args:
            tag: Its modification time from now on, in nanoseconds.

        Returns:
            Whether it did; False if another user's file has the name, and may not be replaced.

        Raises:
            DiskFullError: There turned out to be no room for it.
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
        """Whether it is still on its way."""
        return self._descriptor >= 0 and _is_still(self.path, os.fstat(self._descriptor))

    def keep_shared(self) -> None:
        """Once published: let others read it too, and nobody remove it."""
        with suppress(shared_files.LocksUnsupportedError):
            shared_files.try_lock(self._descriptor, shared=True)

    def close(self) -> None:
        """Let go of the lock; the file stays."""
        if self._descriptor >= 0:
            shared_files.unlock_and_close(self._descriptor)
            self._descriptor = -1


# present -> held, and whether what is there is what should be there


class HeldShard:
    """Files that are here and stay here until :meth:`close`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        """Where they are."""
        self._descriptors: list[int] = []

    def add(self, path: Path) -> os.stat_result | None:
        """Hold another file; gives what it is, None if there is none that may be read."""
        try:
            descriptor = open_regular(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError, PermissionError, StorageError):
            return None
        self._descriptors.append(descriptor)
        with suppress(shared_files.LocksUnsupportedError):
            # Who has it for themselves is about to remove it.
            any(shared_files.try_lock(descriptor, shared=True) for _ in shared_files.pauses(_REMOVAL_SECONDS))
        return os.fstat(descriptor)

    def set_used(self) -> None:
        """Say that they are in use now."""
        for descriptor in self._descriptors:
            usage.set_used(descriptor)

    def close(self) -> None:
        """Let go of them."""
        while self._descriptors:
            shared_files.unlock_and_close(self._descriptors.pop())


class Presence:
    """Judges files under the names of a stream's shards in its cache directory."""

    def __init__(self, directory: CacheDirectory, source: InPlaceSource | RemoteSource) -> None:
        self._directory = directory
        self._source = source
        # Files that are right, but whose time could not be set to say so, by basename.
        self._accepted: dict[str, Identity] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_accepted": {}}

    def hold(self, shard: ShardInfo) -> HeldShard | None:
        """Hold a shard's raw files if they are here, whole and checked; None if one is not."""
        held = HeldShard(self._directory.path)
        with ExitStack() as stack:
            stack.callback(held.close)
            for raw, compressed in shard.files:
                found = held.add(self._path(raw))
                if found is None or not self._is_right(raw, compressed, found):
                    return None
            stack.pop_all()
        return held

    def hold_compressed(self, compressed: FileInfo) -> HeldShard | None:
        """Hold a compressed file that was kept, if it is right; one that is wrong is removed.

        Must be called while holding the claim of its shard.
        """
        held = HeldShard(self._directory.path)
        found = held.add(self._path(compressed)) if self.is_here(compressed, None) else None
        if found is not None and found.st_nlink:
            return held
        held.close()
        return None

    def is_here(self, file: FileInfo, compressed: FileInfo | None) -> bool:
        """Whether a file is here and right; one that is wrong is removed.

        A file that somebody else put there, or changed, is checked by its hash and then remembered. Without a recorded
        hash it is wrong, as it may be another dataset's of the same size; but for a file that came here with this very
        index, and that is stored like this. Must be called while holding the claim of its shard.

        Args:
            file: A raw file, or a compressed one that was kept.
            compressed: What the raw file is made from, if the shards are compressed.

        Raises:
            ConfigError: The hash to check by is not recorded.
            StorageError: A wrong one may not be removed.
        """
        path = self._path(file)
        try:
            found = path.stat()
        except FileNotFoundError:
            return False
        if os.access(path, os.R_OK):
            if self._is_right(file, compressed, found):
                return True
            if found.st_size == file.bytes and self._is_verified(path, file, is_stored=compressed is None):
                return True
        self._directory.remove(path)
        if _is_still(path, found):
            raise StorageError(
                f"{path} is not what the index promises, or may not be read, and belongs to user {found.st_uid}, whose "
                "file may not be removed",
                hint="have it removed, or choose another directory",
                path=str(path),
            )
        return False

    def _path(self, file: FileInfo) -> Path:
        return join_under(self._directory.path, file.basename)

    def _is_right(self, file: FileInfo, compressed: FileInfo | None, found: os.stat_result) -> bool:
        if found.st_size != file.bytes or not found.st_nlink:
            return False
        if self._source.knows_tag(found.st_mtime_ns, self._directory.own, compressed):
            return True
        return self._accepted.get(file.basename) == Identity.of(found)

    def _is_verified(self, path: Path, file: FileInfo, *, is_stored: bool) -> bool:
        if isinstance(self._source, InPlaceSource):
            return False  # made from an original that has changed since
        own = self._directory.own
        try:
            if not self._source.check(file, path) and not (is_stored and own.came_with_index):
                _logger.info("%s is fetched again: it did not come with this index, and no hash tells what it is", path)
                return False
        except FileNotFoundError:  # removed just now
            return False
        except IntegrityError as error:
            _logger.warning("%s is not what the index promises, so it is fetched again: %s", path, error)
            return False
        with suppress(OSError):  # another user's
            found = path.stat()
            os.utime(path, ns=(found.st_atime_ns, own.confirmed(found.st_mtime_ns)))
        identity = shared_files.file_identity(path)
        if identity is not None:
            self._accepted[file.basename] = identity
        return True


def _is_still(path: Path, found: os.stat_result) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), found)
    return False


# present -> evicted, staged -> absent


class CacheDirectory:
    """One stream's directory on this node: made once, cleared of the dead once, never made again.

    Making one of these touches nothing; it may be pickled, forked and shared by threads.

    Args:
        directory: Where it is.
        find_own: Tells which tags are ours there, making the directory if need be.
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
        """Which tags are ours here."""
        if self._own is None:
            self._own = self._find_own()
        return self._own

    def prepare(self) -> None:
        """Make the directory and remove what dead writers left, the first time in each process.

        Raises:
            StorageError: The directory cannot be made.
        """
        if self._prepared_in == os.getpid():
            return
        shared_files.make_cache_directory(self.path)
        _ = self.own
        self._prepared_in = os.getpid()
        if os.access(self.path, os.W_OK) and any(True for _ in usage.staging_files(self.path)):
            with self.locked() as count:
                if count is not None:
                    self.sweep(count)

    def is_gone(self) -> bool:
        """Whether somebody removed the directory since this process prepared it."""
        return self._prepared_in == os.getpid() and not shared_files.is_reachable(self.path)

    @contextmanager
    def locked(self) -> Iterator[UsageCount | None]:
        """Hold the usage lock, see :func:`locked_usage`; None where the filesystem has no locks: nothing is counted."""
        with ExitStack() as stack:
            try:
                count = stack.enter_context(usage.locked_usage(self.path, lambda: self.scan().bytes))
            except shared_files.LocksUnsupportedError:
                count = None
            yield count

    def scan(self) -> usage.Scan:
        """Look through the directory."""
        self._fixed_bytes = usage.fixed_bytes(self.path)
        return usage.scan(self.path, self.own)

    def usage(self) -> int:
        """Bytes of what is ours here, as counted; 0 if nothing ever was."""
        counted = usage.read_usage(self.path)
        if counted is None:
            return self.scan().bytes + self._fixed_bytes if shared_files.is_reachable(self.path) else 0
        return counted + self.fixed_bytes()

    def fixed_bytes(self) -> int:
        """Bytes of the index and of selections, which no eviction makes room of."""
        if not self._fixed_bytes:
            self._fixed_bytes = usage.fixed_bytes(self.path)
        return self._fixed_bytes

    def forget_fixed_bytes(self) -> None:
        """Count them anew when they are asked for."""
        self._fixed_bytes = 0

    def remove_unused(self, count: UsageCount, files: Sequence[CacheEntry], why: str) -> bool:
        """Remove files of ours unless somebody has one of them open. Must be called while holding the usage lock.

        Args:
            count: Where they are counted.
            files: All of them, or none, are removed.
            why: For the log.

        Returns:
            Whether they are gone; False if none was removed.
        """
        descriptors: list[int] = []
        try:
            for file in files:
                descriptors.append(shared_files.open_to_lock(file.path))
                found = os.fstat(descriptors[-1])
                same = (found.st_size, found.st_mtime_ns) == (file.size, file.modified)
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
        """Remove a file that is not what it should be."""
        with self.locked() as count, suppress(FileNotFoundError):
            found = path.stat()
            _logger.debug("removed: %s", path)
            _unlink(count, str(path), found.st_size if self.own.include(found.st_mtime_ns) else 0)

    def drop(self, files: Iterable[StagingFile]) -> None:
        """Give up files on their way; those that were published are only let go of."""
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
        """Remove what dead writers left, and count those. Must be called while holding the usage lock."""
        swept = 0
        for entry in usage.staging_files(self.path):
            descriptor = lock_if_dead(Path(entry.path))
            if descriptor is not None:
                _logger.debug("left by a writer that died: %s", entry.path)
                swept += _unlink(count, entry.path, os.fstat(descriptor).st_size)
                shared_files.unlock_and_close(descriptor)
        return swept


def _unlink(count: UsageCount | None, path: str, size: int) -> int:
    """Remove a file and take its bytes off the count; gives the number of files removed."""
    try:
        os.unlink(path)  # noqa: PTH108  thousands of them in a row
    except OSError:  # gone, or not ours to remove
        return 0
    if count is not None:
        count.used -= size
    return 1


# Is its writer dead?


def lock_if_dead(path: Path) -> int | None:
    """Take the staging file of a writer that died.

    Returns:
        Its descriptor, locked, to be closed by the caller; None if somebody writes it, or may do so.
    """
    try:
        descriptor = shared_files.open_to_lock(path)
    except OSError:  # gone, or of another user
        return None
    try:
        dead = shared_files.try_lock(descriptor, shared=False) and was_left(path.name, descriptor)
    except shared_files.LocksUnsupportedError:
        dead = _is_abandoned(descriptor)
    if dead and _is_still(path, os.fstat(descriptor)):
        return descriptor
    shared_files.unlock_and_close(descriptor)
    return None


def is_written(path: Path) -> bool:
    """Whether a staging file has a writer that lives, or may do so."""
    descriptor = lock_if_dead(path)
    if descriptor is not None:
        shared_files.unlock_and_close(descriptor)
    return descriptor is None


def was_left(name: str, descriptor: int) -> bool:
    """Whether the writer of a file is dead, given that nobody has its lock.

    Args:
        name: Of the staging file whose lock it was written under.
        descriptor: The file.
    """
    return _lock_tells(name, descriptor) or _is_abandoned(descriptor)


def _is_abandoned(descriptor: int) -> bool:
    return os.fstat(descriptor).st_mtime < time.time() - _ABANDONED_SECONDS


def _lock_tells(name: str, descriptor: int) -> bool:
    """Whether a staging file that could be locked is dead for that: it is of this machine, since its start or before.

    For example ``5e1f0a9b-8c07d2e4-0-1f0c3a5e7b9d28465e1f0a9b.part``: host, boot, user, file.
    """
    host, boot, _ = name.split("-", 2) if name.count("-") > 1 else ("", "", "")
    if boot == _boot():  # of a container with another name, perhaps
        return True
    return host == _host() and os.fstat(descriptor).st_mtime < _started()


def _started() -> float:
    """When this machine was started, as its clock tells it now. What was written later is of another of this name."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0


@cache
def _boot() -> str:
    """This machine since it was started: its locks end with it. Machines without such a name have their hostname."""
    try:
        return _digest(_BOOT.read_text())
    except OSError:
        return _host()


@cache
def _host() -> str:
    """This machine, whenever it was started."""
    return _digest(socket.gethostname())


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]
