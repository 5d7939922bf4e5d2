"""A dataset in numbers: totals, formats, columns and sizes of shards, as a report and as facts to print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.shard_table import PART, ShardTable
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.stored.stored_dataset import Column, add_up, columns_of
from lightning_streaming.units import format_bytes

_MAX_BINS = 8
_MIN_PARTS = 20
"""Sizes whose difference is not more than this part of the largest are shown as one bin."""


def summarize(index: DatasetIndex) -> dict[str, Any]:
    """Return totals of a dataset, and the number of its shards of each format, compression and so on."""
    # A million shards are of few kinds: the first shard of each kind, and the number of shards.
    counts = np.bincount(index.shards.kind_of_shard, minlength=1).tolist()
    kinds = [(shard, counts[index.shards.kind_of_shard[number]]) for number, shard in index.shards.examples()]
    columns: Counter[Column] = Counter()
    for shard, count in kinds:
        columns.update(dict.fromkeys(columns_of(shard.schema), count))

    def counted_by(key: str, value_of: Callable[[ShardInfo], Any]) -> list[dict[str, Any]]:
        values: Counter[Any] = Counter()
        for shard, count in kinds:
            values[value_of(shard)] += count
        return [{key: value, "shards": count} for value, count in values.items()]

    return {
        **add_up(index),
        "formats": counted_by("format", lambda shard: shard.format),
        "compressions": counted_by("compression", lambda shard: shard.compression),
        "hashes": counted_by("hashes", lambda shard: shard.hashes),
        "size_limits": counted_by("size_limit", lambda shard: shard.size_limit),
        "columns": [{**column._asdict(), "shards": count} for column, count in columns.items()],
        "shard_sizes": histogram([sum(raw.bytes for raw, _ in shard.files) for shard in index.shards]),
    }


def histogram(sizes: Sequence[int]) -> list[dict[str, int]]:
    """Count sizes in bins of equal width: at most eight, and one if they hardly differ.

    Returns:
        ``smallest`` and ``largest`` of each bin, and the number of ``shards`` from the former up to, but not including,
        the latter; the last bin includes it.
    """
    if not sizes:
        return []
    smallest, largest = min(sizes), max(sizes)
    num_bins = min(_MAX_BINS, len(set(sizes))) if _MIN_PARTS * (largest - smallest) > largest else 1
    edges = [smallest + (largest - smallest) * number // num_bins for number in range(num_bins + 1)]
    counts, _ = np.histogram(sizes, edges if smallest < largest else [smallest, smallest + 1])
    bins = zip(pairwise(edges), counts, strict=True)
    return [{"smallest": start, "largest": stop, "shards": int(count)} for (start, stop), count in bins]


def facts_of(report: Mapping[str, Any], index: DatasetIndex) -> Sequence[tuple[str, str]]:
    """Return what :func:`summarize` reports of the whole dataset as names and texts."""
    counts = index.samples_per_shard()
    per_shard = "-"
    if len(counts):
        fewest, most = counts.min(), counts.max()
        per_shard = f"{counts.mean():,.1f} on average, {fewest:,} to {most:,}" if fewest < most else f"{fewest:,}"
    raw_bytes, stored_bytes = report["raw_bytes"], report["stored_bytes"]
    share = f", {stored_bytes / raw_bytes:.0%} of it" if stored_bytes != raw_bytes > 0 else ""
    hashes = [(", ".join(kind["hashes"]) or None, kind["shards"]) for kind in report["hashes"]]
    compressions = [
        ("as in its files" if kind["compression"] == PART else kind["compression"], kind["shards"])
        for kind in report["compressions"]
    ]
    limits = [(kind["size_limit"] and _size(kind["size_limit"]), kind["shards"]) for kind in report["size_limits"]]
    return (
        ("samples", f"{report['samples']:,}"),
        ("shards", f"{report['shards']:,}"),
        ("samples per shard", per_shard),
        ("raw size", _size(raw_bytes)),
        ("stored size", _size(stored_bytes) + share),
        ("format", _several(kind.values() for kind in report["formats"])),
        ("compression", _several(compressions)),
        ("hashes", _several(hashes)),
        ("size limit", _several(limits)),
    )


def _several(counts: Iterable[Iterable[Any]]) -> str:
    """Return the value that all shards have, or each value with the number of shards."""
    values = [("none" if value is None else str(value), shards) for value, shards in counts]
    if len(values) < 2:
        return "".join(value for value, _ in values) or "-"
    return "; ".join(f"{value} ({counted(shards, 'shard')})" for value, shards in values)


def _size(size: int) -> str:
    return format_bytes(size) if size < 1024 else f"{format_bytes(size)} ({size:,} bytes)"


@dataclass(frozen=True, slots=True, eq=False)
class ShardBytes:
    """Bytes of each shard, those of joined datasets included; arrays of shape (shards,)."""

    fetched: NDArray[np.int64]
    """Bytes downloaded; 0 if it is read in place."""
    kept: NDArray[np.int64]
    """Bytes in a cache directory; 0 if no file is written."""
    making: NDArray[np.int64]
    """Bytes there while it is decompressed, which takes room for both of its forms."""

    @classmethod
    def plain(cls, sizes: NDArray[np.int64]) -> ShardBytes:
        """Return the bytes of shards that are stored uncompressed, and downloaded."""
        return cls(sizes, sizes, sizes)


def stored_bytes(table: ShardTable, *, in_place: bool, keep_zip: bool) -> ShardBytes:
    """Add up the sizes of files in an index.

    Args:
        table: The shards of one dataset.
        in_place: Whether its own directory is read.
        keep_zip: Whether compressed files are cached, too.
    """
    raw, compressed = np.zeros((2, len(table)), np.int64)
    is_compressed = np.zeros(len(table), np.bool_)
    for number, kind in enumerate(table.kinds):
        here = np.flatnonzero(table.kind_of_shard == number)
        is_compressed[here] = kind.example.compression is not None
        for file, name in enumerate(kind.files):
            sizes = compressed if name.startswith("zip") else raw
            sizes[here] += table.sizes[table.first_file[here] + file]
        if kind.example.compression == PART:  # of a file that holds several shards, what is made of its part
            compressed[here] = 0
    if in_place:
        kept = np.where(is_compressed, raw, 0)
        return ShardBytes(np.zeros_like(raw), kept, kept)
    fetched, both = np.where(compressed > 0, compressed, raw), raw + compressed
    return ShardBytes(fetched, both if keep_zip else raw, both)
