"""Output of the tools: exit codes, JSON, notes, errors and progress; tables, and values in a few words.

Results go to standard output, errors and progress to standard error.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import islice
from typing import Any
from unicodedata import category, east_asian_width

from lightning_streaming.errors import StreamingError
from lightning_streaming.escaping import in_one_line
from lightning_streaming.storage.secrets import redact
from lightning_streaming.terminal import report_error, write_error
from lightning_streaming.waits import bar

PROGRAM = "lightning-streaming"
FINE = 0
"""Exit code: success, and nothing is wrong."""
BAD = 1
"""Exit code: something is wrong with the data, as the output says."""
UNUSABLE = 2
"""Exit code: the command failed: arguments, settings, a missing package, a store that does not respond."""
INTERRUPTED = 130
"""Exit code: stopped by the user."""
UNREAD = 141
"""Exit code: the reader closed the pipe, for example head; the code of shells for SIGPIPE."""


def print_json(value: Any) -> None:
    """Print a value as indented JSON, for programs; non-ASCII characters are escaped."""
    print(json.dumps(value, indent=2))


def print_line(text: str = "") -> None:
    """Print an escaped text in one line, with the line breaks at its beginning and end.

    The tools print only by this and :func:`print_table`: names of files and columns may contain any characters.
    """
    inner = text.strip("\n")
    begin, _, end = text.partition(inner) if inner else (text, "", "")
    print(f"{begin}{in_one_line(inner)}{end}")


def print_error(program: str, error: Exception | str) -> None:
    """Print an error: one line, or on a terminal one block."""
    words = str(error)
    if isinstance(error, Exception) and not isinstance(error, StreamingError):
        words = in_one_line(words)
    report_error(program, redact(words, {}))  # an argument may be a URL with a password


def print_note(tool: str, words: str) -> None:
    """Print information that is no result."""
    write_error(in_one_line(f"{PROGRAM} {tool}: {words}") + "\n")


def counted(number: int, thing: str) -> str:
    """Return a number with a noun: ``"1 shard"``, ``"1,234 shards"``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def first_few(files: Sequence[str]) -> str:
    """Return the number of files, and the first ones: ``"7 files (a, b, c, d, e, ...)"``."""
    more = ", ..." if len(files) > _MOST_FILES else ""
    return f"{counted(len(files), 'file')} ({', '.join(files[:_MOST_FILES])}{more})"


class StepCounter:
    """Counts steps, and draws them; any thread may call it with the number of steps since its last call."""

    def __init__(self, draw: Callable[[int], object]) -> None:
        self.done, self._draw = 0, draw

    def __call__(self, steps: int) -> None:
        """Count some steps."""
        self.done += steps
        self._draw(steps)


@contextmanager
def progress(total: int | None, words: str, unit: str) -> Iterator[StepCounter]:
    """Show a progress bar on standard error, if that is a terminal.

    Args:
        total: Number of steps, None if unknown.
        words: Name of the task, for example ``"copy"``.
        unit: Unit of the steps, for example ``"shard"``; ``"B"`` is shown as KB, MB, and so on.

    """
    with bar(words, unit, total, shown=sys.stderr.isatty()) as drawn:
        yield StepCounter(drawn.update)


