"""Whose files a cache directory holds, and which of them are ours, whole, checked and unchanged: by one ``stat``.

A *tag* is a modification time that we set: a whole second of the years 2001 to 2009. A cache directory has one of its
own, kept in its manifest. Whatever we fetch into it gets that time when it is whole and checked. Anything else under a
shard's name was put there by someone, or changed since, and is hashed before it is used.

Another index takes another tag, two seconds later: files that were checked by one before are still ours, and counted
and evicted by all jobs, whichever index they began with; but each job believes only its own tag. The tags of a
directory are a family, the even seconds of about two minutes; the odd ones say "checked by that index, not ours".

The manifest is the file ``.origin``, three lines of text: a digest that tells remotes apart; the tag in nanoseconds, or
the word ``originals`` where files have tags of the compressed originals that they were made from; and JSON about the
index, which names the tag again. Where an earlier version wrote it, there is the first line alone.
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
"""Seconds of one family: few, so that no old file of somebody has such a time by chance; the span has whole ones."""

_FRESH_NANOSECONDS = 10 * 10**9
"""For so long no other process asks the remote again: those of one job start at about the same time."""


def make_tag() -> int:
    """A tag for a directory that has none: a random whole second of the years 2001 to 2009, in nanoseconds."""
    return (FIRST_TAG + secrets.randbelow(TAGS_SPAN // _FAMILY) * _FAMILY) * SECOND


def next_tag(tag: int) -> int:
    """The tag after another: of the same family, or where that is used up, of a new one."""
    later = tag + 2 * SECOND
    return later if _family(later) == _family(tag) else make_tag()


def tag_of_original(found: os.stat_result) -> int:
    """Return the tag of what is made from a file that is read in place: another one once that has changed.

    Args:
        found: The state of the file that is read in place.
    """
    text = f"{found.st_mtime_ns} {found.st_size} {change_time(found)}"
    digest = hashlib.sha256(text.encode()).digest()
    return (FIRST_TAG + int.from_bytes(digest[:8], "big") % TAGS_SPAN) * SECOND


def parse_tag(text: bytes) -> int | None:
    """The tag that a manifest names; None if it is not one."""
    tag = int(text) if text.isdigit() else 0
    return tag if is_tag(tag) else None


@dataclass(frozen=True, slots=True)
class OwnTags:
    """Which tags the files have that are ours to remove."""

    tag: int | None
    """The directory's tag; None where files have tags of their originals, and nobody but us has files."""
    came_with_index: bool = False
    """Whether the index was there before we first fetched anything: then it speaks of what others put there with it."""

    def include(self, modified: int) -> bool:
        """Whether a file with this modification time, in nanoseconds, is ours, by whichever index it was checked."""
        if self.tag is None:
            return is_tag(modified)
        return (modified - self.tag) % (2 * SECOND) == 0 and _family(modified) == _family(self.tag)

    @property
    def of_remote(self) -> int:
        """The tag of what is fetched now, in a directory of a remote."""
        assert self.tag is not None, "there is no index by which to check raw files of a dataset that is read in place"
        return self.tag

    def confirmed(self, modified: int) -> int:
        """The modification time that a file gets when it turns out to be what the index promises.

        One that is ours stays so. Where a later index has confirmed it, that stays, too: jobs of two indexes that share
        a file would change its time to and fro.

        Args:
            modified: Its modification time until now, in nanoseconds.
        """
        tag = self.of_remote
        if modified % SECOND or _family(modified) != _family(tag):
            return verified_tag(tag)
        foreign = (modified - tag) % (2 * SECOND)
        return max(modified - foreign, tag) + foreign


def verified_tag(tag: int) -> int:
    """The time of a file that is right, but was put there by someone else: it is not checked again, and stays."""
    return tag + SECOND


