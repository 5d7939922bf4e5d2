"""The origin file of a cache directory: whose files it holds, its mark, and what is known of its index.

Three lines of text: a digest that tells remotes apart, the mark in nanoseconds, and JSON about the index. Where an
earlier version wrote it, there is the first line alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_streaming.cache.layout import ORIGIN_BASENAME
from lightning_streaming.cache.marks import make_mark, read_mark
from lightning_streaming.cache.permissions import adopt_file


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexCheck:
    """When the remote was last asked for its index, and what it said."""

    digest: str
    """SHA-256 of the index that is here."""
    checked: int
    """Nanoseconds since the epoch."""
    version: Mapping[str, Any] = field(default_factory=dict)
    """What the store said of that version: size, ETag, time; may be empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What an origin file says."""

    remote: str
    """Digest of the location, see :func:`~lightning_streaming.cache.layout.origin_of`."""
    mark: int | None
    """None where an earlier version, or nobody, chose one."""
    check: IndexCheck | None


def read_origin(directory: Path) -> Origin | None:
    """What the origin file of a directory says; None if there is none."""
    try:
        lines = (directory / ORIGIN_BASENAME).read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    remote = lines[0].decode(errors="replace").strip() if lines else ""
    return Origin(remote=remote, mark=read_mark(directory), check=_read_check(lines[2] if len(lines) > 2 else b""))


def settle_origin(directory: Path, remote: str, scratch: Path) -> Origin:
    """The origin of a directory, with a mark; written if there is none yet.

    Args:
        directory: The cache directory, which is there.
        remote: Digest of the location that a new file is to name.
        scratch: A file in it that nobody else writes.
    """
    found = read_origin(directory)
    if found is not None and found.mark is not None:
        return found
    if found is not None:
        found = Origin(remote=found.remote, mark=make_mark(), check=found.check)
        write_origin(directory, found, scratch)
        return found
    made = Origin(remote=remote, mark=make_mark(), check=None)
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
    """Write an origin file anew."""
    _write(directory, origin, scratch)
    os.replace(scratch, directory / ORIGIN_BASENAME)


def _write(directory: Path, origin: Origin, scratch: Path) -> None:
    check = origin.check
    about = check and {"digest": check.digest, "checked": check.checked, "version": dict(check.version)}
    with scratch.open("w") as file:
        file.write(f"{origin.remote}\n{origin.mark}\n{json.dumps(about)}\n")
        adopt_file(file.fileno(), directory)


def _read_check(line: bytes) -> IndexCheck | None:
    with suppress(ValueError, KeyError, TypeError):
        found = json.loads(line)
        return IndexCheck(
            digest=str(found["digest"]), checked=int(found["checked"]), version=dict(found["version"] or {})
        )
    return None
