"""Show which samples a step reads, when a sample is read, and what made a loss jump, without training.

C is a configuration of `lightning-streaming fit`. Its data module is created as in training, and the order is computed
from it: only the indexes of the streams are read, no trainer runs, no shard is downloaded.

Step N is the one in which `trainer.global_step` is N, as loggers write it: the first is 0, and a checkpoint named
step=100 was saved right before step 100. The number of ranks, `accumulate_grad_batches` and `limit_train_batches` are
those of the configured trainer, unless arguments override them.

For packed documents (`packing` or `token_budget` in the configuration), it shows the packs, with their documents and
tokens.

--spike reads a log of lightning_streaming.StepLog and finds the steps at which the loss, or another logged value,
jumped: it is no finite number, or above the expected value by more than --threshold spreads. Expected is what the trend
of the last 100 steps gives, the line with the slope between the medians of their halves, so that a falling loss hides
no spike; at least the median of the last 10. The spread is 1.4826 times the median distance from that line, at least
0.1 % of the median value. The value of a step is the mean over its batches and ranks. Such steps in a row are a spike,
and so are up to 50 steps from its first one while they are above its bound; if none is finite up to the end of the log,
only the first counts. Without a spike, the step that came nearest to one is shown.
Shown are its samples, those of the batches with the largest values first; what these share (stream, shard, phase,
length) more often than the samples of the 100 steps before, beyond chance; and `skip` ranges that leave the batches out
of a run that resumes from an earlier checkpoint with the same number of ranks and batch size.

    lightning-streaming trace --config run.yaml --step 1200
    lightning-streaming trace --config run.yaml --step 1200 --rank 3 --nodes 2 --ranks-per-node 8
    lightning-streaming trace --config run.yaml --sample code:17:4021
    lightning-streaming trace --config run.yaml --step 1200 --ckpt checkpoints/step=1000.ckpt
    lightning-streaming trace --config run.yaml --ckpt last.ckpt --trained --where "contains(text, 'a sentence')"
    lightning-streaming trace --config run.yaml --spike logs/steps --yaml > skip.yaml
    lightning-streaming fit --config run.yaml --config skip.yaml --ckpt_path checkpoints/step=1000.ckpt
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.commands import (
    add_json,
    add_loader,
    add_run,
    add_set,
    not_negative,
    not_negative_number,
    of_run,
    positive,
)


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
    wanted.add_argument(
        "--shard",
        metavar="S",
        help="with --trained: all samples of this shard, STREAM:NUMBER or STREAM:FILE",
    )
    words = "with --trained: all samples that meet this condition in SQL, like \"contains(text, 'a sentence')\" or "
    words += "\"sha256(text) = '...'\"; it reads these columns of all shards, and needs lightning-streaming[select]"
    wanted.add_argument("--where", metavar="SQL", help=words)
    wanted.add_argument(
        "--spike",
        metavar="LOG",
        nargs="?",
        const="",
        help="show where a value in this directory of StepLog jumped; by default that of the configuration's StepLog",
    )
    add("--rank", metavar="R", type=not_negative, help="only the samples of this rank; all by default")
    add_run(parser)
    add("--accumulate", metavar="K", type=positive, help="batches per step (accumulate_grad_batches)")
    add(
        "--ckpt",
        dest="checkpoint",
        metavar="CKPT",
        help="trace the run that resumes from this Lightning checkpoint: steps continue from its step, and the number "
        "of ranks defaults to that of the checkpoint",
    )
    words = "show when the weights of --ckpt were trained on the samples, and the share of their stream then"
    add("--trained", action="store_true", help=words)
    add_loader(parser)
    add(
        "--epochs",
        metavar="E",
        type=positive,
        help="number of epochs to search for a sample; 20 by default",
    )
    add("--value", metavar="NAME", help="with --spike: the logged value; by default the first one, like loss")
    words = "with --spike: the least jump, in spreads of the steps before; 6 by default"
    add("--threshold", metavar="T", type=not_negative_number, help=words)
    add("--yaml", action="store_true", help="with --spike: print only the skip ranges, as a configuration")
    add_set(parser)
    add(
        "--fields",
        action="store_true",
        help="show the contents of each sample even if its shard is not on this node: only the bytes of the sample are "
        "downloaded, or all of a compressed shard",
    )
    add_json(parser)


def run(args: Namespace) -> int:
    """Print the samples of a step, the reads of a sample, or the spikes of a log."""
    of_spike = {"--value": args.value is not None, "--threshold": args.threshold is not None, "--yaml": args.yaml}
    of_trained = {"--shard": args.shard is not None, "--where": args.where is not None}
    needs = [(name, "--spike") for name, is_given in of_spike.items() if is_given and args.spike is None]
    needs += [(name, "--trained") for name, is_given in of_trained.items() if is_given and not args.trained]
    needs += [("--epochs", "--sample")] * (args.epochs is not None and args.sample is None)
    if args.trained:
        of_reads = {"--rank": args.rank, "--epochs": args.epochs}
        needs += [
            (name, "reads to come, and not with --trained") for name, value in of_reads.items() if value is not None
        ]
        needs += [("--trained", "--ckpt")] * (args.checkpoint is None)
        needs += [("--trained", "--sample, --shard or --where")] * (args.step is not None or args.spike is not None)
    for name, other in needs:
        raise ConfigError(f"{name} goes with {other}", option=name)
    if args.json and args.yaml:
        raise ConfigError("--json and --yaml are two ways to print the result", option="--yaml")
    args.epochs = 20 if args.epochs is None else args.epochs
    args.threshold = 6.0 if args.threshold is None else args.threshold
    function = "runs.spikes.trace_spikes" if args.spike is not None else "runs.trace_run.trace_run"
    return of_run("runs.trained.trace_trained" if args.trained else function)(args)
