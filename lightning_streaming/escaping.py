"""Texts of datasets, files and servers, escaped so that a terminal or a log shows them and does nothing else.

All output goes through one of these: errors (``StreamingError.__str__``), loggers (:func:`package_logger`), the
tools (``tools/console.py``), progress bars (``waits.py``).
"""

from __future__ import annotations

import logging
import re
import shlex
from itertools import islice
from pathlib import PurePath
from reprlib import Repr
from typing import Any

_UNPRINTABLE_IN_LINES = re.compile(r"[^\n\t -~]+")


def in_one_line(text: str) -> str:
    """Return a text with every character escaped that is not printable: line breaks too.

    Those are control characters, with which a text could move a terminal's cursor or add lines, characters that change
    the direction of a text, and lone surrogates.

    >>> in_one_line("a\\x1b[2Jb\\u2028c\\ud800 é")
    'a\\\\x1b[2Jb\\\\u2028c\\\\ud800 é'
    """
    return text if text.isprintable() else "".join(map(_escaped, text))


def in_lines(text: str) -> str:
    """Return a text escaped like :func:`in_one_line`, but with its line feeds and tabs."""
    return _UNPRINTABLE_IN_LINES.sub(lambda match: in_one_line(match[0]), text)


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class _ShortRepr(Repr):
    """``repr`` of the first items of a container, and of both ends of a long text or number."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = 40
        self.maxarray = 40
        self.maxstring = self.maxlong = self.maxother = _MOST_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        """Return the number, or its size where it has more digits than Python writes."""
        try:
            return super().repr_int(x, level)
        except ValueError:
            return f"a number of {x.bit_length()} bits"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Return the items in their own order, which ``Repr`` sorts."""
        if level <= 0 and x:
            return "{...}"
        first = [f"{self.repr1(key, level - 1)}: {self.repr1(of, level - 1)}" for key, of in islice(x.items(), 40)]
        return f"{{{', '.join([*first, *(['...'] if len(x) > len(first) else [])])}}}"


_MOST_SHOWN = 300
"""Characters of a value in a message."""
_SHORT = _ShortRepr()


def short_repr(value: object) -> str:
    """Return the ``repr`` of a value that a user passed, for a message: the middle of a long one is left out.

    >>> short_repr({"b": [1, "two"], "a": None}), len(short_repr("x" * 10**6))
    ("{'b': [1, 'two'], 'a': None}", 300)
    """
    return shortened(_SHORT.repr(value), _MOST_SHOWN)


def shortened(text: str, most: int = 400) -> str:
    """Return a text for a message, without its middle where it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 5]} ... {text[-end:]}"


def shell_word(text: str) -> str:
    """Return a text quoted for a shell, of printable characters in one line: bash and zsh read the same text again."""
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_in_shell, text))}'"


def _in_shell(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a path that is not UTF-8, as Python has it
        return f"\\x{number - 0xDC00:02x}"
    if 0x80 <= number <= 0xFF and not character.isprintable():  # where \x is a byte to a shell
        return f"\\u{number:04x}"
    return f"\\{character}" if character in "\\'" else _escaped(character)


class Lines(str):
    """A text of several lines that are ours: line feeds stay. Foreign parts of it are escaped before."""

    __slots__ = ()


def package_logger(name: str) -> logging.Logger:
    """Return the logger of a module of this package, whose messages have their arguments escaped."""
    logger = logging.getLogger(name)
    logger.addFilter(_escape_record)
    return logger


def _escape_record(record: logging.LogRecord) -> bool:
    record.msg = in_lines(str(record.msg))
    if isinstance(record.args, tuple):
        record.args = tuple(map(_escaped_argument, record.args))
    return True


def _escaped_argument(value: object) -> object:
    if isinstance(value, Lines):
        return in_lines(value)
    return in_one_line(str(value)) if isinstance(value, str | PurePath | Exception) else value
