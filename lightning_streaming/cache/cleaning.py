"""Removing files from a cache directory on somebody's wish, without hurting whoever uses it."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from lightning_streaming.cache.arrival import part_path
from lightning_streaming.cache.empty import holds_notes_only, remove_empty
from lightning_streaming.cache.index_lock import held_index, is_left_over, part_of_scratch
from lightning_streaming.cache.inspection import (
    CachedIndex,
    CacheFile,
    FileKind,
    is_locked,
    own_times,
)
from lightning_streaming.cache.ledger import Ledger
from lightning_streaming.cache.locks import try_lock, unlock_and_close
from lightning_streaming.cache.place import CachePlace
from lightning_streaming.cache.scan import find_entry
from lightning_streaming.cache.stamps import time_of
from lightning_streaming.errors import ConfigError, LockTimeoutError
from lightning_streaming.formats.index import INDEX_BASENAME

_AT_ONCE = 16
"""Files that are removed while holding the ledger, for which readers may be waiting."""


class Reason(enum.Enum):
    """Why a file goes, or stays."""

    FETCHED = "fetched and unused"
    DEAD = "left by a process that died"
    OLD_FORM = "parsed form of an index, unused"
    UNNAMED = "not in the index any more"
    COLD = "not used for long"
    IN_USE = "in use"
    NOT_OURS = "not fetched by us"
    PERHAPS_NAMED = "not in the index any more, but a job that runs here may have begun with the one before"
    REFUSED = "of another user, who alone may remove it"


Judged = tuple[CacheFile, Reason]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is to be done with the files of one directory. The index itself always stays, and is in neither list."""

    directory: Path
    goes: Sequence[Judged]
    """To be removed, with why."""
    stays: Sequence[Judged]
    """What one might have thought would go, with why it does not."""
    unused_since: float | None = None
    """What is cold was last used before this, in seconds since 1970."""
    removes_directory: bool = False
    """Whether the directory goes too, because nothing was ever fetched into it but what goes."""


def plan_clear(directory: Path, files: Iterable[CacheFile], index: CachedIndex | None) -> Plan:
    """All that we fetched and nobody uses goes."""
    files = list(files)
    named = _names(index) if _is_busy(files) else None
    goes: list[Judged] = []
    stays: list[Judged] = []
    for file in files:
        if file.kind is FileKind.FOREIGN:
            stays.append((file, Reason.NOT_OURS))
        elif file.name == INDEX_BASENAME:
            continue
        elif file.in_use:
            stays.append((file, Reason.IN_USE))
        elif file.kind is not FileKind.OURS:
            goes.append((file, Reason.DEAD if file.kind is FileKind.ARRIVING else Reason.OLD_FORM))
        elif named is not None and file.name not in named:
            stays.append((file, Reason.PERHAPS_NAMED))
        else:
            goes.append((file, Reason.FETCHED))
    return Plan(directory=directory, goes=goes, stays=stays)


def plan_garbage(
    directory: Path, files: Iterable[CacheFile], index: CachedIndex | None, unused_since: float | None
) -> Plan:
    """What nobody will need goes: what dead processes left, old parsed indexes, files that the index names no more.

    A directory goes too into which nothing was ever fetched.

    Args:
        directory: The cache directory.
        files: What is there.
        index: Its index; None where that is not known, and then all shards are.
        unused_since: Shards last used before this go too, in seconds since 1970; None for no such time.
    """
    files = list(files)
    named, busy = _names(index), _is_busy(files)
    current = None if index is None else index.form_name
    goes: list[Judged] = []
    stays: list[Judged] = []
    for file in files:
        if file.in_use or file.kind is FileKind.FOREIGN or file.name in (INDEX_BASENAME, current):
            continue
        if file.kind is not FileKind.OURS:
            goes.append((file, Reason.DEAD if file.kind is FileKind.ARRIVING else Reason.OLD_FORM))
        elif unused_since is not None and file.last_used is not None and file.last_used < unused_since:
            goes.append((file, Reason.COLD))
        elif named is not None and file.name not in named:
            (stays if busy else goes).append((file, Reason.PERHAPS_NAMED if busy else Reason.UNNAMED))
    is_empty = index is None and len(goes) == len(files) and holds_notes_only(directory)
    return Plan(directory=directory, goes=goes, stays=stays, unused_since=unused_since, removes_directory=is_empty)


