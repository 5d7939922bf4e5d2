"""Logs of JSON lines that survive a kill of their writer: incomplete lines are skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class LineLog:
    """Adds lines to a file; one system call a line, so that a killed process has written all of it.

    Args:
        path: Path of the log; it is appended to, and its directory is created if necessary.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        if _ends_in_a_line_cut_short(path):
            self._file.write(b"\n")

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line; its values are no mappings."""
        # A brace in a text is escaped, so that no line that was cut short ends as whole ones do.
        left = json.dumps(line)[:-1].replace("}", r"\u007d").encode() + b"}\n"
        while left:  # a disk that is nearly full takes a part, and refuses the rest by an error
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_MOST_AT_END = 1 << 16
"""Bytes that are read for the last line: many times what a line has."""


def last_whole_line(path: str | os.PathLike[str]) -> bytes | None:
    """Return the last whole line of a log, without reading what is long before it; None if there is none."""
    with Path(path).open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _MOST_AT_END)
        file.seek(start)
        lines = file.read().splitlines(keepends=True)[1 if start else 0 :]
    return next(filter(_is_whole, reversed(lines)), None)


def whole_lines(path: str | os.PathLike[str]) -> Iterator[tuple[bytes, str]]:
    """Yield the lines of a log, each with its name in errors.

    Incomplete lines, which a full disk or a power cut leaves, are skipped.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if _is_whole(line):
                yield line, f"line {number} of {os.fspath(path)}"


def _is_whole(line: bytes) -> bool:
    return line.endswith(b"}\n") or not line.startswith(b"{")


def _ends_in_a_line_cut_short(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() not in (b"", b"\n")
