"""The lock under which one process of a node fetches and parses an index, while others wait for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_streaming.cache.arrival import Part, arriving, claim, lock_if_dead, part_path, was_left
from lightning_streaming.cache.layout import ARRIVING_BASENAME, PARSED_INDEX_PREFIX
from lightning_streaming.cache.locks import open_to_lock, pauses, unlock_and_close
from lightning_streaming.cache.patience import Patience
from lightning_streaming.files import PARTIAL_SUFFIX
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
        patience: Seconds to wait for a holder who shows no sign of life.

    Raises:
        LockTimeoutError: Another process holds it, and has shown no sign of life for too long.
        StorageError: The directory may not be written to.
    """
    part = _claimed(directory, patience)
    lock = _files_of(directory, part.path)
    try:
        _clear(lock)
        with part.beating():  # also while its download waits for others of this process, or a large index is parsed
            yield lock
    finally:
        _clear(lock)
        if part.is_unpublished():
            part.path.unlink(missing_ok=True)
        part.close()


def being_fetched(directory: Path) -> Path | None:
    """What another user, or machine, holds who is at the index of a directory just now; None if nobody is."""
    ending = part_path(directory, INDEX_BASENAME).name.rpartition("-")[2]
    for entry in arriving(directory):
        if entry.name.endswith(f"-{ending}"):
            descriptor = lock_if_dead(Path(entry.path))
            if descriptor is None:
                return Path(entry.path)
            unlock_and_close(descriptor)
    return None


def part_of_scratch(name: str) -> str | None:
    """Whose lock says that a file is in use that an index is fetched into, or a parsed form is written to.

    Args:
        name: Of a file beside an index.

    Returns:
        The name of the part that is locked; None if it is not such a file.
    """
    part = name.removeprefix(PARSED_INDEX_PREFIX).removesuffix(SCRATCH_SUFFIX)
    return part if part.endswith(PARTIAL_SUFFIX) else None


def is_left_over(path: Path) -> bool:
    """Whether the writer of such a file died, as far as that can be told here; one of another machine after a day."""
    part = part_of_scratch(path.name)
    if part is None:
        return False
    lock = path.parent / ARRIVING_BASENAME / part
    try:
        if lock.exists():
            descriptor = lock_if_dead(lock)
            is_left = descriptor is not None
        else:
            descriptor = open_to_lock(path)
            is_left = was_left(part, descriptor)
    except OSError:  # gone, or not ours to read
        return False
    if descriptor is not None:
        unlock_and_close(descriptor)
    return is_left


def sweep_left_overs(directory: Path) -> None:
    """Remove what dead writers left of indexes: those of other users, and of the time before this machine started."""
    with suppress(OSError), os.scandir(directory) as found:
        for entry in found:
            if entry.name.startswith(PARSED_INDEX_PREFIX) and is_left_over(Path(entry.path)):
                with suppress(OSError):  # another user's
                    Path(entry.path).unlink()


def _claimed(directory: Path, seconds: float) -> Part:
    patience = Patience(seconds)
    for _ in pauses():
        part = claim(directory, INDEX_BASENAME)
        if part is not None:
            return part
        patience.check([part_path(directory, INDEX_BASENAME)])
    raise AssertionError("there is no end to that")


def _files_of(directory: Path, part: Path) -> IndexLock:
    name = f"{PARSED_INDEX_PREFIX}{part.name}"
    return IndexLock(directory / name, directory / f"{name}{SCRATCH_SUFFIX}")


def _clear(lock: IndexLock) -> None:
    lock.arriving.unlink(missing_ok=True)
    lock.scratch.unlink(missing_ok=True)
