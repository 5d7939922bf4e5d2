"""Stores and removes whole objects, with attempts, limits and errors that say what to do."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_streaming.errors import StorageError
from lightning_streaming.files import appears_whole
from lightning_streaming.storage.attempts import Attempts
from lightning_streaming.storage.filesystems import call, open_filesystem
from lightning_streaming.storage.secrets import secrets_of
from lightning_streaming.storage.urls import local_path, mask_url

_SLOWEST_UPLOAD = 32 << 10
_UPLOAD_SECONDS = 120.0


def upload_seconds(size: int) -> float:
    """Seconds that an attempt to upload ``size`` bytes is given: two minutes, and the time it takes at 32 KiB/s."""
    return _UPLOAD_SECONDS + size / _SLOWEST_UPLOAD


def upload(local: Path, url: str, options: Mapping[str, Any], *, retry: int = 5, timeout: float | None = None) -> None:
    """Store a file under a URL, or copy it to a local path, whose directory is made.

    Args:
        local: File to send.
        url: Where to.
        options: Arguments of the filesystem.
        retry: Attempts in total, at least 1.
        timeout: Seconds per attempt; None for a limit that grows with the file, see :func:`upload_seconds`.

    Raises:
        ObjectNotFoundError: There is no such bucket, or no file ``local``.
        AccessDeniedError: No credentials, or not the right ones.
        ConfigError: The options were refused, or no filesystem serves the URL.
        MissingDependencyError: The package that serves the URL is not installed.
        StorageError: Every attempt failed, or the store refused for another reason.
    """
    target = local_path(url)
    seconds = upload_seconds(local.stat().st_size if local.exists() else 0) if timeout is None else timeout

    def attempt() -> None:
        if target is None:
            filesystem, path = open_filesystem(url, options)
            call(filesystem, "put_file", str(local), path, timeout=seconds)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            with appears_whole(target) as partial:
                shutil.copyfile(local, partial)

    purpose = f"upload {local} to {mask_url(url)}"
    _attempts(purpose, url, options, retry).run(attempt)


def upload_bytes(data: bytes, url: str, options: Mapping[str, Any], *, retry: int = 5) -> None:
    """Store bytes under a URL.

    Args:
        data: The whole object.
        url: Where to; not a local path.
        options: Arguments of the filesystem.
        retry: Attempts in total, at least 1.

    Raises:
        StorageError: As for :func:`upload`.
        ConfigError: As for :func:`upload`.
        MissingDependencyError: As for :func:`upload`.
    """

    seconds = upload_seconds(len(data))

    def attempt() -> None:
        filesystem, path = open_filesystem(url, options)
        call(filesystem, "pipe_file", path, data, timeout=seconds)

    purpose = f"upload {len(data)} bytes to {mask_url(url)}"
    _attempts(purpose, url, options, retry).run(attempt)


def remove(url: str, options: Mapping[str, Any], *, retry: int = 5, timeout: float = 60.0) -> None:
    """Remove one object; if there is none, nothing is to be done.

    Args:
        url: URL of the object; not a local path.
        options: Arguments of the filesystem.
        retry: Attempts in total, at least 1.
        timeout: Seconds per attempt.

    Raises:
        StorageError: As for :func:`upload`.
        ConfigError: As for :func:`upload`.
        MissingDependencyError: As for :func:`upload`.
    """

    def attempt() -> None:
        filesystem, path = open_filesystem(url, options)
        with suppress(FileNotFoundError):
            call(filesystem, "rm_file", path, timeout=timeout)

    _attempts(f"remove {mask_url(url)}", url, options, retry).run(attempt)


def _attempts(purpose: str, url: str, options: Mapping[str, Any], retry: int) -> Attempts:
    return Attempts(purpose=purpose, options=options, retry=retry, failure=StorageError, hidden=secrets_of(url))
