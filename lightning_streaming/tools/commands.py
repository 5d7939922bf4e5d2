"""Table of the tools, how to run one, and the arguments that several tools share."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import threading
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from inspect import getdoc
from io import TextIOWrapper
from typing import Any, NoReturn, TypeVar

from lightning_streaming.errors import ConfigError, FormatError, IntegrityError, StreamingError
from lightning_streaming.formats.shard_table import OTHER_FORMATS
from lightning_streaming.storage import StorageOptions
from lightning_streaming.tools.console import BAD, INTERRUPTED, PROGRAM, UNREAD, UNUSABLE, print_error

_Parsed = TypeVar("_Parsed")
_NOT_TEXT = re.compile(r'true|false|null|-?(0|[1-9]\d*)(\.\d+)?|[\[{"].*', re.DOTALL)
_EXAMPLES = re.compile(r"(^    lightning-streaming .*\n)+\n?", re.MULTILINE)
_LAYOUT = RawDescriptionHelpFormatter
ENDING_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals at which a command removes its temporary files and ends with 128 plus their number."""
_LARGEST = 2**31 - 1
"""The largest number of epochs, steps, nodes and so on that an argument takes: their products fit 64 bits."""
_MOST_DIGITS = 1000
"""Python itself refuses numbers of more than 4300 digits, with another error."""
COMMANDS = {
    "init": "write a configuration, a model and a transform for a first run on a dataset",
    "convert": "create a dataset from JSON lines, CSV, Parquet, tar files, images or text",
    "index": "write the index of data of another format, before runs read it in place",
    "inspect": "show the columns, sizes and first samples of a dataset",
    "view": "show a dataset, or what a run reads, in the browser",
    "verify": "check every file and every sample of a dataset, and repair it",
    "copy": "copy a dataset to another directory or store, and check it",
    "merge": "merge datasets under one index, without copying",
    "select": "evaluate a run's selections and joins in advance",
    "lengths": "count the tokens of every document, before a run that packs them",
    "state": "show or change the position in the data that a checkpoint contains",
    "trace": "show which samples a training step reads, and when a sample is read",
    "plan": "predict what a run will read and download, and the memory it needs",
    "tune": "measure how fast this machine reads a run's data, and recommend settings",
    "cache": "show what caches contain, and remove unused files",
}
"""One line of help for each tool, by its name on the command line.

A tool is the module of this name, which is imported on demand. Its docstring is its description, ``add_arguments``
adds its arguments, and ``run(args)`` does the work and returns an exit code. It raises StreamingError for a failure,
which is shown without a traceback. ``args.given`` are the words of the command line.
"""
GROUPS = {
    "Create a dataset": ("convert", "index", "merge"),
    "Inspect it": ("inspect", "view"),
    "Check and move it": ("verify", "copy", "cache"),
    "Prepare a run": ("init", "plan", "tune", "select", "lengths"),
    "Run": ("fit", "validate", "test", "predict", "trace", "state"),
}
"""The groups in which the commands are listed: the tools, and those of Lightning's command line."""

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
        SystemExit: The arguments cannot be parsed, or request help; or the process was signalled to end.
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
            sys.stdout.flush()  # to detect here, and not when Python exits, that the reader closed the pipe
    except StreamingError as error:
        print_error(parser.prog, error)
        return BAD if isinstance(error, FormatError | IntegrityError) else UNUSABLE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, for example head
        # Python would fail to flush the rest when it exits.
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
    """Return the parser of a tool's arguments.

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
    """A parser that answers a mistake with the error and a hint to the help, not with the help itself.

    The commands in a description are shown as examples, below the options, where they stay visible.
    """

    def __init__(self, *, description: str | None = None, **settings: Any) -> None:
        match = _EXAMPLES.search(description or "")
        self.examples = "" if match is None else match[0].rstrip()
        super().__init__(description=_EXAMPLES.sub("", description or "", count=1) or None, **settings)

    def format_help(self) -> str:
        """Return the help, with required arguments alone in the first line, and the examples at its end."""
        form = self._get_formatter()
        required = [[action] for action in self._actions if action.required and action.option_strings]
        required += [group._group_actions for group in self._mutually_exclusive_groups if group.required]
        spelt = [" | ".join(_with_values(form, action) for action in group) for group in required]
        words = [f"({text})" if " | " in text else text for text in spelt] + ["[OPTION ...]"]
        words += [form._format_args(action, action.dest) for action in self._actions if not action.option_strings]
        self.usage = " ".join(["%(prog)s", *words])
        return super().format_help() + (f"\nexamples:\n\n{self.examples}\n" if self.examples else "")

    def error(self, message: str) -> NoReturn:
        words, unknown, arguments = message.partition("unrecognized arguments: ")
        names = [argument.partition("=")[0] for argument in arguments.split()]
        # Not the value of a misspelt option: it may be a secret.
        shown = f"{words}{unknown}{' '.join([name for name in names if name.startswith('-')] or names)}"
        print_error(self.prog, ConfigError(shown, hint=f"see {self.prog} --help"))
        sys.exit(UNUSABLE)


def _with_values(form: Any, action: Action) -> str:
    """Return an option as a usage line shows it, with its metavar or its choices, if it takes a value."""
    return f"{action.option_strings[0]} {form._format_args(action, action.dest.upper())}".rstrip()


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Leave all ``with`` blocks at SIGTERM and SIGHUP, so that temporary files and worker processes are removed.

    A terminal that is closed sends SIGHUP; where it is ignored, as nohup does it, it stays so.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    signals = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def add_json(parser: ArgumentParser) -> None:
    """Add ``--json``, as ``args.json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def add_loader(parser: ArgumentParser, words: str = "") -> None:
    """Add ``--loader NAME``, as ``args.loader``: which train loader of a checkpoint.

    Args:
        parser: Parser of the tool.
        words: A suffix of its help.
    """
    words = f"name of the train loader; required if the checkpoint has several{words}"
    parser.add_argument("--loader", metavar="NAME", help=words)


