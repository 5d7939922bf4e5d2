"""Shards opened, those of other formats by way of the cache, which knows raw forms; and samples read alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_streaming.cache import ShardCache
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.readers import ShardReader
from lightning_streaming.formats.shard import (
    FilePart,
    SingleSampleReader,
    has_single_samples,
    narrowed,
    open_shard,
    table_part,
)
from lightning_streaming.formats.shard_table import OTHER_FORMATS, column_names
from lightning_streaming.storage import Location
from lightning_streaming.tools.stored.stored_dataset import StoredDataset, raw_directory


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


def lone_samples(shard: ShardInfo, at: Location, **how: Any) -> SingleSampleReader:
    """What finds the samples of a shard and decodes each by its bytes alone; of the shard only its offsets are read.

    Args:
        shard: One that has lone samples, and lies uncompressed.
        at: The directory.
        how: As for :class:`SingleSampleReader`.

    Raises:
        StreamingError: They cannot be read, or are not those of the shard.
    """
    file, start, stop = table_part(shard)
    return SingleSampleReader(shard, (at / file.basename).read_range(start, stop), **how)


def parts_of(data: Location, parts: Sequence[FilePart]) -> list[bytes]:
    """The bytes of samples beside each other or near, in ascending order, by one request."""
    start = parts[0].start
    read = data.read_range(start, parts[-1].stop)
    return [read[part.start - start : part.stop - start] for part in parts]


def samples_of(
    place: StoredDataset,
    cache: ShardCache,
    shard: ShardInfo,
    number: int,
    names: list[str],
    *,
    allow_unsafe_types: bool,
) -> Iterator[dict[str, Any]]:
    """These columns of the first samples of a shard; of one on a store no more is fetched than these samples need."""
    # Unsafe columns are not decoded where they are not among those asked for.
    wanted: dict[str, Any] = {"allow_unsafe_types": True, "columns": names}
    if not names:  # nothing is decoded, so nothing is fetched
        yield from [{}] * number
    elif shard.format in OTHER_FORMATS:
        # A sample of these may lack columns, unless they are named.
        is_all = len(names) == len(column_names(shard))
        with opened(cache, shard, None if is_all else names, allow_unsafe_types=allow_unsafe_types) as reader:
            yield from map(reader.__getitem__, range(number))
    elif place.directory is None and has_single_samples(shard):
        samples = lone_samples(shard, place.at, **wanted)
        parts = [samples.part(sample) for sample in range(number)]
        read = parts_of(place.at / shard.raw_data.basename, parts)
        yield from map(samples.decode, range(number), read)
    else:
        with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
            reader = open_shard(shard, raw_directory(place, shard, Path(scratch)), **wanted)
            try:
                yield from map(reader.__getitem__, range(number))
            finally:
                reader.close()
