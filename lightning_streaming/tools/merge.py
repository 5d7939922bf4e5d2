"""Join datasets into one, by an index over the shards of all. No shard is read, moved or copied.

The parts lie in the merged dataset's directory or under its URL, at any depth. Their samples follow each other in the
order the parts are named in; if none is named, all that are found are merged, in the order of their sorted paths. It
may be done again when parts were added.

    lightning-streaming merge data/train
    lightning-streaming merge s3://corpus/train s3://corpus/train/web s3://corpus/train/books
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from lightning_streaming.storage import mask_url
from lightning_streaming.tools.commands import add_json, add_storage_options
from lightning_streaming.tools.console import FINE, counted, print_json
from lightning_streaming.writing.merge import merge, merge_under


def add_arguments(parser: ArgumentParser) -> None:
    """Say what it can be told."""
    parser.add_argument("out", metavar="OUT", help="directory or URL of the merged dataset, which gets an index.json")
    parser.add_argument("parts", metavar="PART", nargs="*", default=(), help="directory or URL of a dataset below OUT")
    add_json(parser)
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Publish the index, and say what it holds."""
    options = args.storage_options
    if args.parts:
        index = merge(args.parts, args.out, storage_options=options)
    else:
        index = merge_under(args.out, storage_options=options)
    report = {"dataset": mask_url(args.out), "shards": len(index.shards), "samples": index.num_samples}
    if args.json:
        print_json(report)
    else:
        shards, samples = counted(len(index.shards), "shard"), counted(index.num_samples, "sample")
        print(f"{report['dataset']}: {shards} with {samples}")
    return FINE