def _family(modified: int) -> int:
    return (modified // SECOND - FIRST_TAG) // _FAMILY


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexCheck:
    """When the remote was last asked for its index, and what it said."""

    digest: str
    """SHA-256 of the index that is here."""
    checked: int
    """Nanoseconds since the epoch."""
    version: Mapping[str, Any] = field(default_factory=dict)
    """What the store said of that version: size, ETag, time; may be empty."""
    asker: int | None = None
    """The process that asked; None where there was no answer."""
    came_along: bool = False
    """Whether that index was in the directory before we first fetched anything into it."""

    def is_fresh(self, asked_after: int = 0) -> bool:
        """Whether another process of this node asked the remote just now, and after some moment.

        One that opens a dataset twice has perhaps written it in between.
        """
        is_of_now = asked_after <= self.checked and 0 <= time.time_ns() - self.checked < _FRESH_NANOSECONDS
        return self.asker != os.getpid() and is_of_now


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheManifest:
    """What a manifest says."""

    remote: str
    """See :attr:`~lightning_streaming.cache.config.CacheConfig.digest`."""
    tag: int | None
    """None where an earlier version, or nobody, chose one, and where ``of_originals``."""
    check: IndexCheck | None
    """The index that the tag goes with; None where none does."""
    of_originals: bool = False
    """Whether the directory is for raw files of a dataset that is read in place, with tags of their originals."""

    @property
    def own(self) -> OwnTags | None:
        """Which modification times are ours in the directory; None where that is not known."""
        return OwnTags(self.tag) if self.tag is not None or self.of_originals else None

    @property
    def digest(self) -> str | None:
        """Of the index that the tag goes with."""
        return None if self.check is None else self.check.digest

    def check_of(self, digest: str) -> IndexCheck | None:
        """What the remote said of the index with this digest; None if it is another, or was not fetched from there."""
        return self.check if self.check is not None and self.check.digest == digest else None


def read_manifest(directory: Path) -> CacheManifest | None:
    """What the manifest of a directory says; None if there is none.

    Raises:
        StorageError: There is one that may not be read, or that is a link or a special file.
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
    return CacheManifest(
        remote=first.decode(errors="replace"),
        tag=parse_tag(second),
        check=_read_check(third, parse_tag(second)),
        of_originals=second == _ORIGINALS.encode(),
    )


def ensure_manifest(directory: Path, remote: str, scratch: Path, *, of_originals: bool = False) -> CacheManifest:
    """The manifest of a directory that says which files are ours; written if there is none yet.

    Args:
        directory: The cache directory, which is there.
        remote: Digest of the location that a new file is to name.
        scratch: A file in it that nobody else writes.
        of_originals: Whether a new one is for raw files of a dataset that is read in place.

    Raises:
        StorageError: There is one that may not be read, or none could be written.
    """
    found = read_manifest(directory)
    if found is not None and found.own is not None:
        return found
    tag = None if of_originals else make_tag()
    made = CacheManifest(remote=found.remote if found else remote, tag=tag, check=None, of_originals=of_originals)
    try:
        if found is not None:
            write_manifest(directory, made, scratch)
            return made
        _write(directory, made, scratch)
        try:
            os.link(scratch, directory / MANIFEST_BASENAME)
        except FileExistsError:  # another user's, or another machine's, who was faster
            made = read_manifest(directory) or made
        except OSError:  # a filesystem without hard links
            os.replace(scratch, directory / MANIFEST_BASENAME)
    except StorageError:  # that one may not be read
        raise
    except OSError as error:
        raise unwritable(directory, error) from error
    finally:
        scratch.unlink(missing_ok=True)
    return made


def write_manifest(directory: Path, manifest: CacheManifest, scratch: Path) -> None:
    """Write a manifest anew; over the old one where the directory does not let us replace another user's file.

    Raises:
        OSError: It cannot be written.
    """
    _write(directory, manifest, scratch)
    path = directory / MANIFEST_BASENAME
    try:
        os.replace(scratch, path)
    except PermissionError:
        _write_over(path, scratch.read_bytes())
        scratch.unlink(missing_ok=True)


def _write_over(path: Path, text: bytes) -> None:
    """Write all of a file at once; whoever still reads it half old and half new finds two tags, and believes none."""
    with open(path, "r+b", buffering=0, opener=open_no_link) as file:
        file.write(text.ljust(os.fstat(file.fileno()).st_size))


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


def _read_check(line: bytes, tag: int | None) -> IndexCheck | None:
    """What is said of an index, if that is whole and goes with this tag."""
    with suppress(ValueError, KeyError, TypeError):
        found = json.loads(line)
        check = IndexCheck(
            digest=str(found["digest"]),
            checked=int(found["checked"]),
            version=dict(found["version"] or {}),
            asker=found.get("asker"),
            came_along=found.get("came_along") is True,
        )
        return check if found.get("mark", tag) == tag else None
    return None
