"""Show what a dataset holds: columns, samples, shards, sizes, compression, hashes, and its first samples.

Of a dataset on a store only the index and what the samples need is read: ranges of an uncompressed shard, or one
compressed shard, which is fetched into a temporary directory.

    lightning-streaming inspect data/train
    lightning-streaming inspect s3://corpus/train --samples 0
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from lightning_streaming.cache.sources import unpack
from lightning_streaming.errors import StreamingError
from lightning_streaming.files import join_under
from lightning_streaming.formats.encodings import is_unsafe
from lightning_streaming.formats.index import DatasetIndex, ShardInfo
from lightning_streaming.formats.shard import check_shard, open_shard
from lightning_streaming.tools.console import FINE, counted, print_json, print_table, printable_name, render
from lightning_streaming.tools.options import add_dataset, add_json, add_storage_options, not_negative, storage_options
from lightning_streaming.tools.stored_dataset import StoredDataset, Summary, columns_of, find_dataset, summarize
from lightning_streaming.units import format_bytes

_BAR_WIDTH = 24


def add_arguments(parser: ArgumentParser) -> None:
    """Say what it can be told."""
    add_dataset(parser)
    parser.add_argument(
        "--samples", metavar="N", type=not_negative, default=2, help="how many samples to show; 2 by default"
    )
    add_json(parser)
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Print the dataset's numbers and its first samples."""
    place = find_dataset(args.dataset, storage_options(args.storage_options))
    index = place.read_index()
    summary = summarize(index)
    samples: list[_Peeked] = []
    failure = None
    try:
        samples.extend(first_samples(place, index, args.samples, allow_unsafe_types=args.allow_unsafe_types))
    except StreamingError as error:  # what is known without them is shown first
        failure = error
    if args.json:
        print_json(_as_json(place, summary, samples))
    else:
        _print_summary(place, summary)
        _print_samples(samples)
    if failure is not None:
        raise failure
    return FINE


def _as_json(place: StoredDataset, summary: Summary, samples: Iterable[_Peeked]) -> dict[str, Any]:
    return {
        "dataset": place.shown,
        "samples": summary.samples,
        "shards": summary.shards,
        "raw_bytes": summary.raw_bytes,
        "stored_bytes": summary.stored_bytes,
        "formats": _counted("format", summary.formats),
        "compressions": _counted("compression", summary.compressions),
        "hashes": _counted("hashes", summary.hashes),
        "size_limits": _counted("size_limit", summary.size_limits),
        "columns": [{**column._asdict(), "shards": shards} for column, shards in summary.columns.items()],
        "shard_sizes": [one._asdict() for one in summary.sizes],
        "first_samples": [
            {"sample": number, "shard": sample.shard, "values": _rendered(sample)}
            for number, sample in enumerate(samples)
        ],
    }


def _counted(key: str, counts: Mapping[Any, int]) -> list[dict[str, Any]]:
    return [{key: value, "shards": shards} for value, shards in counts.items()]


def _rendered(sample: _Peeked) -> dict[str, str]:
    values = {column: render(value) for column, value in sample.values.items()}
    kept_shut = {
        column: f"{encoding}, not decoded; --allow-unsafe-types if you trust whoever wrote it"
        for column, encoding in sample.left_out.items()
    }
    return dict(sorted((values | kept_shut).items()))


