"""One shard: from encoded samples to the files that are stored and the entry of the index, in any format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.formats.compression import compress, extension
from lightning_streaming.formats.hashing import hash_bytes
from lightning_streaming.formats.index import FileInfo, ShardInfo
from lightning_streaming.writing.settings import ShardSettings
from lightning_streaming.writing.shard_buffer import EncodedSamples

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeShard:
    """A shard, in memory."""

    info: ShardInfo
    """The entry of the index."""
    files: tuple[StoredFile, ...]
    """What is to be stored, the meta file before the data file."""


class ShardRecipe(Protocol):
    """What all shards of one writer share."""

    @property
    def format(self) -> str:
        """``mds``, ``json``, ``csv``, ``tsv`` or ``xsv``."""
        ...

    @property
    def settings(self) -> ShardSettings:
        """How to cut, compress and hash."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """What the index says of the columns."""
        ...

    @property
    def uncounted_bytes(self) -> int:
        """Bytes of the raw data file that ``size_limit`` does not count."""
        ...

    def parts(self, sample: Mapping[str, Any]) -> Sequence[Buffer]:
        """Turn a sample into bytes, in parts that follow each other. They may be the memory of its values.

        Raises:
            EncodingError: A column is missing, or its value does not fit.
        """
        ...

    def raw_bytes(self, num_samples: int, data_bytes: int) -> int:
        """What ``size_limit`` counts of a shard with so many samples, of so many bytes together.

        One byte more is one more, and each sample adds the same beside its bytes.
        """
        ...

    def make(self, number: int, samples: EncodedSamples) -> MadeShard:
        """Make the shard at place ``number``, from 0, of samples, which may be none and whose memory it keeps using.

        Raises:
            ConfigError: A file of it would have 4 GiB or more.
        """
        ...

    def samples_in(self, contents: Sequence[bytes]) -> list[bytes]:
        """The encoded samples of a shard that was made by this recipe.

        Args:
            contents: Its raw files, the meta file before the data file.

        Raises:
            ShardCorruptError: The files contradict themselves.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """One file of a shard, ready to be stored."""

    raw: FileInfo
    """The file before compression."""
    compressed: FileInfo | None
    """The compressed file; None without compression."""
    pieces: tuple[bytes | memoryview, ...]
    """The content of the one of both that is stored."""

    @property
    def basename(self) -> str:
        """Where it is stored."""
        return (self.compressed or self.raw).basename


def make_file(basename: str, head: bytes, settings: ShardSettings, samples: EncodedSamples | None = None) -> StoredFile:
    """Hash a raw file, and compress it where the settings say so.

    Args:
        basename: Name of the raw file.
        head: What it begins with.
        settings: How to hash and compress.
        samples: What follows, if anything does. After compression they are not to be looked at.
    """
    pieces = (head,) if samples is None else (head, samples.data)
    raw = _file_info(basename, pieces, settings)
    if settings.compression is None:
        return StoredFile(raw=raw, compressed=None, pieces=pieces)
    with memoryview(head if samples is None else samples.behind(head)) as whole:
        data = compress(settings.compression, whole)
    compressed = _file_info(f"{basename}.{extension(settings.compression)}", (data,), settings)
    return StoredFile(raw=raw, compressed=compressed, pieces=(data,))


def made_shard(recipe: ShardRecipe, samples: int, data: StoredFile, meta: StoredFile | None = None) -> MadeShard:
    """A shard, of its files."""
    info = ShardInfo(
        format=recipe.format,
        samples=samples,
        compression=recipe.settings.compression,
        hashes=recipe.settings.hashes,
        size_limit=recipe.settings.size_limit,
        raw_data=data.raw,
        zip_data=data.compressed,
        raw_meta=None if meta is None else meta.raw,
        zip_meta=None if meta is None else meta.compressed,
        schema=recipe.schema,
    )
    return MadeShard(info=info, files=(data,) if meta is None else (meta, data))


def cut_samples(table: bytes, data: bytes) -> list[bytes]:
    """Take a data file apart.

    Args:
        table: Starts with uint32 n and n + 1 uint32 offsets in the data file.
        data: The data file; the last sample ends where it ends.

    Raises:
        ShardCorruptError: The offsets do not follow each other to the end of the data.
    """
    count = int.from_bytes(table[:4], "little")
    if len(table) < 4 + 4 * (count + 1):
        raise ShardCorruptError(f"{count} samples need {4 + 4 * (count + 1)} bytes of offsets, but found {len(table)}")
    offsets = np.frombuffer(table, "<u4", count + 1, 4).astype(np.int64)
    if np.any(np.diff(offsets) < 0) or offsets[-1] != len(data):
        raise ShardCorruptError(f"the offsets of {count} samples do not lead to the end of {len(data)} bytes")
    return [data[start:stop] for start, stop in pairwise(offsets.tolist())]


def _file_info(basename: str, pieces: Sequence[bytes | memoryview], settings: ShardSettings) -> FileInfo:
    hashes = {name: hash_bytes(name, *pieces) for name in settings.hashes}
    return FileInfo(basename=basename, bytes=sum(map(len, pieces)), hashes=hashes)
