"""One door to the shards of every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from lightning_streaming.errors import UnsupportedError
from lightning_streaming.formats.compression import check_algorithm
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.mds import MDSReader, read_layout


class ShardReader(Protocol):
    """The samples of one shard, read from its raw files."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample at ``index`` in [0, len), as column name to value. It shares no memory with the shard.

        Raises:
            SampleIndexError: There is no such sample.
            FormatError: The sample's bytes are not what the format says.
        """
        ...

    def close(self) -> None:
        """Let go of the files; nothing can be read afterwards."""
        ...


def check_shard(info: ShardInfo, *, allow_unsafe_types: bool = False) -> None:
    """Refuse a shard that could not be read, before anything of it is downloaded.

    Args:
        info: The shard, as its index describes it.
        allow_unsafe_types: Whether encodings may be read that can run code of whoever wrote the data.

    Raises:
        UnsupportedError: This version does not serve its format, compression or an encoding.
        MissingDependencyError: Its compression needs a package that is not installed.
        IndexFormatError: The index describes columns that cannot be.
        ConfigError: A column is unsafe and that was not allowed.
    """
    _check_format(info)
    read_layout(info, allow_unsafe_types=allow_unsafe_types)
    if info.compression is not None:
        check_algorithm(info.compression)


def open_shard(info: ShardInfo, directory: Path, *, allow_unsafe_types: bool = False) -> ShardReader:
    """Open the raw files of a shard.

    Args:
        info: The shard, as its index describes it.
        directory: Where the dataset's files are.
        allow_unsafe_types: Whether encodings may be read that can run code of whoever wrote the data.

    Raises:
        ShardCorruptError: A file is not the one that the index describes.
        ObjectNotFoundError: A file is not there.
        StorageError: A file cannot be opened.
        UnsupportedError: This version does not serve its format or an encoding.
        IndexFormatError: The index describes columns that cannot be.
        ConfigError: A column is unsafe and that was not allowed.
    """
    _check_format(info)
    return MDSReader(info, directory, allow_unsafe_types=allow_unsafe_types)


def _check_format(info: ShardInfo) -> None:
    if info.format != "mds":
        raise UnsupportedError(f"shards of format {info.format} are not served by this version, only mds")
