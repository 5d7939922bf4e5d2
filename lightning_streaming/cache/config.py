"""What a stream says about where its files come from and are kept, and every directory and file name of a cache."""

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
from lightning_streaming.formats.hashing import hash_names
from lightning_streaming.formats.images.encodings import IMAGE_SUFFIXES
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
_MOST_LOOKED_AT = 1000
"""Files of a directory that are looked at to tell its format."""
_UNREADABLE = re.compile(r"[^A-Za-z0-9._-]+")
MANIFEST_BASENAME = ".origin"
"""Beside a fetched index: which remote the directory belongs to, as a digest, so without showing it; and its tag."""
STAGING_BASENAME = ".arriving"
"""Directory of files on their way, in a cache directory."""
USAGE_BASENAME = ".usage"
"""In a cache directory: bytes of the files that are ours, and the lock under which that changes."""
QUEUE_BASENAME = ".queue"
"""In a cache directory: the lock of the reader who is first to get room."""
SELECTIONS_BASENAME = "selections"
"""Directory of kept selections, in a cache directory."""
NOTE_BASENAMES = (MANIFEST_BASENAME, USAGE_BASENAME, QUEUE_BASENAME)
"""What a cache directory says of itself."""
PARSED_INDEX_PREFIX = ".index-"
"""What the names of parsed indexes beside an index begin with."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CacheConfig:
    """One dataset directory, its copy on this node, and how files get from one to the other."""

    name: str
    """The stream, as errors call it."""
    remote: str | None = None
    """URL or path the files come from; None where ``local`` already has them. Of another format it may name some files
    of a directory, as ``data/train-*.parquet`` does."""
    local: str | Path | None = None
    """Directory to keep files in; None for the default one, or for reading a ``remote`` path in place."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the fsspec filesystem of ``remote``; may hold secrets, so they are never shown."""
    download_retry: int = 2
    """Attempts to fetch a file, or a part of a large one, after the first."""
    download_timeout: float = 60
    """Seconds in which something must arrive; a transfer that is slow, but goes on, is not cut."""
    validate_hash: str | None = None
    """The hash to check fetched files by; None or empty for the cheapest one that the index records, if any."""
    keep_zip: bool = False
    """Whether the compressed form of a fetched file is kept beside the raw one."""
    format: str | None = None
    """What lies there, if it is not a dataset with an index: one of ``OTHER_FORMATS``."""
    block_length: int | None = None
    """Tokens of a sample, where the format has no other borders."""

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
            told = format_of_name(self.remote or "") or "parquet"
            raise ConfigError(
                f"remote of stream {self.name!r} is {mask_url(self.remote or '')}, which names files by a wildcard",
                hint=f"pass format= too, like format={told!r}; of MDS give the directory that has the index.json",
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
        self._check_paths()
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

    def _check_paths(self) -> None:
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
        """The directory that files come from, and how it is reached."""
        return Location(self._place[0], self.storage_options, self.attempts, self.download_timeout)

    @property
    def pattern(self) -> str | None:
        """Which files of that directory are read, as :mod:`~lightning_streaming.storage.urls` matches them; None for
        all."""
        return self._place[1]

    @property
    def shown(self) -> str:
        """What is read, as errors call it."""
        location = self.location
        return str(location if self.pattern is None else location / self.pattern)

    @property
    def digest(self) -> str:
        """What the manifest of a cache directory begins with; another one for the same files read in another way."""
        how = [self.format, self.block_length, self.pattern]
        return _digest(self.location.key if self.format is None else json.dumps([self.location.key, *how]))

    @property
    def _place(self) -> tuple[str, str | None]:
        """The directory that files come from, and the pattern of those that are read."""
        source = self.remote or str(self.local)
        if self.format is None:
            return source, None
        place, pattern = split_location(source, FILE_SUFFIXES.get(self.format, ()))
        if self.format == "megatron" and pattern is not None and is_plain_name(pattern):
            pattern = f"{pattern[:-4]}.{{bin,idx}}"
        return place, pattern

    def __repr__(self) -> str:
        remote = mask_url(self.remote) if self.remote else None
        return f"CacheConfig(name={self.name!r}, remote={remote!r}, local={self.local!r})"

    def source_directory(self) -> Path | None:
        """The directory that is read in place and never written to; None if files are fetched into a cache."""
        source, local = _absolute(self._place[0]), _absolute(self.local)
        if not self.remote:
            return source
        return source if local in (None, source) else None

    def cache_directory(self) -> Path:
        """The directory that is ours to write to: for fetched files, or for raw files of compressed ones in place."""
        source, local = self.source_directory(), _absolute(self.local)
        if source is not None:
            whole = default_cache_directory(str(source))
        elif local is not None:
            return local
        else:
            whole = default_cache_directory(self._place[0], self.storage_options)
        if self.format is None:
            return whole
        # Blocks of another length are other samples of the same files, with an index of their own; and so are others of
        # the files.
        length = f"-{self.block_length}" if self.block_length else ""
        files = f"-{hashlib.sha256(self.pattern.encode()).hexdigest()[:8]}" if self.pattern else ""
        return whole.with_name(f"{whole.name}-{self.format}{length}{files}")


def _absolute(location: str | Path | None) -> Path | None:
    """An absolute path, made without asking the disk; None for a URL, or for nothing."""
    path = local_path(str(location)) if location else None
    return None if path is None else Path(os.path.normpath(path.absolute()))


def default_cache_directory(remote: str, storage_options: Mapping[str, Any] | None = None) -> Path:
    """Where files of a dataset are kept when the user gave no directory.

    Named after the dataset, then after everything that tells it from others, credentials apart: for example
    ``~/.cache/lightning_streaming/corpus-1f0c3a5e7b9d2846``. It is not made here.

    Args:
        remote: URL or path of the dataset.
        storage_options: How it is opened; the same URL on another endpoint is another dataset.
    """
    last = mask_url(remote).rstrip("/").rpartition("/")[2]
    readable = _UNREADABLE.sub("-", last).strip(".-")[:_LONGEST_READABLE_NAME] or "dataset"
    return _cache_root() / f"{readable}-{_digest(Location(remote, storage_options or {}).key)}"


def other_format_at(path: Path) -> tuple[str, str] | None:
    """The format of what lies in a directory, or is a file, as far as names tell; and one of the names."""
    with suppress(OSError):
        names = (one.name for one in islice(path.iterdir(), _MOST_LOOKED_AT)) if path.is_dir() else (path.name,)
        found = {told: name for name in sorted(names, reverse=True) if (told := format_of_name(name)) is not None}
        return next(iter(found.items()), None)
    return None


def way_to_an_index(directory: Path) -> str | None:
    """What to do about a directory that has shards of MDS and no index; None if it has none."""
    with suppress(OSError):
        shards = sorted(islice(directory.glob("*.mds*"), _MOST_LOOKED_AT))
        if shards:
            return (
                f"shards like {shards[0].name} are there, but not the index that names them: copy it from where they "
                "came from, or write the dataset again"
            )
    return None


def has_pictures(directory: Path) -> bool:
    """Whether pictures are among the first files in a directory, or in the folders directly in it."""
    with suppress(OSError):
        files = chain(directory.glob("*.*"), directory.glob("*/*.*"))
        return any(one.suffix.lower() in IMAGE_SUFFIXES for one in islice(files, _MOST_LOOKED_AT))
    return False


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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


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


def _check_private(path: Path) -> None:
    """Refuse a directory that others could have prepared for us: the name of ours is easy to guess."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{path} must be a directory that user {os.getuid()} owns and only they can write to, but it belongs to "
            f"user {found.st_uid} and has mode {stat.filemode(found.st_mode)}",
            hint=f"remove it, or set {RUNTIME_VARIABLE} to a directory of your own",
            option=RUNTIME_VARIABLE,
            path=str(path),
        )
