"""Listing, clearing and collecting garbage of a cache directory, for the ``cache`` command.

None of it disturbs processes that use the directory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from lightning_streaming.cache import eviction, index_files, records, selection_files
from lightning_streaming.cache.config import MANIFEST_BASENAME, NOTE_BASENAMES, STAGING_BASENAME
from lightning_streaming.cache.file_states import CacheDirectory, is_written, staging_path
from lightning_streaming.cache.records import OwnTags, read_manifest
from lightning_streaming.cache.shared_files import is_locked
from lightning_streaming.errors import ConfigError, FormatError, LockTimeoutError, StorageError
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.formats.shard import name_in_index

_AT_ONCE = 16
"""Number of files that are removed while the usage lock is held: readers may be waiting for it."""


class FileKind(enum.Enum):
    """Kinds of files in a cache directory."""

    OURS = "ours"
    """Fetched by this library, checked and unchanged."""
    FOREIGN = "foreign"
    """Put there by another program, or changed since; never removed."""
    ARRIVING = "arriving"
    """A staging file."""
    INDEX = "index"
    """The index, or a parsed form of it."""
    SELECTION = "selection"
    """A cached selection of samples, or a part of one that is being created."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFile:
    """A file of a cache directory."""

    name: str
    """Path relative to the directory."""
    kind: FileKind
    bytes: int
    """Its size; that of a staging file is the final one."""
    last_used: float | None
    """Seconds since 1970; None if it is not recorded."""
    in_use: bool
    """Whether a process of this machine has it open, or writes it, or one of another machine may do so."""


def list_cache(directory: Path, advance: Callable[[int], object] | None = None) -> list[CacheFile]:
    """List the files of a cache directory, sorted by name, without those that describe it.

    Args:
        directory: The cache directory of a stream.
        advance: Callback for files.

    Raises:
        ConfigError: It is not a cache directory.
    """
    own = own_tags(directory)
    staged = (records.find_entry(Path(file.path)) for file in records.staging_files(directory))
    entries = chain(
        (
            (entry, FileKind.OURS if own.include(entry.modified) else FileKind.FOREIGN)
            for entry in records.shard_files(directory)
        ),
        ((entry, FileKind.INDEX) for entry in records.index_files(directory)),
        ((entry, FileKind.SELECTION) for entry in records.selection_files(directory)),
        ((entry, FileKind.ARRIVING) for entry in staged if entry is not None),
    )
    files = []
    for entry, kind in entries:
        path = Path(entry.path)
        has_use = kind is FileKind.OURS or (kind is FileKind.SELECTION and selection_files.are_bits(path))
        file = CacheFile(
            name=str(path.relative_to(directory)),
            kind=kind,
            bytes=entry.size,
            last_used=eviction.last_used(entry.accessed) / 1e9 if has_use else None,
            in_use=_is_in_use(path, kind),
        )
        files.append(file)
        if advance is not None:
            advance(1)
    return sorted(files, key=lambda file: file.name)


def find_index(directory: Path) -> index_files.LoadedIndex | None:
    """Return the index of a cache directory; None if it has none, or one that cannot be read."""
    path = directory / INDEX_BASENAME
    forms = index_files.IndexForms(directory)
    with suppress(OSError, FormatError):
        manifest = read_manifest(directory)
        digest = None if manifest is None else manifest.digest
        if path.exists():
            return forms.load(path, likely=digest)
        # A dataset that is read in place may have a parsed form here.
        form = None if digest is None else forms.open(digest)
        return None if form is None else index_files.LoadedIndex(form.index, form.digest)
    return None


def is_cache(directory: Path) -> bool:
    """Return whether a directory is the cache directory of a stream, with a manifest."""
    return _find_own_tags(directory) is not None


def own_tags(directory: Path) -> OwnTags:
    """Return the tags of files that are ours in a cache directory.

    Raises:
        ConfigError: It is not a cache directory.
    """
    own = _find_own_tags(directory)
    if own is None:
        raise ConfigError(
            f"{directory} is not a cache directory of one stream: it has no {MANIFEST_BASENAME} of this library",
            hint="pass the directory of the fetched shards",
            option="directory",
            path=str(directory),
        )
    return own


def _find_own_tags(directory: Path) -> OwnTags | None:
    with suppress(StorageError):  # it may not be read
        manifest = read_manifest(directory)
        return None if manifest is None else manifest.own
    return None


def _is_in_use(path: Path, kind: FileKind) -> bool:
    if kind is FileKind.ARRIVING:
        return is_written(path)
    if kind is FileKind.SELECTION:
        return selection_files.is_in_use(path)
    if kind is FileKind.INDEX and index_files.staging_name_of(path.name) is not None:
        return not index_files.is_leftover(path)
    return is_locked(path)


class Reason(enum.Enum):
    """Reasons why a file is removed, or stays."""

    FETCHED = "fetched and unused"
    DEAD = "left by a process that died"
    OLD_FORM = "parsed form of an index, unused"
    SELECTION = "of a selection, unused"
    UNNAMED = "not in the index any more"
    COLD = "not used for long"
    IN_USE = "in use"
    NOT_OURS = "not fetched by us"
    PERHAPS_NAMED = "not in the index any more, but a job that runs here may have begun with the one before"
    REFUSED = "of another user, who alone may remove it"


Judged = tuple[CacheFile, Reason]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The files of a directory to remove. The index itself always stays, and is in neither list."""

    directory: Path
    goes: Sequence[Judged]
    """Files to remove, with reasons."""
    stays: Sequence[Judged]
    """Files that a user might expect to be removed, with the reasons why they stay."""
    unused_since: float | None = None
    """Files last used before this time count as cold, in seconds since 1970."""
    removes_directory: bool = False
    """Whether the directory is removed, too, because no other file was ever fetched into it."""


def plan_clear(directory: Path, files: Iterable[CacheFile], index: index_files.LoadedIndex | None) -> Plan:
    """Plan to remove all fetched files that are not in use."""
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
            goes.append((file, _UNNEEDED[file.kind]))
        elif named is not None and name_in_index(file.name) not in named:
            stays.append((file, Reason.PERHAPS_NAMED))
        else:
            goes.append((file, Reason.FETCHED))
    return Plan(directory=directory, goes=goes, stays=stays)


def plan_garbage(
    directory: Path, files: Iterable[CacheFile], index: index_files.LoadedIndex | None, unused_since: float | None
) -> Plan:
    """Plan to remove files that no process will need: left by dead processes, old parsed indexes, not in the index.

    A directory into which nothing was ever fetched is removed, too.

    Args:
        directory: The cache directory.
        files: Its files.
        index: Its index; None if it is unknown, and all shards stay.
        unused_since: Shards and selections last used before this are removed, too, in seconds since 1970; None for no
            such time.
    """
    files = list(files)
    selections = {
        selection_files.key_of(Path(file.name))
        for file in files
        if file.kind is FileKind.SELECTION
        and selection_files.are_bits(Path(file.name))
        and (file.in_use or not _is_cold(file, unused_since))
    }
    named, busy = _names(index), _is_busy(files)
    current = None if index is None else index_files.form_name(index.digest)
    goes: list[Judged] = []
    stays: list[Judged] = []
    for file in files:
        if file.in_use or file.kind is FileKind.FOREIGN or file.name in (INDEX_BASENAME, current):
            continue
        if file.kind is FileKind.SELECTION and selection_files.stays_with(selections, Path(file.name)):
            continue
        if _is_cold(file, unused_since):
            goes.append((file, Reason.COLD))
        elif file.kind is not FileKind.OURS:
            goes.append((file, _UNNEEDED[file.kind]))
        elif named is not None and name_in_index(file.name) not in named:
            (stays if busy else goes).append((file, Reason.PERHAPS_NAMED if busy else Reason.UNNAMED))
    is_empty = index is None and len(goes) == len(files) and _holds_notes_only(directory)
    return Plan(directory=directory, goes=goes, stays=stays, unused_since=unused_since, removes_directory=is_empty)


_UNNEEDED = {
    FileKind.ARRIVING: Reason.DEAD,
    FileKind.INDEX: Reason.OLD_FORM,
    FileKind.SELECTION: Reason.SELECTION,
}
"""Reasons to remove files of each kind that are not in use."""


def _is_cold(file: CacheFile, unused_since: float | None) -> bool:
    return unused_since is not None and file.last_used is not None and file.last_used < unused_since


def carry_out(plan: Plan, advance: Callable[[int], object]) -> Plan:
    """Remove the files of a plan, if they are still unused and may be removed.

    Args:
        plan: The plan. Each file is checked again.
        advance: Callback for files.

    Returns:
        The files that were removed, and those that stay.

    Raises:
        ConfigError: It is not a cache directory any more, or its filesystem has no locks, which show what is in use.
        StorageError: The directory may not be written to.
        LockTimeoutError: Another process holds the usage lock for too long.
    """
    cleaner = _Cleaner(plan)
    goes, stays = list[Judged](), list(plan.stays)
    # Files that are not counted come last, as they do not need the usage lock; of a selection, its lock is the last.
    pending = iter(sorted(plan.goes, key=lambda judged: (not _is_counted(judged[0]), _is_selection_lock(judged[0]))))
    while batch := list(islice(pending, _AT_ONCE)):
        for (file, reason), is_removed in zip(batch, cleaner.remove(batch), strict=True):
            if is_removed:
                goes.append((file, reason))
            elif (plan.directory / file.name).exists():
                stays.append((file, cleaner.why_it_stays(file)))
        advance(len(batch))
    removes_directory = plan.removes_directory and _remove_empty(plan.directory)
    return replace(plan, goes=goes, stays=stays, removes_directory=removes_directory)


class _Cleaner:
    """Remover of files of a directory, a few at a time, so that no process waits long for the usage lock."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._directory = plan.directory
        self._cache = CacheDirectory(plan.directory, lambda: own_tags(plan.directory))

    def remove(self, batch: Sequence[Judged]) -> list[bool]:
        """Remove files; return for each whether it was removed."""
        with self._cache.locked() as count:
            if count is None:
                raise ConfigError(
                    f"the filesystem of {self._directory} has no file locks, which show which files are in use",
                    path=str(self._directory),
                )
            if any(file.kind is FileKind.ARRIVING for file, _ in batch):
                self._cache.sweep(count)
            removed = {file.name: self._remove(count, file, why) for file, why in batch if _is_counted(file)}
        for file, reason in batch:
            path = self._directory / file.name
            if file.kind is FileKind.INDEX:
                removed[file.name] = _remove_parsed_index(path)
            elif not _is_counted(file):
                is_unused = not (reason is Reason.COLD and self._was_used(path))
                removed[file.name] = is_unused and selection_files.remove_unused(path)
        return [removed[file.name] for file, _ in batch]

    def _was_used(self, path: Path) -> bool:
        """Return whether a cold file was used since the plan was made."""
        entry, since = records.find_entry(path), self._plan.unused_since
        return entry is not None and since is not None and eviction.last_used(entry.accessed) >= since * 1e9

    def why_it_stays(self, file: CacheFile) -> Reason:
        """Return the reason why a file could not be removed."""
        path = self._directory / file.name
        entry = records.find_entry(path)
        if file.kind is FileKind.OURS and entry is not None:
            if not self._cache.own.include(entry.modified):
                return Reason.NOT_OURS
            if eviction.last_used(entry.accessed) / 1e9 != file.last_used:
                return Reason.IN_USE
        return Reason.IN_USE if _is_in_use(path, file.kind) else Reason.REFUSED

    def _remove(self, count: records.UsageCount, file: CacheFile, reason: Reason) -> bool:
        path = self._directory / file.name
        if file.kind is FileKind.ARRIVING:
            return not path.exists()
        entry = records.find_entry(path)
        if entry is None or not self._cache.own.include(entry.modified):
            return False
        if reason is Reason.COLD and self._was_used(path):
            return False
        return self._cache.remove_unused(count, [entry], f"cache maintenance: {reason.value}")


def _names(index: index_files.LoadedIndex | None) -> Container[str] | None:
    if index is None:
        return None
    files = chain.from_iterable(chain(*shard.files) for shard in index.index.shards)
    return {file.basename for file in files if file is not None}


def _is_busy(files: Iterable[CacheFile]) -> bool:
    return any(file.in_use for file in files)


def _is_counted(file: CacheFile) -> bool:
    return file.kind in (FileKind.OURS, FileKind.ARRIVING)


def _is_selection_lock(file: CacheFile) -> bool:
    return file.kind is FileKind.SELECTION and selection_files.is_lock(Path(file.name))


def _remove_parsed_index(path: Path) -> bool:
    """Remove a parsed index that no process has mapped, or a leftover file of creating one."""
    staging = index_files.staging_name_of(path.name)
    if staging is None:
        return index_files.remove_unlocked(path)
    with suppress(OSError, LockTimeoutError):
        if staging == staging_path(path.parent, INDEX_BASENAME).name:
            with index_files.locked_index(path.parent, 0.0):
                pass  # the lock removes files of its earlier holder
        elif index_files.is_leftover(path):
            path.unlink()
    return not path.exists()


def _holds_notes_only(directory: Path) -> bool:
    """Return whether the cache directory of a remote has no files except those that describe it, and staging files.

    A process that reads a remote has its index there. A dataset that is read in place has none, so its directory may
    be in use even if it is empty.
    """
    with suppress(OSError, StorageError):
        manifest = read_manifest(directory)
        names = {path.name for path in directory.iterdir()}
        return manifest is not None and not manifest.of_originals and names <= {*NOTE_BASENAMES, STAGING_BASENAME}
    return False


def _remove_empty(directory: Path) -> bool:
    """Remove a directory with nothing but the files that describe it, unless a process is fetching an index into it.

    Returns:
        Whether it is gone.
    """
    staging = directory / STAGING_BASENAME
    with suppress(OSError, StorageError, LockTimeoutError):
        with index_files.locked_index(directory, 0.0):
            if not _holds_notes_only(directory) or len(list(staging.iterdir())) > 1:
                return False
            for name in NOTE_BASENAMES:
                (directory / name).unlink(missing_ok=True)
        # A process that starts now has a staging file there, or creates the directory again.
        staging.rmdir()
        directory.rmdir()
    return not directory.exists()
