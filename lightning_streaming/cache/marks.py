"""Marks: modification times by which one ``stat`` tells a file of ours, checked and unchanged, from any other.

A cache directory has a mark of its own, a whole second long ago, kept in its origin file. Whatever we fetch into it
gets that time when it is whole and checked. Anything else under a shard's name was put there by someone, or changed.

Another index takes another mark, two seconds later: files that were checked by one before are still ours, and counted
and evicted by all jobs, whichever index they began with; but each job believes only its own mark. The marks of a
directory are a family, the even seconds of about two minutes; the odd ones say "checked by that index, not ours".
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

SECOND = 10**9
"""In nanoseconds, which all times here are in."""
_FIRST = 978_307_200
"""The year 2001 begins. Whole seconds are told apart by every filesystem, and nobody writes files in the past."""
_SPAN = 283_996_800
"""Seconds until the year 2010 begins."""
_FAMILY = 128
"""Seconds of one family: few, so that no old file of somebody has such a time by chance; the span has whole ones."""


def make_mark() -> int:
    """A mark for a directory that has none: a random whole second of the years 2001 to 2009, in nanoseconds."""
    return (_FIRST + secrets.randbelow(_SPAN // _FAMILY) * _FAMILY) * SECOND


def next_mark(mark: int) -> int:
    """The mark after another: of the same family, or where that is used up, of a new one."""
    later = mark + 2 * SECOND
    return later if _family(later) == _family(mark) else make_mark()


def mark_of_original(modified: int, size: int) -> int:
    """The mark of a raw file made from a compressed one that is read in place: another one once that has changed.

    Args:
        modified: The compressed file's modification time, in nanoseconds.
        size: Its bytes.
    """
    digest = hashlib.sha256(f"{modified} {size}".encode()).digest()
    return (_FIRST + int.from_bytes(digest[:8], "big") % _SPAN) * SECOND


def read_mark(text: bytes) -> int | None:
    """The mark that an origin file names; None if it is not one."""
    mark = int(text) if text.isdigit() else 0
    return mark if _is_mark(mark) else None


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """Which modification times the files have that are ours to remove."""

    mark: int | None
    """The directory's mark; None where files have marks of their originals, and nobody but us has files."""
    came_with_index: bool = False
    """Whether the index was there before we first fetched anything: then it speaks of what others put there with it."""

    def include(self, modified: int) -> bool:
        """Whether a file with this modification time, in nanoseconds, is ours, by whichever index it was checked."""
        if self.mark is None:
            return _is_mark(modified)
        return (modified - self.mark) % (2 * SECOND) == 0 and _family(modified) == _family(self.mark)

    def confirmed(self, modified: int) -> int:
        """The modification time that a file gets when it turns out to be what the index promises.

        One that is ours stays so. Where a later index has confirmed it, that stays, too: jobs of two indexes that share
        a file would change its time to and fro.

        Args:
            modified: Its modification time until now, in nanoseconds.
        """
        assert self.mark is not None, "there is no index by which to check raw files of a dataset that is read in place"
        if modified % SECOND or _family(modified) != _family(self.mark):
            return verified_mark(self.mark)
        foreign = (modified - self.mark) % (2 * SECOND)
        return max(modified - foreign, self.mark) + foreign


def verified_mark(mark: int) -> int:
    """The time of a file that is right, but was put there by someone else: it is not checked again, and stays."""
    return mark + SECOND


def _family(modified: int) -> int:
    return (modified // SECOND - _FIRST) // _FAMILY


def _is_mark(modified: int) -> bool:
    return modified % SECOND == 0 and _FIRST <= modified // SECOND < _FIRST + _SPAN
