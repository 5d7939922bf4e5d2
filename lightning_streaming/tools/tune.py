"""Measure how fast a run's data is read on this machine, and recommend num_workers, predownload and cache_limit.

C is a configuration of `lightning-streaming fit`. Its data module is made as training would make it, with its transform
and collate function, and read for a few seconds with each number of workers; no trainer runs, no model is imported.
Data that has to be fetched comes from a few shards, in a temporary directory (see TMPDIR) that is removed in the end;
the run's own cache is not touched.

Say how long a training step takes when its batch is there, and settings are judged by whether it waits.

    lightning-streaming tune --config run.yaml
    lightning-streaming tune --config run.yaml --consumer-ms 120
    lightning-streaming tune --config run.yaml --yaml > tuned.yaml
    lightning-streaming fit --config run.yaml --config tuned.yaml
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from math import inf, nan

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.console import FINE, print_json, print_note
from lightning_streaming.tools.options import add_json, add_ranks
from lightning_streaming.tools.tuning.cores import usable_cores
from lightning_streaming.tools.tuning.report import Effort, tune
from lightning_streaming.tools.tuning.run import STAGES, Asked, tuned_run
from lightning_streaming.tools.tuning.show import as_json, fragment, print_report
from lightning_streaming.units import parse_bytes

_PROGRAM = "lightning-streaming tune"
_NO_CONSUMER = (
    "\na step was taken to do nothing but ask for the next batch; say with --consumer-ms how long yours takes, and "
    "settings are judged by whether it waits"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Say what it can be told."""
    parser.add_argument(
        "--config",
        metavar="C",
        action="append",
        required=True,
        help="configuration of the run; of several, as with fit, a later one overrides what an earlier one says",
    )
    parser.add_argument("--stage", choices=STAGES, default="fit", help="whose data to read; fit by default: data.train")
    parser.add_argument(
        "--num-workers",
        metavar="N,N,...",
        type=_parse_candidates,
        help="numbers of workers to try; by default 0, 1, 2, 4, ... as long as more help, up to the cores that there "
        "are for each rank",
    )
    parser.add_argument(
        "--seconds", metavar="S", type=_positive_number, default=3.0, help="for each of them; 3 by default"
    )
    parser.add_argument(
        "--consumer-ms",
        metavar="MS",
        type=_not_negative_number,
        help="how long a training step takes when its batch is there, in milliseconds; 0 for steps that do nothing",
    )
    add_ranks(parser)
    parser.add_argument(
        "--fetch", metavar="SIZE", type=_parse_size, default=parse_bytes("256mb"),
        help="how much to fetch at most, but one shard of each stream at least; 256mb by default",
    )  # fmt: skip
    parser.add_argument(
        "--disk", metavar="SIZE", type=_parse_size, help="room that the cache may take; by default what its disk has"
    )
    parser.add_argument("--yaml", action="store_true", help="print only the settings, as a configuration")
    add_json(parser)


def run(args: Namespace) -> int:
    """Measure, and print what to set."""
    if args.json and args.yaml:
        raise ConfigError("--json and --yaml are two ways to print the result; ask for one of them")
    size = "eval_batch_size" if args.stage != "fit" else "batch_size"
    asked = Asked(
        configs=args.config,
        changes={} if args.batch_size is None else {size: str(args.batch_size)},
        stage=args.stage,
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
    )
    tuned = tuned_run(asked)
    if tuned.assumed is not None:
        print_note(_PROGRAM, tuned.assumed)
    consumer = (args.consumer_ms or 0.0) / 1000
    effort = Effort(
        candidates=args.num_workers or doublings(max(1, usable_cores() // tuned.world.ranks_per_node)),
        seconds=args.seconds,
        consumer=consumer,
        most_fetched=args.fetch,
        disk=args.disk,
    )
    report = tune(tuned, effort)
    if args.json:
        print_json(as_json(tuned, report, consumer))
    elif args.yaml:
        print(fragment(tuned, report), end="")
    else:
        print_report(tuned, report, consumer)
        if args.consumer_ms is None:
            print(_NO_CONSUMER)
    return FINE


def doublings(most: int) -> list[int]:
    """Numbers of workers to try: 0, 1, 2, 4, ... and ``most``."""
    return sorted({0, most, *(2**power for power in range(most.bit_length()))})


def _parse_candidates(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ArgumentTypeError(f"must be whole numbers with commas between, like 0,2,4, but got {text!r}")
    return sorted(set(map(int, numbers)))


def _positive_number(text: str) -> float:
    number = _number(text)
    if not 0 < number < inf:
        raise ArgumentTypeError(f"must be a positive number, but got {text!r}")
    return number


def _not_negative_number(text: str) -> float:
    number = _number(text)
    if not 0 <= number < inf:
        raise ArgumentTypeError(f"must be a number of at least 0, but got {text!r}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def _parse_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from None
