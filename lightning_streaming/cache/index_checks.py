"""What an origin file says of the index beside it: when it was asked for, and which version it is."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_streaming.cache.index_file import FoundIndex, KnownIndex
from lightning_streaming.cache.origin import IndexCheck, Origin, read_origin
from lightning_streaming.errors import StorageError

_FRESH_NANOSECONDS = 10 * 10**9
"""For so long no other process asks the remote again: those of one job start at about the same time."""


def is_fresh(known: KnownIndex, check: IndexCheck | None) -> bool:
    """Whether another process of this node asked the remote just now, and this index is what it had.

    One that opens a dataset twice has perhaps written it in between.
    """
    if check is None or check.digest != known.digest or check.asker == os.getpid():
        return False
    return 0 <= time.time_ns() - check.checked < _FRESH_NANOSECONDS


def checked(found: FoundIndex, version: Mapping[str, Any], asker: int | None) -> IndexCheck:
    return IndexCheck(digest=found.known.digest, checked=time.time_ns(), version=version, asker=asker)


def likely_digest(origin: Origin | None) -> str | None:
    """The digest of the index that was here last."""
    return None if origin is None else origin.digest


def version_of(known: KnownIndex, origin: Origin) -> Mapping[str, Any] | None:
    """What the remote said of this index when it was fetched, if anything; None if it was not fetched from there."""
    return origin.check.version if origin.check is not None and origin.check.digest == known.digest else None


def mark_checked_by(directory: Path, digest: str) -> int | None:
    """What files have as modification time that were fetched into a directory and checked by an index.

    Args:
        directory: Any directory.
        digest: SHA-256 of the index.

    Returns:
        None where the directory is no cache, or one of another index by now.
    """
    with suppress(StorageError):
        origin = read_origin(directory)
        if origin is not None and origin.digest == digest:
            return origin.mark
    return None
