"""Files that several processes and users share: ``flock`` on them, waiting for whoever has it, and permissions.

The kernel gives a lock back when its owner dies. Everything in a cache directory has the directory's own permissions;
what several users open gets them before it gets its name, so that nobody ever sees it without.
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
"""What the names begin with that files and directories have before they get their permissions."""
_PERMITTED_SECONDS = 2.0
"""More than anybody needs from making a file to setting its permissions, where that cannot be done before naming it."""
UNREACHABLE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""What says that there is nothing of ours at a path: no such file, or none that this user may get to."""


class LocksUnsupportedError(OSError):
    """The filesystem has no such locks; never leaves this room."""


def try_lock(descriptor: int, *, shared: bool) -> bool:
    """Lock an open file, or turn a shared lock into an exclusive one or back, without waiting.

    Args:
        descriptor: The open file. Its copies, those of forked children too, share the lock.
        shared: Whether others may have it too.

    Returns:
        Whether it is locked now; False if another holds it. A lock that was to be turned into another one may be lost.

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
    """Whether somebody has a file locked so that we cannot: for ourselves, or ``shared``."""
    with suppress(OSError):
        descriptor = open_regular(path, os.O_RDONLY)
        try:
            return not try_lock(descriptor, shared=shared)
        finally:
            unlock_and_close(descriptor)
    return False


def open_no_link(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open a file of a cache directory, but not through a symbolic link: that could lead to any file of the user.

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
    """Open a file to lock it for ourselves, for which some network filesystems want it opened for writing.

    Raises:
        OSError: It is gone, or may not be read either.
    """
    try:
        return open_regular(path, os.O_RDWR)
    except OSError:  # another user's, or on a disk that may only be read
        return open_regular(path, os.O_RDONLY)


def unlock_and_close(descriptor: int) -> None:
    """Close a file and let go of its lock, also where a child forked meanwhile has a copy of it."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def pauses(seconds: float = math.inf, longest: float = _LONGEST_PAUSE) -> Iterator[None]:
    """Give way for a moment between tries: at once, then after longer and longer pauses, until time is up.

    There is no waiting for a kernel lock with a time limit, and one without would hang where its holder is stopped.

    Args:
        seconds: For how long; the last try comes when they have passed. Without end where the caller knows when.
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
    """Who holds the lock of a file, for an error message."""
    try:
        inode = str(path.stat().st_ino)
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:  # gone just now, or not Linux
        return "another process"
    # For example "1: FLOCK  ADVISORY  WRITE 4711 fe:00:131072 0 EOF".
    owners = [words[4] for words in locks if len(words) > 5 and words[5].rpartition(":")[2] == inode]
    return f"process {owners[0]}" if owners else "another process"


class StallTimeout:
    """Ends the wait for a process that is stopped; one that goes on, however slowly, is waited for.

    Args:
        seconds: How long it may show no sign of life.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: list[Identity | None] = []
        self._since = 0.0

    def check(self, paths: Sequence[Path]) -> None:
        """To be called while waiting.

        Args:
            paths: What the other writes to, which need not exist; the one that it holds the lock of first.

        Raises:
            LockTimeoutError: Nothing has changed for too long.
        """
        seen = [file_identity(path) for path in paths]
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        elif time.monotonic() > self._since + self._seconds:
            owner = lock_owner(paths[0])
            raise LockTimeoutError(
                f"waited {self._seconds:g} s for a sign of life of {owner}, which holds {paths[0]}",
                hint="wait for it, or end it",
                path=str(paths[0]),
            )


def file_identity(path: Path) -> Identity | None:
    """What changes when the file at a path is replaced or written to; None if there is none."""
    with suppress(FileNotFoundError):
        return Identity.of(path)
    return None


