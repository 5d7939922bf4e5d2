"""Write the index of data of another library, before runs read it in place.

    lightning-streaming index s3://bucket/tars --format webdataset
    lightning-streaming index data/tokens --format npy --block-length 2049
    lightning-streaming index https://host/corpus --format megatron --out corpus

Runs read such data with format= (docs/other-formats.md). The first run on each node scans all files (tar files
completely), and caches an index. This command does it once for all runs: it writes index.json next to the data, where
every run finds it, or to --out, if you cannot write there.

Files are scanned again only if their size changed, even after an interruption. After adding files, run the command
again.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from lightning_streaming.cache.generated_index import KnownIndex, generated_index
from lightning_streaming.cache.shared_files import make_cache_directory
from lightning_streaming.dataset.stream import Stream, StreamDefaults, cache_config_of
from lightning_streaming.errors import ConfigError
from lightning_streaming.files import remove_partials
from lightning_streaming.formats.index import INDEX_BASENAME, parse_index
from lightning_streaming.storage import Location
from lightning_streaming.tools.commands import add_format, add_json, add_storage_options
from lightning_streaming.tools.console import FINE, print_json, print_table, progress
from lightning_streaming.tools.stored.stored_dataset import own_index

_JOURNAL = ".index.journal"
"""File in the cache directory of runs with the results of the scan so far."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add = parser.add_argument
    add("source", metavar="SRC", help="directory or URL of the data")
    add_format(parser, required=True)
    add("--out", metavar="DIR", help="directory or URL to write index.json to; by default SRC")
    add_json(parser)
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Create the index, and print what is in it."""
    stream = Stream(
        remote=args.source,
        storage={"options": args.storage_options},
        format=args.format,
        block_length=args.block_length,
    )
    config = cache_config_of(stream, "0", StreamDefaults())
    if config.pattern is not None:
        raise ConfigError(
            f"an index describes all files of a directory, so pass {config.location}",
            hint=f"runs with a pattern like {config.pattern!r} use the same index",
            option="DATASET",
        )
    source, out = config.location, _out(args, config.location)
    known, began = _known(out), time.monotonic()
    directory = config.cache_directory()
    make_cache_directory(directory)
    with progress(None, "scan", "shards") as advance:
        text = generated_index(
            source, args.format, args.block_length, known=known, journal=directory / _JOURNAL, progress=advance
        )
    written = out / INDEX_BASENAME
    if written.path is not None:
        remove_partials(written.path)  # of processes that were killed
    written.put(text)
    index = parse_index(text, str(out))
    report = {
        "written_to": str(written),
        "shards": len(index.shards),
        "samples": index.num_samples,
        "bytes": int(index.shards.data_bytes().sum()),
        "columns": ", ".join(name for _, shard in index.shards.examples()[:1] for name in shard.schema["column_names"]),
        "seconds": round(time.monotonic() - began, 1),
    }
    if args.json:
        print_json(report)
        return FINE
    texts = (f"{value:,}" if isinstance(value, int) else str(value) for value in report.values())
    print_table("index", (), [(name.replace("_", " "), text) for name, text in zip(report, texts, strict=True)])
    return FINE


def _out(args: Namespace, source: Location) -> Location:
    """Return the location to write the index to.

    Raises:
        ConfigError: It has another library's index of the same name.
    """
    if args.out is not None:
        return Location(args.out, args.storage_options if "://" in args.out else {}, source.attempts, source.timeout)
    existing = (source / INDEX_BASENAME).read_if_there()
    if existing is not None and own_index(existing) is None:
        raise ConfigError(
            f"{source / INDEX_BASENAME} exists, and is not an index of ours",
            hint="it is not replaced. Pass another directory as --out, or create no index: runs scan the data too",
            option="--out",
            path=str(source / INDEX_BASENAME),
        )
    return source


def _known(out: Location) -> KnownIndex | None:
    """Return the existing index; None if there is none, or its store does not report its time."""
    location = out / INDEX_BASENAME
    text, listed = location.read_if_there(), location.listed()
    index = None if text is None else own_index(text)
    if index is None or listed is None or listed.modified is None:
        return None
    return KnownIndex(index.shards, listed.modified)
