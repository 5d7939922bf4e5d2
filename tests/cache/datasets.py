"""Small datasets for tests of the cache, which looks at files and never into them."""

from __future__ import annotations

import random
from pathlib import Path

from lightning_streaming.cache import ShardCache
from lightning_streaming.cache.layout import ARRIVING_BASENAME
from lightning_streaming.cache.room import CacheRoom
from lightning_streaming.formats.compression import compress, extension
from lightning_streaming.formats.hashing import hash_bytes
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, dump_index

_SCHEMA = {"column_encodings": ("bytes",), "column_names": ("data",), "column_sizes": (None,)}


def write_dataset(
    directory: Path,
    *,
    shards: int = 2,
    compression: str | None = None,
    hashes: tuple[str, ...] = ("sha1",),
    seed: int = 0,
) -> DatasetIndex:
    """Write an index and its shard files; two datasets of different seeds differ in every file but in no raw size."""
    generator = random.Random(seed)
    index = DatasetIndex(
        tuple(
            _write_shard(directory, f"shard.{number:05}.mds", generator.randbytes(3000), compression, hashes)
            for number in range(shards)
        )
    )
    (directory / INDEX_BASENAME).write_bytes(dump_index(index.shards))
    return index


def raw_data(shard: int, *, seed: int = 0) -> bytes:
    """What the raw file of a shard of :func:`write_dataset` must hold."""
    generator = random.Random(seed)
    return [generator.randbytes(3000) for _ in range(shard + 1)][-1]


def fetch_shard(cache: ShardCache, shard: ShardInfo, room: CacheRoom | None = None) -> Path:
    """Have a shard on this node for now; gives where its raw files are."""
    with cache.hold(shard, room) as directory:
        return directory


def cached(directory: Path) -> dict[str, bytes]:
    """Name and contents of everything in a cache directory but what the cache keeps there for itself."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if not path.name.startswith(".")}


def parts(directory: Path) -> list[Path]:
    """Files on their way into a cache directory."""
    return sorted((directory / ARRIVING_BASENAME).glob("*"))


def _write_shard(
    directory: Path, basename: str, data: bytes, compression: str | None, hashes: tuple[str, ...]
) -> ShardInfo:
    stored_name = basename if compression is None else f"{basename}.{extension(compression)}"
    stored = data if compression is None else compress(compression, data)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / stored_name).write_bytes(stored)
    return ShardInfo(
        format="mds",
        samples=1,
        compression=compression,
        hashes=hashes,
        size_limit=None,
        raw_data=_describe(basename, data, hashes),
        zip_data=None if compression is None else _describe(stored_name, stored, hashes),
        schema=_SCHEMA,
    )


def _describe(basename: str, data: bytes, hashes: tuple[str, ...]) -> FileInfo:
    return FileInfo(basename=basename, bytes=len(data), hashes={name: hash_bytes(name, data) for name in hashes})
