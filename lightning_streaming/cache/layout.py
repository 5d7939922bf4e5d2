"""Where the cache and its locks are: every directory and file name that is not in an index."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.storage import location_key, mask_url

CACHE_VARIABLE = "LIGHTNING_STREAMING_CACHE"
"""Environment variable that moves the root of all default cache directories."""
RUNTIME_VARIABLE = "LIGHTNING_STREAMING_RUNTIME"
"""Environment variable that moves locks and other files of running programs; must be local to the node."""

_NAME = "lightning_streaming"
_LONGEST_READABLE_NAME = 40
_UNREADABLE = re.compile(r"[^A-Za-z0-9._-]+")
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def default_cache_directory(remote: str, storage_options: Mapping[str, Any] = _NO_OPTIONS) -> Path:
    """Where files of a dataset are kept when the user gave no directory.

    Named after the dataset, then after everything that tells it from others, credentials apart: for example
    ``~/.cache/lightning_streaming/corpus-1f0c3a5e7b9d2846``. It is not made here.

    Args:
        remote: URL or path of the dataset.
        storage_options: How it is opened; the same URL on another endpoint is another dataset.
    """
    last = mask_url(remote).rstrip("/").rpartition("/")[2]
    readable = _UNREADABLE.sub("-", last).strip(".-")[:_LONGEST_READABLE_NAME] or "dataset"
    return _cache_root() / f"{readable}-{_digest(location_key(remote, storage_options))}"


def runtime_directory() -> Path:
    """The directory of locks and other files of running programs: local to the node, for one user, made when missing.

    Raises:
        ConfigError: The place in the temporary directory is taken by another user, or open to others, or there can be
            no directory.
    """
    chosen = os.environ.get(RUNTIME_VARIABLE)
    if chosen:
        return _made(Path(chosen).expanduser())
    path = Path(tempfile.gettempdir()) / f"{_NAME}-{os.getuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _check_private(path)
    return path


ORIGIN_BASENAME = ".origin"
"""Beside a fetched index: which remote the directory belongs to, as a digest, so without showing it; and its mark."""
ARRIVING_BASENAME = ".arriving"
"""Directory of files on their way, in a cache directory."""
USAGE_BASENAME = ".usage"
"""In a cache directory: bytes of the files that are ours, and the lock under which that changes."""
QUEUE_BASENAME = ".queue"
"""In a cache directory: the lock of the reader whose turn it is to wait for room."""
PARSED_INDEX_PREFIX = ".index-"
"""What the names of parsed indexes beside an index begin with."""


def origin_of(remote: str, storage_options: Mapping[str, Any]) -> bytes:
    """What the origin file of a cache directory of this remote holds."""
    return _digest(location_key(remote, storage_options)).encode()


def orders_directory() -> Path:
    """Where sample orders of running epochs are kept; made when missing.

    Raises:
        ConfigError: As for :func:`runtime_directory`.
    """
    return _made(runtime_directory() / "orders")


def _cache_root() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / _NAME


def _made(path: Path) -> Path:
    """A directory of running programs, made when missing."""
    problem: OSError | str | None = None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        problem = error
    if problem is None and not os.access(path, os.W_OK | os.X_OK):
        problem = f"user {os.getuid()} may not write to it"
    if problem is not None:
        raise ConfigError(
            f"{path} must be a directory for files of running programs, but {problem}; set {RUNTIME_VARIABLE} to a "
            "directory of your own on this node"
        )
    return path


def _check_private(path: Path) -> None:
    """Refuse a directory that others could have prepared for us: the name of ours is easy to guess."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{path} must be a directory that user {os.getuid()} owns and only they can write to, but it belongs to "
            f"user {found.st_uid} and has mode {stat.filemode(found.st_mode)}; remove it, or set {RUNTIME_VARIABLE} "
            "to a directory of your own"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
