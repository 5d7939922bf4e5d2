"""The first samples of a dataset, wherever it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from lightning_streaming.formats.encodings import is_unsafe
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.shard import check_shard, open_shard
from lightning_streaming.tools.raw_files import peek_directory
from lightning_streaming.tools.stored_dataset import StoredDataset
from lightning_streaming.tools.summary import columns_of


class Peeked(NamedTuple):
    """One sample."""

    shard: str
    """Name of its data file."""
    values: dict[str, Any]
    """Column to value; without unsafe columns, unless they were allowed."""
    left_out: dict[str, str]
    """Unsafe column to its encoding."""


def first_samples(
    place: StoredDataset, index: DatasetIndex, number: int, *, allow_unsafe_types: bool
) -> Iterator[Peeked]:
    """Read samples from the first one on.

    Args:
        place: Where the dataset is.
        index: Its index.
        number: How many; there may be fewer.
        allow_unsafe_types: Whether encodings may be decoded that can run code of whoever wrote the data.

    Raises:
        FormatError: A shard is not what the index says.
        StorageError: A file could not be fetched.
        UnsupportedError: This version does not serve a format or an encoding.
        MissingDependencyError: A package is needed that is not installed.
    """
    for shard in index.shards:
        if number <= 0:
            return
        wanted = min(number, shard.samples)
        if wanted:
            with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
                yield from _samples_of(place, shard, wanted, Path(scratch), allow_unsafe_types)
        number -= wanted


def _samples_of(
    place: StoredDataset, shard: ShardInfo, number: int, scratch: Path, allow_unsafe_types: bool
) -> Iterator[Peeked]:
    columns = columns_of(shard.schema)
    unsafe = {} if allow_unsafe_types else {one.name: one.encoding for one in columns if is_unsafe(one.encoding)}
    safe = [column.name for column in columns if column.name not in unsafe]
    check_shard(shard, allow_unsafe_types=True)
    if not safe:  # nothing is decoded, so nothing is fetched
        yield from [Peeked(shard.raw_data.basename, {}, unsafe)] * number
        return
    directory = peek_directory(place, shard, number, scratch)
    # Unsafe columns are not decoded where they are not among those asked for.
    reader = open_shard(shard, directory, allow_unsafe_types=True, columns=safe)
    try:
        for sample in range(number):
            yield Peeked(shard.raw_data.basename, reader[sample], unsafe)
    finally:
        reader.close()
