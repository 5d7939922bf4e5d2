"""Write a first run for a dataset: a commented run.yaml, and a module.py with a model and a transform, ready to train.

Reads the index of DATASET and a few samples. Images get a classifier, tokens and text a small language model, other
numbers a linear regression. Several datasets become streams of one run. Nothing is overwritten.

    lightning-streaming init data/train
    lightning-streaming init s3://corpus/code s3://corpus/docs --out run1
    lightning-streaming init hf://datasets/USER/NAME/data --format parquet
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import shell_word
from lightning_streaming.tools.commands import add_format, add_storage_options
from lightning_streaming.tools.console import FINE, PROGRAM, print_line, printable_name
from lightning_streaming.tools.starting.look import look_at, task_of, told_size
from lightning_streaming.tools.starting.run_config import RUN, config_text, told_secrets
from lightning_streaming.tools.starting.run_module import module_text
from lightning_streaming.tools.stored.stored_dataset import find_dataset

MODULE = "module.py"
_MOST_NAMES = 12


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    words = "directory or URL of a dataset; several are mixed"
    parser.add_argument("datasets", metavar="DATASET", nargs="+", help=words)
    words = "directory to write to, created if necessary; by default the current one"
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path(), help=words)
    add_format(parser)
    add_storage_options(parser)


def _listed(names: Iterable[str]) -> str:
    """The first few."""
    shown = [*map(printable_name, islice(names, _MOST_NAMES + 1))]
    return ", ".join([*shown[:_MOST_NAMES], *["..."] * (len(shown) > _MOST_NAMES)])


def run(args: Namespace) -> int:
    """Inspect the datasets, write the files, and print the next commands."""
    out: Path = args.out
    there = [name for name in (RUN, MODULE) if (out / name).exists()]
    if there:
        raise ConfigError(
            f"{out / there[0]} exists and is not overwritten",
            hint="choose another --out",
            option="--out",
            path=str(out / there[0]),
        )
    places = [find_dataset(one, args.storage_options, args.format, args.block_length) for one in args.datasets]
    looks = [look_at(place) for place in places]
    task = task_of(looks)
    values = [value for look in looks for value in look.values(task.inputs[0])]
    files = {MODULE: module_text(task, all(isinstance(one, str) for one in values)), RUN: config_text(looks, task, out)}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        with (out / name).open("x", encoding="utf-8") as file:  # do not overwrite a file that was just created
            file.write(text)
    for look in looks:
        print_line(f"{look.place.shown}: {told_size(look)}; columns {_listed(look.columns)}")
    unread = dict.fromkeys(name for look in looks for name in look.columns if name not in task.columns)
    left_out = f", and leaves out {_listed(unread)}" if unread else ""
    print_line(f"Wrote {out / RUN} and {out / MODULE}: {task.kind.value}. It reads {_listed(task.columns)}{left_out}.")
    print_line("Train, and resume after any stop, with")
    print_line()
    where = "" if out == Path() else f"cd {shell_word(str(out))} && "
    print_line(f"    {where}{PROGRAM} fit --config {RUN}")
    print_line(f"    {where}{PROGRAM} fit --config {RUN} --ckpt_path last")
    for line in told_secrets(looks):
        print_line(f"\n{line}")
    return FINE
