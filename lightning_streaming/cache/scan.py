"""Looking through a cache directory: which files are ours, how big they are, and when each was last used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_streaming.cache.arrival import arriving
from lightning_streaming.cache.layout import (
    ARRIVING_BASENAME,
    ORIGIN_BASENAME,
    PARSED_INDEX_PREFIX,
    QUEUE_BASENAME,
    USAGE_BASENAME,
)
from lightning_streaming.cache.marks import OwnTimes
from lightning_streaming.cache.permissions import NEW_PREFIX, UNREACHABLE
from lightning_streaming.formats.index import INDEX_BASENAME

_NOT_SHARD_PREFIXES = (PARSED_INDEX_PREFIX, NEW_PREFIX)
_NOT_SHARDS = (ARRIVING_BASENAME, ORIGIN_BASENAME, USAGE_BASENAME, QUEUE_BASENAME, INDEX_BASENAME)


class Entry(NamedTuple):
    """A file of a cache directory."""

    path: str
    """Where it is."""
    size: int
    """Its bytes."""
    stamp: int
    """When it was last used, in nanoseconds; see :mod:`lightning_streaming.cache.stamps`."""
    modified: int
    """Its modification time, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What one look at a cache directory found."""

    files: list[Entry]
    """Whole files that are ours."""
    arriving_bytes: int
    """Size of all parts."""

    @property
    def bytes(self) -> int:
        """What the ledger should say."""
        return self.arriving_bytes + sum(file.size for file in self.files)


def scan(root: Path, own: OwnTimes) -> Scan:
    """Look through a cache directory; one that is not there is empty.

    Parts come first: one that is published meanwhile is counted twice rather than missed.

    Args:
        root: The directory.
        own: Which modification times are ours.
    """
    arriving_bytes = 0
    for entry in arriving(root):
        with suppress(FileNotFoundError):
            arriving_bytes += entry.stat(follow_symlinks=False).st_size
    return Scan([file for file in shard_files(root) if own.include(file.modified)], arriving_bytes)


def shard_files(root: Path) -> Iterator[Entry]:
    """Every regular file under a cache directory that is not the cache's own, whoever put it there."""
    pending = [str(root)]
    while pending:
        folder = pending.pop()
        with suppress(*UNREACHABLE), os.scandir(folder) as found:
            for entry in found:
                if folder == str(root) and (entry.name in _NOT_SHARDS or entry.name.startswith(_NOT_SHARD_PREFIXES)):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if not _is_cache(entry.path):
                        pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield Entry(entry.path, status.st_size, status.st_atime_ns, status.st_mtime_ns)


def find_entry(path: Path) -> Entry | None:
    """One file; None if there is no such file."""
    try:
        status = path.stat()
    except UNREACHABLE:
        return None
    return Entry(str(path), status.st_size, status.st_atime_ns, status.st_mtime_ns)


def index_files(root: Path) -> Iterator[Entry]:
    """The index of a cache directory, and parsed forms of it."""
    with suppress(*UNREACHABLE), os.scandir(root) as found:
        for entry in found:
            if entry.name == INDEX_BASENAME or entry.name.startswith(PARSED_INDEX_PREFIX):
                described = find_entry(Path(entry.path))
                if described is not None:
                    yield described


def index_bytes(root: Path) -> int:
    """Size of the index of a cache directory, parsed forms included."""
    return sum(entry.size for entry in index_files(root))


def _is_cache(folder: str) -> bool:
    """Whether a directory within a cache directory is another one, which has its own count."""
    return any(os.path.lexists(f"{folder}/{name}") for name in (ORIGIN_BASENAME, USAGE_BASENAME))
