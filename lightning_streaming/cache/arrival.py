"""Files on their way into a cache directory: each is written by one process, whose death everybody can see.

The lock of a part file is the lock of the shard file it will become: who has it fetches, others wait or come back
later. A part whose lock can be taken has lost its writer.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from lightning_streaming.cache.layout import ARRIVING_BASENAME
from lightning_streaming.cache.locks import LocksUnsupportedError, open_to_lock, try_lock, unlock_and_close
from lightning_streaming.cache.permissions import UNREACHABLE, adopt_file, is_reachable, make_directories
from lightning_streaming.errors import DiskFullError, StorageError
from lightning_streaming.files import PARTIAL_SUFFIX, join_under

_ABANDONED_SECONDS = 24 * 3600
"""After this long without a byte, a part of another machine is taken to be dead; its lock says nothing here."""
_BEAT_SECONDS = 1.0
"""Between two signs of life of a part that is being made, a small part of what anybody waits for one."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MOST_TRIES = 100
"""To make a file in a directory that each writer removes when it was the last: every try lost is a file of another."""


class Part:
    """A file on its way, locked by this process. To be ended by :meth:`publish` or by removing and closing it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor: int = descriptor

    @property
    def size(self) -> int:
        """Bytes it counts for."""
        return os.fstat(self.descriptor).st_size

    def resize(self, size: int) -> None:
        """Give it its final size before it is written, so that it is counted in full; the disk takes no room yet."""
        os.ftruncate(self.descriptor, size)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show those who wait for it that this process lives, also while nothing arrives: its time goes on."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(_BEAT_SECONDS):
                with suppress(OSError):  # the disk's own trouble is told by who writes
                    os.utime(self.descriptor)

        thread = threading.Thread(target=beat, name="lightning-streaming-part", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def publish(self, root: Path, basename: str, mark: int) -> bool:
        """Let it appear under its own name, whole, and on disk: its time says that it was checked, after a reset too.

        Args:
            root: The cache directory.
            basename: Its name there.
            mark: Its modification time, which says that it is ours and was checked.

        Returns:
            Whether it did; False if another user's file has the name, and may not be replaced.

        Raises:
            DiskFullError: There turned out to be no room for it.
            StorageError: The directory is gone, or may not be written to.
        """
        final = join_under(root, basename)
        try:
            os.fdatasync(self.descriptor)
            make_directories(final.parent, root)
            os.utime(self.descriptor, ns=(time.time_ns(), mark))
            os.replace(self.path, final)
        except PermissionError as error:
            if final.exists():
                return False
            raise unwritable(root, error) from error
        except OSError as error:
            raise unwritable(root, error) from error
        return True

    def is_unpublished(self) -> bool:
        """Whether it is still on its way."""
        return _is_at(self.path, self.descriptor)

    def keep_shared(self) -> None:
        """Once published: let others read it too, and nobody remove it."""
        with suppress(LocksUnsupportedError):
            try_lock(self.descriptor, shared=True)

    def close(self) -> None:
        """Let go of the lock; the file stays."""
        unlock_and_close(self.descriptor)


def claim(root: Path, basename: str) -> Part | None:
    """Become the one who writes a file.

    What a dead writer left of it is taken over.

    Args:
        root: The cache directory.
        basename: The file's name there.

    Returns:
        The part to write to; None if another process, or thread, is at it.

    Raises:
        StorageError: The cache directory is gone, or may not be written to.
    """
    path = part_path(root, basename)
    while True:
        descriptor = _open(path, root)
        try:
            if not try_lock(descriptor, shared=False):
                os.close(descriptor)
                return None
        except LocksUnsupportedError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            alone = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}{PARTIAL_SUFFIX}")
            return Part(alone, _open(alone, root))
        if _is_at(path, descriptor):
            return Part(path, descriptor)
        # It was published, or removed, between opening and locking it.
        unlock_and_close(descriptor)


def part_path(root: Path, basename: str) -> Path:
    """Where this user of this machine writes a file before it is whole."""
    digest = hashlib.sha256(basename.encode()).hexdigest()[:24]
    return root / ARRIVING_BASENAME / f"{_host()}-{_boot()}-{os.getuid()}-{digest}{PARTIAL_SUFFIX}"


def arriving(root: Path) -> Iterator[os.DirEntry[str]]:
    """The parts of a cache directory, living and dead."""
    with suppress(*UNREACHABLE), os.scandir(root / ARRIVING_BASENAME) as found:
        for entry in found:
            if entry.name.endswith(PARTIAL_SUFFIX):
                yield entry


def lock_if_dead(path: Path) -> int | None:
    """Take the part of a writer that died.

    Returns:
        Its descriptor, locked, to be closed by the caller; None if somebody writes it, or may do so.
    """
    try:
        descriptor = open_to_lock(path)
    except OSError:  # gone, or of another user
        return None
    try:
        dead = try_lock(descriptor, shared=False) and (_lock_tells(path.name, descriptor) or _is_abandoned(descriptor))
    except LocksUnsupportedError:
        dead = _is_abandoned(descriptor)
    if dead and _is_at(path, descriptor):
        return descriptor
    unlock_and_close(descriptor)
    return None


def was_left(name: str, descriptor: int) -> bool:
    """Whether a file is left over that was written under the lock of a part which is gone.

    Args:
        name: The part's.
        descriptor: The file.
    """
    return _lock_tells(name, descriptor) or _is_abandoned(descriptor)


def _open(path: Path, root: Path) -> int:
    for _ in range(_MOST_TRIES):
        try:
            return os.open(path, os.O_RDWR)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise unwritable(root, error) from error
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            _make_arriving(root)
        except OSError as error:
            raise unwritable(root, error) from error
        else:
            return _adopted(descriptor, root)
    raise StorageError(f"{path.parent} is made and removed again and again")


def _adopted(descriptor: int, root: Path) -> int:
    try:
        adopt_file(descriptor, root)
    except OSError as error:
        os.close(descriptor)
        raise unwritable(root, error) from error
    return descriptor


def _make_arriving(root: Path) -> None:
    try:
        make_directories(root / ARRIVING_BASENAME, root)
    except OSError as error:
        raise unwritable(root, error) from error


def unwritable(root: Path, error: OSError) -> StorageError:
    """What to say where something in a cache directory could not be written."""
    if not isinstance(error, PermissionError) and not is_reachable(root):
        return directory_gone(root)
    if error.errno in _NO_ROOM:
        return DiskFullError(f"no room left in {root}: {error}; make room there, or choose another directory")
    return StorageError(f"{root} cannot be written to: {error}; choose another directory")


def directory_gone(root: Path) -> StorageError:
    """What to say where a cache directory was removed under us. It is not made again: that could undo an unmount."""
    return StorageError(f"the cache directory {root} was removed while it was in use; start again to make it anew")


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (found.st_ino, found.st_dev) == (opened.st_ino, opened.st_dev)


def _is_abandoned(descriptor: int) -> bool:
    return os.fstat(descriptor).st_mtime < time.time() - _ABANDONED_SECONDS


def _lock_tells(name: str, descriptor: int) -> bool:
    """Whether a part that could be locked is dead for that: it is of this machine, since it was started or before.

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
