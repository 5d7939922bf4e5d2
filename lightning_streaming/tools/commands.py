"""Table of the tools, how to run one, and the arguments that several tools share."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import getdoc
from io import TextIOWrapper
from typing import Any, NoReturn

from lightning_streaming.errors import ConfigError, FormatError, IntegrityError, StreamingError
from lightning_streaming.formats.shard_table import OTHER_FORMATS
from lightning_streaming.storage import StorageOptions
from lightning_streaming.tools.console import BAD, INTERRUPTED, PROGRAM, UNREAD, UNUSABLE, print_error

_NOT_TEXT = re.compile(r'true|false|null|-?(0|[1-9]\d*)(\.\d+)?|[\[{"].*', re.DOTALL)
_EXAMPLES = re.compile(r"(^    lightning-streaming .*\n)+\n?", re.MULTILINE)
_LAYOUT = RawDescriptionHelpFormatter
ENDING_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals at which a command removes its temporary files and ends with 128 plus their number."""
_LARGEST = 2**31 - 1
"""The largest number of epochs, steps, nodes and so on that an argument takes: their products fit 64 bits."""
_MOST_DIGITS = 1000
"""Python itself refuses numbers of more than 4300 digits, with an error of its own."""
COMMANDS = {
    "init": "write a first run for a dataset: a configuration, a model, a transform",
    "convert": "make a dataset of JSON lines, CSV, Parquet, tar files, images or texts",
    "index": "make the index of data of another format, ahead of the runs that read it as it lies",
    "inspect": "show what a dataset holds: columns, sizes, first samples",
    "view": "show a dataset, or what a run reads, as pages in the browser",
    "verify": "check every file and every sample of a dataset, and repair it",
    "copy": "copy a dataset to another directory or store, checked",
    "merge": "join datasets under one index, without copying",
    "select": "evaluate which samples a run reads, ahead of the run",
    "lengths": "count the tokens of every document, ahead of a run that packs them",
    "state": "show and move the place in the data that a checkpoint holds",
    "trace": "tell which samples a step of training reads, and when a sample is read",
    "plan": "tell what a run will read, fetch and need, before it runs",
    "tune": "measure how fast a run's data is read here, and recommend settings for it",
    "cache": "show what caches hold, and make room in them",
}
"""What each tool does, in one line, by what is typed after ``lightning-streaming``.

A tool is the module of this name, which is not imported before it is asked for. Its docstring is its description;
``add_arguments(parser)`` says what it can be told, and ``run(args)`` does the work and returns an exit code. It raises
StreamingError where that could not be done, which is shown without a traceback. ``args.given`` are its words.
"""
GROUPS = {
    "Make a dataset": ("convert", "index", "merge"),
    "Look at it": ("inspect", "view"),
    "Check and move it": ("verify", "copy", "cache"),
    "Prepare a run": ("init", "plan", "tune", "select", "lengths"),
    "Run": ("fit", "validate", "test", "predict", "trace", "state"),
}
"""The commands as they are listed, by what they are for: the tools, and what Lightning's command line does."""

STAGES = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
"""The data of each of Lightning's stages; of ``fit`` that to train on."""


def run_command(name: str, args: Sequence[str]) -> int:
    """Run a tool.

    Args:
        name: One of :data:`COMMANDS`.
        args: The arguments after its name.

    Returns:
        The exit code of the process.

    Raises:
        SystemExit: The arguments cannot be parsed, or ask for help; or the process was told to end.
    """
    tool, parser = import_module(f"lightning_streaming.tools.{name}"), parser_of(name)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # where a terminal's encoding lacks a character of the data
    try:
        try:
            with _ended_in_order():
                code: int = tool.run(parser.parse_args(args, Namespace(given=tuple(args))))
        finally:
            sys.stdout.flush()  # to find out here, and not when Python exits, that nobody reads the output any more
    except StreamingError as error:
        print_error(parser.prog, error)
        return BAD if isinstance(error, FormatError | IntegrityError) else UNUSABLE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output, head for example, has seen enough
        # Python would fail to flush what is left when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except OSError as error:  # the system refused a path, or a disk is full
        print_error(parser.prog, error)
        return UNUSABLE
    except MemoryError as error:
        print_error(parser.prog, f"out of memory: {error}".removesuffix(": "))
        return UNUSABLE
    return code


def parser_of(name: str) -> CommandParser:
    """The parser of a tool's arguments.

    Args:
        name: One of :data:`COMMANDS`.
    """
    tool = import_module(f"lightning_streaming.tools.{name}")
    parser = CommandParser(
        prog=f"{PROGRAM} {name}", description=tool.__doc__, formatter_class=_LAYOUT, allow_abbrev=False
    )
    tool.add_arguments(parser)
    return parser


