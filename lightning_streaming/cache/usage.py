"""The contents of a cache directory: scans, the count of its bytes, and the time when each file was last used.

The count is a number in the file ``.usage``, changed under that file's lock. It is never too small as long as staging
files grow, and files of ours are removed, only by the holder of the lock, who changes the number as well. A kill in
between leaves it too large, until a process that needs room counts again.

The time of the last use is the access time, which we set, since filesystems do so seldom or never; ``eviction.py``
defines its meaning.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from lightning_streaming.cache import config, shared_files
from lightning_streaming.cache.eviction import finished_time
from lightning_streaming.cache.manifest import OwnTags
from lightning_streaming.errors import LockTimeoutError, StorageError
from lightning_streaming.files import PARTIAL_SUFFIX
from lightning_streaming.formats.index import INDEX_BASENAME

_NOT_SHARD_PREFIXES = (config.PARSED_INDEX_PREFIX, shared_files.NEW_PREFIX)
_NOT_SHARDS = (*config.NOTE_BASENAMES, config.STAGING_BASENAME, INDEX_BASENAME)
_SELECTION_FILE = re.compile(r"[0-9a-f]{32}\.((npy|lock)(\..+\.part)?|parts/\d+-\d+\.npy(\..+\.part)?)")
_LOCK_SECONDS = 120.0
"""Timeout for the usage lock: holders are quick, except when they remove thousands of files."""
_DIGITS = 20


class CacheEntry(NamedTuple):
    """A file of a cache directory."""

    path: str
    size: int
    """Bytes."""
    accessed: int
    """Its access time, in nanoseconds: see ``eviction.py``."""
    modified: int
    """Its modification time, in nanoseconds."""

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> CacheEntry:
        """Return the entry of a file from the result of ``stat``."""
        return cls(path, status.st_size, status.st_atime_ns, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of scanning a cache directory."""

    files: list[CacheEntry]
    """Complete files that are ours."""
    staged_bytes: int
    """Size of all staging files."""

    @property
    def bytes(self) -> int:
        """The exact count."""
        return self.staged_bytes + sum(file.size for file in self.files)


def scan(root: Path, own: OwnTags) -> Scan:
    """Scan a cache directory; a missing one is empty.

    Staging files are read first: one that is published meanwhile is counted twice rather than missed.

    Args:
        root: The directory.
        own: The tags of files that are ours.
    """
    staged_bytes = 0
    for entry in staging_files(root):
        with suppress(FileNotFoundError):
            staged_bytes += entry.stat(follow_symlinks=False).st_size
    return Scan([file for file in shard_files(root) if own.include(file.modified)], staged_bytes)


def shard_files(root: Path) -> Iterator[CacheEntry]:
    """Yield every regular file under a cache directory, except files of the cache itself, ours and others."""
    pending, selections = [str(root)], f"{root}/{config.SELECTIONS_BASENAME}/"
    while pending:
        folder = pending.pop()
        with suppress(*shared_files.UNREACHABLE), os.scandir(folder) as entries:
            for entry in entries:
                if folder == str(root) and (entry.name in _NOT_SHARDS or entry.name.startswith(_NOT_SHARD_PREFIXES)):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if not _is_cache(entry.path):
                        pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and not _is_selection(entry.path, selections):
                    with suppress(FileNotFoundError):
                        yield CacheEntry.of(entry.path, entry.stat(follow_symlinks=False))


def selection_files(root: Path) -> Iterator[CacheEntry]:
    """Yield cached selections, and files of those being created: files of our folder that have such names.

    Raises:
        StorageError: The folder is a link.
    """
    pending, selections = [_folder(root, config.SELECTIONS_BASENAME)], f"{root}/{config.SELECTIONS_BASENAME}/"
    while pending:
        with suppress(*shared_files.UNREACHABLE), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and _is_selection(entry.path, selections):
                    with suppress(FileNotFoundError):
                        yield CacheEntry.of(entry.path, entry.stat(follow_symlinks=False))


def _folder(root: Path, name: str) -> str:
    """Return a folder of the cache in its directory, which must be no link: files of the user may look like ours.

    Raises:
        StorageError: It is a link.
    """
    folder = f"{root}/{name}"
    if os.path.islink(folder):  # noqa: PTH114  False where that is unknown, as in a directory of another user
        raise StorageError(f"{folder} is a symbolic link", hint="remove the link", path=folder)
    return folder


def _is_selection(path: str, selections: str) -> bool:
    return path.startswith(selections) and _SELECTION_FILE.fullmatch(path, len(selections)) is not None


def find_entry(path: Path) -> CacheEntry | None:
    """Return the entry of a file; None if there is no such file."""
    try:
        return CacheEntry.of(str(path), path.stat())
    except shared_files.UNREACHABLE:
        return None


