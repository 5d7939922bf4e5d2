"""What a store says of its version of an object, without sending it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_streaming.errors import StorageError
from lightning_streaming.storage.attempts import Attempts
from lightning_streaming.storage.filesystems import call, open_filesystem
from lightning_streaming.storage.secrets import secrets_of
from lightning_streaming.storage.urls import mask_url

_TELLING = (
    "ETag",
    "etag",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
    "generation",
    "md5Hash",
    "Content-MD5",
    "content_md5",
    "ino",
    "modified",
)
"""Keys by which filesystems tell versions of an object apart."""
_LONGEST_SECONDS = 30.0


def object_version(url: str, options: Mapping[str, Any], *, retry: int, timeout: float) -> dict[str, Any]:
    """Size, and whatever else tells versions of an object apart; as plain values, to be compared later.

    Args:
        url: URL or local path of the object.
        options: Arguments of its filesystem.
        retry: Attempts in total, at least 1.
        timeout: Seconds per attempt; half a minute is the longest.

    Raises:
        StorageError: The store did not answer, or refused.
        ConfigError: The options were refused, or no filesystem serves the URL.
        MissingDependencyError: The package that serves the URL is not installed.
    """

    def attempt() -> dict[str, Any]:
        filesystem, path = open_filesystem(url, options)
        filesystem.invalidate_cache()
        found: dict[str, Any] = call(filesystem, "info", path, timeout=min(timeout, _LONGEST_SECONDS))
        told = {key: str(found[key]) for key in _TELLING if found.get(key) is not None}
        return {"size": found.get("size"), **told}

    return Attempts(
        purpose=f"look up {mask_url(url)}", options=options, retry=retry, failure=StorageError, hidden=secrets_of(url)
    ).run(attempt)
