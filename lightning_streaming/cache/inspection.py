"""Looking at a cache directory from outside, without hurting whoever uses it."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lightning_streaming.cache.arrival import arriving, lock_if_dead
from lightning_streaming.cache.index_file import load_index
from lightning_streaming.cache.index_forms import IndexForms, form_name
from lightning_streaming.cache.index_lock import is_left_over, part_of_scratch
from lightning_streaming.cache.layout import ORIGIN_BASENAME
from lightning_streaming.cache.locks import LocksUnsupportedError, try_lock, unlock_and_close
from lightning_streaming.cache.marks import OwnTimes
from lightning_streaming.cache.origin import read_origin
from lightning_streaming.cache.scan import Entry, find_entry, index_files, shard_files
from lightning_streaming.cache.stamps import time_of
from lightning_streaming.errors import ConfigError, FormatError, StorageError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex


class FileKind(enum.Enum):
    """What a file of a cache directory is."""

    OURS = "ours"
    """Fetched by us, checked and unchanged."""
    FOREIGN = "foreign"
    """Put there by somebody, or changed since; never removed."""
    ARRIVING = "arriving"
    """On its way."""
    INDEX = "index"
    """The index, or a parsed form of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFile:
    """One file of a cache directory."""

    name: str
    """Path relative to the directory."""
    kind: FileKind
    bytes: int
    """Its size; of a file on its way the one it will have."""
    last_used: float | None
    """Seconds since 1970; None where we keep no account of it."""
    in_use: bool
    """Whether a process of this machine has it open, or writes it, or one of another machine may do so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedIndex:
    """The index of a cache directory."""

    index: DatasetIndex
    digest: str
    """SHA-256 of its text."""

    @property
    def form_name(self) -> str:
        """The name of its parsed form, if there is one."""
        return form_name(self.digest)


def list_cache(directory: Path, advance: Callable[[int], object] | None = None) -> list[CacheFile]:
    """Every file of a cache directory but its own notes, sorted by name.

    Args:
        directory: One stream's cache directory.
        advance: Told that another file was looked at.

    Raises:
        ConfigError: It is not one.
    """
    own = own_times(directory)
    found = chain(
        (
            (entry, FileKind.OURS if own.include(entry.modified) else FileKind.FOREIGN)
            for entry in shard_files(directory)
        ),
        ((entry, FileKind.INDEX) for entry in index_files(directory)),
        ((entry, FileKind.ARRIVING) for entry in _parts(directory)),
    )
    files = []
    for entry, kind in found:
        files.append(_described(directory, entry, kind))
        if advance is not None:
            advance(1)
    return sorted(files, key=lambda file: file.name)


def find_index(directory: Path) -> CachedIndex | None:
    """The index of a cache directory; None where it has none, or one that cannot be read."""
    path = directory / INDEX_BASENAME
    with suppress(OSError, FormatError):
        check = None if (origin := read_origin(directory)) is None else origin.check
        digest = None if check is None else check.digest
        if path.exists():
            found = load_index(path, str(path), IndexForms(directory), None, digest)
            return CachedIndex(index=found.index, digest=found.known.digest)
        # Of a dataset that is read in place there may be a parsed form.
        form = None if digest is None else IndexForms(directory).open(digest)
        return None if form is None else CachedIndex(index=form.index, digest=form.digest)
    return None


def is_cache(directory: Path) -> bool:
    """Whether a directory is one stream's cache: we left a note there."""
    return _own_times(directory) is not None


def own_times(directory: Path) -> OwnTimes:
    """Which modification times are ours in a cache directory.

    Raises:
        ConfigError: It is not one.
    """
    found = _own_times(directory)
    if found is None:
        raise ConfigError(
            f"{directory} is not a cache directory of one stream: it has no {ORIGIN_BASENAME} of ours; give the one "
            "that holds the shards that were fetched"
        )
    return found


def is_locked(path: Path) -> bool:
    """Whether a process of this machine has a file open and says so."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not try_lock(descriptor, shared=False)
    except LocksUnsupportedError:
        return False
    finally:
        unlock_and_close(descriptor)


def _own_times(directory: Path) -> OwnTimes | None:
    with suppress(StorageError):  # one that may not be read says nothing
        origin = read_origin(directory)
        return None if origin is None else origin.own
    return None


def _parts(directory: Path) -> Iterator[Entry]:
    found = (find_entry(Path(part.path)) for part in arriving(directory))
    return (entry for entry in found if entry is not None)


def _described(directory: Path, entry: Entry, kind: FileKind) -> CacheFile:
    path = Path(entry.path)
    return CacheFile(
        name=str(path.relative_to(directory)),
        kind=kind,
        bytes=entry.size,
        last_used=time_of(entry.stamp) / 1e9 if kind is FileKind.OURS else None,
        in_use=_is_in_use(path, kind),
    )


def _is_in_use(path: Path, kind: FileKind) -> bool:
    if kind is FileKind.ARRIVING:
        return _is_written(path)
    if kind is FileKind.INDEX and part_of_scratch(path.name) is not None:
        return not is_left_over(path)
    return is_locked(path)


def _is_written(path: Path) -> bool:
    descriptor = lock_if_dead(path)
    if descriptor is not None:
        unlock_and_close(descriptor)
    return descriptor is None
