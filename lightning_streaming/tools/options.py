"""Arguments that several tools have, spelled and explained the same; and the configuration that ``--config`` names."""

from __future__ import annotations

import json
import os
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from inspect import getdoc
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.storage import StorageOptions

_NOT_TEXT = re.compile(r'true|false|null|-?(0|[1-9]\d*)(\.\d+)?|[\[{"].*', re.DOTALL)


def add_json(parser: ArgumentParser) -> None:
    """Add ``--json``, as ``args.json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def add_dataset(parser: ArgumentParser) -> None:
    """Add the dataset to look at, as ``args.dataset``; and whether its unsafe columns may be decoded."""
    parser.add_argument("dataset", metavar="DATASET", help="directory or URL of a dataset, or of its index.json")
    words = "also decode columns of encoding pkl, which can run any code of whoever wrote the data"
    parser.add_argument("--allow-unsafe-types", action="store_true", help=words)


def add_action(actions: Any, word: str, words: str, action: Callable[[Namespace], int]) -> ArgumentParser:
    """Add one of several actions of a tool, as ``args.action``; its docstring is what its ``--help`` shows.

    Args:
        actions: What ``add_subparsers`` gave.
        word: What is typed.
        words: What it does, in one line.
        action: Does it, and returns an exit code.
    """
    layout = RawDescriptionHelpFormatter
    parser: ArgumentParser = actions.add_parser(
        word, help=words, description=getdoc(action), formatter_class=layout, allow_abbrev=False
    )
    parser.set_defaults(action=action)
    return parser


def add_storage_options(parser: ArgumentParser, name: str = "--storage-options", of: str = "the store") -> None:
    """Add ``--storage-options KEY=VALUE``, to be read with :func:`storage_options`.

    Args:
        parser: What to add it to.
        name: Its name, if there are several.
        of: Whose options they are.
    """
    parser.add_argument(
        name,
        metavar="KEY=VALUE",
        action="append",
        type=_parse_pair,
        default=None,
        help=f"an argument of the fsspec filesystem of {of}, for example anon=true or endpoint_url=http://host; may be "
        'given several times. Numbers, true, false, null, {...}, [...] and "..." are read as JSON, all else is text. '
        "Values are never shown",
    )


def storage_options(pairs: Iterable[tuple[str, Any]] | None) -> StorageOptions:
    """What ``--storage-options`` gave, as a mapping; of two with one key the last one."""
    return StorageOptions(dict(pairs or ()))


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


def positive(text: str) -> int:
    """A whole number of at least 1, for ``add_argument(type=...)``."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """A whole number of at least 0, for ``add_argument(type=...)``."""
    return _at_least(0, text)


def usable_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _at_least(smallest: int, text: str) -> int:
    if not text.isdecimal() or int(text) < smallest:
        raise ArgumentTypeError(f"must be a whole number of at least {smallest}, but got {text!r}")
    return int(text)


def _parse_pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:  # not showing it: it may be a secret
        raise ArgumentTypeError("must be written KEY=VALUE")
    if _NOT_TEXT.fullmatch(value) is None:
        return key, value
    try:
        return key, json.loads(value)
    except ValueError:
        raise ArgumentTypeError(f"the value of {key} starts like JSON, but is not JSON") from None


_READER = "lightning_streaming.trainer.cli"
_USES = {"train": "no training", "val": "no validation", "test": "no test", "predict": "nothing to predict"}


def read_run_files(files: Sequence[str], changes: Mapping[str, Any], stage: str = "train") -> Any:
    """What configuration files of ``lightning-streaming fit`` say of data and trainer.

    Args:
        files: Paths; what a later one says overrides an earlier one.
        changes: More settings of the data, by dotted name without ``data.``.
        stage: The data that is to be there: "train", "val", "test" or "predict".

    Returns:
        A :class:`~lightning_streaming.trainer.cli.WrittenRun`; its data module is not set up.

    Raises:
        ConfigError: A file cannot be read, its data cannot be made, or the stage has none.
    """
    # Lightning takes seconds to import, and other tools do not need it.
    written = import_module(_READER).read_config_files(files, changes)
    if written.datamodule.configs[stage] is None:
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
