"""The lock under which one process of a node fetches and parses an index, while others wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_streaming.cache.arrival import Part, claim, part_path
from lightning_streaming.cache.layout import PARSED_INDEX_PREFIX
from lightning_streaming.cache.locks import lock_owner, pauses
from lightning_streaming.errors import LockTimeoutError
from lightning_streaming.formats.index import INDEX_BASENAME

SCRATCH_SUFFIX = ".scratch"


@dataclass(frozen=True, slots=True)
class IndexLock:
    """What its holder may write to."""

    arriving: Path
    """A file for an index on its way."""
    scratch: Path
    """A file for anything else that is then renamed."""


@contextmanager
def held_index(directory: Path, patience: float) -> Iterator[IndexLock]:
    """Hold the lock of a directory's index. Files that an earlier holder left are gone by then.

    Args:
        directory: The cache directory, which is there.
        patience: Seconds to wait for a holder who fetches nothing.

    Raises:
        LockTimeoutError: Another process held it for too long.
        StorageError: The directory may not be written to.
    """
    part = _claimed(directory, patience)
    lock = _files_of(directory, part.path)
    try:
        _clear(lock)
        yield lock
    finally:
        _clear(lock)
        if part.is_unpublished():
            part.path.unlink(missing_ok=True)
        part.close()


def _claimed(directory: Path, patience: float) -> Part:
    path = part_path(directory, INDEX_BASENAME)
    while True:
        before = _progress(directory, path)
        for _ in pauses(patience):
            part = claim(directory, INDEX_BASENAME)
            if part is not None:
                return part
        if _progress(directory, path) == before:
            owner = lock_owner(path)
            raise LockTimeoutError(f"waited {patience:g} s for {path}, held by {owner}, to read the index there")


def _files_of(directory: Path, part: Path) -> IndexLock:
    name = f"{PARSED_INDEX_PREFIX}{part.name}"
    return IndexLock(directory / name, directory / f"{name}{SCRATCH_SUFFIX}")


def _clear(lock: IndexLock) -> None:
    lock.arriving.unlink(missing_ok=True)
    lock.scratch.unlink(missing_ok=True)


def _progress(directory: Path, part: Path) -> tuple[int, int] | None:
    """What changes as long as the holder fetches something."""
    try:
        found = _files_of(directory, part).arriving.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns
