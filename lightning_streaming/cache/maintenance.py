"""What the cache commands of the command line do: look at a cache directory, and remove files from it on a wish.

Neither hurts whoever uses the directory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from lightning_streaming.cache import eviction, index_files, selection_files, usage
from lightning_streaming.cache.config import MANIFEST_BASENAME, NOTE_BASENAMES, STAGING_BASENAME
from lightning_streaming.cache.file_states import CacheDirectory, is_written, staging_path
from lightning_streaming.cache.manifest import OwnTags, read_manifest
from lightning_streaming.cache.shared_files import is_locked
from lightning_streaming.errors import ConfigError, FormatError, LockTimeoutError, StorageError
from lightning_streaming.formats.index import INDEX_BASENAME
from lightning_streaming.formats.shard import name_in_index

_AT_ONCE = 16
"""Files that are removed while holding the usage lock, for which readers may be waiting."""


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
    SELECTION = "selection"
    """A kept selection of samples, or what is there of one that is being made."""


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


def list_cache(directory: Path, advance: Callable[[int], object] | None = None) -> list[CacheFile]:
    """Every file of a cache directory but its own notes, sorted by name.

    Args:
        directory: One stream's cache directory.
        advance: Told that another file was looked at.

    Raises:
        ConfigError: It is not one.
    """
    own = own_tags(directory)
    found = chain(
        (
            (entry, FileKind.OURS if own.include(entry.modified) else FileKind.FOREIGN)
            for entry in usage.shard_files(directory)
        ),
        ((entry, FileKind.INDEX) for entry in usage.index_files(directory)),
        ((entry, FileKind.SELECTION) for entry in usage.selection_files(directory)),
        ((entry, FileKind.ARRIVING) for entry in _staged(directory)),
    )
    files = []
    for entry, kind in found:
        files.append(_described(directory, entry, kind))
        if advance is not None:
            advance(1)
    return sorted(files, key=lambda file: file.name)


def find_index(directory: Path) -> index_files.LoadedIndex | None:
    """The index of a cache directory; None where it has none, or one that cannot be read."""
    path = directory / INDEX_BASENAME
    forms = index_files.IndexForms(directory)
    with suppress(OSError, FormatError):
        manifest = read_manifest(directory)
        digest = None if manifest is None else manifest.digest
        if path.exists():
            return forms.load(path, likely=digest)
        # Of a dataset that is read in place there may be a parsed form.
        form = None if digest is None else forms.open(digest)
        return None if form is None else index_files.LoadedIndex(form.index, form.digest)
    return None


def is_cache(directory: Path) -> bool:
    """Whether a directory is one stream's cache: we left a note there."""
    return _find_own_tags(directory) is not None


def own_tags(directory: Path) -> OwnTags:
    """Which tags are ours in a cache directory.

    Raises:
        ConfigError: It is not one.
    """
    found = _find_own_tags(directory)
    if found is None:
        raise ConfigError(
            f"{directory} is not a cache directory of one stream: it has no {MANIFEST_BASENAME} of ours",
            hint="give the one that holds the shards that were fetched",
            option="directory",
            path=str(directory),
        )
    return found


def _find_own_tags(directory: Path) -> OwnTags | None:
    with suppress(StorageError):  # one that may not be read says nothing
        manifest = read_manifest(directory)
        return None if manifest is None else manifest.own
    return None


def _staged(directory: Path) -> Iterator[usage.CacheEntry]:
    return filter(None, (usage.find_entry(Path(file.path)) for file in usage.staging_files(directory)))


def _described(directory: Path, entry: usage.CacheEntry, kind: FileKind) -> CacheFile:
    path = Path(entry.path)
    is_used = kind is FileKind.OURS or (kind is FileKind.SELECTION and selection_files.are_bits(path))
    return CacheFile(
        name=str(path.relative_to(directory)),
        kind=kind,
        bytes=entry.size,
        last_used=eviction.last_used(entry.accessed) / 1e9 if is_used else None,
        in_use=_is_in_use(path, kind),
    )


def _is_in_use(path: Path, kind: FileKind) -> bool:
    if kind is FileKind.ARRIVING:
        return is_written(path)
    if kind is FileKind.SELECTION:
        return selection_files.is_in_use(path)
    if kind is FileKind.INDEX and index_files.staging_name_of(path.name) is not None:
        return not index_files.is_left_over(path)
    return is_locked(path)


class Reason(enum.Enum):
    """Why a file goes, or stays."""

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


def plan_clear(directory: Path, files: Iterable[CacheFile], index: index_files.LoadedIndex | None) -> Plan:
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
            goes.append((file, _UNNEEDED[file.kind]))
        elif named is not None and name_in_index(file.name) not in named:
            stays.append((file, Reason.PERHAPS_NAMED))
        else:
            goes.append((file, Reason.FETCHED))
    return Plan(directory=directory, goes=goes, stays=stays)


def plan_garbage(
    directory: Path, files: Iterable[CacheFile], index: index_files.LoadedIndex | None, unused_since: float | None
) -> Plan:
    """What nobody will need goes: what dead processes left, also of selections; old parsed indexes; files that the
    index names no more.

    A directory goes too into which nothing was ever fetched.

    Args:
        directory: The cache directory.
        files: What is there.
        index: Its index; None where that is not known, and then all shards are.
        unused_since: Shards and selections last used before this go too, in seconds since 1970; None for no such time.
    """
    files = list(files)
    selections = {selection_files.key_of(Path(file.name)) for file in files if _is_kept(file, unused_since)}
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
"""Why a file of each kind goes that is in the way of nobody."""