def add_dataset(parser: ArgumentParser, *, or_else: bool = False) -> None:
    """Add the dataset, as ``args.dataset``, and ``--allow-unsafe-types``.

    Args:
        parser: Parser of the tool.
        or_else: Whether the dataset may be omitted because the tool accepts something else.
    """
    words = "directory or URL of a dataset, or of its index.json"
    parser.add_argument("dataset", metavar="DATASET", nargs="?" if or_else else None, help=words)
    words = "also decode columns of encoding pkl, which can run any code of the data's author"
    parser.add_argument("--allow-unsafe-types", action="store_true", help=words)


def add_format(parser: ArgumentParser, *, required: bool = False, has_block_length: bool = False) -> None:
    """Add ``--format`` and ``--block-length`` of data of another format, as ``args.format`` and ``args.block_length``.

    Args:
        parser: Parser of the tool.
        required: Whether the format must be given.
        has_block_length: Whether the tool has an option of that name already.
    """
    words = (
        "format of the data"
        if required
        else "format of data of another library, which is read in place, as with format= of a run"
    )
    parser.add_argument("--format", required=required, choices=OTHER_FORMATS, help=words)
    if has_block_length:
        return
    words = "with --format: tokens per sample, if samples are blocks of tokens"
    parser.add_argument("--block-length", type=positive, metavar="N", help=words)


def add_action(actions: Any, word: str, words: str, action: Callable[[Namespace], int]) -> ArgumentParser:
    """Add one of several actions of a tool, as ``args.action``; the docstring of the function is shown by ``--help``.

    Args:
        actions: Result of ``add_subparsers``.
        word: Name of the action.
        words: Help in one line.
        action: Runs the action, and returns an exit code.
    """
    texts = {"help": words, "description": getdoc(action)}
    parser: ArgumentParser = actions.add_parser(word, **texts, formatter_class=_LAYOUT, allow_abbrev=False)
    parser.set_defaults(action=action)
    return parser


def add_storage_options(parser: ArgumentParser, name: str = "--storage-options", of: str = "the store") -> None:
    """Add ``--storage-options KEY=VALUE``, a mapping.

    Args:
        parser: Parser of the tool.
        name: Name of the option, if there are several.
        of: Name of the store.
    """
    parser.add_argument(
        name,
        metavar="KEY=VALUE",
        action=_AddOption,
        type=_parse_pair,
        default=StorageOptions({}, name),
        help=f"argument of the fsspec filesystem of {of}, like anon=true or endpoint_url=http://host; may be given "
        "several times. Values that are JSON are read as JSON, others as text; no value is printed",
    )


class _AddOption(Action):
    """Adds an option to earlier ones; of two with the same key the last one counts."""

    def __call__(self, _: ArgumentParser, args: Namespace, pair: Any, __: str | None = None) -> None:
        """See :class:`argparse.Action`."""
        setattr(args, self.dest, StorageOptions({**getattr(args, self.dest), pair[0]: pair[1]}, self.option_strings[0]))


def add_workers(parser: ArgumentParser, default: int | None, words: str) -> None:
    """Add ``--workers``, a positive number, as ``args.workers``.

    Args:
        parser: Parser of the tool.
        default: Number by default; None if the tool chooses it.
        words: Help: what they are, and the default.
    """
    parser.add_argument("--workers", metavar="N", type=positive, default=default, help=words)


def add_run(parser: ArgumentParser) -> None:
    """Add ``args.config``, and settings it may omit: ``args.nodes``, ``args.ranks_per_node``, ``args.batch_size``."""
    words = "configuration of the run; may be given several times: as with fit, later ones override earlier ones"
    parser.add_argument("--config", metavar="C", action="append", required=True, help=words)
    parser.add_argument("--nodes", metavar="P", type=positive, help="number of nodes")
    parser.add_argument("--ranks-per-node", metavar="G", type=positive, help="processes, or GPUs, on each node")
    parser.add_argument("--batch-size", metavar="B", type=positive, help="samples per batch on each rank")


