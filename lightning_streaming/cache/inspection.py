"""Looking at a cache directory from outside, and clearing it, without hurting whoever uses it."""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lightning_streaming.cache.arrival import arriving, lock_if_dead
from lightning_streaming.cache.index_forms import IndexForms
from lightning_streaming.cache.layout import USAGE_BASENAME
from lightning_streaming.cache.locks import LocksUnsupportedError, try_lock, unlock_and_close
from lightning_streaming.cache.marks import OwnTimes, read_mark
from lightning_streaming.cache.place import CachePlace
from lightning_streaming.cache.scan import Entry, find_entry, index_files, shard_files
from lightning_streaming.cache.stamps import FINISHED_BEFORE
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import INDEX_BASENAME, parse_index


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
    """Seconds since 1970; None where that is not known, or the shard was finished with."""
    in_use: bool
    """Whether a process has it open, or writes it, on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """What was removed."""

    files: int
    bytes: int


def list_cache(directory: Path) -> list[CacheFile]:
    """Every file of a cache directory but its own notes, sorted by name.

    Args:
        directory: One stream's cache directory.

    Raises:
        ConfigError: It is not one.
    """
    own = _own_times(directory)
    whole = [
        _described(directory, entry, FileKind.OURS if own.include(entry.modified) else FileKind.FOREIGN)
        for entry in shard_files(directory)
    ]
    indexes = [_described(directory, entry, FileKind.INDEX) for entry in index_files(directory)]
    parts = [_described(directory, entry, FileKind.ARRIVING) for entry in _parts(directory)]
    return sorted([*whole, *indexes, *parts], key=lambda file: file.name)


def clear_cache(directory: Path) -> Removed:
    """Remove all shards that we fetched and nobody uses, and what dead writers left.

    Raises:
        ConfigError: It is not a cache directory, or its filesystem has no locks to tell what is in use.
    """
    return _remove(directory, _any)


def collect_garbage(directory: Path) -> Removed:
    """Remove what nobody will need: parts of dead writers, parsed forms of old indexes, shards that the index lacks.

    Raises:
        ConfigError: As for :func:`clear_cache`.
        IndexFormatError: The index cannot be read.
    """
    path = directory / INDEX_BASENAME
    if not path.exists():
        return _remove(directory, _none)
    text = path.read_bytes()
    files = chain.from_iterable(chain(*shard.files) for shard in parse_index(text, str(path)).shards)
    known = {os.path.join(directory, file.basename) for file in files if file is not None}  # noqa: PTH118  many
    before = sum(entry.size for entry in index_files(directory))
    forms = len(list(index_files(directory)))
    IndexForms(directory).sweep(hashlib.sha256(text).hexdigest())
    removed = _remove(directory, lambda entry: entry.path not in known)
    after = list(index_files(directory))
    return Removed(
        files=removed.files + forms - len(after),
        bytes=removed.bytes + before - sum(entry.size for entry in after),
    )


def _remove(directory: Path, unwanted: Callable[[Entry], bool]) -> Removed:
    """Remove unused files of ours that are unwanted, and dead parts."""
    place = CachePlace(directory, lambda: _own_times(directory))
    files = size = 0
    own = place.own
    with place.held() as ledger:
        if ledger is None:
            raise ConfigError(f"the filesystem of {directory} has no file locks, so what is in use cannot be told")
        before = ledger.used or 0
        files += place.sweep(ledger)
        for entry in place.scan().files:
            if own.include(entry.modified) and unwanted(entry):
                files += place.remove_unused(ledger, [entry])
        size = before - (ledger.used or 0)
    return Removed(files=files, bytes=size)


def _any(entry: Entry) -> bool:  # noqa: ARG001  all are alike
    return True


def _none(entry: Entry) -> bool:  # noqa: ARG001  all are alike
    return False


def _own_times(directory: Path) -> OwnTimes:
    mark = read_mark(directory)
    if mark is None and not (directory / USAGE_BASENAME).exists():
        raise ConfigError(f"{directory} is not a cache directory of one stream; give the one that holds its shards")
    return OwnTimes(mark)


def _parts(directory: Path) -> Iterator[Entry]:
    found = (find_entry(Path(part.path)) for part in arriving(directory))
    return (entry for entry in found if entry is not None)


def _described(directory: Path, entry: Entry, kind: FileKind) -> CacheFile:
    path = Path(entry.path)
    return CacheFile(
        name=str(path.relative_to(directory)),
        kind=kind,
        bytes=entry.size,
        last_used=entry.stamp / 1e9 if entry.stamp >= FINISHED_BEFORE and kind is FileKind.OURS else None,
        in_use=_is_written(path) if kind is FileKind.ARRIVING else _is_open(path),
    )


def _is_open(path: Path) -> bool:
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


def _is_written(path: Path) -> bool:
    descriptor = lock_if_dead(path)
    if descriptor is not None:
        unlock_and_close(descriptor)
    return descriptor is None