def index_files(root: Path) -> Iterator[CacheEntry]:
    """Yield the index of a cache directory, and parsed forms of it."""
    with suppress(*shared_files.UNREACHABLE), os.scandir(root) as entries:
        for entry in entries:
            if entry.name == INDEX_BASENAME or entry.name.startswith(config.PARSED_INDEX_PREFIX):
                file = find_entry(Path(entry.path))
                if file is not None:
                    yield file


def fixed_bytes(root: Path) -> int:
    """Return the size of files that are never evicted: the index, its parsed forms, and cached selections."""
    selections = f"{root}/{config.SELECTIONS_BASENAME}"
    # Not the parts of those being created, which are removed afterwards.
    kept = (entry for entry in selection_files(root) if os.path.dirname(entry.path) == selections)  # noqa: PTH120
    return sum(entry.size for entry in chain(index_files(root), kept))


def _is_cache(folder: str) -> bool:
    """Return whether a directory within a cache directory is another cache, which has a separate count."""
    return any(os.path.lexists(f"{folder}/{name}") for name in (config.MANIFEST_BASENAME, config.USAGE_BASENAME))


def staging_files(root: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the staging files of a cache directory, of living and dead writers.

    Raises:
        StorageError: Their folder is a link.
    """
    with suppress(*shared_files.UNREACHABLE), os.scandir(_folder(root, config.STAGING_BASENAME)) as entries:
        for entry in entries:
            if entry.name.endswith(PARTIAL_SUFFIX):
                yield entry


class UsageCount:
    """The count of a directory, locked by this process.

    Args:
        root: The cache directory.
        descriptor: Its file, open and locked.
        count: Function that counts the bytes, called if the file has no number.
    """

    def __init__(self, root: Path, descriptor: int, count: Callable[[], int]) -> None:
        self._root = root
        self._descriptor = descriptor
        counted = _parse_number(os.pread(descriptor, _DIGITS, 0))
        if counted is None:
            self.used = count()
        else:
            self._used = counted

    @property
    def used(self) -> int:
        """Bytes of files that are ours, staging files included."""
        return self._used

    @used.setter
    def used(self, count: int) -> None:
        self._used = max(0, count)
        try:
            write_number(self._descriptor, self._used)
        except OSError as error:  # the disk is full, and the file still empty
            raise shared_files.unwritable(self._root, error) from error


@contextmanager
def locked_usage(root: Path, count: Callable[[], int]) -> Iterator[UsageCount]:
    """Hold the usage lock of a cache directory.

    Args:
        root: The cache directory.
        count: See :class:`UsageCount`.

    Raises:
        LocksUnsupportedError: The filesystem has no locks.
        LockTimeoutError: Another process has held it for too long.
        StorageError: The directory is gone, or may not be written to.
    """
    path = root / config.USAGE_BASENAME
    descriptor = shared_files.open_shared(path, root)
    try:
        if not any(shared_files.try_lock(descriptor, shared=False) for _ in shared_files.pauses(_LOCK_SECONDS)):
            owner = shared_files.lock_owner(path)
            raise LockTimeoutError(
                f"waited {_LOCK_SECONDS:g} s for {path}, held by {owner}, to change it", path=str(path)
            )
        yield UsageCount(root, descriptor, count)
    finally:
        shared_files.unlock_and_close(descriptor)


def read_usage(root: Path) -> int | None:
    """Return the current count; None if there is none yet."""
    return read_number(root / config.USAGE_BASENAME)


def write_number(descriptor: int, number: int) -> None:
    """Write a number into a file: one write of a fixed length, so that a kill leaves the old number or the new one."""
    os.pwrite(descriptor, f"{number:<{_DIGITS - 1}}\n".encode(), 0)


def read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is none."""
    with suppress(OSError), open(path, "rb", opener=shared_files.open_no_link) as file:
        return _parse_number(file.read(_DIGITS))
    return None


def _parse_number(text: bytes) -> int | None:
    return int(text) if text.strip().isdigit() else None


def set_used(file: int | Path) -> None:
    """Set the time of the last use of a file to now.

    Args:
        file: Its path, or the descriptor of the open file.
    """
    _set_accessed(file, time.time_ns())


def set_finished(path: Path) -> None:
    """Mark a file as no longer needed in this epoch, unless another reader has it open."""
    with suppress(OSError):  # gone, another user's, or a filesystem without locks
        descriptor = shared_files.open_to_lock(path)
        try:
            if shared_files.try_lock(descriptor, shared=False):
                _set_accessed(descriptor, finished_time(time.time_ns()))
        finally:
            shared_files.unlock_and_close(descriptor)


def _set_accessed(file: int | Path, accessed: int) -> None:
    with suppress(OSError):  # another user's, or gone
        os.utime(file, ns=(accessed, os.stat(file).st_mtime_ns))  # noqa: PTH116  a descriptor has no Path
