"""Files that several processes and users share: ``flock`` on them, waiting for the holder of a lock, and permissions.

The kernel releases a lock when its owner dies. Everything in a cache directory has the permissions of the directory;
files that several users open get them before they get their name, so that no process sees them without.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_streaming.cache.config import CACHE_VARIABLE
from lightning_streaming.errors import DiskFullError, LockTimeoutError, StorageError
from lightning_streaming.files import DISK_FULL, Identity, open_regular

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF)
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02
NEW_PREFIX = ".new-"
"""Prefix of the names of files and directories before they get their permissions."""
_PERMISSION_SECONDS = 2.0
"""Longest time between creating a file and setting its permissions, where that must be done after naming it."""
UNREACHABLE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Errors for a path at which there is nothing of ours: no such file, or none that this user may access."""


class LocksUnsupportedError(OSError):
    """An error of a filesystem without such locks; handled within this package."""


def try_lock(descriptor: int, *, shared: bool) -> bool:
    """Lock an open file, or turn a shared lock into an exclusive one or back, without waiting.

    Args:
        descriptor: The open file. Its copies, those of forked children too, share the lock.
        shared: Whether others may have it too.

    Returns:
        Whether it is locked now; False if another holds it. A lock that should be converted may then be lost.

    Raises:
        LocksUnsupportedError: The filesystem has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise LocksUnsupportedError(*error.args) from error
        raise
    return True


def is_locked(path: Path, *, shared: bool = False) -> bool:
    """Return whether another process holds a lock of a file that excludes ours, exclusive or ``shared``."""
    with suppress(OSError):
        descriptor = open_regular(path, os.O_RDONLY)
        try:
            return not try_lock(descriptor, shared=shared)
        finally:
            unlock_and_close(descriptor)
    return False


def open_no_link(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open a file of a cache directory, but not through a symbolic link, which could lead to any file of the user.

    Also serves as ``opener`` of :func:`open`.

    Raises:
        StorageError: It is a special file.
        OSError: It is a link, or cannot be opened.
    """
    return open_regular(path, flags | os.O_NOFOLLOW, mode)


