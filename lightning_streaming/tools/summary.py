"""What an index tells of its dataset, added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from lightning_streaming.formats.index import DatasetIndex, ShardInfo

_MOST_BINS = 8
_HARDLY = 20


class Column(NamedTuple):
    """One column, as the index describes it."""

    name: str
    encoding: str
    bytes: int | None
    """Size of each value; None where it varies or the format does not say."""


class Bin(NamedTuple):
    """Shards of similar size."""

    smallest: int
    """Raw bytes; the bin holds shards from here ..."""
    largest: int
    """... to here; only the last bin holds those of just this size."""
    shards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A dataset in numbers."""

    samples: int
    shards: int
    raw_bytes: int
    """Of all files, uncompressed."""
    stored_bytes: int
    """Of all files as they are stored."""
    formats: Mapping[str, int]
    """Format to the number of shards that have it; also of the next three."""
    compressions: Mapping[str | None, int]
    hashes: Mapping[tuple[str, ...], int]
    size_limits: Mapping[int | None, int]
    columns: Mapping[Column, int]
    """Each column to the number of shards that have it just so."""
    samples_per_shard: tuple[int, float, int] | None
    """Fewest, mean and most; None if there are no shards."""
    sizes: tuple[Bin, ...]
    """How large the shards are, uncompressed, from the smallest on."""


def summarize(index: DatasetIndex) -> Summary:
    """Add up an index."""
    raw_sizes = [sum(raw.bytes for raw, _ in shard.files) for shard in index.shards]
    counts = index.samples_per_shard()
    return Summary(
        samples=index.num_samples,
        shards=len(index.shards),
        raw_bytes=sum(raw_sizes),
        stored_bytes=sum((stored or raw).bytes for shard in index.shards for raw, stored in shard.files),
        formats=Counter(shard.format for shard in index.shards),
        compressions=Counter(shard.compression for shard in index.shards),
        hashes=Counter(shard.hashes for shard in index.shards),
        size_limits=Counter(shard.size_limit for shard in index.shards),
        columns=_count_columns(index.shards),
        samples_per_shard=(int(counts.min()), float(counts.mean()), int(counts.max())) if len(counts) else None,
        sizes=histogram(raw_sizes),
    )


def columns_of(schema: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns of a shard, from what the index says of it."""
    if "columns" in schema:
        return tuple(Column(name, encoding, None) for name, encoding in sorted(schema["columns"].items()))
    names, encodings = schema["column_names"], schema["column_encodings"]
    sizes = schema.get("column_sizes", (None,) * len(names))
    return tuple(map(Column, names, encodings, sizes))


def histogram(sizes: Sequence[int]) -> tuple[Bin, ...]:
    """Sort sizes into bins of one width: at most eight, and one where they hardly differ."""
    if not sizes:
        return ()
    smallest, largest = min(sizes), max(sizes)
    differ = (largest - smallest) * _HARDLY > largest
    num_bins = min(_MOST_BINS, len(set(sizes))) if differ else 1
    edges = [smallest + (largest - smallest) * number // num_bins for number in range(num_bins + 1)]
    counts, _ = np.histogram(sizes, edges if smallest < largest else [smallest, smallest + 1])
    return tuple(Bin(*ends, int(count)) for ends, count in zip(pairwise(edges), counts, strict=True))


def _count_columns(shards: Sequence[ShardInfo]) -> dict[Column, int]:
    # Shards of one writer share their schema, so a million of them are counted by a handful of objects.
    schemas: dict[int, Mapping[str, Any]] = {}  # holding them keeps their ids from being given to others
    counts: Counter[int] = Counter()
    for schema in (shard.schema for shard in shards):
        schemas.setdefault(id(schema), schema)
        counts[id(schema)] += 1
    columns: Counter[Column] = Counter()
    for key, schema in schemas.items():
        for column in columns_of(schema):
            columns[column] += counts[key]
    return dict(columns)
