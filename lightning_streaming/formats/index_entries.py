"""One shard of ``index.json``, and its files.

A value of this module has been checked when it exists: sizes are sound, file names stay inside the dataset, and each
shard has the files that its compression calls for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from lightning_streaming.errors import IndexFormatError
from lightning_streaming.files import join_under
from lightning_streaming.formats.checks import brief

INDEX_VERSION = 2
INDEX_BASENAME = "index.json"

MAX_RAW_BYTES = 2**32 - 1
"""Most bytes of a raw file, and most samples of a shard: both are written in 32 bits."""

_MOST_BYTES = 2**63 - 1
"""No file system has longer files."""
_ANYWHERE = Path()
_MOST_NAME_BYTES = 255
_MOST_PATH_BYTES = 1024
"""What file systems, and buckets, let a file name and a key have."""


_Info = TypeVar("_Info", "FileInfo", "ShardInfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """One file of a shard."""

    basename: str
    """Path relative to the dataset's directory, with forward slashes."""
    bytes: int
    """Size of the whole file."""
    hashes: Mapping[str, str]
    """Hash name to lowercase hexadecimal digits over the whole file."""

    def __post_init__(self) -> None:
        join_under(_ANYWHERE, self.basename)
        _check_length(self.basename)
        _check_not_taken(self.basename)
        if self.bytes < 0:
            raise IndexFormatError(f"bytes of {self.basename} must not be negative, but is {self.bytes}")
        if self.bytes > _MOST_BYTES:
            raise IndexFormatError(
                f"bytes of {self.basename} must be at most {_MOST_BYTES}, but is {brief(self.bytes)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One shard: its samples, and each file in its raw form and, where it is compressed, in its stored one."""

    format: str
    """``mds``, ``json``, ``csv``, ``tsv`` or ``xsv``."""
    samples: int
    """Number of samples; may be 0."""
    compression: str | None
    """Algorithm, for example ``zstd:7``."""
    hashes: tuple[str, ...]
    """Names of the hashes recorded of each file, sorted."""
    size_limit: int | None
    """The writer's limit of raw bytes per shard."""
    raw_data: FileInfo
    """The uncompressed data file, recorded also where only the compressed one is stored."""
    zip_data: FileInfo | None
    """The compressed data file."""
    raw_meta: FileInfo | None = None
    """The uncompressed meta file of the formats that have one."""
    zip_meta: FileInfo | None = None
    """The compressed meta file."""
    schema: Mapping[str, Any]
    """What the format says of the columns, with tuples for lists; not to be changed, shards of one writer share it."""

    def __post_init__(self) -> None:
        if not 0 <= self.samples <= MAX_RAW_BYTES:
            raise IndexFormatError(f"samples must be in [0, {MAX_RAW_BYTES}], but is {self.samples}")
        for raw, compressed in self.files:
            if raw.bytes > MAX_RAW_BYTES:
                raise IndexFormatError(f"{raw.basename} must be at most {MAX_RAW_BYTES} bytes, but is {raw.bytes}")
            if (compressed is None) != (self.compression is None):
                wanted = "no compressed file" if self.compression is None else "a compressed file"
                raise IndexFormatError(
                    f"compression is {self.compression!r}, which calls for {wanted} of {raw.basename}"
                )

    @property
    def files(self) -> tuple[tuple[FileInfo, FileInfo | None], ...]:
        """(raw, compressed) of each file, the meta file before the data file."""
        data = (self.raw_data, self.zip_data)
        return (data,) if self.raw_meta is None else ((self.raw_meta, self.zip_meta), data)


def _check_not_taken(basename: str) -> None:
    parts = PurePosixPath(basename).parts
    if parts[-1] == INDEX_BASENAME or any(part.startswith(".") for part in parts):
        raise IndexFormatError(
            f"a file of a shard must not be called {INDEX_BASENAME}, nor begin with a dot, also its directories: such "
            f"names are those of a cache's own files; but got {brief(basename)}"
        )


def unchecked(cls: type[_Info], **fields: Any) -> _Info:
    """A file or a shard whose fields were checked when its index was read; all must be given."""
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _check_length(basename: str) -> None:
    name = basename.encode()
    if len(name) > _MOST_PATH_BYTES or max(map(len, name.split(b"/"))) > _MOST_NAME_BYTES:
        raise IndexFormatError(
            f"a file name can have {_MOST_NAME_BYTES} bytes, and {_MOST_PATH_BYTES} with its directories, but is "
            f"{brief(basename)}"
        )
