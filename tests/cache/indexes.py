"""Indexes without shard files, small and large, and what a test wants to know of a cache of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.cache.layout import ORIGIN_BASENAME, PARSED_INDEX_PREFIX
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, FileInfo, ShardInfo, dump_index
from tests.servers import HttpStore

SMALL, LARGE = 3, 4000
"""Shards of an index that is parsed whenever it is needed, and of one whose parsed form is kept."""


def shard(number: int, seed: int = 0) -> ShardInfo:
    """A shard whose hash tells its number and seed."""
    file = FileInfo(basename=f"shard.{number:05}.mds", bytes=2000, hashes={"sha1": f"{number + 10**9 * seed:040}"})
    return ShardInfo(
        format="mds",
        samples=3,
        compression=None,
        hashes=("sha1",),
        size_limit=None,
        raw_data=file,
        zip_data=None,
        schema={"column_names": ("a",), "column_encodings": ("int",), "column_sizes": (8,)},
    )


def put(directory: Path, count: int, seed: int = 0) -> DatasetIndex:
    """Write an index of so many shards."""
    index = DatasetIndex([shard(number, seed) for number in range(count)])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / INDEX_BASENAME).write_bytes(dump_index(index.shards))
    return index


def forms(directory: Path) -> list[Path]:
    """The parsed forms in a directory."""
    return sorted(directory.glob(f"{PARSED_INDEX_PREFIX}*"))


def in_place(directory: Path) -> IndexCache:
    """Of a directory that is read where it is."""
    return IndexCache(CacheConfig(name="code", local=directory))


def kept_for(directory: Path) -> Path:
    """Where the parsed form of an index that is read in place is kept."""
    return CacheConfig(name="code", local=directory).cache_directory()


def over_http(store: HttpStore, tmp_path: Path, **settings: Any) -> IndexCache:
    """Of a remote, kept in the directory "cache"."""
    return IndexCache(CacheConfig(name="code", remote=store.url, local=tmp_path / "cache", **settings))


def let_a_minute_pass(directory: Path) -> None:
    """Make it as if the remote had been asked a while ago."""
    let_time_pass(directory, 61)


def let_time_pass(directory: Path, seconds: int) -> None:
    """Make it as if the remote had been asked so long ago."""
    path = directory / ORIGIN_BASENAME
    *lines, last = path.read_text().rstrip().splitlines()  # what was longer once is padded
    check = json.loads(last)
    check["checked"] -= seconds * 10**9
    path.write_text("\n".join([*lines, json.dumps(check)]))
