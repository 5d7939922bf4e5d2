"""Merge datasets into one, by writing an index of all their shards. No shard is read, moved or copied.

The parts must be in the directory or under the URL of the merged dataset, at any depth. Samples are in the order of the
arguments; without PART, all parts are merged, in the order of their paths. After adding parts, run the command again.

    lightning-streaming merge data/train
    lightning-streaming merge s3://corpus/train s3://corpus/train/web s3://corpus/train/books
    lightning-streaming merge s3://bucket/tars --format webdataset

With --format, parts are data of another library. If lightning-streaming index has written an index, it is used;
otherwise, the files are scanned. Without PART, all files below OUT are merged, in the order of their paths.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from dataclasses import replace

from lightning_streaming.cache.generated_index import KnownIndex, generated_index
from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, parse_index
from lightning_streaming.formats.shard_table import OTHER_FORMATS
from lightning_streaming.storage import Location, is_url, mask_url
from lightning_streaming.tools.commands import add_format, add_json, add_storage_options
from lightning_streaming.tools.console import FINE, counted, print_json, print_line
from lightning_streaming.tools.stored.stored_dataset import StoredDataset, find_dataset, own_index
from lightning_streaming.writing.merging import dataset_location, joined, merge, merge_recursive, path_below, publish


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    parser.add_argument("out", metavar="OUT", help="directory or URL of the merged dataset, which gets an index.json")
    parser.add_argument("parts", metavar="PART", nargs="*", default=(), help="directory or URL of a dataset below OUT")
    add_format(parser)
    add_json(parser)
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Publish the index, and print its totals."""
    options = args.storage_options
    if args.format is not None or args.block_length is not None:
        index = _merge_format(args)
    elif (existing := _other_format_at(args)) is not None:
        raise ConfigError(
            f"the index of {mask_url(args.out)} is of {existing} files, so it is not replaced by one of MDS",
            hint=f"add --format {existing}, or merge datasets of MDS into another directory",
            option="--format",
            path=mask_url(args.out),
        )
    elif args.parts:
        index = merge(args.parts, args.out, storage_options=options)
    else:
        index = merge_recursive(args.out, storage_options=options)
    report = {"dataset": mask_url(args.out), "shards": len(index.shards), "samples": index.num_samples}
    if args.json:
        print_json(report)
    else:
        shards, samples = counted(len(index.shards), "shard"), counted(index.num_samples, "sample")
        print_line(f"{report['dataset']}: {shards} with {samples}")
    return FINE


def _merge_format(args: Namespace) -> DatasetIndex:
    """Publish an index over data of another format.

    Raises:
        ConfigError: A part is elsewhere, or an index of another library would be replaced.
    """
    out = find_dataset(args.out, args.storage_options, args.format, args.block_length)
    text = (out.at / INDEX_BASENAME).read_if_there()
    if text is not None and own_index(text) is None:
        raise ConfigError(
            f"{out.at / INDEX_BASENAME} is of another library, and is not replaced",
            hint="read that directory and others as streams of one run (streams=), or write them as MDS with "
            "lightning-streaming convert, and merge that",
            option="OUT",
            path=str(out.at / INDEX_BASENAME),
        )
    below = [path[: -len(INDEX_BASENAME) - 1] for path in out.at.walk() if path.endswith(f"/{INDEX_BASENAME}")]
    parts = [_path_of(part, out) for part in args.parts] or (below if args.format == "litdata" else [])
    if parts:
        index = joined({path: replace(out, location=(out.at / path).url).cache().read_index() for path in parts})
    else:
        known = {path: own_index((out.at / path / INDEX_BASENAME).read()) for path in below}
        indexes = {path: index for path, index in known.items() if index is not None}
        for path, existing in indexes.items():
            format_of_index = _format_of(existing)
            if format_of_index != args.format:
                raise ConfigError(
                    f"{out.at / path} has an index of {format_of_index or 'MDS'} files, which cannot be merged with "
                    f"{args.format}",
                    hint="move it elsewhere, or read both as streams of one run (streams=)",
                    option="--format",
                    path=str(out.at / path),
                )
        trusted = KnownIndex(joined(indexes).shards, math.inf)
        index = parse_index(generated_index(out.at, args.format, args.block_length, known=trusted), out.shown)
    publish(index, out.location, storage_options=args.storage_options)
    return index


def _other_format_at(args: Namespace) -> str | None:
    """Return the format of our index at OUT, if it is not MDS."""
    text = (Location(args.out, args.storage_options if is_url(args.out) else {}) / INDEX_BASENAME).read_if_there()
    index = None if text is None else own_index(text)
    return None if index is None else _format_of(index)


def _format_of(index: DatasetIndex) -> str | None:
    """Return the format of another library that an index describes; None for formats that we write."""
    return next((shard.format for _, shard in index.shards.examples() if shard.format in OTHER_FORMATS), None)


def _path_of(part: str, out: StoredDataset) -> str:
    path = path_below(dataset_location(part), out.location)
    if path is None:
        raise ConfigError(
            f"a part must be below {out.shown}, because an index names shards by their path from there, but got "
            f"{mask_url(part)}",
            hint="move it there, or merge into a directory above both",
            option="PART",
            path=mask_url(part),
        )
    return path
