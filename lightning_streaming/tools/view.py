"""Show a dataset, or what a run reads, in the browser: samples, columns, shards, and the order of batches.

This process serves the pages, to this machine only, at an address that contains a secret; Ctrl-C ends it. The pages
have no scripts, and load nothing from other hosts. From a remote dataset only the bytes of the shown samples are read;
nothing is written, neither next to the data nor to the caches of runs.

    lightning-streaming view data/train
    lightning-streaming view s3://corpus/train --open
    lightning-streaming view --config run.yaml
    lightning-streaming view --config run.yaml --ckpt checkpoints/last.ckpt
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.commands import (
    add_dataset,
    add_format,
    add_loader,
    add_set,
    add_storage_options,
    check_set_is_of_a_run,
    of_run,
    positive,
)
from lightning_streaming.tools.console import FINE
from lightning_streaming.tools.report.pages import import_jinja
from lightning_streaming.tools.stored.stored_dataset import find_dataset, temporary_caches
from lightning_streaming.tools.viewing.pages import Viewed
from lightning_streaming.tools.viewing.server import serve
from lightning_streaming.tools.viewing.viewed import ViewedStream

_MAX_PORT = 65535


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add_dataset(parser, or_else=True)
    add_format(parser)
    words = "show what the run of this configuration reads; of several, later ones override earlier ones"
    parser.add_argument("--config", metavar="C", action="append", default=[], help=words)
    words = "with --config: show the run that resumes from this checkpoint"
    parser.add_argument("--ckpt", dest="checkpoint", metavar="CKPT", help=words)
    add_loader(parser, " (with --ckpt)")
    parser.add_argument("--nodes", metavar="P", type=positive, help="with --config: number of nodes")
    words = "with --config: processes, or GPUs, on each node"
    parser.add_argument("--ranks-per-node", metavar="G", type=positive, help=words)
    words = "with --config: batches per step (accumulate_grad_batches)"
    parser.add_argument("--accumulate", metavar="K", type=positive, help=words)
    add_set(parser, "with --config: ")
    words = "port to serve at; by default, any free one"
    parser.add_argument("--port", metavar="N", type=_port, default=0, help=words)
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Serve the pages until a signal ends the process."""
    import_jinja()
    if bool(args.config) == bool(args.dataset):
        raise ConfigError(
            "give either DATASET, a directory or URL, or the configuration of a run, as --config run.yaml",
            option="DATASET",
        )
    if args.config:
        if args.storage_options or args.format or args.block_length is not None:
            raise ConfigError(
                "a run configuration already defines how data is read",
                hint="omit --storage-options, --format and --block-length",
                option="--config",
            )
        if args.loader is not None and args.checkpoint is None:
            raise ConfigError(
                "--loader names a train loader of a checkpoint", hint="give --ckpt with it", option="--loader"
            )
        return of_run("viewing.view_run.view_run")(args)
    check_set_is_of_a_run(args)
    for option in ("checkpoint", "loader", "nodes", "ranks_per_node", "accumulate"):
        if getattr(args, option) is not None:
            name = "ckpt" if option == "checkpoint" else option.replace("_", "-")
            raise ConfigError(
                f"--{name} needs a run",
                hint="give the run's configuration with it, as --config run.yaml",
                option=f"--{name}",
            )
    dataset = find_dataset(args.dataset, args.storage_options, args.format, args.block_length)
    with temporary_caches():
        viewed = Viewed(shown=dataset.shown, streams=[ViewedStream(dataset, dataset.shown, args.allow_unsafe_types)])
        try:
            _ = viewed.streams[0].reader.index  # raises here if it is no dataset
            serve(viewed, args.port, open_browser=args.open)
        finally:
            viewed.close()
    return FINE


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise ArgumentTypeError(f"must be a port, 0 to {_MAX_PORT}, but got {text!r}")
    return int(text)
