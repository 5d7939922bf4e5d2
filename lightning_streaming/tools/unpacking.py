"""Decompresses one file of a shard."""

from __future__ import annotations

from pathlib import Path

from lightning_streaming.cache.verify import unpack
from lightning_streaming.formats.index import FileInfo


def unpack_to(path: Path, shown: str, raw: FileInfo, algorithm: str, destination: Path) -> None:
    """Decompress a whole file to a new one, whose directory is made.

    Args:
        path: The compressed file.
        shown: What to call it in an error.
        raw: What the index records of the raw file.
        algorithm: How it was compressed.
        destination: The raw file to write.

    Raises:
        IntegrityError: The data is damaged, or the raw file has another size than recorded.
        StorageError: It cannot be written.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.touch()  # a cache has set aside the room before
    unpack(path, shown, raw, algorithm, destination)
