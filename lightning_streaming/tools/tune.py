"""Measure how fast this machine reads a run's data, and recommend num_workers, predownload and cache_limit.

C is a configuration of `lightning-streaming fit`. Its data module is created as in training, with its transform and
collate function, and read for a few seconds with each number of workers; no trainer runs, no model is imported.
From remote data, a few shards are downloaded to a temporary directory (see TMPDIR), which is removed at the end; the
run's own cache is not touched.

With --consumer-ms, the duration of a training step without waiting, settings are rated by how long a step waits for
data.

    lightning-streaming tune --config run.yaml
    lightning-streaming tune --config run.yaml --consumer-ms 120
    lightning-streaming tune --config run.yaml --yaml > tuned.yaml
    lightning-streaming fit --config run.yaml --config tuned.yaml
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import suppress

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.commands import STAGES, add_json, add_run, not_negative_number, of_run, parsed
from lightning_streaming.units import parse_bytes


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add = parser.add_argument
    add(
        "--stage",
        choices=STAGES,
        default="fit",
        help="stage whose data to read; by default fit, which reads data.train",
    )
    add(
        "--num-workers",
        metavar="N,N,...",
        type=_parse_candidates,
        help="numbers of workers to try; by default 0, 1, 2, 4, ... while more help, up to the cores of each rank",
    )
    add("--seconds", metavar="S", type=_positive_number, default=3.0, help="duration of each measurement; 3 by default")
    add(
        "--consumer-ms",
        metavar="MS",
        type=not_negative_number,
        help="duration of a training step without waiting for data, in milliseconds; 0 for steps that do nothing",
    )
    add_run(parser)
    add(
        "--fetch", metavar="SIZE", type=parsed(parse_bytes), default=parse_bytes("256mb"),
        help="maximum download, but at least one shard of each stream; 256mb by default",
    )  # fmt: skip
    add(
        "--disk",
        metavar="SIZE",
        type=parsed(parse_bytes),
        help="space for the cache; by default the free space of its disk",
    )
    add("--yaml", action="store_true", help="print only the settings, as a configuration")
    add_json(parser)


def run(args: Namespace) -> int:
    """Measure, and print what to set."""
    if args.json and args.yaml:
        raise ConfigError(
            "--json and --yaml are two ways to print the result", hint="pass one of them", option="--yaml"
        )
    return of_run("tuning.tune_run.tune_run")(args)


def _parse_candidates(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ArgumentTypeError(f"must be whole numbers with commas between, like 0,2,4, but got {text!r}")
    return sorted(set(map(int, numbers)))


def _positive_number(text: str) -> float:
    with suppress(ArgumentTypeError):
        if number := not_negative_number(text):
            return number
    raise ArgumentTypeError(f"must be a positive number, but got {text!r}")