def carry_out(plan: Plan, advance: Callable[[int], object]) -> Plan:
    """Remove what is to go, as far as that is still right and permitted.

    Args:
        plan: What is to be done. Each file is looked at again.
        advance: Told the number of files dealt with since it was last told.

    Returns:
        What was done: what has gone, and what stays.

    Raises:
        ConfigError: It is not a cache directory any more, or its filesystem has no locks to tell what is in use.
        StorageError: The directory may not be written to.
        LockTimeoutError: Another process holds the ledger for too long.
    """
    cleaner = _Cleaner(plan)
    goes, stays = list[Judged](), list(plan.stays)
    # Those of indexes come last: they are not counted, and nobody needs the ledger for them.
    pending = iter(sorted(plan.goes, key=lambda judged: judged[0].kind is FileKind.INDEX))
    while batch := list(islice(pending, _AT_ONCE)):
        for (file, reason), gone in zip(batch, cleaner.remove(batch), strict=True):
            if gone:
                goes.append((file, reason))
            elif (plan.directory / file.name).exists():
                stays.append((file, cleaner.why_it_stays(file)))
        advance(len(batch))
    is_gone = plan.removes_directory and remove_empty(plan.directory)
    return replace(plan, goes=goes, stays=stays, removes_directory=is_gone)


class _Cleaner:
    """Removes files of one directory, some at a time: nobody has to wait long for the ledger."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._directory = plan.directory
        self._place = CachePlace(plan.directory, lambda: own_times(plan.directory))

    def remove(self, batch: Sequence[Judged]) -> list[bool]:
        """Whether each of some files was removed."""
        with self._place.held() as ledger:
            if ledger is None:
                raise ConfigError(
                    f"the filesystem of {self._directory} has no file locks, so what is in use cannot be told"
                )
            if any(file.kind is FileKind.ARRIVING for file, _ in batch):
                self._place.sweep(ledger)
            removed = {file.name: self._remove(ledger, file, why) for file, why in batch if _is_counted(file)}
        return [
            removed[file.name] if _is_counted(file) else _remove_beside_index(self._directory / file.name)
            for file, _ in batch
        ]

    def why_it_stays(self, file: CacheFile) -> Reason:
        """Why a file could not be removed."""
        path = self._directory / file.name
        entry = find_entry(path)
        if file.kind is FileKind.OURS and entry is not None and not self._place.own.include(entry.modified):
            return Reason.NOT_OURS
        was_used = entry is not None and file.kind is FileKind.OURS and time_of(entry.stamp) / 1e9 != file.last_used
        return Reason.IN_USE if was_used or is_locked(path) else Reason.REFUSED

    def _remove(self, ledger: Ledger, file: CacheFile, reason: Reason) -> bool:
        path = self._directory / file.name
        if file.kind is FileKind.ARRIVING:
            return not path.exists()
        entry = find_entry(path)
        if entry is None or not self._place.own.include(entry.modified):
            return False
        since = self._plan.unused_since
        if reason is Reason.COLD and since is not None and time_of(entry.stamp) >= since * 1e9:
            return False  # it was used meanwhile
        return self._place.remove_unused(ledger, [entry])


def _names(index: CachedIndex | None) -> Container[str] | None:
    if index is None:
        return None
    files = chain.from_iterable(chain(*shard.files) for shard in index.index.shards)
    return {file.basename for file in files if file is not None}


def _is_busy(files: Iterable[CacheFile]) -> bool:
    return any(file.in_use for file in files)


def _is_counted(file: CacheFile) -> bool:
    return file.kind is not FileKind.INDEX


def _remove_beside_index(path: Path) -> bool:
    """Remove a parsed index that nobody has mapped, or what was left of making one."""
    part = part_of_scratch(path.name)
    if part is None:
        return _remove_unlocked(path)
    with suppress(OSError, LockTimeoutError):
        if part == part_path(path.parent, INDEX_BASENAME).name:
            with held_index(path.parent, 0.0):
                pass  # its holder removes what an earlier one left
        elif is_left_over(path):
            path.unlink()
    return not path.exists()


def _remove_unlocked(path: Path) -> bool:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if try_lock(descriptor, shared=False):
                path.unlink()
                return True
        finally:
            unlock_and_close(descriptor)
    return False
