"""What a stream says about where its files come from and where they are kept."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_streaming.cache.layout import default_cache_directory
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.hashing import hash_names
from lightning_streaming.storage import local_path, mask_url
from lightning_streaming.storage.options import check_options


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CacheConfig:
    """One dataset directory, its copy on this node, and how files get from one to the other."""

    name: str
    """The stream, as errors call it."""
    remote: str | None = None
    """URL or path the files come from; None where ``local`` already has them."""
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

    def __post_init__(self) -> None:
        check_options(self.storage_options, f" of stream {self.name!r}")
        if not self.remote and not self.local:
            raise ConfigError(f"stream {self.name!r} needs remote, local or both, but has neither")
        if self.local and local_path(str(self.local)) is None:
            raise ConfigError(
                f"local of stream {self.name!r} must be a directory of this machine, but is {mask_url(str(self.local))}"
            )
        if self.download_retry < 0:
            raise ConfigError(
                f"download_retry of stream {self.name!r} counts attempts after the first and must not be negative, "
                f"but is {self.download_retry}"
            )
        if not 0 < self.download_timeout < math.inf:
            raise ConfigError(
                f"download_timeout of stream {self.name!r} must be a positive number of seconds, "
                f"but is {self.download_timeout}"
            )
        if self.validate_hash and self.validate_hash not in hash_names():
            raise ConfigError(
                f"validate_hash of stream {self.name!r} must be one of {', '.join(hash_names())}, "
                f"but is {self.validate_hash!r}"
            )

    @property
    def attempts(self) -> int:
        """Attempts to fetch a file, or a part of a large one, in total."""
        return self.download_retry + 1

    def __repr__(self) -> str:
        remote = mask_url(self.remote) if self.remote else None
        return f"CacheConfig(name={self.name!r}, remote={remote!r}, local={self.local!r})"

    def source_directory(self) -> Path | None:
        """The directory that is read in place and never written to; None if files are fetched into a cache."""
        remote = _absolute(self.remote)
        local = _absolute(self.local)
        if not self.remote:
            return local
        return remote if local in (None, remote) else None

    def cache_directory(self) -> Path:
        """The directory that is ours to write to: for fetched files, or for raw files of compressed ones in place."""
        source = self.source_directory()
        if source is not None:
            return default_cache_directory(str(source))
        local = _absolute(self.local)
        return local or default_cache_directory(self.remote or "", self.storage_options)


def _absolute(location: str | Path | None) -> Path | None:
    """An absolute path, made without asking the disk; None for a URL, or for nothing."""
    path = local_path(str(location)) if location else None
    return None if path is None else Path(os.path.normpath(path.absolute()))