def write_no_link(path: Path, data: bytes) -> None:
    """Write a whole file of a cache directory, but not through a symbolic link.

    Raises:
        OSError: It is a link, or cannot be written.
    """
    with os.fdopen(open_no_link(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)


def open_to_lock(path: str | Path) -> int:
    """Open a file for an exclusive lock, for which some network filesystems require that it is open for writing.

    Raises:
        OSError: It is gone, or may not be read either.
    """
    try:
        return open_regular(path, os.O_RDWR)
    except OSError:  # another user's, or on a disk that may only be read
        return open_regular(path, os.O_RDONLY)


def unlock_and_close(descriptor: int) -> None:
    """Close a file and release its lock, even if a child forked meanwhile has a copy of the descriptor."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def pauses(seconds: float = math.inf, longest: float = _LONGEST_PAUSE) -> Iterator[None]:
    """Yield between attempts: immediately, then after longer and longer pauses, until the time is up.

    There is no wait for a kernel lock with a time limit, and one without would hang if its holder is stopped.

    Args:
        seconds: Total time; the last attempt follows when it has passed. Unlimited if the caller ends the loop.
        longest: Longest pause, in seconds.
    """
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    yield
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
        yield


def lock_owner(path: Path) -> str:
    """Return the holder of the lock of a file, for an error message."""
    try:
        inode = str(path.stat().st_ino)
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:  # gone just now, or not Linux
        return "another process"
    # For example "1: FLOCK  ADVISORY  WRITE 4711 fe:00:131072 0 EOF".
    owners = [words[4] for words in locks if len(words) > 5 and words[5].rpartition(":")[2] == inode]
    return f"process {owners[0]}" if owners else "another process"


class StallTimeout:
    """Limit of the wait for a process that is stopped; the wait for one that makes progress, even slowly, continues.

    Args:
        seconds: Maximum time without progress.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: list[Identity | None] = []
        self._since = 0.0

    def check(self, paths: Sequence[Path]) -> None:
        """Check for progress, repeatedly while waiting.

        Args:
            paths: Files that the other process writes, which may be missing; first the one whose lock it holds.

        Raises:
            LockTimeoutError: Nothing has changed for too long.
        """
        seen = [file_identity(path) for path in paths]
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        elif time.monotonic() > self._since + self._seconds:
            owner = lock_owner(paths[0])
            raise LockTimeoutError(
                f"waited {self._seconds:g} s for progress of {owner}, which holds {paths[0]}",
                hint="wait for it, or end it",
                path=str(paths[0]),
            )


def file_identity(path: Path) -> Identity | None:
    """Return a value that changes when the file at a path is replaced or written to; None if there is none."""
    with suppress(FileNotFoundError):
        return Identity.of(path)
    return None


def make_cache_directory(directory: Path) -> None:
    """Create a stream's cache directory, if it is missing.

    Raises:
        StorageError: It cannot be created.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{directory} cannot be created: {error}",
            hint=f"give the stream another directory with local=, or set {CACHE_VARIABLE} to another root",
            path=str(directory),
        ) from error


def is_reachable(directory: Path) -> bool:
    """Return whether a directory exists and this user may access it: some cannot enter their ``$HOME``."""
    try:
        return directory.is_dir()
    except PermissionError:
        return False


def adopt_file(descriptor: int, root: Path, *, writable: bool = False) -> None:
    """Give a new file in a cache directory the read permissions of the directory, with any umask.

    Args:
        descriptor: The file, which is ours.
        root: The cache directory.
        writable: Whether to give it the write permissions as well.

    Raises:
        FileNotFoundError: The cache directory is missing.
    """
    status = root.stat()
    mode = status.st_mode & (0o666 if writable else 0o444) | 0o600
    with suppress(PermissionError):  # not a member of the directory's group
        os.fchown(descriptor, -1, status.st_gid)
    with suppress(PermissionError):  # a filesystem without permissions
        os.fchmod(descriptor, mode)


def open_shared(path: Path, root: Path) -> int:
    """Open a file that all users of the cache directory write to; create it if there is none.

    Args:
        path: The file, in the cache directory.
        root: The cache directory.

    Returns:
        Its descriptor, to read and write.

    Raises:
        StorageError: The cache directory is gone, or the file cannot be opened or created.
    """
    refused: OSError | None = None
    for _ in pauses(_PERMISSION_SECONDS):
        try:
            while True:
                with suppress(FileNotFoundError):
                    return open_no_link(path, os.O_RDWR)
                _create_shared(path, root)
        except OSError as error:  # noqa: PERF203
            refused = error
            # A file without permission for us may be new, on a filesystem without hard links.
            if not isinstance(error, PermissionError) or not path.exists():
                break
    assert refused is not None
    raise unwritable(root, refused) from refused


def _create_shared(path: Path, root: Path) -> None:
    descriptor, name = tempfile.mkstemp(prefix=NEW_PREFIX, dir=root)
    try:
        adopt_file(descriptor, root, writable=True)
        os.link(name, path)
    except FileExistsError:
        return
    except FileNotFoundError:
        raise
    except OSError:  # no hard links here
        with suppress(FileExistsError):
            created = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            adopt_file(created, root, writable=True)
            os.close(created)
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108  mkstemp gives no Path


def make_directories(path: Path, root: Path) -> None:
    """Create a directory anywhere under a cache directory, with its permissions; never the cache directory itself.

    Raises:
        FileNotFoundError: The cache directory is missing.
        OSError: It cannot be created.
    """
    if path == root or path.is_dir():
        return
    make_directories(path.parent, root)
    with _new_directory(path.parent, root) as new:
        try:
            # One that another process created meanwhile is replaced while it is empty, by an equal one.
            new.rename(path)
        except OSError:
            if not path.is_dir():
                raise


@contextmanager
def _new_directory(parent: Path, root: Path) -> Iterator[Path]:
    """Yield a new directory with permissions and a temporary name; remove it if it still exists afterwards."""
    status = root.stat()
    new = Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=parent))
    try:
        with suppress(PermissionError):
            os.chown(new, -1, status.st_gid)
        with suppress(PermissionError):
            new.chmod(stat.S_IMODE(status.st_mode))
        yield new
    finally:
        with suppress(FileNotFoundError):
            new.rmdir()


def unwritable(root: Path, error: OSError) -> StorageError:
    """Return the error for a file in a cache directory that could not be written."""
    if not isinstance(error, PermissionError) and not is_reachable(root):
        return directory_removed(root)
    if isinstance(error, StorageError):
        return error
    if error.errno == errno.ELOOP and error.filename is not None:
        return StorageError(
            f"{os.fsdecode(error.filename)} is a symbolic link, and the cache does not write to links, which may lead "
            "to any file",
            hint="remove it",
            path=os.fsdecode(error.filename),
        )
    if error.errno in DISK_FULL:
        return DiskFullError(
            f"no space left in {root}: {error}", hint="free space there, or choose another directory", path=str(root)
        )
    return StorageError(f"{root} cannot be written to: {error}", hint="choose another directory", path=str(root))


def directory_removed(root: Path) -> StorageError:
    """Return the error for a cache directory that was removed. It is not created again: it may be unmounted."""
    return StorageError(
        f"the cache directory {root} was removed while it was in use",
        hint="restart the run, which creates it again",
        path=str(root),
    )
