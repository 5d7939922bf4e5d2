"""The manifest of a cache directory, and its tags, by which one ``stat`` identifies files that are ours and checked.

A *tag* is a modification time that we set: a whole second of the years 2001 to 2009. Each cache directory has one,
stored in its manifest. Files that we fetch get that time once they are complete and checked. Any other file under a
shard's name was written by somebody else, or changed since, and is hashed before it is used.

Another index takes another tag, two seconds later: files that were checked by an earlier one are still ours, and
counted and evicted by all jobs, whichever index they started with; but each job trusts only its tag. The tags of a
directory are a family, the even seconds of about two minutes; the odd ones mean "checked by that index, not ours".

The manifest is the file ``.origin``, three lines of text: a digest of the remote; the tag in nanoseconds, or the word
``originals`` where files have tags of the compressed originals that they were created from; and JSON about the index,
which names the tag again. An earlier version wrote only the first line.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_streaming.cache.config import MANIFEST_BASENAME
from lightning_streaming.cache.shared_files import adopt_file, open_no_link, unwritable
from lightning_streaming.errors import StorageError
from lightning_streaming.files import FIRST_TAG, SECOND, TAGS_SPAN, change_time, is_tag

_ORIGINALS = "originals"
_FAMILY = 128
"""Seconds of one family: few, so that no old file of a user has such a time by chance; the span is a multiple."""

_FRESH_NANOSECONDS = 10 * 10**9
"""For this time no other process requests the index again: those of one job start at about the same time."""


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
    path = directory / MANIFEST_BASENAME
    try:
        with open(path, "rb", opener=open_no_link) as file:
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
            os.link(scratch, directory / MANIFEST_BASENAME)
        except FileExistsError:  # of another user or machine that was faster
            manifest = read_manifest(directory) or manifest
        except OSError:  # a filesystem without hard links
            os.replace(scratch, directory / MANIFEST_BASENAME)
    except StorageError:  # the existing one may not be read
        raise
    except OSError as error:
        raise unwritable(directory, error) from error
    finally:
        scratch.unlink(missing_ok=True)
    return manifest


def write_manifest(directory: Path, manifest: CacheManifest, scratch: Path) -> None:
    """Replace a manifest; overwrite it where the directory does not allow to replace another user's file.

    Raises:
        OSError: It cannot be written.
    """
    _write(directory, manifest, scratch)
    path = directory / MANIFEST_BASENAME
    try:
        os.replace(scratch, path)
    except PermissionError:
        text = scratch.read_bytes()
        # In one write; a reader that gets half of the old and half of the new one finds two tags, and trusts neither.
        with open(path, "r+b", buffering=0, opener=open_no_link) as file:
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
    with open(scratch, "w", opener=open_no_link) as file:
        file.write(f"{manifest.remote}\n{_ORIGINALS if manifest.of_originals else manifest.tag}\n{json.dumps(about)}\n")
        adopt_file(file.fileno(), directory, writable=True)
