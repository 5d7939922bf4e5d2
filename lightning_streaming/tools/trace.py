"""Tell which samples a step of training reads, and when a sample is read; without training.

C is a configuration of `lightning-streaming fit`. Its data module is made as training would make it, and the order is
worked out from it: only the indexes of the streams are read, no trainer runs, no shard is fetched.

Step N is the one in which `trainer.global_step` is N, as loggers write it: the first is 0, and a checkpoint named
step=100 was saved right before step 100. How many ranks there are, `accumulate_grad_batches` and `limit_train_batches`
are as the configuration has them for its trainer, unless said otherwise.

    lightning-streaming trace --config run.yaml --step 1200
    lightning-streaming trace --config run.yaml --step 1200 --rank 3 --nodes 2 --ranks-per-node 8
    lightning-streaming trace --config run.yaml --sample code:17:4021
    lightning-streaming trace --config run.yaml --step 1200 --ckpt checkpoints/step=1000.ckpt
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence

from lightning_streaming.errors import ConfigError, StreamingError
from lightning_streaming.loading.sample_key import SampleKey
from lightning_streaming.tools.console import FINE, counted, print_json, print_note
from lightning_streaming.tools.options import add_json, add_ranks, not_negative, positive
from lightning_streaming.tools.traces.fields import fields_of
from lightning_streaming.tools.traces.reads import Read, reads_of_key, reads_of_sample, reads_of_step
from lightning_streaming.tools.traces.run import Asked, TracedRun, traced_run
from lightning_streaming.tools.traces.show import as_json, print_reads, print_step

_PROGRAM = "lightning-streaming trace"


def add_arguments(parser: ArgumentParser) -> None:
    """Say what it can be told."""
    parser.add_argument(
        "--config",
        metavar="C",
        action="append",
        required=True,
        help="configuration of the run; of several, as with fit, a later one overrides what an earlier one says",
    )
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--step", metavar="N", type=not_negative, help="tell what this global step reads")
    wanted.add_argument(
        "--sample",
        metavar="S",
        help="tell when this sample is read: STREAM:SHARD:INDEX, counted from 0 within stream and shard; or a key as "
        "JSON, from with_keys=True or from this tool, for one very read",
    )
    parser.add_argument("--rank", metavar="R", type=not_negative, help="only what this rank reads; all by default")
    add_ranks(parser)
    parser.add_argument("--accumulate", metavar="K", type=positive, help="batches per step (accumulate_grad_batches)")
    parser.add_argument(
        "--ckpt",
        metavar="CKPT",
        help="trace the run that goes on from this checkpoint of Lightning: steps count from its own, and unless said "
        "otherwise there are as many ranks as it was saved with",
    )
    parser.add_argument(
        "--epochs", metavar="E", type=positive, default=20, help="look for a sample in so many epochs; 20 by default"
    )
    parser.add_argument(
        "--set",
        metavar="FIELD=VALUE",
        type=_parse_change,
        action="append",
        default=[],
        help="change a field of the data, like train.shuffle_seed=3, as --data.train.shuffle_seed=3 does in fit",
    )
    parser.add_argument(
        "--fields",
        action="store_true",
        help="show what is in each sample also where its shard is not on this node: the bytes of the sample alone are "
        "fetched, or of a compressed shard all",
    )
    add_json(parser)


def run(args: Namespace) -> int:
    """Print the samples of a step, or the reads of a sample."""
    changes = dict(args.set) | ({} if args.batch_size is None else {"batch_size": str(args.batch_size)})
    asked = Asked(
        configs=args.config,
        changes=changes,
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        accumulate=args.accumulate,
        checkpoint=args.ckpt,
    )
    traced = traced_run(asked)
    try:
        if traced.assumed is not None:
            print_note(_PROGRAM, traced.assumed)
        reads = _find(traced, args)
        _show(traced, reads, args)
    finally:
        traced.loader.close()
    return FINE


def _find(traced: TracedRun, args: Namespace) -> list[Read]:
    if args.step is not None:
        return reads_of_step(traced, args.step, args.rank)
    if args.sample.lstrip().startswith("{"):
        reads = reads_of_key(traced, _parse_key(args.sample))
    else:
        reads = reads_of_sample(traced, *_parse_place(args.sample), args.epochs)
    return [read for read in reads if args.rank is None or 0 <= args.rank - read.rank < traced.replication]


def _show(traced: TracedRun, reads: Sequence[Read], args: Namespace) -> None:
    shown: dict[int, dict[str, str]] = {}
    failure = None
    try:
        shown = fields_of(traced.loader.dataset, reads, fetch=args.fields)
    except StreamingError as error:  # what is known without them is shown first
        failure = error
    if args.json:
        print_json(as_json(traced, reads, shown))
    elif args.step is not None:
        print_step(f"step {args.step}, epoch {reads[0].key.epoch}, {_topology(traced)}", traced, reads, shown)
    elif reads:
        print_reads(f"sample {args.sample}, {_topology(traced)}", traced, reads, shown)
    else:
        print(f"{args.sample} is not read in {counted(args.epochs, 'epoch')} from epoch {traced.begins.epoch} on")
    if failure is not None:
        raise failure


def _topology(traced: TracedRun) -> str:
    nodes, ranks = counted(traced.num_nodes, "node"), counted(traced.ranks_per_node, "rank")
    return f"{nodes} of {ranks}" if traced.num_nodes > 1 else ranks


def _parse_place(text: str) -> tuple[str, int, int]:
    stream, *numbers = text.rsplit(":", 2)  # the name of a stream may have colons
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"--sample must be STREAM:SHARD:INDEX or a key as JSON, but got {text!r}")
    return stream, int(numbers[0]), int(numbers[1])


def _parse_key(text: str) -> SampleKey:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--sample starts like JSON, but is not JSON: {error}") from None
    return SampleKey.from_dict(values)


def _parse_change(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError("must be written FIELD=VALUE")
    return name.removeprefix("data.").removeprefix("init_args."), value
