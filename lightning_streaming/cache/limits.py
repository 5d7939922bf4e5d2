"""Which limits can work: arithmetic on sizes that indexes tell."""

from __future__ import annotations

import numpy as np

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index_table import ShardTable
from lightning_streaming.units import format_bytes


def largest_shard_bytes(shards: ShardTable) -> int:
    """Bytes that the largest shard takes while it is made: all its files, compressed and raw; 0 where there is none."""
    if not len(shards):
        return 0
    return int(np.add.reduceat(shards.sizes, shards.first_file[:-1]).max())


def least_limit(index_bytes: int, shard_bytes: int) -> int:
    """The smallest limit that can work: one shard in use, and the next one on its way.

    Args:
        index_bytes: Size of the indexes, which always stay.
        shard_bytes: See :func:`largest_shard_bytes`.
    """
    return index_bytes + 2 * shard_bytes


def check_limit(limit: int | None, index_bytes: int, shard_bytes: int) -> None:
    """Refuse a limit that cannot work.

    Raises:
        ConfigError: It is too small; the message has the smallest that is not.
    """
    least = least_limit(index_bytes, shard_bytes)
    if limit is not None and limit < least:
        raise ConfigError(
            f"cache_limit must leave room for the index ({format_bytes(index_bytes)}) and for two of the largest shard "
            f"({format_bytes(shard_bytes)}, raw and compressed), which is {least} bytes, but is {limit}"
        )


def reader_share(limit: int, readers: int) -> int:
    """Bytes of shards that one reader may keep open, and may fetch ahead: half of the limit is for each.

    Args:
        limit: Most bytes of all shards.
        readers: Processes that read the same dataset on this node.
    """
    return limit // (2 * readers)
