"""What lies under a location, and how big one object is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_streaming.errors import ObjectNotFoundError, StorageError
from lightning_streaming.storage.attempts import Attempts
from lightning_streaming.storage.filesystems import call, kind_of, open_filesystem
from lightning_streaming.storage.secrets import secrets_of
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
        with _remembering_nothing(filesystem):
            found = call(filesystem, "find", root, timeout=timeout)
        return sorted(one[len(root) :] for one in found if one.startswith(root) and one != root)

    return _attempts(url, options, retry, timeout).run(attempt)


def file_sizes(url: str, options: Mapping[str, Any], *, retry: int = 5, timeout: float = 600.0) -> dict[str, int]:
    """List the objects directly under a URL.

    Args:
        url: URL of a directory, which need not exist; not a local path.
        options: Arguments of the filesystem.
        retry: Attempts in total, at least 1.
        timeout: Seconds per attempt.

    Returns:
        Name to size in bytes.

    Raises:
        StorageError: As for :func:`list_files`.
        ConfigError: As for :func:`list_files`.
        MissingDependencyError: As for :func:`list_files`.
    """

    def attempt() -> dict[str, int]:
        filesystem, path = open_filesystem(url, options)
        try:
            with _remembering_nothing(filesystem):
                found = call(filesystem, "ls", path, True, timeout=timeout)
        except FileNotFoundError:
            return {}
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in found if entry["type"] == "file"}

    return _attempts(url, options, retry, timeout).run(attempt)


def object_size(url: str, options: Mapping[str, Any], *, retry: int, timeout: float) -> int | None:
    """Bytes of an object; None if there is no such object.

    Args:
        url: URL or local path of the object.
        options: Arguments of its filesystem.
        retry: Attempts in total, at least 1.
        timeout: Seconds per attempt.

    Raises:
        StorageError: As for :func:`list_files`.
        ConfigError: As for :func:`list_files`.
        MissingDependencyError: As for :func:`list_files`.
    """

    def attempt() -> int:
        filesystem, path = open_filesystem(url, options)
        with _remembering_nothing(filesystem):
            try:
                return int(call(filesystem, "info", path, timeout=timeout)["size"])
            except FileNotFoundError as error:
                # Over HTTP every failure is one of these, and only its cause tells which.
                if kind_of(filesystem, url) == "http" and isinstance(error.__cause__, Exception):
                    raise error.__cause__ from None
                raise

    try:
        return _attempts(url, options, retry, timeout, verb="look at").run(attempt)
    except ObjectNotFoundError:
        return None


def _attempts(url: str, options: Mapping[str, Any], retry: int, timeout: float, verb: str = "list") -> Attempts:
    return Attempts(
        purpose=f"{verb} {mask_url(url)}",
        options=options,
        retry=retry,
        timeout=timeout,
        failure=StorageError,
        hidden=secrets_of(url),
    )


@contextmanager
def _remembering_nothing(filesystem: Any) -> Iterator[None]:
    """List anew, and keep no listing: s3fs would not even find an object to read it that was written since."""
    filesystem.invalidate_cache()
    try:
        yield
    finally:
        filesystem.invalidate_cache()
