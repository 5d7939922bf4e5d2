"""Write the files of a first run on a dataset: a commented run.yaml, and a module.py with a model and a transform.

The command reads the index of DATASET and a few samples. Images get a classifier, tokens and text a small language
model, other numbers a linear regression. Several datasets become streams of one run. Nothing is overwritten.

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
from lightning_streaming.tools.starting.run_files import MODULE, RUN, config_text, module_text, secret_hints
from lightning_streaming.tools.starting.tasks import preview, task_of
from lightning_streaming.tools.stored.stored_dataset import find_dataset

_MAX_NAMES = 12


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    words = "directory or URL of a dataset; several are mixed"
    parser.add_argument("datasets", metavar="DATASET", nargs="+", help=words)
    words = "directory to write to, created if necessary; by default the current one"
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path(), help=words)
    add_format(parser)
    add_storage_options(parser)


def run(args: Namespace) -> int:
    """Inspect the datasets, write the files, and print the next commands."""
    out: Path = args.out
    existing = [out / name for name in (RUN, MODULE) if (out / name).exists()]
    if existing:
        raise ConfigError(
            f"{existing[0]} exists and is not overwritten",
            hint="choose another --out",
            option="--out",
            path=str(existing[0]),
        )
    datasets = [find_dataset(name, args.storage_options, args.format, args.block_length) for name in args.datasets]
    previews = [preview(dataset) for dataset in datasets]
    task = task_of(previews)
    holds_text = all(isinstance(value, str) for dataset in previews for value in dataset.values(task.inputs[0]))
    files = {MODULE: module_text(task, holds_text), RUN: config_text(previews, task, out)}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        with (out / name).open("x", encoding="utf-8") as file:  # do not overwrite a file that was just created
            file.write(text)
    for dataset in previews:
        print_line(f"{dataset.dataset.shown}: {dataset.size}; columns {_shortened(dataset.columns)}")
    unread = dict.fromkeys(name for dataset in previews for name in dataset.columns if name not in task.columns)
    left_out = f", and leaves out {_shortened(unread)}" if unread else ""
    print_line(
        f"Wrote {out / RUN} and {out / MODULE}: {task.kind.value}. It reads {_shortened(task.columns)}{left_out}."
    )
    print_line("Train, and resume after any stop, with")
    print_line()
    where = "" if out == Path() else f"cd {shell_word(str(out))} && "
    print_line(f"    {where}{PROGRAM} fit --config {RUN}")
    print_line(f"    {where}{PROGRAM} fit --config {RUN} --ckpt_path last")
    for line in secret_hints(previews):
        print_line(f"\n{line}")
    return FINE


def _shortened(names: Iterable[str]) -> str:
    """Return the first few names."""
    shown = [*map(printable_name, islice(names, _MAX_NAMES + 1))]
    return ", ".join([*shown[:_MAX_NAMES], *["..."] * (len(shown) > _MAX_NAMES)])
