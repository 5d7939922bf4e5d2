"""A dataset in numbers: what its index adds up to, of which kinds its shards are, and how both are told to people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.shard_table import PART, ShardTable
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.stored.stored_dataset import Column, add_up, columns_of
from lightning_streaming.units import format_bytes

_MOST_BINS = 8
_HARDLY = 20


def summarize(index: DatasetIndex) -> dict[str, Any]:
    """A dataset in numbers, and how many of its shards have each format, compression and so on, as is reported."""
    kinds = _counted_kinds(index.shards)
    return {
        **add_up(index),
        "formats": _counted("format", kinds, lambda shard: shard.format),
        "compressions": _counted("compression", kinds, lambda shard: shard.compression),
        "hashes": _counted("hashes", kinds, lambda shard: shard.hashes),
        "size_limits": _counted("size_limit", kinds, lambda shard: shard.size_limit),
        "columns": [{**column._asdict(), "shards": count} for column, count in _count_columns(kinds).items()],
        "shard_sizes": histogram([sum(raw.bytes for raw, _ in shard.files) for shard in index.shards]),
    }


_Kinds = Sequence[tuple[ShardInfo, int]]
"""The first shard of each kind, and how many there are: a million shards are of a handful of kinds."""


def _counted_kinds(shards: ShardTable) -> _Kinds:
    counts = np.bincount(shards.kind_of_shard, minlength=1).tolist()
    return [(shard, counts[shards.kind_of_shard[place]]) for place, shard in shards.examples()]


def _counted(key: str, kinds: _Kinds, value_of: Callable[[ShardInfo], Any]) -> list[dict[str, Any]]:
    counts: Counter[Any] = Counter()
    for shard, count in kinds:
        counts[value_of(shard)] += count
    return [{key: value, "shards": count} for value, count in counts.items()]


def _count_columns(kinds: _Kinds) -> Counter[Column]:
    columns: Counter[Column] = Counter()
    for shard, count in kinds:
        columns.update(dict.fromkeys(columns_of(shard.schema), count))
    return columns


def histogram(sizes: Sequence[int]) -> list[dict[str, int]]:
    """Sort sizes into bins of one width: at most eight, and one where they hardly differ.

    Returns:
        Of each bin ``smallest`` and ``largest``, and how many ``shards`` are from the one up to the other; only in the
        last bin also of just the largest size.
    """
    if not sizes:
        return []
    smallest, largest = min(sizes), max(sizes)
    differ = (largest - smallest) * _HARDLY > largest
    num_bins = min(_MOST_BINS, len(set(sizes))) if differ else 1
    edges = [smallest + (largest - smallest) * number // num_bins for number in range(num_bins + 1)]
    counts, _ = np.histogram(sizes, edges if smallest < largest else [smallest, smallest + 1])
    bins = zip(pairwise(edges), counts, strict=True)
    return [{"smallest": start, "largest": stop, "shards": int(count)} for (start, stop), count in bins]


def facts_of(report: Mapping[str, Any], index: DatasetIndex) -> Sequence[tuple[str, str]]:
    """What :func:`summarize` reports of a dataset as a whole, for people: names and what is said of each."""
    counts = index.samples_per_shard()
    per_shard = "-"
    if len(counts):
        fewest, most = counts.min(), counts.max()
        per_shard = f"{counts.mean():,.1f} on average, {fewest:,} to {most:,}" if fewest < most else f"{fewest:,}"
    raw_bytes, stored_bytes = report["raw_bytes"], report["stored_bytes"]
    share = f", {stored_bytes / raw_bytes:.0%} of it" if stored_bytes != raw_bytes > 0 else ""
    hashes = [(", ".join(one["hashes"]) or None, one["shards"]) for one in report["hashes"]]
    packed = [
        ("as in its files" if one["compression"] == PART else one["compression"], one["shards"])
        for one in report["compressions"]
    ]
    limits = [(one["size_limit"] and _size(one["size_limit"]), one["shards"]) for one in report["size_limits"]]
    return (
        ("samples", f"{report['samples']:,}"),
        ("shards", f"{report['shards']:,}"),
        ("samples per shard", per_shard),
        ("raw size", _size(raw_bytes)),
        ("stored size", _size(stored_bytes) + share),
        ("format", _several(one.values() for one in report["formats"])),
        ("compression", _several(packed)),
        ("hashes", _several(hashes)),
        ("size limit", _several(limits)),
    )


def _several(counts: Iterable[Iterable[Any]]) -> str:
    """The one value that all shards have; or each value with the number of shards."""
    found = [("none" if value is None else str(value), shards) for value, shards in counts]
    if len(found) < 2:
        return "".join(value for value, _ in found) or "-"
    return "; ".join(f"{value} ({counted(shards, 'shard')})" for value, shards in found)


def _size(size: int) -> str:
    return format_bytes(size) if size < 1024 else f"{format_bytes(size)} ({size:,} bytes)"
