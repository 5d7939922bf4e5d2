"""Several byte strings in one payload: how many, their sizes, then the strings back to back.

uint32 count, count times uint32 size, the parts
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from lightning_streaming.errors import EncodingError

_COUNT = struct.Struct("<I")


def join_parts(parts: Sequence[bytes | bytearray]) -> bytes:
    """Put parts into one payload.

    Raises:
        EncodingError: There are too many, or one is too large, for 32 bits.
    """
    try:
        head = struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts))
    except struct.error as error:
        raise EncodingError(f"expected parts whose number and sizes fit in 32 bits ({error})") from None
    return b"".join([head, *parts])


def split_parts(data: memoryview) -> Iterator[memoryview]:
    """The parts of a payload, as slices of it. What it says of their number and sizes is checked before any is given.

    Raises:
        EncodingError: The sizes do not add up to the payload.
    """
    (count,) = _COUNT.unpack_from(data) if len(data) >= _COUNT.size else (0,)
    start = 4 + 4 * count
    if len(data) < start:
        raise EncodingError(f"expected {start} bytes for the sizes of {count} parts, but found {len(data)}")
    sizes = struct.unpack_from(f"<{count}I", data, 4)
    if start + sum(sizes) != len(data):
        raise EncodingError(f"expected {start + sum(sizes)} bytes by the sizes of the parts, but found {len(data)}")
    return _slices(data, start, sizes)


def _slices(data: memoryview, start: int, sizes: Sequence[int]) -> Iterator[memoryview]:
    for size in sizes:
        yield data[start : start + size]
        start += size
