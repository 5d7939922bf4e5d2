"""Everything in a cache directory has the directory's own permissions, so that several users can share one.

What several users open gets its permissions before it gets its name: nobody ever sees it without.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_streaming.cache.locks import pauses

NEW_PREFIX = ".new-"
"""What the names begin with that files and directories have before they get their permissions."""
_PERMITTED_SECONDS = 2.0
"""More than anybody needs from making a file to setting its permissions, where that cannot be done before naming it."""


UNREACHABLE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""What says that there is nothing of ours at a path: no such file, or none that this user may get to."""


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
        FileNotFoundError: The cache directory is not there.
        OSError: It cannot be opened or made.
    """
    refused: PermissionError | None = None
    for _ in pauses(_PERMITTED_SECONDS):
        try:
            return _open_or_make(path, root)
        except PermissionError as error:  # noqa: PERF203
            if not path.exists():  # the directory is not ours to write to
                raise
            refused = error  # it may be new, on a filesystem without hard links
    assert refused is not None
    raise refused


def _open_or_make(path: Path, root: Path) -> int:
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR)
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
