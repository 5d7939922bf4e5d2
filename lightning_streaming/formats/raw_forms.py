"""Raw forms of compressed shards: what may lie beside what is stored, and may as well be another dataset's.

A raw file repeats its writer's settings, where its offsets are. That tells a file that was written uncompressed, and so
is a shard of another dataset, from the raw form of a compressed one. It proves nothing: raw forms of two datasets of
one writer's settings say the same.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lightning_streaming.files import join_under
from lightning_streaming.formats.index import FileInfo, ShardInfo

_HEAD = struct.Struct("<II")
_MOST_CONFIG_BYTES = 2**24


def raw_forms(shards: Iterable[ShardInfo]) -> Iterator[FileInfo]:
    """The raw files of compressed shards: their names are the dataset's, though it stores nothing under them."""
    return (raw for shard in shards for raw, compressed in shard.files if compressed is not None)


def was_written_for(shard: ShardInfo, directory: Path) -> bool:
    """Whether the raw files of a shard say that they are of so many samples and of this compression.

    Args:
        shard: An entry of an index.
        directory: Where the raw files are.
    """
    table = shard.raw_meta or shard.raw_data
    try:
        with join_under(directory, table.basename).open("rb") as file:
            config = _config(file, shard, table.bytes)
    except (OSError, ValueError, struct.error, RecursionError):
        return False
    return isinstance(config, dict) and config.get("compression") == shard.compression


def _config(file: BinaryIO, shard: ShardInfo, size: int) -> Any:
    """The config text, read as JSON: between the offsets and the samples, or the end of a meta file."""
    count, first = _HEAD.unpack(file.read(_HEAD.size))
    start = 4 + 4 * (count + 1)
    stop = first if shard.raw_meta is None else size
    if count != shard.samples or not 0 <= stop - start <= _MOST_CONFIG_BYTES:
        return None
    file.seek(start)
    return json.loads(file.read(stop - start))
