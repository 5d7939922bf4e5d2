"""The records of a cache directory: its manifest with tags, its files, the count of their bytes, their last use.

**Tags** identify by one ``stat`` files that are ours and checked. A tag is a modification time that we set: a whole
second of the years 2001 to 2009. Each cache directory has one, stored in its manifest. Fetched files get that time once
they are complete and checked. Any other file with the name of a shard was written by another program, or changed
since, and is hashed before it is used.

Another index gets another tag, two seconds later: files that were checked by an earlier one are still ours, and
counted and evicted by all jobs, whichever index they started with; but each job trusts only its tag. The tags of a
directory are a family, the even seconds of about two minutes; the odd ones mean "checked by that index, not ours".

**The manifest** is the file ``.origin``, three lines of text: a digest of the remote; the tag in nanoseconds, or the
word ``originals`` where files have tags of the compressed originals that they were created from; and JSON about the
index, which names the tag again. An earlier version wrote only the first line.

**The count** is a number in the file ``.usage``, changed under that file's lock. It is never too small as long as
staging files grow, and files of ours are removed, only by the holder of the lock, who changes the number as well. A
kill in between leaves it too large, until a process that needs room counts again.

**The time of the last use** is the access time, which we set, since filesystems do so seldom or never; ``eviction.py``
defines its meaning.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lightning_streaming.cache import config, shared_files
from lightning_streaming.cache.eviction import finished_time
from lightning_streaming.errors import LockTimeoutError, StorageError
from lightning_streaming.files import FIRST_TAG, PARTIAL_SUFFIX, SECOND, TAGS_SPAN, change_time, is_tag
from lightning_streaming.formats.index import INDEX_BASENAME

_ORIGINALS = "originals"
_FAMILY = 128
"""Seconds of one family: few, so that no old file of a user has such a time by chance; the span is a multiple."""

_FRESH_NANOSECONDS = 10 * 10**9
"""For this time no other process requests the index again: those of one job start at about the same time."""
_SEPARATE_COUNT = (config.MANIFEST_BASENAME, config.USAGE_BASENAME)
_NOT_SHARD_PREFIXES = (config.PARSED_INDEX_PREFIX, shared_files.NEW_PREFIX)
_NOT_SHARDS = (*config.NOTE_BASENAMES, config.STAGING_BASENAME, INDEX_BASENAME)
_SELECTION_FILE = re.compile(r"[0-9a-f]{32}\.((npy|lock)(\..+\.part)?|parts/\d+-\d+\.npy(\..+\.part)?)")
_LOCK_SECONDS = 120.0
"""Timeout for the usage lock: holders are quick, except when they remove thousands of files."""
_DIGITS = 20

# Tags and manifest ----------------------------------------------------------------------------------------------------


def make_tag() -> int:
    """Return a tag for a directory that has none: a random whole second of the years 2001 to 2009, in nanoseconds."""
    return (FIRST_TAG + secrets.randbelow(TAGS_SPAN // _FAMILY) * _FAMILY) * SECOND


def next_tag(tag: int) -> int:
    """Return the tag after another: of the same family, or if that is exhausted, of a new one."""
    later = tag + 2 * SECOND
    return later if _family(later) == _family(tag) else make_tag()


def tag_of_original(status: os.stat_result) -> int:
    """Return the tag of a file created from one that is read in place: another one once that has changed.

    Args:
        status: The result of ``stat`` for the file that is read in place.
    """
    text = f"{status.st_mtime_ns} {status.st_size} {change_time(status)}"
    digest = hashlib.sha256(text.encode()).digest()
    return (FIRST_TAG + int.from_bytes(digest[:8], "big") % TAGS_SPAN) * SECOND


def parse_tag(text: bytes) -> int | None:
    """Return the tag in a manifest; None if it is not one."""
    tag = int(text) if text.isdigit() else 0
    return tag if is_tag(tag) else None


@dataclass(frozen=True, slots=True)
class OwnTags:
    """The tags of files that are ours, and may be removed."""

    tag: int | None
    """The directory's tag; None where files have tags of their originals, and all files are ours."""
    came_with_index: bool = False
    """Whether the index existed before we first fetched anything: it then describes the files that came with it."""

    def include(self, modified: int) -> bool:
        """Return whether a file with this modification time, in nanoseconds, is ours, checked by any index."""
        if self.tag is None:
            return is_tag(modified)
        return (modified - self.tag) % (2 * SECOND) == 0 and _family(modified) == _family(self.tag)

    @property
    def of_remote(self) -> int:
        """The tag of files that are fetched now, in a directory of a remote."""
        assert self.tag is not None, "there is no index by which to check raw files of a dataset that is read in place"
        return self.tag

    def confirmed(self, modified: int) -> int:
        """Return the modification time of a file once it has the hashes in the index.

        A file that is ours stays ours. A file that a later index has confirmed keeps that tag: otherwise jobs of two
        indexes that share a file would change its time back and forth.

        Args:
            modified: Its current modification time, in nanoseconds.
        """
        tag = self.of_remote
        if modified % SECOND or _family(modified) != _family(tag):
            return verified_tag(tag)
        foreign = (modified - tag) % (2 * SECOND)
        return max(modified - foreign, tag) + foreign


