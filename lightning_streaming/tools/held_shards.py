"""Shards of data of another format, opened as every reader opens them: by way of the cache, which knows raw forms."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from lightning_streaming.cache import ShardCache
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.other_formats import ShardReader
from lightning_streaming.formats.shard import narrowed, open_shard


@contextmanager
def opened(
    cache: ShardCache,
    shard: ShardInfo,
    columns: Sequence[str] | None = None,
    *,
    allow_unsafe_types: bool = False,
    as_files: Collection[str] = (),
) -> Iterator[ShardReader]:
    """Open a shard; what had to be fetched or unpacked for it is removed again.

    Args:
        cache: Of the dataset.
        shard: An entry of its index.
        columns: Names of the columns to read; None for all.
        allow_unsafe_types: Whether values may be decoded that can run code of whoever wrote the data.
        as_files: As for :func:`open_shard`.

    Raises:
        StreamingError: As for :meth:`ShardCache.hold` and :func:`open_shard`.
    """
    held = narrowed(shard, columns)
    was_here = cache.has(held)
    try:
        with cache.hold(held) as directory:
            reader = open_shard(
                held, directory, allow_unsafe_types=allow_unsafe_types, columns=columns, as_files=as_files
            )
            try:
                yield reader
            finally:
                reader.close()
    finally:
        if not was_here:
            cache.evict(held)