def make_cache_directory(directory: Path) -> None:
    """Make a stream's cache directory, if it is not there.

    Raises:
        StorageError: It cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{directory} cannot be made: {error}",
            hint=f"give the stream another directory with local=, or set {CACHE_VARIABLE} to another root",
            path=str(directory),
        ) from error


def is_reachable(directory: Path) -> bool:
    """Whether a directory is there, where this user may get to it: some cannot enter their own ``$HOME``."""
    try:
        return directory.is_dir()
    except PermissionError:
        return False


def adopt_file(descriptor: int, root: Path, *, writable: bool = False) -> None:
    """Let whoever may read a cache directory read a new file in it, whatever the umask.

    Args:
        descriptor: The file, which is ours.
        root: The cache directory.
        writable: Whether those who may write to the directory may write to the file as well.

    Raises:
        FileNotFoundError: The cache directory is not there.
    """
    found = root.stat()
    mode = found.st_mode & (0o666 if writable else 0o444) | 0o600
    with suppress(PermissionError):  # not a member of the directory's group
        os.fchown(descriptor, -1, found.st_gid)
    with suppress(PermissionError):  # a filesystem without permissions
        os.fchmod(descriptor, mode)


def open_shared(path: Path, root: Path) -> int:
    """Open a file that whoever may write to the cache directory writes to; it is made if there is none.

    Args:
        path: The file, in the cache directory.
        root: The cache directory.

    Returns:
        Its descriptor, to read and write.

    Raises:
        StorageError: The cache directory is gone, or it cannot be opened or made.
    """
    refused: OSError | None = None
    for _ in pauses(_PERMITTED_SECONDS):
        try:
            return _open_or_make(path, root)
        except OSError as error:  # noqa: PERF203
            refused = error
            # Refused to us, it may be new, on a filesystem without hard links.
            if not isinstance(error, PermissionError) or not path.exists():
                break
    assert refused is not None
    raise unwritable(root, refused) from refused


def _open_or_make(path: Path, root: Path) -> int:
    while True:
        with suppress(FileNotFoundError):
            return open_no_link(path, os.O_RDWR)
        _make_shared(path, root)


def _make_shared(path: Path, root: Path) -> None:
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
            made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            adopt_file(made, root, writable=True)
            os.close(made)
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108  mkstemp gives no Path


def make_directories(path: Path, root: Path) -> None:
    """Make a directory somewhere under a cache directory, with its permissions; never the cache directory itself.

    Raises:
        FileNotFoundError: The cache directory is not there.
        OSError: It cannot be made.
    """
    if path == root or path.is_dir():
        return
    make_directories(path.parent, root)
    with _new_directory(path.parent, root) as new:
        try:
            # One that somebody made meanwhile is replaced while it is empty, which nobody notices: it is the same.
            new.rename(path)
        except OSError:
            if not path.is_dir():
                raise


@contextmanager
def _new_directory(parent: Path, root: Path) -> Iterator[Path]:
    """A directory with its permissions, and a name that nobody looks for; removed if it is still there afterwards."""
    found = root.stat()
    new = Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=parent))
    try:
        with suppress(PermissionError):
            os.chown(new, -1, found.st_gid)
        with suppress(PermissionError):
            new.chmod(stat.S_IMODE(found.st_mode))
        yield new
    finally:
        with suppress(FileNotFoundError):
            new.rmdir()


def unwritable(root: Path, error: OSError) -> StorageError:
    """What to say where something in a cache directory could not be written."""
    if not isinstance(error, PermissionError) and not is_reachable(root):
        return directory_gone(root)
    if isinstance(error, StorageError):
        return error
    if error.errno == errno.ELOOP and error.filename is not None:
        return StorageError(
            f"{os.fsdecode(error.filename)} is a symbolic link, and the cache writes to no link, which may lead to any "
            "file",
            hint="remove it",
            path=os.fsdecode(error.filename),
        )
    if error.errno in DISK_FULL:
        return DiskFullError(
            f"no room left in {root}: {error}", hint="make room there, or choose another directory", path=str(root)
        )
    return StorageError(f"{root} cannot be written to: {error}", hint="choose another directory", path=str(root))


def directory_gone(root: Path) -> StorageError:
    """What to say where a cache directory was removed under us. It is not made again: that could undo an unmount."""
    return StorageError(
        f"the cache directory {root} was removed while it was in use",
        hint="restart the run, which creates it again",
        path=str(root),
    )