def print_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> None:
    """Print a table to standard output. Texts are not markup, and are escaped, each in one line.

    If it is wider than the terminal, heads are wrapped; if that is not enough, texts, the widest first, between words
    if possible; else both. A table that cannot be that narrow keeps its heads on one line.

    Args:
        title: Title of the table.
        heads: Name of each column; none for pairs of a name and a value.
        rows: Texts, one for each column.
        right: Columns that are aligned to the right.
        whole: Columns whose texts are not wrapped, even if the table is wider than the terminal.
    """
    title, rows = in_one_line(title), [[*map(in_one_line, row)] for row in rows]
    columns = list(zip(heads or ("", ""), *rows, strict=True))
    around = _AROUND + len(columns) * _BETWEEN_COLUMNS
    widths = _widths(columns, whole, shutil.get_terminal_size().columns - around)
    is_right = [bool(heads) and column[0] in right for column in columns]
    begin, between = ("  ", "   ") if heads else (" ", "  ")

    def lines_of(cells: Sequence[Sequence[str]], style: str = "{}") -> Iterator[str]:
        for texts in zip(*cells, strict=True):
            padded = list[str]()
            for text, width, right_aligned in zip(texts, widths, is_right, strict=True):
                padding = " " * (width - _cells(text))
                padded.append(padding + text if right_aligned else text + padding)
            yield style.format((begin + between.join(padded)).rstrip())

    bold = "\033[1m{}\033[0m" if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else "{}"
    drawn = [bold.format(title)]
    if heads:
        cells = [_wrapped("\n".join(_in_lines(head, width)), width) for head, width in zip(heads, widths, strict=True)]
        height = max(map(len, cells))
        drawn += ["", *lines_of([[""] * (height - len(cell)) + cell for cell in cells], bold)]
        drawn.append(" " + "─" * (sum(widths) + len(between) * len(widths) - 1))
    for row in rows:
        cells = [_wrapped(text, width) for text, width in zip(row, widths, strict=True)]
        height = max(map(len, cells))
        drawn += lines_of([cell + [""] * (height - len(cell)) for cell in cells])
    print("\n".join(drawn).rstrip() + "\n")


def print_records(
    title: str, records: Sequence[Mapping[str, str]], *, left: Sequence[str] = (), whole: Sequence[str] = ()
) -> None:
    """Print a table of records, which map heads to texts; columns without any text are left out.

    Args:
        title: Title of the table.
        records: At least one; all have the same heads.
        left: Columns that are aligned to the left, and not to the right.
        whole: As for :func:`print_table`.
    """
    heads = [head for head in records[0] if any(record[head] for record in records)]
    rows = [[record[head] for head in heads] for record in records]
    print_table(title, heads, rows, right=[head for head in heads if head not in left], whole=whole)


def _cells(text: str) -> int:
    """Return the number of terminal cells that a text takes: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0 if category(character) in ("Mn", "Me", "Cf") else 1 + (east_asian_width(character) in "WF")
        for character in text
    )


def _wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text in a column of some width: broken between words, and within a word that is wider."""
    lines = list[str]()
    for paragraph in text.expandtabs().split("\n"):
        lines.append("")
        for word, space in re.findall(r"(\s*\S+)(\s*)", paragraph):
            if _cells(lines[-1] + word) > width:
                lines += [""] if lines[-1] else []
            for piece in [word] if _cells(word) <= width else word:
                lines += [""] if _cells(lines[-1] + piece) > width else []
                lines[-1] += piece
            lines[-1] += space
    return [line.rstrip() for line in lines]


def _widths(columns: Sequence[Sequence[str]], whole: Sequence[str], most: int) -> list[int]:
    """Return the width of each column, within the width of the terminal if possible.

    Args:
        columns: The head of each, and the texts below it.
        whole: Heads of those whose texts are not wrapped.
        most: Maximum sum of the widths.
    """
    texts = [max((_cells(line) for text in column[1:] for line in text.split("\n")), default=0) for column in columns]
    words = [max((_cells(word) for text in column for word in text.split()), default=0) for column in columns]
    natural = [max(width, _cells(column[0])) for width, column in zip(texts, columns, strict=True)]
    slim, places = list(natural), range(len(columns))
    for lines in range(2, 1 + max(len(head.split()) for head, *_ in columns)):
        aimed = [max(width, _narrowest(head, lines)) for width, (head, *_) in zip(texts, columns, strict=True)]
        for place in sorted(places, key=lambda place: aimed[place] - slim[place]):
            if sum(slim) > most:
                slim[place] = aimed[place]

    def broken(begin: Sequence[int], least: Sequence[int]) -> list[int]:
        widths = list(begin)
        for place in sorted(places, key=lambda place: -widths[place]):
            if columns[place][0] not in whole:
                needed = widths[place] - max(0, sum(widths) - most)
                widths[place] = min(widths[place], max(least[place], _LEAST_WIDTH, needed))
        return widths

    nowhere = [0] * len(columns)
    candidates = [natural, slim, *(broken(begin, least) for least in (words, nowhere) for begin in (natural, slim))]
    return next((widths for widths in candidates if sum(widths) <= most), broken(natural, nowhere))