def _is_cold(file: CacheFile, unused_since: float | None) -> bool:
    return unused_since is not None and file.last_used is not None and file.last_used < unused_since


def _is_kept(file: CacheFile, unused_since: float | None) -> bool:
    """Whether a file is a whole selection, which stays."""
    is_whole = file.kind is FileKind.SELECTION and selection_files.are_bits(Path(file.name))
    return is_whole and (file.in_use or not _is_cold(file, unused_since))


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
        LockTimeoutError: Another process holds the usage lock for too long.
    """
    cleaner = _Cleaner(plan)
    goes, stays = list[Judged](), list(plan.stays)
    # Those that are not counted come last: nobody needs the usage lock for them. Of a selection its lock does.
    pending = iter(sorted(plan.goes, key=lambda judged: (not _is_counted(judged[0]), _is_lock(judged[0]))))
    while batch := list(islice(pending, _AT_ONCE)):
        for (file, reason), gone in zip(batch, cleaner.remove(batch), strict=True):
            if gone:
                goes.append((file, reason))
            elif (plan.directory / file.name).exists():
                stays.append((file, cleaner.why_it_stays(file)))
        advance(len(batch))
    is_gone = plan.removes_directory and _remove_empty(plan.directory)
    return replace(plan, goes=goes, stays=stays, removes_directory=is_gone)


class _Cleaner:
    """Removes files of one directory, some at a time: nobody has to wait long for the usage lock."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._directory = plan.directory
        self._cache = CacheDirectory(plan.directory, lambda: own_tags(plan.directory))

    def remove(self, batch: Sequence[Judged]) -> list[bool]:
        """Whether each of some files was removed."""
        with self._cache.locked() as count:
            if count is None:
                raise ConfigError(
                    f"the filesystem of {self._directory} has no file locks, so what is in use cannot be told",
                    path=str(self._directory),
                )
            if any(file.kind is FileKind.ARRIVING for file, _ in batch):
                self._cache.sweep(count)
            removed = {file.name: self._remove(count, file, why) for file, why in batch if _is_counted(file)}
        return [
            removed[file.name] if _is_counted(file) else self._remove_uncounted(file, reason) for file, reason in batch
        ]

    def _remove_uncounted(self, file: CacheFile, reason: Reason) -> bool:
        path = self._directory / file.name
        if file.kind is FileKind.INDEX:
            return _remove_beside_index(path)
        return not (reason is Reason.COLD and self._was_used(path)) and selection_files.remove_unused(path)

    def _was_used(self, path: Path) -> bool:
        """Whether somebody has used a file since it was planned to remove it for being cold."""
        entry, since = usage.find_entry(path), self._plan.unused_since
        return entry is not None and since is not None and eviction.last_used(entry.accessed) >= since * 1e9

    def why_it_stays(self, file: CacheFile) -> Reason:
        """Why a file could not be removed."""
        path = self._directory / file.name
        entry = usage.find_entry(path)
        if file.kind is FileKind.OURS and entry is not None:
            if not self._cache.own.include(entry.modified):
                return Reason.NOT_OURS
            if eviction.last_used(entry.accessed) / 1e9 != file.last_used:
                return Reason.IN_USE
        return Reason.IN_USE if _is_in_use(path, file.kind) else Reason.REFUSED

    def _remove(self, count: usage.UsageCount, file: CacheFile, reason: Reason) -> bool:
        path = self._directory / file.name
        if file.kind is FileKind.ARRIVING:
            return not path.exists()
        entry = usage.find_entry(path)
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


def _is_lock(file: CacheFile) -> bool:
    return file.kind is FileKind.SELECTION and selection_files.is_lock(Path(file.name))


def _remove_beside_index(path: Path) -> bool:
    """Remove a parsed index that nobody has mapped, or what was left of making one."""
    staging = index_files.staging_name_of(path.name)
    if staging is None:
        return index_files.remove_unlocked(path)
    with suppress(OSError, LockTimeoutError):
        if staging == staging_path(path.parent, INDEX_BASENAME).name:
            with index_files.locked_index(path.parent, 0.0):
                pass  # its holder removes what an earlier one left
        elif index_files.is_left_over(path):
            path.unlink()
    return not path.exists()


def _holds_notes_only(directory: Path) -> bool:
    """Whether there is nothing but our notes in the cache directory of a remote, files on their way apart.

    Whoever reads a remote has its index there. A dataset that is read in place has none, so its directory may be in
    use however empty it is.
    """
    with suppress(OSError, StorageError):
        manifest = read_manifest(directory)
        found = {path.name for path in directory.iterdir()}
        return manifest is not None and not manifest.of_originals and found <= {*NOTE_BASENAMES, STAGING_BASENAME}
    return False


def _remove_empty(directory: Path) -> bool:
    """Remove a directory that holds our notes only, unless somebody is about to fetch an index into it.

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
        # Whoever comes now has a staging file there, or makes the directory anew.
        staging.rmdir()
        directory.rmdir()
    return not directory.exists()
