"""What a tool shows: exit codes, JSON, notes and errors, progress; tables for people, and values in a few words.

Results go to standard output, errors and progress to standard error.
"""

from __future__ import annotations

import json
import reprlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import islice
from typing import Any

from lightning_streaming.storage.secrets import redact
from lightning_streaming.waits import bar

PROGRAM = "lightning-streaming"
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


def print_note(tool: str, words: str) -> None:
    """Print something worth knowing that is no result."""
    print(f"{PROGRAM} {tool}: {words}", file=sys.stderr)


def counted(number: int, thing: str) -> str:
    """A number of things: ``"1 shard"``, ``"1,234 shards"``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def first_few(files: Sequence[str]) -> str:
    """How many, and the first ones: ``"7 files (a, b, c, d, e, ...)"``."""
    more = ", ..." if len(files) > _MOST_FILES else ""
    return f"{counted(len(files), 'file')} ({', '.join(files[:_MOST_FILES])}{more})"


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
    with bar(words, unit, total, shown=sys.stderr.isatty()) as drawn:
        yield drawn.update


def print_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> None:
    """Print a table to standard output. Texts are shown as they are, in several lines where they are long.

    Args:
        title: What it is of.
        heads: Name of each column; two facts in a row need none.
        rows: Texts, one for each column.
        right: Columns that are aligned to the right.
        whole: Columns whose texts stay on one line, also where that makes the table wider than the terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD if heads else None, show_header=bool(heads))
    columns = list(zip(heads, *rows, strict=True)) if heads else []
    is_wide = _AROUND + sum(max(map(len, column)) + _BETWEEN_COLUMNS for column in columns) > console.width
    for one in heads or ("", ""):
        head = "\n".join(one.split()) if is_wide and one in whole else one
        table.add_column(Text(head), justify="right" if one in right else "left", overflow="fold", no_wrap=one in whole)
    for row in rows:
        table.add_row(*map(Text, row))  # not as markup: [red] in a sample is no colour
    if is_wide and whole:
        least = [max(map(len, [*head.split(), *texts])) if head in whole else _LEAST_WIDTH for head, *texts in columns]
        console.width = max(console.width, _AROUND + sum(least) + len(least) * _BETWEEN_COLUMNS)
    with console.capture() as drawn:
        console.print(Text(title, style="bold"), soft_wrap=True)  # a path is not cut
        console.print(table)
    print("\n".join(line.rstrip() for line in drawn.get().rstrip().splitlines()) + "\n")


_AROUND = 1
"""Characters that a table has beside those of its columns and between them."""
_BETWEEN_COLUMNS = 3
_LEAST_WIDTH = 12
_MOST_CHARACTERS = 160
_MOST_FILES = 5
_MOST_BYTES = 24
_MOST_NUMBERS = 8
_MOST_ITEMS = 4
_DEEPEST = 3


def render(value: Any, depth: int = 0) -> str:
    """Describe a value.

    Texts are quoted, and long ones cut; arrays show dtype, shape and their ends; images mode and size; bytes their
    number and beginning. For example ``uint16[2049] 17 4 901 7 … 3 0 12 9``.

    Args:
        value: What a column was decoded to.
        depth: In how many lists or mappings it lies.
    """
    import numpy as np  # not for --help

    if isinstance(value, str):
        more = f"… ({len(value):,} characters)" if len(value) > _MOST_CHARACTERS else ""
        return f"{value[:_MOST_CHARACTERS]!r}{more}"
    if isinstance(value, bytes):
        more = "…" if len(value) > _MOST_BYTES else ""
        return f"{counted(len(value), 'byte')} {value[:_MOST_BYTES]!r}{more}"
    if isinstance(value, np.ndarray):
        return _array_ends(value)
    if isinstance(value, np.generic | Decimal | bool | float | None):
        return str(value)
    if is_image(value):
        return f"image {value.mode} {value.width}×{value.height}"
    if isinstance(value, Mapping):
        items = (f"{printable_name(str(key))}: {render(item, depth + 1)}" for key, item in value.items())
        return f"{{{_first_of(items, len(value), depth)}}}"
    if isinstance(value, list | tuple):
        return f"[{_first_of((render(item, depth + 1) for item in value), len(value), depth)}]"
    return _cut_repr(value)


def printable_name(text: str) -> str:
    """A name as it is, or quoted if it would do something to a terminal."""
    return text if text.isprintable() and text else repr(text)


def is_image(value: object) -> bool:
    """Whether a value is a PIL image; where PIL is not imported, nothing is."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def _array_ends(array: Any) -> str:
    shape = "×".join(map(str, array.shape))
    half = _MOST_NUMBERS // 2
    is_long = array.size > _MOST_NUMBERS
    flat = array.reshape(-1)  # array.flat knows 32 dimensions, arrays 64
    numbers = [*flat[:half], "…", *flat[-half:]] if is_long else flat
    return f"{array.dtype}[{shape}] {' '.join(map(str, numbers))}".rstrip()


def _first_of(items: Iterator[str], length: int, depth: int) -> str:
    if depth >= _DEEPEST and length:
        return f"… {counted(length, 'item')}"
    return ", ".join(islice(items, _MOST_ITEMS)) + (f", … {length:,} items" if length > _MOST_ITEMS else "")


def _cut_repr(value: object) -> str:
    try:
        text = reprlib.repr(value)
    except ValueError:  # Python refuses to write ints of thousands of digits
        return f"a huge {type(value).__name__}"
    return "".join(character if character.isprintable() else " " for character in text)
