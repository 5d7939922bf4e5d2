"""Show what a dataset holds: columns, samples, shards, sizes, compression, hashes, and its first samples.

Of a dataset on a store only the index and what the samples need is read: ranges of an uncompressed shard, or one
compressed shard, which is fetched into a temporary directory.

    lightning-streaming inspect data/train
    lightning-streaming inspect s3://corpus/train --samples 0
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_streaming.errors import StreamingError
from lightning_streaming.tools.console import FINE, counted, print_json
from lightning_streaming.tools.options import add_json, add_storage_options, not_negative, storage_options
from lightning_streaming.tools.peek import Peeked, first_samples
from lightning_streaming.tools.render import name, render
from lightning_streaming.tools.stored_dataset import StoredDataset, find_dataset
from lightning_streaming.tools.summary import Summary, summarize
from lightning_streaming.tools.tables import print_table
from lightning_streaming.units import format_bytes

_BAR_WIDTH = 24


def add_arguments(parser: ArgumentParser) -> None:
    """Say what it can be told."""
    parser.add_argument("dataset", metavar="DATASET", help="directory or URL of a dataset, or of its index.json")
    parser.add_argument(
        "--samples", metavar="N", type=not_negative, default=2, help="how many samples to show; 2 by default"
    )
    parser.add_argument(
        "--allow-unsafe-types",
        action="store_true",
        help="also decode columns of encoding pkl, which can run any code of whoever wrote the data",
    )
    add_json(parser)
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Print the dataset's numbers and its first samples."""
    place = find_dataset(args.dataset, storage_options(args.storage_options))
    index = place.read_index()
    summary = summarize(index)
    samples: list[Peeked] = []
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


def _as_json(place: StoredDataset, summary: Summary, samples: Iterable[Peeked]) -> dict[str, Any]:
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


def _rendered(sample: Peeked) -> dict[str, str]:
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
        (name(column.name), column.encoding, "varies" if column.bytes is None else f"{column.bytes:,}", f"{shards:,}")
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


def _print_samples(samples: Sequence[Peeked]) -> None:
    rows = [
        ("" if position else str(number), name(column), value)
        for number, sample in enumerate(samples)
        for position, (column, value) in enumerate(_rendered(sample).items())
    ]
    if rows:
        print_table("first samples", ("sample", "column", "value"), rows)