def _in_lines(head: str, width: int) -> list[str]:
    return textwrap.wrap(head, max(1, width), break_long_words=False, break_on_hyphens=False)


def _narrowest(head: str, lines: int) -> int:
    """Return the smallest width in which a head takes at most ``lines`` lines."""
    least = max((len(word) for word in head.split()), default=0)
    return next((width for width in range(least, len(head)) if len(_in_lines(head, width)) <= lines), len(head))


_AROUND = 1
"""Width of a table except its columns and the space between them."""
_BETWEEN_COLUMNS = 3
_LEAST_WIDTH = 12
_MOST_CHARACTERS = 160
_MOST_FILES = 5
_MOST_BYTES = 24
_MOST_NUMBERS = 8
_MOST_ITEMS = 4
_DEEPEST = 3


def render(value: Any, depth: int = 0) -> str:
    """Describe a value in one line.

    Texts are quoted, and long ones cut; arrays show dtype, shape and their ends; images mode and size; bytes their
    number and beginning. For example ``uint16[2049] 17 4 901 7 … 3 0 12 9``.

    Args:
        value: The decoded value of a column.
        depth: Number of lists and mappings around it.
    """
    import numpy as np  # not for --help

    if isinstance(value, str):
        more = f"… ({len(value):,} characters)" if len(value) > _MOST_CHARACTERS else ""
        return f"{value[:_MOST_CHARACTERS]!r}{more}"
    if isinstance(value, bytes):
        more = "…" if len(value) > _MOST_BYTES else ""
        return f"{counted(len(value), 'byte')} {value[:_MOST_BYTES]!r}{more}"
    if isinstance(value, np.ndarray):
        flat: Any = value.reshape(-1)  # array.flat knows 32 dimensions, arrays 64
        half = _MOST_NUMBERS // 2
        numbers = [*flat[:half], "…", *flat[-half:]] if value.size > _MOST_NUMBERS else flat
        return f"{value.dtype}[{'×'.join(map(str, value.shape))}] {' '.join(map(str, numbers))}".rstrip()
    if isinstance(value, np.generic | Decimal | bool | float | None):
        return str(value)
    if is_image(value):
        return f"image {value.mode} {value.width}×{value.height}"
    if isinstance(value, Mapping):
        items = (f"{printable_name(str(key))}: {render(item, depth + 1)}" for key, item in value.items())
        return f"{{{_first_of(items, len(value), depth)}}}"
    if isinstance(value, list | tuple):
        return f"[{_first_of((render(item, depth + 1) for item in value), len(value), depth)}]"
    try:
        text = reprlib.repr(value)
    except ValueError:  # Python refuses to write ints of thousands of digits
        return f"a huge {type(value).__name__}"
    return "".join(character if character.isprintable() else " " for character in text)


def printable_name(text: str) -> str:
    """Return a name unchanged, or quoted if it has characters that a terminal interprets."""
    return text if text.isprintable() and text else repr(text)


def is_image(value: object) -> bool:
    """Return whether a value is a PIL image; false if PIL is not imported."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def _first_of(items: Iterator[str], length: int, depth: int) -> str:
    if depth >= _DEEPEST and length:
        return f"… {counted(length, 'item')}"
    return ", ".join(islice(items, _MOST_ITEMS)) + (f", … {length:,} items" if length > _MOST_ITEMS else "")
