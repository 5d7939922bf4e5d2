"""A shard's raw file, memory-mapped."""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path

from lightning_streaming.errors import ObjectNotFoundError, ShardCorruptError, StorageError


def map_file(path: Path, expected_bytes: int) -> memoryview:
    """Map a file that must have a known size; an empty one, which cannot be mapped, is an empty view.

    As long as the map lives it has a shared lock on the file, by which a cache knows that the file is in use.

    Raises:
        ShardCorruptError: It has another size.
        ObjectNotFoundError: It is not there.
        StorageError: It cannot be opened.
    """
    try:
        with path.open("rb") as file:
            with suppress(OSError):  # a filesystem without locks, or a file that is just being removed
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found = os.fstat(file.fileno())
            if found.st_nlink and found.st_size != expected_bytes:
                raise ShardCorruptError(
                    f"{path} must have {expected_bytes} bytes by its index, but has {found.st_size}"
                )
            if found.st_nlink:
                # The map keeps the file open by itself, and so the lock. Files are replaced by renaming and never cut,
                # so it stays sound.
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if expected_bytes else b"")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error}") from error
    # It may also have been removed from a cache between opening and locking it.
    raise ObjectNotFoundError(f"{path} is named by an index, but is not there")
