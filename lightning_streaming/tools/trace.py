"""Show which samples a training step reads, when a sample is read, and in which phase, without training.

C is a configuration of `lightning-streaming fit`. Its data module is created as in training, and the order is computed
from it: only the indexes of the streams are read, no trainer runs, no shard is downloaded.

Step N is the one in which `trainer.global_step` is N, as loggers write it: the first is 0, and a checkpoint named
step=100 was saved right before step 100. The number of ranks, `accumulate_grad_batches` and `limit_train_batches` are
those of the configured trainer, unless arguments override them.

Of packed documents (`packing` or `token_budget` in the configuration) it shows the packs, with the documents and
tokens in them.

    lightning-streaming trace --config run.yaml --step 1200
    lightning-streaming trace --config run.yaml --step 1200 --rank 3 --nodes 2 --ranks-per-node 8
    lightning-streaming trace --config run.yaml --sample code:17:4021
    lightning-streaming trace --config run.yaml --step 1200 --ckpt checkpoints/step=1000.ckpt
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from lightning_streaming.tools.commands import add_json, add_loader, add_run, add_set, not_negative, of_run, positive


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add = parser.add_argument
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--step", metavar="N", type=not_negative, help="show what this global step reads")
    wanted.add_argument(
        "--sample",
        metavar="S",
        help="show when this sample is read: STREAM:SHARD:INDEX, counted from 0 within stream and shard; or a key as "
        "JSON, from return_keys=True or from this tool, for a single read",
    )
    add("--rank", metavar="R", type=not_negative, help="only the samples of this rank; all by default")
    add_run(parser)
    add("--accumulate", metavar="K", type=positive, help="batches per step (accumulate_grad_batches)")
    add(
        "--ckpt",
        dest="checkpoint",
        metavar="CKPT",
        help="trace the run that resumes from this Lightning checkpoint: steps count from its own, and the number of "
        "ranks defaults to that of the checkpoint",
    )
    add_loader(parser)
    add(
        "--epochs",
        metavar="E",
        type=positive,
        default=20,
        help="number of epochs to search for a sample; 20 by default",
    )
    add_set(parser)
    add(
        "--fields",
        action="store_true",
        help="show the contents of each sample even if its shard is not on this node: only the bytes of the sample are "
        "downloaded, or all of a compressed shard",
    )
    add_json(parser)


def run(args: Namespace) -> int:
    """Print the samples of a step, or the reads of a sample."""
    return of_run("runs.trace_run.trace_run")(args)