def verified_tag(tag: int) -> int:
    """Return the time of a correct file that is not ours: it is not checked again, and never removed."""
    return tag + SECOND


def _family(modified: int) -> int:
    return (modified // SECOND - FIRST_TAG) // _FAMILY


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexCheck:
    """The last request for the index of the remote, and its result."""

    digest: str
    """SHA-256 of the index in the directory."""
    checked: int
    """Time of the request, in nanoseconds since the epoch."""
    version: Mapping[str, Any] = field(default_factory=dict)
    """The store's description of that version: size, ETag, time; may be empty."""
    asker: int | None = None
    """The process that sent the request; None if there was no response."""
    came_along: bool = False
    """Whether that index was in the directory before we first fetched anything into it."""

    def is_fresh(self, after: int = 0) -> bool:
        """Return whether another process of this node requested the index just now, and after a time.

        This process may have written the dataset since its last request.
        """
        is_recent = after <= self.checked and 0 <= time.time_ns() - self.checked < _FRESH_NANOSECONDS
        return self.asker != os.getpid() and is_recent


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheManifest:
    """The contents of a manifest."""

    remote: str
    """See :attr:`~lightning_streaming.cache.config.CacheConfig.digest`."""
    tag: int | None
    """The tag; None in a manifest of an earlier version, and with ``of_originals``."""
    check: IndexCheck | None
    """The request for the index of the tag; None if there was none."""
    of_originals: bool = False
    """Whether the directory is for raw files of a dataset that is read in place, with tags of their originals."""

    @property
    def own(self) -> OwnTags | None:
        """The modification times of files that are ours; None if unknown."""
        return OwnTags(self.tag) if self.tag is not None or self.of_originals else None

    @property
    def digest(self) -> str | None:
        """The digest of the index of the tag."""
        return None if self.check is None else self.check.digest

    def check_of(self, digest: str) -> IndexCheck | None:
        """Return the request for the index with this digest; None for another, or one not fetched from the remote."""
        return self.check if self.check is not None and self.check.digest == digest else None


def read_manifest(directory: Path) -> CacheManifest | None:
    """Read the manifest of a directory; return None if there is none.

    Raises:
        StorageError: It may not be read, or is a link or a special file.
    """
    path = directory / config.MANIFEST_BASENAME
    try:
        with open(path, "rb", opener=shared_files.open_no_link) as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read: {error}",
            hint="the file records which files are the cache's; choose another directory",
            path=str(path),
        ) from error
    first, second, third = (line.strip() for line in [*lines[:3], b"", b"", b""][:3])
    tag, check = parse_tag(second), None
    with suppress(ValueError, KeyError, TypeError):
        fields = json.loads(third)
        read = IndexCheck(
            digest=str(fields["digest"]),
            checked=int(fields["checked"]),
            version=dict(fields["version"] or {}),
            asker=fields.get("asker"),
            came_along=fields.get("came_along") is True,
        )
        check = read if fields.get("mark", tag) == tag else None  # else it was read while it was overwritten
    return CacheManifest(
        remote=first.decode(errors="replace"), tag=tag, check=check, of_originals=second == _ORIGINALS.encode()
    )


