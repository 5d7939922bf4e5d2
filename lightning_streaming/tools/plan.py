"""Predict what a run will read and download, and the memory it needs, from its configuration and its data's indexes.

C is a configuration of `lightning-streaming fit`. Its training data is created as in training; the order, the samples
of each rank, prefetching and the contents of caches are computed by the rules of the run itself. Only the indexes are
read: no shard is downloaded and no trainer runs. What a run computes before it starts (lengths of packed documents,
conditions of `where`) is computed, if it is not cached, as `lightning-streaming lengths` and `select` do.

    lightning-streaming plan --config run.yaml
    lightning-streaming plan --config run.yaml --html plan.html --limit 500gb --limit 1tb --link 10gbit
    lightning-streaming plan --config run.yaml --ckpt run.ckpt --steps 20000
    lightning-streaming plan --config run.yaml --fail-if "repeats(math) > 4" --fail-if "bytes > 2TB"

The exit code is 1 if a condition of --fail-if holds.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools import commands
from lightning_streaming.tools.commands import parsed
from lightning_streaming.tools.planning.fail_if import names_help, parse_condition
from lightning_streaming.units import parse_bytes

_LINK = re.compile(r"(\d+(?:\.\d*)?)\s*([kmgt])bit(?:/s)?", re.IGNORECASE)
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def add_arguments(parser: ArgumentParser) -> None:
    """See :data:`~lightning_streaming.tools.commands.COMMANDS`."""
    parser.epilog = f"conditions of --fail-if are NAME OP NUMBER or NAME(STREAM) OP NUMBER; names are\n\n{names_help()}"
    commands.add_run(parser)
    commands.add_set(parser)
    words = "plan the run that resumes from this Lightning checkpoint"
    parser.add_argument("--ckpt", dest="checkpoint", metavar="CKPT", help=words)
    commands.add_loader(parser)
    parser.add_argument(
        "--accumulate", metavar="A", type=commands.positive, help="batches per step (accumulate_grad_batches)"
    )
    parser.add_argument(
        "--epochs", metavar="N", type=commands.positive, help="number of epochs to plan, instead of the trainer's"
    )
    parser.add_argument(
        "--steps", metavar="N", type=commands.not_negative, help="last step to plan, instead of the trainer's"
    )
    words = "also plan this cache_limit, like 500gb, or none for no limit; may be given several times"
    parser.add_argument("--limit", metavar="SIZE", type=parsed(_parse_limit), action="append", default=[], help=words)
    words = "link of a node to the store, like 10gbit, or 1.2gb for bytes per second (default: 10gbit)"
    parser.add_argument("--link", metavar="SPEED", type=parsed(_parse_link), default="10gbit", help=words)
    words = "seconds before the store answers (default: 0.05)"
    parser.add_argument("--latency", metavar="S", type=commands.not_negative_number, default=0.05, help=words)
    parser.add_argument(
        "--html", metavar="F", type=Path, help="also write a self-contained page with charts to this file"
    )
    words = "exit with code 1 if this holds, like 'repeats(math) > 4'; may be given several times; names are below"
    parser.add_argument(
        "--fail-if", metavar="CONDITION", type=parsed(parse_condition), action="append", default=[], help=words
    )
    commands.add_json(parser)


def run(args: Namespace) -> int:
    """See :data:`~lightning_streaming.tools.commands.COMMANDS`."""
    return commands.of_run("planning.plan_run.plan_run")(args)


def _parse_limit(text: str) -> int | None:
    return None if text == "none" else parse_bytes(text)


def _parse_link(text: str) -> float:
    bits = _LINK.fullmatch(text.strip())
    speed = float(bits[1]) * _BITS[bits[2].lower()] / 8 if bits else float(parse_bytes(text.removesuffix("/s")))
    if not speed > 0:
        raise ConfigError(f"must be a speed of more than 0, but got {text!r}")
    return speed
