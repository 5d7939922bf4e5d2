"""Show a dataset: its columns, samples, shards, sizes, compression, hashes and first samples. With --config,
show what a run reads: for each stage, stream and phase, the samples stored, selected and drawn.

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
from lightning_streaming.formats.shard import check_shard, unsafe_columns
from lightning_streaming.tools import commands
from lightning_streaming.tools.console import FINE, print_json, print_table, printable_name, render
from lightning_streaming.tools.stored.stored_dataset import StoredDataset, columns_of, find_dataset, samples_of
from lightning_streaming.tools.stored.summary import facts_of, summarize
from lightning_streaming.units import format_bytes

_BAR_WIDTH = 24


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    commands.add_dataset(parser, or_else=True)
    commands.add_format(parser)
    words = "show what the run of this configuration reads; of several, later ones override earlier ones"
    parser.add_argument("--config", metavar="C", action="append", default=[], help=words)
    words = (
        "with --config: show the run that resumes from this checkpoint; streams that it no longer reads may not exist"
    )
    parser.add_argument("--ckpt", dest="checkpoint", metavar="CKPT", help=words)
    parser.add_argument(
        "--samples", metavar="N", type=commands.not_negative, help="number of samples to show; 2 by default"
    )
    commands.add_loader(parser, " (with --ckpt)")
    commands.add_set(parser, "with --config: ")
    commands.add_json(parser)
    commands.add_storage_options(parser)


def run(args: Namespace) -> int:
    """Print the dataset's numbers and its first samples, or what a run reads."""
    commands.check_config_or_dataset(args, "samples", "storage_options", "allow_unsafe_types", "format", "block_length")
    if args.config:
        if args.loader is not None and args.checkpoint is None:
            raise ConfigError(
                "--loader names a train loader of a checkpoint", hint="give --ckpt with it", option="--loader"
            )
        inspect_run = commands.of_run("runs.stages.inspect_run")
        return inspect_run(args.config, dict(args.set), args.checkpoint, args.loader, as_json=args.json)
    if args.checkpoint is not None or args.loader is not None:
        option = "--loader" if args.checkpoint is None else "--ckpt"
        raise ConfigError(
            f"{option} needs a run", hint="give the run's configuration with it, as --config run.yaml", option=option
        )
    dataset = find_dataset(args.dataset, args.storage_options, args.format, args.block_length)
    index = dataset.read_index()
    samples: list[dict[str, Any]] = []
    failure = None
    try:
        number = 2 if args.samples is None else args.samples
        samples.extend(first_samples(dataset, index, number, allow_unsafe_types=args.allow_unsafe_types))
    except StreamingError as error:  # raised after what is known without them is shown
        failure = error
    report = {"dataset": dataset.shown, **summarize(index), "first_samples": samples}
    if args.json:
        print_json(report)
    else:
        _print_report(report, index)
    if failure is not None:
        raise failure
    return FINE


def _print_report(report: Mapping[str, Any], index: DatasetIndex) -> None:
    print_table(report["dataset"], (), facts_of(report, index))
    columns = [
        (
            printable_name(column["name"]),
            column["encoding"],
            "varies" if column["bytes"] is None else f"{column['bytes']:,}",
            f"{column['shards']:,}",
        )
        for column in report["columns"]
    ]
    heads = ("column", "encoding", "bytes", "shards")
    width = len(heads) - all(column["shards"] == report["shards"] for column in report["columns"])
    print_table("columns", heads[:width], [row[:width] for row in columns], right=("bytes", "shards"))
    most = max((size["shards"] for size in report["shard_sizes"]), default=1)
    sizes = []
    for size in report["shard_sizes"]:
        smallest, largest = format_bytes(size["smallest"]), format_bytes(size["largest"])
        span = smallest if size["smallest"] == size["largest"] else f"{smallest} to {largest}"
        sizes.append((span, f"{size['shards']:,}", "█" * -(-size["shards"] * _BAR_WIDTH // most)))
    print_table("shard sizes, uncompressed", ("bytes", "shards", ""), sizes, right=("shards",))
    rows = [
        ("" if number else str(sample["sample"]), printable_name(column), value)
        for sample in report["first_samples"]
        for number, (column, value) in enumerate(sample["values"].items())
    ]
    if rows:
        print_table("first samples", ("sample", "column", "value"), rows)


def first_samples(
    dataset: StoredDataset, index: DatasetIndex, number: int, *, allow_unsafe_types: bool
) -> Iterator[dict[str, Any]]:
    """Yield the first samples of a dataset: ``sample``, its number; the ``shard``; ``values`` as short texts.

    Args:
        dataset: The dataset.
        index: Its index.
        number: Number of samples; there may be fewer.
        allow_unsafe_types: Whether encodings may be decoded that can run code of the author of the data.

    Raises:
        FormatError: A shard is not as the index says.
        StorageError: A file could not be fetched.
        UnsupportedError: This version does not read a format or an encoding.
        MissingDependencyError: A package is not installed.
    """
    before, cache = 0, dataset.cache()
    for shard in index.shards:
        if before == number:
            return
        wanted = min(number - before, shard.samples)
        if not wanted:
            continue
        encodings = {column.name: column.encoding for column in columns_of(shard.schema)}
        unsafe = {
            name: f"{encodings[name]}, not decoded; pass --allow-unsafe-types if you trust its author"
            for name in (() if allow_unsafe_types else unsafe_columns(shard))
        }
        check_shard(shard, allow_unsafe_types=True)
        safe = [name for name in encodings if name not in unsafe]
        samples = samples_of(dataset, cache, shard, wanted, safe, allow_unsafe_types=allow_unsafe_types)
        for sample, values in enumerate(samples, before):
            shown = unsafe | {column: render(value) for column, value in values.items()}
            yield {"sample": sample, "shard": shard.raw_data.basename, "values": dict(sorted(shown.items()))}
        before += wanted
