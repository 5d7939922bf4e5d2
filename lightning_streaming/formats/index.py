"""``index.json``: the list of shards that a dataset consists of.

A value of this module has been checked when it exists: sizes are sound, file names stay inside the dataset, and each
shard has the files that its compression calls for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import IndexFormatError
from lightning_streaming.files import join_under
from lightning_streaming.formats.checks import brief
from lightning_streaming.formats.index_fields import (
    take,
    take_compression,
    take_schema,
    take_size_limit,
    take_text_mapping,
    take_texts,
)

INDEX_VERSION = 2
INDEX_BASENAME = "index.json"

MAX_RAW_BYTES = 2**32 - 1
"""Most bytes of a raw file, and most samples of a shard: both are written in 32 bits."""

_ANYWHERE = Path()
_MOST_NAME_BYTES = 255
_MOST_PATH_BYTES = 1024
"""What file systems, and buckets, let a file name and a key have."""


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
        if self.bytes < 0:
            raise IndexFormatError(f"bytes of {self.basename} must not be negative, but is {self.bytes}")


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


@dataclass(frozen=True, slots=True)
class DatasetIndex:
    """A dataset: its shards in sample order."""

    shards: tuple[ShardInfo, ...]
    """May be empty."""

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return sum(shard.samples for shard in self.shards)

    def samples_per_shard(self) -> NDArray[np.int64]:
        """Samples of each shard, of shape (shards,)."""
        return np.fromiter((shard.samples for shard in self.shards), np.int64, len(self.shards))


def _check_length(basename: str) -> None:
    name = basename.encode()
    if len(name) > _MOST_PATH_BYTES or max(map(len, name.split(b"/"))) > _MOST_NAME_BYTES:
        raise IndexFormatError(
            f"a file name can have {_MOST_NAME_BYTES} bytes, and {_MOST_PATH_BYTES} with its directories, but is "
            f"{brief(basename)}"
        )


def dump_index(shards: Iterable[ShardInfo]) -> bytes:
    """The text of ``index.json``, byte for byte as the original writer makes it."""
    root = {"shards": [_shard_to_json(shard) for shard in shards], "version": INDEX_VERSION}
    return json.dumps(root, sort_keys=True).encode()


def _shard_to_json(shard: ShardInfo) -> dict[str, Any]:
    entry = {
        **shard.schema,
        "compression": shard.compression,
        "format": shard.format,
        "hashes": shard.hashes,
        "raw_data": _file_to_json(shard.raw_data),
        "samples": shard.samples,
        "size_limit": shard.size_limit,
        "version": INDEX_VERSION,
        "zip_data": shard.zip_data and _file_to_json(shard.zip_data),
    }
    if shard.raw_meta is not None:
        entry["raw_meta"] = _file_to_json(shard.raw_meta)
        entry["zip_meta"] = shard.zip_meta and _file_to_json(shard.zip_meta)
    return entry


def _file_to_json(file: FileInfo) -> dict[str, Any]:
    return {"basename": file.basename, "bytes": file.bytes, "hashes": dict(file.hashes)}


def parse_index(data: bytes, source: str) -> DatasetIndex:
    """Read the text of ``index.json``. Keys that this version does not know are ignored.

    All formats that the specification knows are understood here; whether a shard can also be read,
    :func:`~lightning_streaming.formats.shard.check_shard` tells.

    Args:
        data: The whole file.
        source: Its path or URL, for errors.

    Raises:
        IndexFormatError: It is not an index of version 2, or one of its shards contradicts itself or would leave the
            dataset's directory; the message names the shard by its number.
    """
    try:
        entries = _parse_root(data)
    except IndexFormatError as error:
        raise IndexFormatError(f"{source}: {error}") from None
    shards: list[ShardInfo] = []
    try:
        for entry in entries:
            shards.append(_parse_shard(entry, shards[-1].schema if shards else {}))
    except IndexFormatError as error:
        raise IndexFormatError(f"{source}, shard {len(shards)}: {error}") from None
    return DatasetIndex(tuple(shards))


def _parse_root(data: bytes) -> list[Any]:
    try:
        root = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IndexFormatError(f"an index must be JSON, but {error}") from None
    if type(root) is not dict:
        raise IndexFormatError(f"an index must be a JSON object, but is {brief(root)}")
    _check_version(root)
    return take(root, "shards", list)


def _parse_shard(entry: Any, schema_before: Mapping[str, Any]) -> ShardInfo:
    if type(entry) is not dict:
        raise IndexFormatError(f"a shard must be a JSON object, but is {brief(entry)}")
    _check_version(entry)
    shard_format = take(entry, "format", str)
    schema = take_schema(entry, shard_format)
    has_meta = shard_format != "mds"
    shard = ShardInfo(
        format=shard_format,
        samples=take(entry, "samples", int),
        compression=take_compression(entry),
        hashes=take_texts(entry, "hashes"),
        size_limit=take_size_limit(entry),
        raw_data=_parse_file(entry, "raw_data"),
        zip_data=_parse_optional_file(entry, "zip_data"),
        raw_meta=_parse_file(entry, "raw_meta") if has_meta else None,
        zip_meta=_parse_optional_file(entry, "zip_meta") if has_meta else None,
        schema=schema_before if schema == schema_before else schema,
    )
    with_offsets = shard.raw_data if shard.raw_meta is None else shard.raw_meta
    if 4 * (shard.samples + 2) > with_offsets.bytes:
        raise IndexFormatError(
            f"{with_offsets.basename} has {with_offsets.bytes} bytes, too few to say where {shard.samples} samples are"
        )
    return shard


def _check_version(entry: dict[str, Any]) -> None:
    version = take(entry, "version", int)
    if version != INDEX_VERSION:
        raise IndexFormatError(f"only version {INDEX_VERSION} can be read, but version is {version}")


def _parse_file(entry: dict[str, Any], key: str) -> FileInfo:
    file = take(entry, key, dict)
    try:
        return FileInfo(
            basename=take(file, "basename", str),
            bytes=take(file, "bytes", int),
            hashes=take_text_mapping(file, "hashes"),
        )
    except IndexFormatError as error:
        raise IndexFormatError(f"{key}: {error}") from None


def _parse_optional_file(entry: dict[str, Any], key: str) -> FileInfo | None:
    return None if entry.get(key) is None else _parse_file(entry, key)
