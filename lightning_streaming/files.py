"""Atomic writes of files, locks that the kernel releases, paths under a root, typed errors of the disk, identities."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from glob import escape
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from filelock import FileLock, Timeout

from lightning_streaming.errors import DiskFullError, IndexFormatError, LockTimeoutError, StorageError, StreamingError

PARTIAL_SUFFIX = ".part"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOCK_POLL_SECONDS = 0.01
SECOND = 10**9
"""In nanoseconds."""
FIRST_TAG = 978_307_200
"""Start of the year 2001. Whole seconds differ on every filesystem, and no program writes files in the past."""
TAGS_SPAN = 283_996_800
"""Seconds until the start of the year 2010."""


def partial_path(path: Path) -> Path:
    """Return the path at which this thread writes ``path`` until it is whole: in its directory, under a unique name.

    For example ``shard.00000.mds`` becomes ``shard.00000.mds.node7-4711-140032.part``: machine, process and thread.
    """
    writer = f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    return path.with_name(f"{path.name}.{writer}{PARTIAL_SUFFIX}")


@contextmanager
def appears_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to; rename it to ``path`` if the block succeeds, remove it if the block raises.

    No fsync: after a crash of the machine a file may be short, which is why readers check sizes.
    """
    partial = partial_path(path)
    with suppress(FileNotFoundError):  # of a process before us; or a link, through which we would write to another file
        partial.unlink()
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:  # Ctrl-C too: nothing half-written stays
        partial.unlink(missing_ok=True)
        raise


def open_regular(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open a file unless it is a pipe or another special file, which may block; serves as ``opener`` of :func:`open`.

    Raises:
        StorageError: It is a special file.
        OSError: It cannot be opened.
    """
    refusal = StorageError(f"{path} is no regular file", hint="remove it", path=str(path))
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, mode)
    except OSError as error:
        raise refusal if error.errno == errno.ENXIO else error from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    return descriptor


def remove_partials(path: Path) -> None:
    """Remove the partial files that killed writers of ``path`` on this machine left.

    The directory may be shared with other machines and users, whose locks are invisible here: a writer that is alive,
    or may be, keeps its file.
    """
    for leftover in path.parent.glob(f"{escape(path.name)}.{escape(socket.gethostname())}-*{PARTIAL_SUFFIX}"):
        process = leftover.name.removesuffix(PARTIAL_SUFFIX).split("-")[-2]
        if process.isdigit() and not _is_alive(int(process)):
            leftover.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # not Linux, or gone just now
        return True
    # One that was killed keeps its number, as a zombie "Z", until its parent waits for it.
    return status.rpartition(")")[2].split()[0] != "Z"


def join_under(root: Path, basename: str) -> Path:
    """Join a file name of an index to the directory of its dataset.

    Raises:
        IndexFormatError: The name is absolute, empty, or climbs out of ``root``.
    """
    parts = PurePosixPath(basename).parts
    is_a_name = parts and not basename.startswith("/") and "\\" not in basename and "\0" not in basename
    is_text = not any("\ud800" <= character <= "\udfff" for character in basename)
    if not is_a_name or not is_text or ".." in parts:
        raise IndexFormatError(
            f"a file name in an index must stay inside its dataset directory, but got {basename!r}",
            hint="the index is damaged or malicious",
            path=basename,
        )
    return root.joinpath(*parts)


@contextmanager
def hold_lock(path: Path, timeout: float, purpose: str) -> Iterator[None]:
    """Hold the lock file ``path`` exclusively; the kernel releases it when this process dies.

    Args:
        path: The lock file; it and its directory are created if missing.
        timeout: Seconds to wait; 0 tries once, -1 waits for ever.
        purpose: What the lock is for, as the error of a process that waits in vain says.

    Raises:
        LockTimeoutError: Another process kept the lock; its name is in the message.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=timeout, poll_interval=_LOCK_POLL_SECONDS)
    except Timeout:
        raise LockTimeoutError(
            f"waited {timeout:g} s for {path}, held by {_owner(path)}, to {purpose}", path=str(path)
        ) from None
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        lock.release()


def _owner(path: Path) -> str:
    try:
        return path.read_text() or "another process"
    except OSError:
        return "another process"


def file_named_by(error: OSError) -> str | None:
    """Return the path of the file that an error of the system is about; None if it names none."""
    return os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes, os.PathLike)) else None


@contextmanager
def system_errors(
    doing: str, hint: str = "change that, or choose another place", path: Path | None = None
) -> Iterator[None]:
    """Raise typed errors for those of this machine's system in the block, or in the function that this decorates.

    Args:
        doing: The action for the message, for example ``"list a directory"``; the system names the path.
        hint: How to fix it.
        path: The file or directory. None: the one that the system names.

    Raises:
        DiskFullError: There is no room.
        StorageError: The system refused for another reason.
    """
    try:
        yield
    except StreamingError:  # some are an OSError too
        raise
    except OSError as error:
        shown = file_named_by(error) if path is None else str(path)
        if error.errno in DISK_FULL:
            raise DiskFullError(
                f"no space left to {doing}: {error}", hint="free space there, or choose another directory", path=shown
            ) from error
        raise StorageError(f"could not {doing}: {error}", hint=hint, path=shown) from error


def disk_errors(path: Path, doing: str = "write") -> AbstractContextManager[None]:
    """Return :func:`system_errors` for writing a file."""
    return system_errors(f"{doing} {path}", "make it writable, or choose another directory", path)


class Identity(NamedTuple):
    """Attributes in which versions of a file differ, unless its modification time was set back."""

    size: int
    """Bytes."""
    modified: int
    """Nanoseconds."""
    inode: int

    @classmethod
    def of(cls, file: int | Path | os.stat_result) -> Identity:
        """Return the identity of a file, by its descriptor, its path, or the result of ``stat``."""
        status = file if isinstance(file, os.stat_result) else os.stat(file)  # noqa: PTH116  a descriptor has no Path
        return cls(*(number & 2**63 - 1 for number in (status.st_size, status.st_mtime_ns, status.st_ino)))


def is_tag(modified: int) -> bool:
    """Return whether a modification time, in nanoseconds, may be one that a cache gives its files."""
    return modified % SECOND == 0 and FIRST_TAG <= modified // SECOND < FIRST_TAG + TAGS_SPAN


def change_time(status: os.stat_result) -> int:
    """Return when a file was last changed, replaced or renamed, in nanoseconds, by the clock of its filesystem.

    0 for a file of a cache: its readers set its access time, which changes this time as well.
    """
    return 0 if is_tag(status.st_mtime_ns) else status.st_ctime_ns
