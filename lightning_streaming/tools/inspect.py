"""Show what a dataset holds: columns, samples, shards, sizes, compression, hashes, and its first samples. Or what the
configuration of a run reads: of each stage, stream and phase the samples stored, selected and drawn.

Of a dataset on a store only the index and what the samples need is read: ranges of an uncompressed shard, or one
compressed shard, which is fetched into a temporary directory.

    lightning-streaming inspect data/train
    lightning-streaming inspect s3://corpus/train --samples 0
    lightning-streaming inspect s3://bucket/tars --format webdataset
    lightning-streaming inspect --config run.yaml
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lightning_streaming.cache import ShardCache
from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.shard import (
    LoneSamples,
    check_shard,
    has_lone_samples,
    open_shard,
    table_part,
    unsafe_columns,
)
from lightning_streaming.formats.shard_table import OTHER_FORMATS, PART, ShardTable, column_names
from lightning_streaming.tools.commands import (
    add_dataset,
    add_format,
    add_json,
    add_loader,
    add_set,
    add_storage_options,
    check_set_is_of_a_run,
    not_negative,
    of_run,
)
from lightning_streaming.tools.console import FINE, counted, print_json, print_table, printable_name, render
from lightning_streaming.tools.held_shards import opened
from lightning_streaming.tools.stored_dataset import (
    Column,
    StoredDataset,
    add_up,
    columns_of,
    find_dataset,
    raw_directory,
)
from lightning_streaming.units import format_bytes

_BAR_WIDTH = 24
_MOST_BINS = 8
_HARDLY = 20


def add_arguments(parser: ArgumentParser) -> None:
    """Say what it can be told."""
    add_dataset(parser, or_else=True)
    add_format(parser)
    words = "show what a run reads that is configured so; of several, a later one overrides what an earlier one says"
    parser.add_argument("--config", metavar="C", action="append", default=[], help=words)
    words = (
        "with --config: of the training that goes on from this checkpoint; streams that it has done with may be gone"
    )
    parser.add_argument("--ckpt", dest="checkpoint", metavar="CKPT", help=words)
    parser.add_argument("--samples", metavar="N", type=not_negative, help="how many samples to show; 2 by default")
    add_loader(parser, ", with --ckpt")
    add_set(parser, "with --config: ")
    add_json(parser)
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Print the dataset's numbers and its first samples, or what a run reads."""
    if bool(args.config) == bool(args.dataset):
        raise ConfigError("say what to look at: either DATASET, a directory or URL, or --config run.yaml")
    if args.config:
        if args.samples is not None or args.storage_options or args.allow_unsafe_types or args.format:
            raise ConfigError("--config shows no samples, and says itself how data is read; give it alone")
        if args.loader is not None and args.checkpoint is None:
            raise ConfigError("--loader names a train loader of a checkpoint; give --ckpt with it")
        return of_run("inspect")(args.config, dict(args.set), args.checkpoint, args.loader, as_json=args.json)
    check_set_is_of_a_run(args)
    if args.checkpoint is not None or args.loader is not None:
        option = "--loader" if args.checkpoint is None else "--ckpt"
        raise ConfigError(f"{option} is of a run; give the run's configuration with it, as --config run.yaml")
    place = find_dataset(args.dataset, args.storage_options, args.format, args.block_length)
    index = place.read_index()
    samples: list[dict[str, Any]] = []
    failure = None
    try:
        samples.extend(
            first_samples(
                place, index, 2 if args.samples is None else args.samples, allow_unsafe_types=args.allow_unsafe_types
            )
        )
    except StreamingError as error:  # what is known without them is shown first
        failure = error
    report = {"dataset": place.shown, **summarize(index), "first_samples": samples}
    if args.json:
        print_json(report)
    else:
        _print_report(report, index)
    if failure is not None:
        raise failure
    return FINE


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


