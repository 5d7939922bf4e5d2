"""Everything in a cache directory has the directory's own permissions, so that several users can share one."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def adopt_file(descriptor: int, root: Path, *, writable: bool = False) -> None:
    """Let whoever may read a cache directory read a new file in it, whatever the umask.

    Args:
        descriptor: The file, which is ours.
        root: The cache directory.
        writable: Whether those who may write to the directory may write to the file as well.
    """
    found = root.stat()
    mode = found.st_mode & (0o666 if writable else 0o444) | 0o600
    with suppress(PermissionError):  # not a member of the directory's group
        os.fchown(descriptor, -1, found.st_gid)
    with suppress(PermissionError):  # a filesystem without permissions
        os.fchmod(descriptor, mode)


def make_directories(path: Path, root: Path) -> None:
    """Make a directory somewhere under a cache directory, with its permissions; never the cache directory itself.

    Raises:
        FileNotFoundError: The cache directory is not there.
    """
    if path == root:
        return
    make_directories(path.parent, root)
    try:
        path.mkdir()
    except FileExistsError:
        return
    found = root.stat()
    with suppress(PermissionError):
        os.chown(path, -1, found.st_gid)
    with suppress(PermissionError):
        path.chmod(stat.S_IMODE(found.st_mode))