def add_set(parser: ArgumentParser, words: str = "") -> None:
    """Add ``--set FIELD=VALUE``, as ``args.set``: pairs of a setting of the data and its value.

    Args:
        parser: Parser of the tool.
        words: A prefix of its help.
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


def check_config_or_dataset(args: Namespace, *not_with_config: str) -> None:
    """Refuse arguments that name both a dataset and a configuration, or neither.

    Args:
        args: ``config`` and ``dataset`` among them.
        *not_with_config: Further arguments, by attribute name, that do not go with a configuration.

    Raises:
        ConfigError: Both were given, or neither, or one of the further arguments with a configuration.
    """
    if bool(args.config) == bool(args.dataset):
        raise ConfigError("give either DATASET, a directory or URL, or --config run.yaml", option="DATASET")
    values = {name: getattr(args, name) for name in not_with_config}
    is_set = {name: bool(value) or type(value) is int for name, value in values.items()}
    names = {"bad_logs": "not"}
    options = [f"--{names.get(name, name).replace('_', '-')}" for name in not_with_config if is_set[name]]
    if args.config and options:
        hint = f"leave {' and '.join(options)} out"
        raise ConfigError("--config defines what is read, and from where", hint=hint, option=options[0])
    if not args.config:
        check_set_is_of_a_run(args)


def check_set_is_of_a_run(args: Namespace) -> None:
    """Check that ``--set`` is not used without a configuration.

    Raises:
        ConfigError: It is.
    """
    if getattr(args, "set", ()):
        hint = "give the run's configuration with it, as --config run.yaml"
        raise ConfigError("--set changes the data of a run", hint=hint, option="--set")


def _parse_change(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError("must be written FIELD=VALUE")
    return name.removeprefix("data.").removeprefix("init_args."), value


def _within(smallest: int, largest: int | None, text: str) -> int:
    if largest is not None and text.isdecimal() and (len(text) > len(str(largest)) or int(text) > largest):
        raise ArgumentTypeError(f"must be a whole number of at most {largest}, but got {text!r:.40}")
    if len(text) > _MOST_DIGITS or not text.isdecimal() or int(text) < smallest:
        raise ArgumentTypeError(f"must be a whole number of at least {smallest}, but got {text!r:.40}")
    return int(text)


positive = partial(_within, 1, _LARGEST)
"""Parses a whole number in [1, 2^31), for ``add_argument(type=...)``."""
not_negative = partial(_within, 0, _LARGEST)
"""Parses a whole number in [0, 2^31)."""
position = partial(_within, 0, None)
"""Parses a whole number of at least 0: of samples there may be more than 2^31 in an epoch."""
amount = partial(_within, 1, None)
"""Parses a whole number of at least 1, of any size."""


def not_negative_number(text: str) -> float:
    """Return a number of at least 0, for ``add_argument(type=...)``."""
    with suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    raise ArgumentTypeError(f"must be a number of at least 0, but got {text!r:.40}")


def parsed(parse: Callable[[str], _Parsed]) -> Callable[[str], _Parsed]:
    """Return the same function for ``add_argument(type=...)``: argparse shows its errors."""

    def parse_argument(text: str) -> _Parsed:
        try:
            return parse(text)
        except ConfigError as error:
            raise ArgumentTypeError(str(error)) from None

    return parse_argument


def usable_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def of_run(name: str) -> Callable[..., int]:
    """Return the function that a tool calls for a configured run; the function returns an exit code.

    It is imported here, and not with the tool: it imports torch, which takes seconds and which a stored dataset does
    not need.

    Args:
        name: Package, module and function under ``tools``, like "planning.plan_run.plan_run".
    """
    module, _, function = name.rpartition(".")
    of_run: Callable[..., int] = getattr(import_module(f"lightning_streaming.tools.{module}"), function)
    return of_run


_READER = "lightning_streaming.trainer.cli"
_USES = {"train": "no training", "val": "no validation", "test": "no test", "predict": "nothing to predict"}


def read_run_files(files: Sequence[str], changes: Mapping[str, Any], stage: str | None = "train") -> Any:
    """Read data and trainer from configuration files of ``lightning-streaming fit``.

    Args:
        files: Paths; a later file overrides an earlier one.
        changes: More settings of the data, by dotted name without ``data.``.
        stage: The data that must be configured: "train", "val", "test" or "predict"; None for any.

    Returns:
        A :class:`~lightning_streaming.trainer.cli.WrittenRun`; its data module is not set up.

    Raises:
        ConfigError: A file cannot be read, its data is invalid, or the stage has none.
    """
    # Lightning takes seconds to import, and other tools do not need it.
    written = import_module(_READER).read_config_files(files, changes)
    if stage is not None and written.datamodule.configs[stage] is None:
        raise ConfigError(
            f"{', '.join(files)}: there is no data.{stage}, so there is {_USES[stage]}",
            option=f"data.{stage}",
            path=", ".join(files),
        )
    return written


def count_ranks(trainer: Mapping[str, Any]) -> tuple[int, str | None]:
    """Return the configured ranks on each node; and an assumption about them, if the trainer leaves the number open."""
    devices = trainer.get("devices", "auto")
    if isinstance(devices, list):
        return len(devices), None
    if str(devices).isdecimal() and int(devices):
        return int(devices), None
    return 1, "the configuration leaves the number of devices open; assuming 1, see --ranks-per-node"