class CommandParser(ArgumentParser):
    """A parser that answers a mistake with what is wrong and where to read on, not with all there is to read.

    The commands in a description are shown as examples, below the options: what is read last stays in sight.
    """

    def __init__(self, *, description: str | None = None, **settings: Any) -> None:
        found = _EXAMPLES.search(description or "")
        self.examples = "" if found is None else found[0].rstrip()
        super().__init__(description=_EXAMPLES.sub("", description or "", count=1) or None, **settings)

    def format_help(self) -> str:
        """The help, with the examples at its end."""
        return super().format_help() + (f"\nexamples:\n\n{self.examples}\n" if self.examples else "")

    def error(self, message: str) -> NoReturn:
        words, unknown, given = message.partition("unrecognized arguments: ")
        names = [one.partition("=")[0] for one in given.split()]
        # Not what follows a misspelt option: it may be a secret.
        told = f"{words}{unknown}{' '.join([one for one in names if one.startswith('-')] or names)}"
        print_error(self.prog, ConfigError(f"{told}; see {self.prog} --help"))
        sys.exit(UNUSABLE)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Leave all ``with`` blocks at SIGTERM and SIGHUP, so that temporary files and worker processes are removed.

    A terminal that is closed sends SIGHUP; where it is ignored, as nohup does it, it stays so.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    signals = [one for one in ENDING_SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, lambda number, _: sys.exit(128 + number)) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def add_json(parser: ArgumentParser) -> None:
    """Add ``--json``, as ``args.json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def add_loader(parser: ArgumentParser, words: str = "") -> None:
    """Add ``--loader NAME``, as ``args.loader``: which train loader of a checkpoint.

    Args:
        parser: What to add it to.
        words: More about it.
    """
    told = f"name of the train loader; needed if the checkpoint is of several{words}"
    parser.add_argument("--loader", metavar="NAME", help=told)


def add_dataset(parser: ArgumentParser, *, or_else: bool = False) -> None:
    """Add the dataset to look at, as ``args.dataset``; and whether its unsafe columns may be decoded.

    Args:
        parser: What to add it to.
        or_else: Whether it may be left out, because something else can be looked at.
    """
    words = "directory or URL of a dataset, or of its index.json"
    parser.add_argument("dataset", metavar="DATASET", nargs="?" if or_else else None, help=words)
    words = "also decode columns of encoding pkl, which can run any code of whoever wrote the data"
    parser.add_argument("--allow-unsafe-types", action="store_true", help=words)


def add_format(parser: ArgumentParser, *, required: bool = False, has_block_length: bool = False) -> None:
    """Add what data of another format is, as ``args.format`` and ``args.block_length``.

    Args:
        parser: What to add it to.
        required: Whether it must be said.
        has_block_length: Whether the tool has an option of that name already.
    """
    words = "what lies there, if it has no index of ours: it is read as it lies, as runs read it with format="
    told = "what lies there" if required else words
    parser.add_argument("--format", required=required, choices=OTHER_FORMATS, help=told)
    if has_block_length:
        return
    words = "with --format: tokens of a sample, where it is to be a block of so many"
    parser.add_argument("--block-length", type=positive, metavar="N", help=words)


def add_action(actions: Any, word: str, words: str, action: Callable[[Namespace], int]) -> ArgumentParser:
    """Add one of several actions of a tool, as ``args.action``; its docstring is what its ``--help`` shows.

    Args:
        actions: What ``add_subparsers`` gave.
        word: What is typed.
        words: What it does, in one line.
        action: Does it, and returns an exit code.
    """
    told = {"help": words, "description": getdoc(action)}
    parser: ArgumentParser = actions.add_parser(word, **told, formatter_class=_LAYOUT, allow_abbrev=False)
    parser.set_defaults(action=action)
    return parser


def add_storage_options(parser: ArgumentParser, name: str = "--storage-options", of: str = "the store") -> None:
    """Add ``--storage-options KEY=VALUE``, a mapping.

    Args:
        parser: What to add it to.
        name: Its name, if there are several.
        of: Whose options they are.
    """
    parser.add_argument(
        name,
        metavar="KEY=VALUE",
        action=_AddOption,
        type=_parse_pair,
        default=StorageOptions({}),
        help=f"an argument of the fsspec filesystem of {of}, for example anon=true or endpoint_url=http://host; may be "
        'given several times. Numbers, true, false, null, {...}, [...] and "..." are read as JSON, all else is text. '
        "Values are never shown",
    )


class _AddOption(Action):
    """Adds an option to those given before; of two with one key the last one counts."""

    def __call__(self, _: ArgumentParser, args: Namespace, pair: Any, __: str | None = None) -> None:
        """See :class:`argparse.Action`."""
        setattr(args, self.dest, StorageOptions({**getattr(args, self.dest), pair[0]: pair[1]}))


def add_workers(parser: ArgumentParser, default: int | None, words: str) -> None:
    """Add ``--workers``, a positive number, as ``args.workers``.

    Args:
        parser: What to add it to.
        default: How many there are if nothing is said; None leaves it to the tool.
        words: What they are, and how many there are by default.
    """
    parser.add_argument("--workers", metavar="N", type=positive, default=default, help=words)


def add_run(parser: ArgumentParser) -> None:
    """Add ``args.config``, and what it may leave open: ``args.nodes``, ``args.ranks_per_node``, ``args.batch_size``."""
    words = "configuration of the run; of several, as with fit, a later one overrides what an earlier one says"
    parser.add_argument("--config", metavar="C", action="append", required=True, help=words)
    parser.add_argument("--nodes", metavar="P", type=positive, help="number of nodes")
    parser.add_argument("--ranks-per-node", metavar="G", type=positive, help="processes, or GPUs, on each node")
    parser.add_argument("--batch-size", metavar="B", type=positive, help="samples per batch on each rank")


def add_set(parser: ArgumentParser, words: str = "") -> None:
    """Add ``--set FIELD=VALUE``, as ``args.set``: pairs of a setting of the data and its value.

    Args:
        parser: What to add it to.
        words: What comes before what it does.
    """
    parser.add_argument(
        "--set",
        metavar="FIELD=VALUE",
        type=_parse_change,
        action="append",
        default=[],
        help=f"{words}change a field of the data, like train.shuffle_seed=3, as --data.train.shuffle_seed=3 does in "
        "fit; may be given several times",
    )


def check_set_is_of_a_run(args: Namespace) -> None:
    """Refuse ``--set`` of what has no configuration.

    Raises:
        ConfigError: It was given.
    """
    if args.set:
        raise ConfigError("--set changes the data of a run; give the run's configuration with it, as --config run.yaml")


def _parse_change(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError("must be written FIELD=VALUE")
    return name.removeprefix("data.").removeprefix("init_args."), value


def positive(text: str) -> int:
    """Return a whole number in [1, 2^31), for ``add_argument(type=...)``."""
    return _within(1, _LARGEST, text)


def not_negative(text: str) -> int:
    """Return a whole number in [0, 2^31), for ``add_argument(type=...)``."""
    return _within(0, _LARGEST, text)


def position(text: str) -> int:
    """Return a whole number of at least 0: of samples there may be more than 2^31 in an epoch."""
    return _within(0, None, text)


def amount(text: str) -> int:
    """Return a whole number of at least 1, of any size."""
    return _within(1, None, text)


def usable_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _within(smallest: int, largest: int | None, text: str) -> int:
    if largest is not None and text.isdecimal() and (len(text) > len(str(largest)) or int(text) > largest):
        raise ArgumentTypeError(f"must be a whole number of at most {largest}, but got {text!r:.40}")
    if len(text) > _MOST_DIGITS or not text.isdecimal() or int(text) < smallest:
        raise ArgumentTypeError(f"must be a whole number of at least {smallest}, but got {text!r:.40}")
    return int(text)


def _parse_pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:  # not showing it: it may be a secret
        raise ArgumentTypeError("must be written KEY=VALUE")
    if _NOT_TEXT.fullmatch(value) is None:
        return key, value
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        raise ArgumentTypeError(f"the value of {key} starts like JSON, but is not JSON") from None


def of_run(door: str) -> Callable[..., int]:
    """What a tool does for a configured run; gives an exit code.

    It imports torch, which takes seconds, and of which the same tool needs nothing to look at stored data.

    Args:
        door: Room and module under ``tools``, "planning.plan_run"; the function is named as the module is.
    """
    found: Callable[..., int] = getattr(import_module(f"lightning_streaming.tools.{door}"), door.partition(".")[2])
    return found


_READER = "lightning_streaming.trainer.cli"
_USES = {"train": "no training", "val": "no validation", "test": "no test", "predict": "nothing to predict"}


def read_run_files(files: Sequence[str], changes: Mapping[str, Any], stage: str | None = "train") -> Any:
    """What configuration files of ``lightning-streaming fit`` say of data and trainer.

    Args:
        files: Paths; what a later one says overrides an earlier one.
        changes: More settings of the data, by dotted name without ``data.``.
        stage: The data that is to be there: "train", "val", "test" or "predict"; None for any.

    Returns:
        A :class:`~lightning_streaming.trainer.cli.WrittenRun`; its data module is not set up.

    Raises:
        ConfigError: A file cannot be read, its data cannot be made, or the stage has none.
    """
    # Lightning takes seconds to import, and other tools do not need it.
    written = import_module(_READER).read_config_files(files, changes)
    if stage is not None and written.datamodule.configs[stage] is None:
        raise ConfigError(f"{', '.join(files)}: there is no data.{stage}, so there is {_USES[stage]}")
    return written


def count_ranks(trainer: Mapping[str, Any]) -> tuple[int, str | None]:
    """Ranks on each node as a trainer is configured; and what is assumed of them, where it leaves that open."""
    devices = trainer.get("devices", "auto")
    if isinstance(devices, list):
        return len(devices), None
    if str(devices).isdecimal() and int(devices):
        return int(devices), None
    return 1, "the configuration leaves the number of devices open; taken to be 1, see --ranks-per-node"
