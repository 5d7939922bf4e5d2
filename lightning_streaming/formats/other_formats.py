"""Data that other libraries wrote, read as it lies: what each format must be able to do, and where to find it.

A format answers two questions: which shards are under a place (``describe``), and what are the samples of a shard
(``open``). What ``describe`` finds goes into an index like any other, so cache, orders, selections and resumes know
nothing of formats. A shard is a file of the data, or several that belong together; its entry in the index has::

    format          one of OTHER_FORMATS
    raw_data        the file; where it is compressed, the file that it becomes, with zip_data for the file as it lies
                    or the file that a part of it becomes, with zip_data for the whole of it and PART for compression
    raw_meta        a second file without which the first cannot be read; or none
    column_names, column_encodings
                    the columns of each sample, and the MDS encodings that would hold their values
    described       JSON text: what else the format has to know of all shards alike; "block_length" where one is asked
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_streaming.errors import IndexFormatError
from lightning_streaming.formats.shard_table import OTHER_FORMATS, FileInfo, ShardInfo
from lightning_streaming.formats.values import brief


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


class StoredFiles(Protocol):
    """The files under a place where data lies."""

    @property
    def shown(self) -> str:
        """What to call the place in an error."""
        ...

    def shown_file(self, name: str) -> str:
        """Return the path or URL of a file, without secrets."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file, by its path below the place with forward slashes, sorted."""
        ...

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Some bytes of a file; never more than there are.

        Raises:
            StorageError: They could not be read.
        """
        ...

    def read_if_there(self, name: str) -> bytes | None:
        """A whole file, also one that is hidden; None if there is none.

        Raises:
            StorageError: It could not be read.
        """
        ...


class OtherFormat(Protocol):
    """What a format can do."""

    def describe(self, files: StoredFiles, known: Mapping[str, ShardInfo]) -> Generator[ShardInfo, None, None]:
        """Find the shards under a place, in the order of their samples; closed, it leaves no thread behind.

        Args:
            files: What lies there.
            known: Shards that were described before, by the name of their raw data file. One whose files have the same
                sizes may be given again without a look at them.

        Raises:
            ConfigError: No file there is of this format.
            FormatError: A file is damaged; names it.
            StorageError: A file could not be read.
        """
        ...

    def check(self, info: ShardInfo, columns: Sequence[str] | None) -> None:
        """Refuse a shard that could not be read, before anything of it is fetched.

        Raises:
            MissingDependencyError: It needs a package that is not installed.
            IndexFormatError: Its entry in the index is not of this format.
        """
        ...

    def open(self, info: ShardInfo, directory: Path, columns: Sequence[str] | None) -> ShardReader:
        """Open the raw files of a shard.

        Args:
            info: The shard, as its index describes it.
            directory: Where its raw files are.
            columns: Names of the columns to read; None for all.

        Raises:
            FormatError: A file is not what the index describes, or damaged.
            ObjectNotFoundError: A file is not there.
            StorageError: A file cannot be opened.
        """
        ...


class RangedFile(Protocol):
    """A file as it is stored, of which parts are read."""

    @property
    def shown(self) -> str:
        """What to call it in an error."""
        ...

    @property
    def size(self) -> int:
        """Its bytes, as the index tells them."""
        ...

    def read(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes | memoryview]:
        """The bytes of some ranges, none of them empty: each from its first byte up to, not including, its last.

        Raises:
            StorageError: They could not be read.
        """
        ...


class PartsFormat(OtherFormat, Protocol):
    """A format whose shards are parts of files; what is read of one is made of it, and kept on the node."""

    @property
    def is_read_in_place(self) -> bool:
        """Whether :meth:`open` takes a directory that has the stored file itself, too."""
        ...

    def narrowed(self, info: ShardInfo, columns: Sequence[str] | None) -> ShardInfo:
        """The shard that has some columns of another alone, for which less is fetched.

        Args:
            info: A shard.
            columns: Names of columns, all of which it has; None for all.
        """
        ...

    def look(self, stored: RangedFile) -> Any:
        """What is to be known of a file before parts of it are unpacked; it is kept for the next.

        Raises:
            FormatError: The file is damaged.
            StorageError: It could not be read.
        """
        ...

    def unpack(self, info: ShardInfo, known: Any, stored: RangedFile, destination: Path) -> int:
        """Make the raw file of a shard.

        Args:
            info: The shard; of all its columns, or of some.
            known: What :meth:`look` gave.
            stored: The file that the shard is a part of.
            destination: The raw file, written to where it is if it exists; has the size that the shard tells.

        Returns:
            Bytes that were read of the stored file.

        Raises:
            ShardCorruptError: The file is damaged, or another one than when the index was made.
            StorageError: It could not be read.
            OSError: The raw file cannot be written.
        """
        ...


def by_file(known: Mapping[str, ShardInfo], sizes: Mapping[str, int]) -> dict[str, list[ShardInfo]]:
    """The shards that were described before, by the file that they are parts of, or all of, if its size is the same.

    Args:
        known: See :meth:`OtherFormat.describe`.
        sizes: Bytes of each file there is.
    """
    found = dict[str, list[ShardInfo]]()
    for shard in known.values():
        file = shard.zip_data or shard.raw_data
        if sizes.get(file.basename) == file.bytes:
            found.setdefault(file.basename, []).append(shard)
    return found


def other_shard(
    shard_format: str,
    samples: int,
    raw_data: FileInfo,
    columns: Mapping[str, str],
    described: Mapping[str, Any],
    *,
    raw_meta: FileInfo | None = None,
    compression: str | None = None,
    zip_data: FileInfo | None = None,
) -> ShardInfo:
    """The entry of a shard in an index; arguments are those of :class:`ShardInfo`.

    Args:
        columns: The columns of each sample, with the MDS encoding that their values would have, like "ndarray:uint16";
            for who looks at columns without a look at samples.
        described: What the format has to know of all shards alike, as plain JSON values.
    """
    return ShardInfo(
        format=shard_format,
        samples=samples,
        compression=compression,
        hashes=(),
        size_limit=None,
        raw_data=raw_data,
        zip_data=zip_data,
        raw_meta=raw_meta,
        schema={
            "column_names": tuple(columns),
            "column_encodings": tuple(columns.values()),
            "described": json.dumps(described, sort_keys=True, separators=(",", ":")),
        },
    )


def described(info: ShardInfo) -> dict[str, Any]:
    """What :func:`other_shard` was given; empty for a shard of another format.

    Raises:
        IndexFormatError: It is no JSON object.
    """
    if info.format not in OTHER_FORMATS:
        return {}
    try:
        found = json.loads(info.schema["described"])
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise IndexFormatError(f"described must be the text of a JSON object, but is {brief(info.schema['described'])}")
    return found