def ensure_manifest(directory: Path, remote: str, scratch: Path, *, of_originals: bool = False) -> CacheManifest:
    """Return the manifest of a directory, with a tag; write one if there is none yet.

    Args:
        directory: The cache directory, which exists.
        remote: Digest of the remote for a new manifest.
        scratch: A file in the directory that no other process writes.
        of_originals: Whether a new one is for raw files of a dataset that is read in place.

    Raises:
        StorageError: It may not be read, or could not be written.
    """
    existing = read_manifest(directory)
    if existing is not None and existing.own is not None:
        return existing
    tag = None if of_originals else make_tag()
    remote = existing.remote if existing else remote
    manifest = CacheManifest(remote=remote, tag=tag, check=None, of_originals=of_originals)
    try:
        if existing is not None:
            write_manifest(directory, manifest, scratch)
            return manifest
        _write(directory, manifest, scratch)
        try:
            os.link(scratch, directory / config.MANIFEST_BASENAME)
        except FileExistsError:  # of another user or machine that was faster
            manifest = read_manifest(directory) or manifest
        except OSError:  # a filesystem without hard links
            os.replace(scratch, directory / config.MANIFEST_BASENAME)
    except StorageError:  # the existing one may not be read
        raise
    except OSError as error:
        raise shared_files.unwritable(directory, error) from error
    finally:
        scratch.unlink(missing_ok=True)
    return manifest


def write_manifest(directory: Path, manifest: CacheManifest, scratch: Path) -> None:
    """Replace a manifest; overwrite it where the directory does not allow to replace another user's file.

    Raises:
        OSError: It cannot be written.
    """
    _write(directory, manifest, scratch)
    path = directory / config.MANIFEST_BASENAME
    try:
        os.replace(scratch, path)
    except PermissionError:
        text = scratch.read_bytes()
        # In one write; a reader that gets half of the old and half of the new one finds two tags, and trusts neither.
        with open(path, "r+b", buffering=0, opener=shared_files.open_no_link) as file:
            file.write(text.ljust(os.fstat(file.fileno()).st_size))
        scratch.unlink(missing_ok=True)


def _write(directory: Path, manifest: CacheManifest, scratch: Path) -> None:
    check = manifest.check
    about = check and {
        "digest": check.digest,
        "checked": check.checked,
        "version": dict(check.version),
        "asker": check.asker,
        "came_along": check.came_along,
        "mark": manifest.tag,
    }
    with open(scratch, "w", opener=shared_files.open_no_link) as file:
        file.write(f"{manifest.remote}\n{_ORIGINALS if manifest.of_originals else manifest.tag}\n{json.dumps(about)}\n")
        shared_files.adopt_file(file.fileno(), directory, writable=True)


# Files, their bytes and their last use --------------------------------------------------------------------------------


class CacheEntry(NamedTuple):
    """A file of a cache directory."""

    path: str
    size: int
    """Bytes."""
    accessed: int
    """Its access time, in nanoseconds: see ``eviction.py``."""
    modified: int
    """Its modification time, in nanoseconds."""
    inode: int
    """Number that it keeps when it is renamed."""

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> CacheEntry:
        """Return the entry of a file from the result of ``stat``."""
        return cls(path, status.st_size, status.st_atime_ns, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of scanning a cache directory."""

    files: list[CacheEntry]
    """Complete files that are ours."""
    staged_bytes: int
    """Size of all staging files but those that are among the complete ones by now."""

    @property
    def bytes(self) -> int:
        """The exact count."""
        return self.staged_bytes + sum(file.size for file in self.files)


def scan(root: Path, own: OwnTags) -> Scan:
    """Scan a cache directory; a missing one is empty.

    Staging files are listed first, so that a file published meanwhile is not missed. It is one that is gone from there
    and has the inode of a complete file; inodes alone say nothing where all files have the same, as with some FUSE.

    Args:
        root: The directory.
        own: The tags of files that are ours.
    """
    staged = _staged(root)
    files = [file for file in shard_files(root) if own.include(file.modified)]
    inodes = {file.inode for file in files}
    maybe_published = {path for path, file in staged.items() if file.inode in inodes}
    still = _staged(root) if maybe_published else {}
    published = {path for path in maybe_published if path not in still or still[path].inode not in inodes}
    return Scan(files, sum(file.size for path, file in staged.items() if path not in published))


def _staged(root: Path) -> dict[str, CacheEntry]:
    """Return the staging files of a cache directory by path."""
    staged = {}
    for entry in staging_files(root):
        with suppress(FileNotFoundError):
            # Not entry.inode(), which may be the same for all files where that of stat is not.
            staged[entry.path] = CacheEntry.of(entry.path, entry.stat(follow_symlinks=False))
    return staged


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
                    # Another cache within this one has a separate count.
                    if not any(os.path.lexists(f"{entry.path}/{name}") for name in _SEPARATE_COUNT):
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
