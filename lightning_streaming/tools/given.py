"""The words that a command was given, to be told again as they can be typed; secrets stay untold."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from lightning_streaming.storage import mask_url
from lightning_streaming.tools.commands import PROGRAM

_LEFT_OUT = {"--columns": True, "--resume": False}
"""Options, and whether a value follows."""
_SECRET = ("--storage-options", "--source-options")


def command_without_columns(given: Sequence[str]) -> str:
    """The ``convert`` that was typed, to be begun anew with other columns."""
    return shlex.join([PROGRAM, "convert", *_kept(given)])


def _kept(given: Sequence[str]) -> Iterator[str]:
    words = iter(given)
    for word in words:
        option, equals, value = word.partition("=")
        if option in _LEFT_OUT:
            if _LEFT_OUT[option] and not equals:
                next(words, None)
        elif option in _SECRET:
            pair = value if equals else next(words, "")
            yield from (option, f"{pair.partition('=')[0]}=...")
        else:
            yield mask_url(word)
