"""The origin file of a cache directory: whose files it holds, its mark, and what is known of its index.

Three lines of text: a digest that tells remotes apart; the mark in nanoseconds, or the word ``originals`` where files
have marks of the compressed originals that they were made from; and JSON about the index, which names the mark again.
Where an earlier version wrote it, there is the first line alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_streaming.cache.arrival import unwritable
from lightning_streaming.cache.layout import ORIGIN_BASENAME
from lightning_streaming.cache.marks import OwnTimes, make_mark, read_mark
from lightning_streaming.cache.permissions import adopt_file
from lightning_streaming.errors import ObjectNotFoundError, StorageError
from lightning_streaming.storage import mask_url

_ORIGINALS = "originals"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What an origin file says."""

    remote: str
    """Digest of the location, see :func:`~lightning_streaming.cache.layout.origin_of`."""
    mark: int | None
    """None where an earlier version, or nobody, chose one, and where ``of_originals``."""
    check: IndexCheck | None
    """The index that the mark goes with; None where none does."""
    of_originals: bool = False
    """Whether the directory is for raw files of a dataset that is read in place, with marks of their originals."""

    @property
    def own(self) -> OwnTimes | None:
        """Which modification times are ours in the directory; None where that is not known."""
        return OwnTimes(self.mark) if self.mark is not None or self.of_originals else None

    @property
    def digest(self) -> str | None:
        """Of the index that the mark goes with."""
        return None if self.check is None else self.check.digest


def read_origin(directory: Path) -> Origin | None:
    """What the origin file of a directory says; None if there is none.

    Raises:
        StorageError: There is one that may not be read.
    """
    path = directory / ORIGIN_BASENAME
    try:
        lines = path.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read: {error}; it says whose files are there, so choose another directory"
        ) from error
    first, second, third = (line.strip() for line in [*lines[:3], b"", b"", b""][:3])
    return Origin(
        remote=first.decode(errors="replace"),
        mark=read_mark(second),
        check=_read_check(third, read_mark(second)),
        of_originals=second == _ORIGINALS.encode(),
    )


def settle_origin(directory: Path, remote: str, scratch: Path, *, of_originals: bool = False) -> Origin:
    """The origin of a directory that says which files are ours; written if there is none yet.

    Args:
        directory: The cache directory, which is there.
        remote: Digest of the location that a new file is to name.
        scratch: A file in it that nobody else writes.
        of_originals: Whether a new one is for raw files of a dataset that is read in place.

    Raises:
        StorageError: There is one that may not be read, or none could be written.
    """
    found = read_origin(directory)
    if found is not None and found.own is not None:
        return found
    try:
        return _make_origin(directory, found, remote, scratch, of_originals)
    except OSError as error:
        raise unwritable(directory, error) from error


def gone(url: str, directory: Path, error: ObjectNotFoundError) -> ObjectNotFoundError:
    """What to raise where the remote answers that it has no index any more, though one of it is here."""
    return ObjectNotFoundError(
        f"{mask_url(url)} is not there any more, though {directory} keeps an index that came from it ({error}); "
        f"correct remote=, or put the dataset back; to read what this node keeps, whole or not, give "
        f"local={str(directory)!r} alone, without remote="
    )


def _make_origin(directory: Path, found: Origin | None, remote: str, scratch: Path, of_originals: bool) -> Origin:
    mark = None if of_originals else make_mark()
    made = Origin(remote=found.remote if found else remote, mark=mark, check=None, of_originals=of_originals)
    if found is not None:
        write_origin(directory, made, scratch)
        return made
    _write(directory, made, scratch)
    try:
        os.link(scratch, directory / ORIGIN_BASENAME)
    except FileExistsError:  # another user's, or another machine's, who was faster
        return read_origin(directory) or made
    except OSError:  # a filesystem without hard links
        os.replace(scratch, directory / ORIGIN_BASENAME)
    finally:
        scratch.unlink(missing_ok=True)
    return made


def write_origin(directory: Path, origin: Origin, scratch: Path) -> None:
    """Write an origin file anew; over the old one where the directory does not let us replace another user's file.

    Raises:
        OSError: It cannot be written.
    """
    _write(directory, origin, scratch)
    path = directory / ORIGIN_BASENAME
    try:
        os.replace(scratch, path)
    except PermissionError:
        _write_over(path, scratch.read_bytes())
        scratch.unlink(missing_ok=True)


def _write_over(path: Path, text: bytes) -> None:
    """Write all of a file at once; whoever still reads it half old and half new finds two marks, and believes none."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, text.ljust(os.fstat(descriptor).st_size), 0)
    finally:
        os.close(descriptor)


def _write(directory: Path, origin: Origin, scratch: Path) -> None:
    check = origin.check
    about = check and {**asdict(check), "version": dict(check.version), "mark": origin.mark}
    with scratch.open("w") as file:
        file.write(f"{origin.remote}\n{_ORIGINALS if origin.of_originals else origin.mark}\n{json.dumps(about)}\n")
        adopt_file(file.fileno(), directory, writable=True)


def _read_check(line: bytes, mark: int | None) -> IndexCheck | None:
    """What is said of an index, if that is whole and goes with this mark."""
    with suppress(ValueError, KeyError, TypeError):
        found = json.loads(line)
        check = IndexCheck(
            digest=str(found["digest"]),
            checked=int(found["checked"]),
            version=dict(found["version"] or {}),
            asker=found.get("asker"),
            came_along=found.get("came_along") is True,
        )
        return check if found.get("mark", mark) == mark else None
    return None
