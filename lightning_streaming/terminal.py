"""Standard streams of the command line: errors on standard error, and streams that are closed."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from contextlib import suppress

from lightning_streaming.escaping import in_lines

_STDERR = 2


def report_error(program: str, text: str) -> None:
    """Print an error on standard error: in one line, or on a terminal in one block.

    Args:
        program: The command that failed, as it was typed: ``"lightning-streaming fit"``.
        text: The message, without secrets.
    """
    message = in_lines(f"{program}: error: {text}")
    if sys.stderr.isatty() and "\n" not in message:  # several lines are a table
        width = shutil.get_terminal_size((100, 24)).columns
        message = textwrap.fill(message, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    write_error(f"{message}\n")


def write_error(text: str) -> None:
    """Write to standard error. Where nothing can be written, the exit code alone reports the error."""
    with suppress(OSError, ValueError):  # no reader, a terminal that is closed
        sys.stderr.write(text)
        sys.stderr.flush()


def open_closed_streams() -> None:
    """Open standard streams that are closed, as in ``command 2>&-``, on the null device.

    Python has None for them, which cannot be written to. The next file that is opened gets their descriptor, and a C
    library that reports an error writes into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free one: that of the stream
            os.set_inheritable(descriptor, descriptor <= _STDERR)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="replace"))
