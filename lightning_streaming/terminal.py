"""What is told on standard error, the same by every command."""

from __future__ import annotations

import shutil
import sys
import textwrap

from lightning_streaming.escaping import in_lines


def tell_error(program: str, words: str) -> None:
    """Tell an error: in one line, or on a terminal in one block.

    Args:
        program: What failed, as it was typed: ``"lightning-streaming fit"``.
        words: What went wrong, without secrets.
    """
    message = in_lines(f"{program}: error: {words}")
    if sys.stderr.isatty() and "\n" not in message:  # what comes in lines is a table
        width = shutil.get_terminal_size((100, 24)).columns
        message = textwrap.fill(message, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    sys.stderr.write(f"{message}\n")