def _print_report(report: Mapping[str, Any], index: DatasetIndex) -> None:
    print_table(report["dataset"], (), facts_of(report, index))
    everywhere = all(column["shards"] == report["shards"] for column in report["columns"])
    columns = [
        (printable_name(one["name"]), one["encoding"], _value_size(one["bytes"]), f"{one['shards']:,}")
        for one in report["columns"]
    ]
    heads = ("column", "encoding", "bytes", "shards")
    kept = len(heads) - everywhere
    print_table("columns", heads[:kept], [row[:kept] for row in columns], right=("bytes", "shards"))
    fullest = max((one["shards"] for one in report["shard_sizes"]), default=1)
    sizes = [
        (_size_range(**one), f"{one['shards']:,}", "█" * -(-one["shards"] * _BAR_WIDTH // fullest))
        for one in report["shard_sizes"]
    ]
    print_table("shard sizes, uncompressed", ("bytes", "shards", ""), sizes, right=("shards",))
    rows = [
        ("" if position else str(one["sample"]), printable_name(column), value)
        for one in report["first_samples"]
        for position, (column, value) in enumerate(one["values"].items())
    ]
    if rows:
        print_table("first samples", ("sample", "column", "value"), rows)


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


def _value_size(size: int | None) -> str:
    return "varies" if size is None else f"{size:,}"


def _size(size: int) -> str:
    return format_bytes(size) if size < 1024 else f"{format_bytes(size)} ({size:,} bytes)"


def _size_range(smallest: int, largest: int, **_: int) -> str:
    return format_bytes(smallest) if smallest == largest else f"{format_bytes(smallest)} to {format_bytes(largest)}"


def first_samples(
    place: StoredDataset, index: DatasetIndex, number: int, *, allow_unsafe_types: bool
) -> Iterator[dict[str, Any]]:
    """The first samples of a dataset: ``sample``, its number; the ``shard``; ``values``, each in a few words.

    Args:
        place: Where the dataset is.
        index: Its index.
        number: How many samples; there may be fewer.
        allow_unsafe_types: Whether encodings may be decoded that can run code of whoever wrote the data.

    Raises:
        FormatError: A shard is not what the index says.
        StorageError: A file could not be fetched.
        UnsupportedError: This version does not serve a format or an encoding.
        MissingDependencyError: A package is needed that is not installed.
    """
    before = 0
    cache = place.cache()
    for shard in index.shards:
        if before == number:
            return
        wanted = min(number - before, shard.samples)
        if not wanted:
            continue
        encodings = {one.name: one.encoding for one in columns_of(shard.schema)}
        shut = {
            name: f"{encodings[name]}, not decoded; --allow-unsafe-types if you trust whoever wrote it"
            for name in (() if allow_unsafe_types else unsafe_columns(shard))
        }
        check_shard(shard, allow_unsafe_types=True)
        safe = [name for name in encodings if name not in shut]
        samples = _samples_of(place, cache, shard, wanted, safe, allow_unsafe_types=allow_unsafe_types)
        for sample, values in enumerate(samples, before):
            shown = shut | {column: render(value) for column, value in values.items()}
            yield {"sample": sample, "shard": shard.raw_data.basename, "values": dict(sorted(shown.items()))}
        before += wanted


def _samples_of(
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
    elif place.directory is None and has_lone_samples(shard):
        table, *span = table_part(shard)
        samples = LoneSamples(shard, (place.at / table.basename).read_range(*span), **wanted)
        start = samples.part(0).start
        data = (place.at / shard.raw_data.basename).read_range(start, samples.part(number - 1).stop)
        for sample in range(number):
            part = samples.part(sample)
            yield samples.decode(sample, data[part.start - start : part.stop - start])
    else:
        with TemporaryDirectory(prefix="lightning_streaming_") as scratch:
            reader = open_shard(shard, raw_directory(place, shard, Path(scratch)), **wanted)
            try:
                yield from map(reader.__getitem__, range(number))
            finally:
                reader.close()
