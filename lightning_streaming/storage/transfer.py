"""Moves whole objects between a store and this machine, with attempts, deadlines and errors that say what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_streaming.errors import DownloadError, IntegrityError, StorageError
from lightning_streaming.files import appears_whole
from lightning_streaming.storage.attempts import Attempts
from lightning_streaming.storage.filesystems import call, open_filesystem
from lightning_streaming.storage.urls import local_path, mask_url

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def download(
    url: str,
    options: Mapping[str, Any],
    destination: Path,
    *,
    expected_bytes: int | None,
    retry: int,
    timeout: float,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Fetch an object into a file, which does not exist if this raises.

    Args:
        url: URL or local path of the object.
        options: Arguments of its filesystem.
        destination: File to write; in an existing directory, under a name that nobody reads yet.
        expected_bytes: Size the object must have; None if it is not known.
        retry: Attempts in total, at least 1.
        timeout: Seconds per attempt.
        check: Looks at what arrived and raises IntegrityError if it is not as promised; that fails the attempt.

    Raises:
        ObjectNotFoundError: There is no such object or bucket.
        AccessDeniedError: No credentials, or not the right ones.
        ConfigError: The options were refused, or no filesystem serves the URL.
        MissingDependencyError: The package that serves the URL is not installed.
        IntegrityError: What arrives has another size than expected, or fails the check, time after time.
        DownloadError: Every attempt failed.
        StorageError: The store refused for another reason, or ``destination`` cannot be written.
    """

    def attempt() -> None:
        try:
            filesystem, path = open_filesystem(url, options)
            call(filesystem, "get_file", path, str(destination), timeout=timeout)
            _check_size(url, destination, expected_bytes)
            if check is not None:
                check(destination)
        except BaseException as error:
            destination.unlink(missing_ok=True)
            if _is_ours(error, destination):
                raise StorageError(
                    f"could not write {destination}: {error}; make room there, or choose another directory"
                ) from error
            raise

    _download_attempts(url, options, retry, timeout).run(attempt)


def read_bytes(url: str, options: Mapping[str, Any], *, retry: int, timeout: float) -> bytes:
    """Fetch a small object into memory.

    Args:
        url: URL or local path of the object.
        options: Arguments of its filesystem.
        retry: Attempts in total, at least 1.
        timeout: Seconds per attempt.

    Raises:
        StorageError: As for :func:`download`.
        ConfigError: As for :func:`download`.
        MissingDependencyError: As for :func:`download`.
    """

    def attempt() -> bytes:
        filesystem, path = open_filesystem(url, options)
        data: bytes = call(filesystem, "cat_file", path, timeout=timeout)
        return data

    return _download_attempts(url, options, retry, timeout).run(attempt)


def upload(local: Path, url: str, options: Mapping[str, Any], *, retry: int = 5, timeout: float | None = None) -> None:
    """Store a file under a URL, or copy it to a local path, whose directory is made.

    Args:
        local: File to send.
        url: Where to.
        options: Arguments of the filesystem.
        retry: Attempts in total, at least 1.
        timeout: Seconds per attempt; None for no limit.

    Raises:
        ObjectNotFoundError: There is no such bucket, or no file ``local``.
        AccessDeniedError: No credentials, or not the right ones.
        ConfigError: The options were refused, or no filesystem serves the URL.
        MissingDependencyError: The package that serves the URL is not installed.
        StorageError: Every attempt failed, or the store refused for another reason.
    """
    target = local_path(url)

    def attempt() -> None:
        if target is None:
            filesystem, path = open_filesystem(url, options)
            call(filesystem, "put_file", str(local), path, timeout=timeout)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            with appears_whole(target) as partial:
                shutil.copyfile(local, partial)

    purpose = f"upload {local} to {mask_url(url)}"
    Attempts(purpose=purpose, options=options, retry=retry, timeout=timeout, failure=StorageError).run(attempt)


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

    def attempt() -> None:
        filesystem, path = open_filesystem(url, options)
        call(filesystem, "pipe_file", path, data, timeout=None)

    purpose = f"upload {len(data)} bytes to {mask_url(url)}"
    Attempts(purpose=purpose, options=options, retry=retry, timeout=None, failure=StorageError).run(attempt)


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

    purpose = f"remove {mask_url(url)}"
    Attempts(purpose=purpose, options=options, retry=retry, timeout=timeout, failure=StorageError).run(attempt)


def _download_attempts(url: str, options: Mapping[str, Any], retry: int, timeout: float) -> Attempts:
    return Attempts(
        purpose=f"download {mask_url(url)}", options=options, retry=retry, timeout=timeout, failure=DownloadError
    )


def _check_size(url: str, path: Path, expected_bytes: int | None) -> None:
    found = path.stat().st_size
    if expected_bytes is not None and found != expected_bytes:
        raise IntegrityError(f"the index promises {expected_bytes} bytes of {mask_url(url)}, but {found} arrived")


def _is_ours(error: BaseException, destination: Path) -> bool:
    """Whether it is not the store that failed, but the disk written to."""
    return isinstance(error, OSError) and (error.errno in _NO_ROOM or error.filename == str(destination))
