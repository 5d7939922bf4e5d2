"""Files on their way into a cache directory: each is written by one process, whose death everybody can see.

The lock of a part file is the lock of the shard file it will become: who has it fetches, others wait or come back
later. A part whose lock can be taken has lost its writer.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from lightning_streaming.cache.layout import ARRIVING_BASENAME
from lightning_streaming.cache.locks import LocksUnsupportedError, try_lock, unlock_and_close
from lightning_streaming.cache.permissions import adopt_file, make_directories
from lightning_streaming.errors import StorageError
from lightning_streaming.files import PARTIAL_SUFFIX, join_under

_ABANDONED_SECONDS = 24 * 3600
"""After this long without a byte, a part of another machine is taken to be dead; its lock says nothing here."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


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

    def publish(self, root: Path, basename: str, mark: int) -> None:
        """Let it appear under its own name, whole.

        Args:
            root: The cache directory.
            basename: Its name there.
            mark: Its modification time, which says that it is ours and was checked.
        """
        final = join_under(root, basename)
        make_directories(final.parent, root)
        os.utime(self.descriptor, ns=(time.time_ns(), mark))
        os.replace(self.path, final)

    def is_unpublished(self) -> bool:
        """Whether it is still on its way."""
        return _is_at(self.path, self.descriptor)

    def keep_shared(self) -> bool:
        """Once published: let others read it too, and nobody remove it; False if somebody removes it just now."""
        try:
            return try_lock(self.descriptor, shared=True) and os.fstat(self.descriptor).st_nlink > 0
        except LocksUnsupportedError:
            return True

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
    return root / ARRIVING_BASENAME / f"{_machine()}-{os.getuid()}-{digest}{PARTIAL_SUFFIX}"


def arriving(root: Path) -> Iterator[os.DirEntry[str]]:
    """The parts of a cache directory, living and dead."""
    with suppress(FileNotFoundError), os.scandir(root / ARRIVING_BASENAME) as found:
        for entry in found:
            if entry.name.endswith(PARTIAL_SUFFIX):
                yield entry


def lock_if_dead(path: Path) -> int | None:
    """Take the part of a writer that died.

    Returns:
        Its descriptor, locked, to be closed by the caller; None if somebody writes it, or may do so.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # gone, or of another user
        return None
    try:
        on_this_machine = path.name.startswith(f"{_machine()}-")
        dead = try_lock(descriptor, shared=False) and (on_this_machine or _is_abandoned(descriptor))
    except LocksUnsupportedError:
        dead = _is_abandoned(descriptor)
    if dead and _is_at(path, descriptor):
        return descriptor
    unlock_and_close(descriptor)
    return None


def _open(path: Path, root: Path) -> int:
    for _ in range(2):
        try:
            return os.open(path, os.O_RDWR)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"{root} cannot be written to: {error}; choose another directory") from error
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            _make_arriving(root)
        except OSError as error:
            raise StorageError(f"{root} cannot be written to: {error}; choose another directory") from error
        else:
            adopt_file(descriptor, root)
            return descriptor
    raise StorageError(f"{path.parent} is made and removed again and again")


def _make_arriving(root: Path) -> None:
    try:
        make_directories(root / ARRIVING_BASENAME, root)
    except FileNotFoundError:
        raise directory_gone(root) from None
    except OSError as error:
        raise StorageError(f"{root} cannot be written to: {error}; choose another directory") from error


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


@cache
def _machine() -> str:
    """This machine since it was started: its locks end with it. Machines without such a name have their hostname."""
    try:
        name = _BOOT.read_text()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:12]
