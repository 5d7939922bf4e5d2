"""Arguments that several tools have, spelled and explained the same."""

from __future__ import annotations

import json
import os
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from typing import Any

from lightning_streaming.storage import StorageOptions

_NOT_TEXT = re.compile(r'true|false|null|-?(0|[1-9]\d*)(\.\d+)?|[\[{"].*', re.DOTALL)


def add_json(parser: ArgumentParser) -> None:
    """Add ``--json``, as ``args.json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


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


def add_ranks(parser: ArgumentParser) -> None:
    """Add what a configuration may leave open: ``args.nodes``, ``args.ranks_per_node`` and ``args.batch_size``."""
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