def _print_summary(place: StoredDataset, summary: Summary) -> None:
    print_table(place.shown, ("", ""), _facts(summary), head=False)
    everywhere = all(shards == summary.shards for shards in summary.columns.values())
    columns = [
        (
            printable_name(column.name),
            column.encoding,
            "varies" if column.bytes is None else f"{column.bytes:,}",
            f"{shards:,}",
        )
        for column, shards in summary.columns.items()
    ]
    heads = ("column", "encoding", "bytes", "shards")
    kept = len(heads) - everywhere
    print_table("columns", heads[:kept], [row[:kept] for row in columns], right=("bytes", "shards"))
    fullest = max((one.shards for one in summary.sizes), default=1)
    sizes = [
        (_size_range(one.smallest, one.largest), f"{one.shards:,}", "█" * -(-one.shards * _BAR_WIDTH // fullest))
        for one in summary.sizes
    ]
    print_table("shard sizes, uncompressed", ("bytes", "shards", ""), sizes, right=("shards",))


def _facts(summary: Summary) -> Sequence[tuple[str, str]]:
    per_shard = ""
    if summary.samples_per_shard is not None:
        fewest, mean, most = summary.samples_per_shard
        per_shard = f"{mean:,.1f} on average, {fewest:,} to {most:,}" if fewest < most else f"{fewest:,}"
    share = ""
    if summary.stored_bytes != summary.raw_bytes > 0:
        share = f", {summary.stored_bytes / summary.raw_bytes:.0%} of it"
    return (
        ("samples", f"{summary.samples:,}"),
        ("shards", f"{summary.shards:,}"),
        ("samples per shard", per_shard or "-"),
        ("raw size", _size(summary.raw_bytes)),
        ("stored size", _size(summary.stored_bytes) + share),
        ("format", _several(summary.formats)),
        ("compression", _several(summary.compressions)),
        ("hashes", _several({", ".join(names) or None: shards for names, shards in summary.hashes.items()})),
        ("size limit", _several({limit and _size(limit): shards for limit, shards in summary.size_limits.items()})),
    )


def _several(counts: Mapping[Any, int]) -> str:
    """The one value that all shards have; or each value with the number of shards."""
    values = ["none" if value is None else str(value) for value in counts]
    if len(values) < 2:
        return "".join(values) or "-"
    return "; ".join(
        f"{value} ({counted(shards, 'shard')})" for value, shards in zip(values, counts.values(), strict=True)
    )


def _size(size: int) -> str:
    return format_bytes(size) if size < 1024 else f"{format_bytes(size)} ({size:,} bytes)"


def _size_range(smallest: int, largest: int) -> str:
    return format_bytes(smallest) if smallest == largest else f"{format_bytes(smallest)} to {format_bytes(largest)}"


def _print_samples(samples: Sequence[_Peeked]) -> None:
    rows = [
        ("" if position else str(number), printable_name(column), value)
        for number, sample in enumerate(samples)
        for position, (column, value) in enumerate(_rendered(sample).items())
    ]
    if rows:
        print_table("first samples", ("sample", "column", "value"), rows)


class _Peeked(NamedTuple):
    """One sample."""

    shard: str
    """Name of its data file."""
    values: dict[str, Any]
    """Column to value; without unsafe columns, unless they were allowed."""
    left_out: dict[str, str]
    """Unsafe column to its encoding."""


def first_samples(
    place: StoredDataset, index: DatasetIndex, number: int, *, allow_unsafe_types: bool
) -> Iterator[_Peeked]:
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
) -> Iterator[_Peeked]:
    columns = columns_of(shard.schema)
    unsafe = {} if allow_unsafe_types else {one.name: one.encoding for one in columns if is_unsafe(one.encoding)}
    safe = [column.name for column in columns if column.name not in unsafe]
    check_shard(shard, allow_unsafe_types=True)
    if not safe:  # nothing is decoded, so nothing is fetched
        yield from [_Peeked(shard.raw_data.basename, {}, unsafe)] * number
        return
    directory = _peek_directory(place, shard, number, scratch)
    # Unsafe columns are not decoded where they are not among those asked for.
    reader = open_shard(shard, directory, allow_unsafe_types=True, columns=safe)
    try:
        for sample in range(number):
            yield _Peeked(shard.raw_data.basename, reader[sample], unsafe)
    finally:
        reader.close()


def _raw_directory(place: StoredDataset, shard: ShardInfo, scratch: Path) -> Path:
    """Make the raw files of a shard present.

    Files of a directory are used where they are, raw or compressed; what is on a store is fetched. A raw file is not
    used where there is a compressed one: it may be of another dataset that was there.

    Args:
        place: Where the dataset is.
        shard: An entry of its index.
        scratch: An empty directory for what is fetched or decompressed.

    Returns:
        The directory that holds the raw files under their basenames.

    Raises:
        IntegrityError: A file is not what the index promises.
        StorageError: A file could not be fetched.
    """
    if place.directory is not None and _is_raw_there(place, shard):
        return place.directory
    for raw, compressed in shard.files:
        stored = compressed or raw
        path = join_under(scratch, stored.basename)
        if place.directory is not None and compressed is not None and place.path(stored.basename).exists():
            path = place.path(stored.basename)
        else:
            place.fetch(stored, path)
        if compressed is not None and shard.compression is not None:
            destination = join_under(scratch, raw.basename)
            destination.parent.mkdir(parents=True, exist_ok=True)
            unpack(path, compressed.basename, raw, shard.compression, destination)
    return scratch


def _is_raw_there(place: StoredDataset, shard: ShardInfo) -> bool:
    if any(compressed is not None and place.path(compressed.basename).exists() for _, compressed in shard.files):
        return False
    return all(place.path(raw.basename).exists() for raw, _ in shard.files)


def _peek_directory(place: StoredDataset, shard: ShardInfo, samples: int, scratch: Path) -> Path:
    """Make the first samples of a shard readable, fetching of an uncompressed shard on a store no more than they need.

    Args:
        place: Where the dataset is.
        shard: An entry of its index.
        samples: How many, from the first one on.
        scratch: An empty directory for what is fetched or decompressed.

    Returns:
        A directory from which the shard can be opened. Beyond these samples its files may be empty.

    Raises:
        IntegrityError: A file is not what the index promises.
        StorageError: A file could not be fetched.
    """
    if place.directory is None and shard.compression is None:
        _fetch_start(place, shard, samples, scratch)
        return scratch
    return _raw_directory(place, shard, scratch)


def _fetch_start(place: StoredDataset, shard: ShardInfo, samples: int, scratch: Path) -> None:
    table_file = shard.raw_meta or shard.raw_data
    table_bytes = min(4 + 4 * (shard.samples + 1), table_file.bytes)
    table = (place.at / table_file.basename).read_range(0, table_bytes)
    offsets = np.frombuffer(table[4 : len(table) // 4 * 4], "<u4")
    # Offsets that contradict the sizes are for the reader to find, so they need only be no harm here.
    stop = min(int(offsets[min(samples, len(offsets) - 1)]), shard.raw_data.bytes) if len(offsets) else 0
    start = min(table_bytes, stop) if shard.raw_meta is None else 0
    data = (place.at / shard.raw_data.basename).read_range(start, stop)
    if shard.raw_meta is None:
        _write_sparse(join_under(scratch, shard.raw_data.basename), table + data, shard.raw_data.bytes)
    else:
        place.fetch(shard.raw_meta, join_under(scratch, shard.raw_meta.basename))
        _write_sparse(join_under(scratch, shard.raw_data.basename), data, shard.raw_data.bytes)


def _write_sparse(path: Path, start: bytes, size: int) -> None:
    """Write a file that has its full size, takes the room of its start, and holds zeros after it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
