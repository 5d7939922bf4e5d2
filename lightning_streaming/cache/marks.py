"""Marks: modification times by which one ``stat`` tells a file of ours, checked and unchanged, from any other.

A cache directory has a mark of its own, a whole second long ago, kept in its origin file. Whatever we fetch into it
gets that time when it is whole and checked. Anything else under a shard's name was put there by someone, or changed.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from lightning_streaming.cache.layout import ORIGIN_BASENAME

SECOND = 10**9
"""In nanoseconds, which all times here are in."""
_FIRST = 978_307_200
"""The year 2001 begins. Whole seconds are told apart by every filesystem, and nobody writes files in the past."""
_SPAN = 283_996_800
"""Seconds until the year 2010 begins."""


def make_mark() -> int:
    """A mark for a directory that has none: a random whole second of the years 2001 to 2009, in nanoseconds."""
    return (_FIRST + secrets.randbelow(_SPAN // 2) * 2) * SECOND


def mark_of_original(modified: int, size: int) -> int:
    """The mark of a raw file made from a compressed one that is read in place: another one once that has changed.

    Args:
        modified: The compressed file's modification time, in nanoseconds.
        size: Its bytes.
    """
    digest = hashlib.sha256(f"{modified} {size}".encode()).digest()
    return (_FIRST + int.from_bytes(digest[:8], "big") % _SPAN) * SECOND


def read_mark(directory: Path) -> int | None:
    """The mark of a cache directory: the second line of its origin file; None if there is none."""
    try:
        lines = (directory / ORIGIN_BASENAME).read_bytes().split()
    except (FileNotFoundError, NotADirectoryError):
        return None
    mark = int(lines[1]) if len(lines) > 1 and lines[1].isdigit() else 0
    return mark if _is_mark(mark) else None


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """Which modification times the files have that are ours to remove."""

    mark: int | None
    """The directory's mark; None where files have marks of their originals, and nobody but us has files."""

    def include(self, modified: int) -> bool:
        """Whether a file with this modification time, in nanoseconds, is ours."""
        return _is_mark(modified) if self.mark is None else modified == self.mark


def verified_mark(mark: int) -> int:
    """The time of a file that is right, but was put there by someone else: it is not checked again, and stays."""
    return mark + SECOND


def _is_mark(modified: int) -> bool:
    return modified % SECOND == 0 and _FIRST <= modified // SECOND < _FIRST + _SPAN
