"""What lies under a location."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_streaming.errors import StorageError
from lightning_streaming.storage.attempts import Attempts
from lightning_streaming.storage.filesystems import call, open_filesystem
from lightning_streaming.storage.urls import mask_url


def list_files(url: str, options: Mapping[str, Any], *, retry: int, timeout: float) -> list[str]:
    """List the files under a URL or local path, at any depth.

    Args:
        url: URL or local path of a directory; it need not exist.
        options: Arguments of its filesystem.
        retry: Attempts in total, at least 1.
        timeout: Seconds per attempt.

    Returns:
        Paths relative to ``url``, with forward slashes, sorted. Links to directories are not followed.

    Raises:
        StorageError: The store did not answer, or refused.
        ConfigError: The options were refused, or no filesystem serves the URL.
        MissingDependencyError: The package that serves the URL is not installed.
    """

    def attempt() -> list[str]:
        filesystem, path = open_filesystem(url, options)
        root = path.rstrip("/") + "/"
        filesystem.invalidate_cache()  # it may remember what was there before others wrote
        try:
            found = call(filesystem, "find", root, timeout=timeout)
        finally:
            filesystem.invalidate_cache()  # s3fs would not even find a new object to read it
        return sorted(one[len(root) :] for one in found if one.startswith(root) and one != root)

    purpose = f"list {mask_url(url)}"
    return Attempts(purpose=purpose, options=options, retry=retry, timeout=timeout, failure=StorageError).run(attempt)
