"""What a tool shows: results on standard output, errors and progress on standard error, and an exit code."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_streaming.storage.secrets import redact

FINE = 0
"""Exit code: done, and nothing is wrong."""
BAD = 1
"""Exit code: something is wrong with the data, and the output says what."""
UNUSABLE = 2
"""Exit code: it could not be done as asked: arguments, settings, a missing package, a store that does not answer."""
INTERRUPTED = 130
"""Exit code: stopped by the user."""
UNREAD = 141
"""Exit code: whoever read the output went away before its end, as head does; what shells make of SIGPIPE."""
TERMINATED = 143
"""Exit code: told to end by a signal, as schedulers do it."""


_COUNTING = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}]"
"""tqdm's own bar, but that it shows slow things as 0.5 a second, never as seconds for each."""


def print_json(value: Any) -> None:
    """Print a value as indented JSON, for programs; non-ASCII characters are escaped."""
    print(json.dumps(value, indent=2))


def print_error(program: str, error: Exception | str) -> None:
    """Print an error: one line, or on a terminal one block."""
    message = f"{program}: error: {redact(str(error), {})}"  # an argument may be a URL with a password
    if sys.stderr.isatty() and "\n" not in message:  # what comes in lines is a table
        width = shutil.get_terminal_size((100, 24)).columns
        message = textwrap.fill(message, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print(message, file=sys.stderr)


def print_note(program: str, words: str) -> None:
    """Print something worth knowing that is no result."""
    print(f"{program}: {words}", file=sys.stderr)


def counted(number: int, thing: str) -> str:
    """A number of things: ``"1 shard"``, ``"1,234 shards"``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


@contextmanager
def progress(total: int | None, words: str, unit: str) -> Iterator[Callable[[int], object]]:
    """A progress bar on standard error, where that is a terminal.

    Args:
        total: Steps to take, None if it is not known.
        words: What is going on, for example ``"copy"``.
        unit: What is counted, for example ``"shard"``; ``"B"`` is shown as KB, MB, and so on.

    Yields:
        A function to be told how many steps were taken since it was last told; it may be called by any thread.
    """
    from tqdm import tqdm

    in_bytes = unit == "B"
    with tqdm(
        total=total,
        desc=words,
        unit=unit if in_bytes else f" {unit}",
        unit_scale=in_bytes,
        unit_divisor=1024 if in_bytes else 1000,
        bar_format=None if in_bytes or total is None else _COUNTING,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        leave=False,
    ) as bar:
        yield bar.update
