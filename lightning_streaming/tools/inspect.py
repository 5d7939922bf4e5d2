"""Show a dataset: its columns, samples, shards, sizes, compression, hashes and first samples. Or show what a run reads:
for each stage, stream and phase the samples stored, selected and drawn.

For a remote dataset only the index and the bytes of the shown samples are read: ranges of an uncompressed shard, or one
compressed shard, which is downloaded to a temporary directory.

    lightning-streaming inspect data/train
    lightning-streaming inspect s3://corpus/train --samples 0
    lightning-streaming inspect s3://bucket/tars --format webdataset
    lightning-streaming inspect --config run.yaml
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.formats.shard import (
    check_shard,
    unsafe_columns,
)
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
from lightning_streaming.tools.console import FINE, print_json, print_table, printable_name, render
from lightning_streaming.tools.stored.stored_dataset import (
    StoredDataset,
    columns_of,
    find_dataset,
    samples_of,
)
from lightning_streaming.tools.stored.summary import facts_of, summarize
from lightning_streaming.units import format_bytes

_BAR_WIDTH = 24


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add_dataset(parser, or_else=True)
    add_format(parser)
    words = "show what the run of this configuration reads; of several, a later one overrides an earlier one"
    parser.add_argument("--config", metavar="C", action="append", default=[], help=words)
    words = (
        "with --config: show the training that resumes from this checkpoint; streams it no longer reads may be missing"
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
        raise ConfigError(
            "say what to look at: either DATASET, a directory or URL, or --config run.yaml", option="DATASET"
        )
    if args.config:
        if args.samples is not None or args.storage_options or args.allow_unsafe_types or args.format:
            raise ConfigError(
                "--config shows no samples, and says itself how data is read", hint="give it alone", option="--config"
            )
        if args.loader is not None and args.checkpoint is None:
            raise ConfigError(
                "--loader names a train loader of a checkpoint", hint="give --ckpt with it", option="--loader"
            )
        return of_run("runs.stages.inspect_run")(
            args.config, dict(args.set), args.checkpoint, args.loader, as_json=args.json
        )
    check_set_is_of_a_run(args)
    if args.checkpoint is not None or args.loader is not None:
        option = "--loader" if args.checkpoint is None else "--ckpt"
        raise ConfigError(
            f"{option} is of a run", hint="give the run's configuration with it, as --config run.yaml", option=option
        )
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


def _value_size(size: int | None) -> str:
    return "varies" if size is None else f"{size:,}"


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
        samples = samples_of(place, cache, shard, wanted, safe, allow_unsafe_types=allow_unsafe_types)
        for sample, values in enumerate(samples, before):
            shown = shut | {column: render(value) for column, value in values.items()}
            yield {"sample": sample, "shard": shard.raw_data.basename, "values": dict(sorted(shown.items()))}
        before += wanted
