"""How an object is cut into parts, and what HTTP says about ranges of bytes. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

PART_BYTES = 8 << 20
"""About how long a part is: long enough that its request costs little, short enough that several share an object."""
_ALIGNMENT = 64 << 10
_CONTENT_RANGE = re.compile(r"bytes\s+(\d+)-")


@dataclass(slots=True)
class Part:
    """A run of an object's bytes that one request at a time fetches."""

    start: int
    """Its first byte."""
    stop: int
    """The byte after its last."""
    is_last: bool
    """Whether the object must end where it does."""
    at: int
    """The first byte that has not arrived yet."""

    @property
    def span(self) -> tuple[int, int] | None:
        """The first byte to ask for, and the one after the last; None for the whole object.

        For the last part one byte more than there should be, so that a longer object is noticed. Never empty.
        """
        if self.at == 0 and self.is_last:
            return None
        return self.at, self.stop + self.is_last


def cut(size: int, part_bytes: int = PART_BYTES) -> list[Part]:
    """Cut an object into parts of nearly equal length; one up to half as long again as a part stays whole.

    Args:
        size: Bytes of the object.
        part_bytes: Bytes a part should have.
    """
    count = max(1, (size + part_bytes // 2) // part_bytes)
    length = max(1, math.ceil(size / count / _ALIGNMENT) * _ALIGNMENT)
    starts = range(0, max(size, 1), length)
    return [Part(start, min(start + length, size), start + length >= size, start) for start in starts]


def range_header(span: tuple[int, int]) -> str:
    """The Range header for bytes from ``span[0]`` up to, not including, ``span[1]``."""
    return f"bytes={span[0]}-{span[1] - 1}"


def first_byte(content_range: str | None) -> int | None:
    """The first byte that a Content-Range header tells of; None without a usable one."""
    found = _CONTENT_RANGE.match(content_range or "")
    return int(found[1]) if found else None
