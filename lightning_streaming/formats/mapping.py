"""A shard's raw file, memory-mapped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from lightning_streaming.errors import ObjectNotFoundError, ShardCorruptError, StorageError


def map_file(path: Path, expected_bytes: int) -> memoryview:
    """Map a file that must have a known size; an empty one, which cannot be mapped, is an empty view.

    Raises:
        ShardCorruptError: It has another size.
        ObjectNotFoundError: It is not there.
        StorageError: It cannot be opened.
    """
    try:
        with path.open("rb") as file:
            found_bytes = os.fstat(file.fileno()).st_size
            if found_bytes != expected_bytes:
                raise ShardCorruptError(f"{path} must have {expected_bytes} bytes by its index, but has {found_bytes}")
            if found_bytes == 0:
                return memoryview(b"")
            # The map keeps the file open by itself. Files are replaced by renaming and never cut, so it stays sound.
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise ObjectNotFoundError(f"{path} is named by an index, but is not there") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error}") from error
