"""The options of a stream that determine its source and its cache, and all directory and file names of a cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.algorithms import hash_names
from lightning_streaming.formats.images import IMAGE_SUFFIXES
from lightning_streaming.formats.shard_table import FILE_SUFFIXES, OTHER_FORMATS, format_of_name
from lightning_streaming.storage import Location, StorageOptions, local_path, mask_url
from lightning_streaming.storage.urls import is_plain_name, split_location, without_query
from lightning_streaming.units import is_one_of, plain_number, store_whole

CACHE_VARIABLE = "LIGHTNING_STREAMING_CACHE"
"""Environment variable that moves the root of all default cache directories."""
RUNTIME_VARIABLE = "LIGHTNING_STREAMING_RUNTIME"
"""Environment variable that moves locks and other files of running programs; must be local to the node."""

_NAME = "lightning_streaming"
_LONGEST_READABLE_NAME = 40
_MAX_LISTED = 1000
"""Maximum number of files of a directory that are listed to detect its format."""
_UNREADABLE = re.compile(r"[^A-Za-z0-9._-]+")
MANIFEST_BASENAME = ".origin"
"""File in a cache directory: the remote of the directory, as a digest, and its tag."""
STAGING_BASENAME = ".arriving"
"""Directory of staging files, in a cache directory."""
USAGE_BASENAME = ".usage"
"""File in a cache directory: bytes of the files that are ours, and the lock for changing that."""
QUEUE_BASENAME = ".queue"
"""File in a cache directory: the lock of the reader that is next to get room."""
SELECTIONS_BASENAME = "selections"
"""Directory of cached selections, in a cache directory."""
NOTE_BASENAMES = (MANIFEST_BASENAME, USAGE_BASENAME, QUEUE_BASENAME)
"""Files that describe a cache directory."""
PARSED_INDEX_PREFIX = ".index-"
"""Prefix of the names of parsed indexes."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CacheConfig:
    """A dataset directory, its copy on this node, and the options of downloads."""

    name: str
    """Name of the stream, for errors."""
    remote: str | None = None
    """URL or path of the files; None if they are in ``local``. With another format it may name some files of a
    directory, like ``data/train-*.parquet``."""
    local: str | Path | None = None
    """Directory in which files are cached; None for the default one, or for reading a ``remote`` path in place."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the fsspec filesystem of ``remote``; may hold secrets, so they are never shown."""
    download_retry: int = 2
    """Attempts to fetch a file, or a part of a large one, after the first."""
    download_timeout: float = 60
    """Seconds without progress; a transfer that is slow, but continues, is not cancelled."""
    validate_hash: str | None = None
    """The hash to check fetched files by; None or empty for the cheapest one that the index records, if any."""
    keep_zip: bool = False
    """Whether the compressed form of a fetched file is kept next to the raw one."""
    format: str | None = None
    """The format of the files, if they are no dataset with an index: one of ``OTHER_FORMATS``."""
    block_length: int | None = None
    """Tokens of a sample, where the format has no other boundaries."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
        except ConfigError as error:
            raise error.with_context(stream=self.name) from None
        if not self.remote and not self.local:
            raise ConfigError(
                f"stream {self.name!r} needs remote, local or both, but has neither", option="remote", stream=self.name
            )
        if self.remote:
            object.__setattr__(self, "remote", str(self.remote))  # users give paths, too
        if self.format is None and "*" in without_query(self.remote or ""):
            example = format_of_name(self.remote or "") or "parquet"
            raise ConfigError(
                f"remote of stream {self.name!r} is {mask_url(self.remote or '')}, which names files by a wildcard",
                hint=f"pass format= too, like format={example!r}; for MDS pass the directory with the index.json",
                option="format",
                stream=self.name,
            )
        if self.local and local_path(str(self.local)) is None:
            raise ConfigError(
                f"local of stream {self.name!r} must be a directory of this machine, but is "
                f"{mask_url(str(self.local))}",
                option="local",
                stream=self.name,
            )
        for option in ("remote", "local"):
            try:
                is_path = b"\0" not in os.fsencode(str(getattr(self, option)))
            except UnicodeEncodeError:
                is_path = False
            if not is_path:
                raise ConfigError(
                    f"{option} of stream {self.name!r} has a character that no file name can have: "
                    f"{short_repr(mask_url(str(getattr(self, option))))}",
                    option=option,
                    stream=self.name,
                )
        self._check_whole("download_retry", 0)
        if (plain_number(self.download_timeout) or 0) <= 0:
            raise ConfigError(
                f"download_timeout of stream {self.name!r} must be a positive number of seconds, "
                f"but is {short_repr(self.download_timeout)}",
                option="download_timeout",
                stream=self.name,
            )
        self._check_format()
        if not is_one_of(self.validate_hash, (None, "", *hash_names())):
            raise ConfigError(
                f"validate_hash of stream {self.name!r} must be one of {', '.join(hash_names())}, "
                f"but is {short_repr(self.validate_hash)}",
                option="validate_hash",
                stream=self.name,
            )

    def _check_format(self) -> None:
        if not is_one_of(self.format, (None, *OTHER_FORMATS)):
            raise ConfigError(
                f"format of stream {self.name!r} must be one of {', '.join(OTHER_FORMATS)}, "
                f"but is {short_repr(self.format)}",
                hint="leave it out for a dataset with an index.json",
                option="format",
                stream=self.name,
            )
        if self.block_length is None:
            return
        self._check_whole("block_length", 1)
        if self.format is None:
            raise ConfigError(
                f"block_length of stream {self.name!r} cuts tokens of another format into samples",
                hint="give format= too, or leave it out",
                option="block_length",
                stream=self.name,
            )

    def _check_whole(self, field: str, least: int) -> None:
        try:
            store_whole(self, field, least, name=f"{field} of stream {self.name!r}")
        except ConfigError as error:
            raise error.with_context(stream=self.name) from None

    @property
    def attempts(self) -> int:
        """Attempts to fetch a file, or a part of a large one, in total."""
        return self.download_retry + 1

    @property
    def location(self) -> Location:
        """The directory of the files, with the options to access it."""
        return Location(self._split[0], self.storage_options, self.attempts, self.download_timeout)

    @property
    def pattern(self) -> str | None:
        """The pattern of the files in that directory, see :mod:`~lightning_streaming.storage.urls`; None for all."""
        return self._split[1]

    @property
    def shown(self) -> str:
        """The files that are read, for errors."""
        location = self.location
        return str(location if self.pattern is None else location / self.pattern)

    @property
    def digest(self) -> str:
        """The digest in the manifest of a cache directory; another one for the same files with other options."""
        options = [self.format, self.block_length, self.pattern]
        return _digest(self.location.key if self.format is None else json.dumps([self.location.key, *options]))

    @property
    def _split(self) -> tuple[str, str | None]:
        """The directory of the files, and the pattern of those that are read."""
        source = self.remote or str(self.local)
        if self.format is None:
            return source, None
        directory, pattern = split_location(source, FILE_SUFFIXES.get(self.format, ()))
        if self.format == "megatron" and pattern is not None and is_plain_name(pattern):
            pattern = f"{pattern[:-4]}.{{bin,idx}}"
        return directory, pattern

    def __repr__(self) -> str:
        remote = mask_url(self.remote) if self.remote else None
        return f"CacheConfig(name={self.name!r}, remote={remote!r}, local={self.local!r})"

    def source_directory(self) -> Path | None:
        """Return the directory that is read in place and never written to; None if files are fetched into a cache."""
        source, local = _absolute(self._split[0]), _absolute(self.local)
        if not self.remote:
            return source
        return source if local in (None, source) else None

    def cache_directory(self) -> Path:
        """Return the directory for fetched files, or for raw files of compressed ones that are read in place."""
        source, local = self.source_directory(), _absolute(self.local)
        if source is not None:
            whole = default_cache_directory(str(source))
        elif local is not None:
            return local
        else:
            whole = default_cache_directory(self._split[0], self.storage_options)
        if self.format is None:
            return whole
        # Blocks of another length are other samples of the same files, with another index; as are other files.
        length = f"-{self.block_length}" if self.block_length else ""
        files = f"-{hashlib.sha256(self.pattern.encode()).hexdigest()[:8]}" if self.pattern else ""
        return whole.with_name(f"{whole.name}-{self.format}{length}{files}")


def _absolute(location: str | Path | None) -> Path | None:
    """Return an absolute path, without accessing the disk; None for a URL, or for None."""
    path = local_path(str(location)) if location else None
    return None if path is None else Path(os.path.normpath(path.absolute()))


def default_cache_directory(remote: str, storage_options: Mapping[str, Any] | None = None) -> Path:
    """Return the default cache directory of a dataset.

    It is named after the dataset, and a digest of everything in which it differs from others, except credentials: for
    example ``~/.cache/lightning_streaming/corpus-1f0c3a5e7b9d2846``. It is not created here.

    Args:
        remote: URL or path of the dataset.
        storage_options: Its storage options; the same URL on another endpoint is another dataset.
    """
    last = mask_url(remote).rstrip("/").rpartition("/")[2]
    readable = _UNREADABLE.sub("-", last).strip(".-")[:_LONGEST_READABLE_NAME] or "dataset"
    chosen = os.environ.get(CACHE_VARIABLE)
    root = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", _NAME)
    return root.expanduser() / f"{readable}-{_digest(Location(remote, storage_options or {}).key)}"


def other_format_at(path: Path) -> tuple[str, str] | None:
    """Return the format of a file, or of the files in a directory, by their names; and one of the names."""
    with suppress(OSError):
        names = (file.name for file in islice(path.iterdir(), _MAX_LISTED)) if path.is_dir() else (path.name,)
        formats = {kind: name for name in sorted(names, reverse=True) if (kind := format_of_name(name)) is not None}
        return next(iter(formats.items()), None)
    return None


def missing_index_hint(directory: Path) -> str | None:
    """Return a hint for a directory that has shards of MDS and no index; None if it has no shards."""
    with suppress(OSError):
        shards = sorted(islice(directory.glob("*.mds*"), _MAX_LISTED))
        if shards:
            return (
                f"shards like {shards[0].name} are there, but not the index that names them: copy it from where they "
                "came from, or write the dataset again"
            )
    return None


def has_images(directory: Path) -> bool:
    """Return whether images are among the first files in a directory, or in the folders directly in it."""
    with suppress(OSError):
        files = chain(directory.glob("*.*"), directory.glob("*/*.*"))
        return any(file.suffix.lower() in IMAGE_SUFFIXES for file in islice(files, _MAX_LISTED))
    return False


def runtime_directory() -> Path:
    """Return the directory of locks and other files of running programs: local to the node, for one user, created.

    Raises:
        ConfigError: Its path in the temporary directory belongs to another user, or is writable by others, or it cannot
            be created.
    """
    chosen = os.environ.get(RUNTIME_VARIABLE)
    if chosen:
        return _create_private(Path(chosen).expanduser())
    path = Path(tempfile.gettempdir()) / f"{_NAME}-{os.getuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    # Another user could have created it: its name is easy to guess.
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{path} must be a directory that user {os.getuid()} owns and only they can write to, but it belongs to "
            f"user {status.st_uid} and has mode {stat.filemode(status.st_mode)}",
            hint=f"remove it, or set {RUNTIME_VARIABLE} to a directory of your own",
            option=RUNTIME_VARIABLE,
            path=str(path),
        )
    return path


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def orders_directory() -> Path:
    """Return the directory of sample orders of running epochs, created.

    Raises:
        ConfigError: :func:`runtime_directory` raises it.
    """
    return _create_private(runtime_directory() / "orders")


def _create_private(path: Path) -> Path:
    """Create a directory of running programs, if it is missing."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"user {os.getuid()} may not write to it")
    except OSError as problem:
        raise ConfigError(
            f"{path} must be a directory for files of running programs, but {problem}",
            hint=f"set {RUNTIME_VARIABLE} to a directory of your own on this node",
            option=RUNTIME_VARIABLE,
            path=str(path),
        ) from problem
    return path
