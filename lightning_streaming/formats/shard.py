"""One door to the shards of every format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_streaming.formats.columns import check_columns
from lightning_streaming.formats.compression import check_algorithm
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.mds import MDSReader
from lightning_streaming.formats.mds_decoder import check_safe, read_decoder
from lightning_streaming.formats.split import read_split_layout
from lightning_streaming.formats.split_reader import SplitReader


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


def check_wanted(info: ShardInfo, *, allow_unsafe_types: bool = False, columns: Sequence[str] | None = None) -> None:
    """Refuse a shard for its columns' names and kinds alone, whatever is installed and registered here.

    Args:
        info: The shard, as its index describes it.
        allow_unsafe_types: Whether encodings may be read that can run code of whoever wrote the data.
        columns: Names of the columns to read; None for all.

    Raises:
        ConfigError: The shard lacks a wanted column, or one is unsafe and that was not allowed.
    """
    check_columns(info, columns)
    if not allow_unsafe_types:
        check_safe(info, columns)


def check_shard(info: ShardInfo, *, allow_unsafe_types: bool = False, columns: Sequence[str] | None = None) -> None:
    """Refuse a shard that could not be read, before anything of it is downloaded.

    Args:
        info: The shard, as its index describes it.
        allow_unsafe_types: Whether encodings may be read that can run code of whoever wrote the data.
        columns: Names of the columns to read; None for all.

    Raises:
        MissingDependencyError: Its compression, or a wanted column, needs a package that is not installed.
        IndexFormatError: The index describes columns that cannot be.
        ConfigError: The shard lacks a wanted column, or one is unsafe and that was not allowed.
    """
    check_columns(info, columns)
    if info.format == "mds":
        read_decoder(info, allow_unsafe_types=allow_unsafe_types, columns=columns)
    else:
        read_split_layout(info)
    if info.compression is not None:
        check_algorithm(info.compression)


def open_shard(
    info: ShardInfo, directory: Path, *, allow_unsafe_types: bool = False, columns: Sequence[str] | None = None
) -> ShardReader:
    """Open the raw files of a shard.

    Args:
        info: The shard, as its index describes it.
        directory: Where the dataset's files are.
        allow_unsafe_types: Whether encodings may be read that can run code of whoever wrote the data.
        columns: Names of the columns to read; None for all. What is not wanted is not decoded.

    Raises:
        ShardCorruptError: A file is not the one that the index describes.
        ObjectNotFoundError: A file is not there.
        StorageError: A file cannot be opened.
        IndexFormatError: The index describes columns that cannot be.
        ConfigError: The shard lacks a wanted column, or one is unsafe and that was not allowed.
        MissingDependencyError: A wanted column needs a package that is not installed.
    """
    if info.format != "mds":
        return SplitReader(info, directory, columns=columns)
    return MDSReader(info, directory, allow_unsafe_types=allow_unsafe_types, columns=columns)
