"""The header of a ``.npy`` file, as it is read by threads.

    bytes    content
    6        b"\\x93NUMPY"
    2        version: 1.0, 2.0 or 3.0
    2 or 4   little-endian length of the header: two bytes in version 1.0
    any      the header: the text of a Python dict with "descr" (the dtype), "fortran_order" and "shape"
    any      the values

NumPy reads that text by Python's ``ast``, which is not for threads: several releases of Python up to 3.12 (gh-106905)
count the depth of what they build over all of them, and where garbage collection lets another one go on in between,
they fail with a SystemError. So the text is read here without it.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.formats.values import shortened

_MAGIC = b"\x93NUMPY"
_LENGTHS: Mapping[bytes, struct.Struct] = {
    b"\x01\x00": struct.Struct("<H"),
    b"\x02\x00": struct.Struct("<I"),
    b"\x03\x00": struct.Struct("<I"),
}
"""How the length of the header is written, by version."""
_FIRST_READ = 4096
"""Bytes that hold nearly every header."""
MOST_HEADER_BYTES = 1 << 20


class NpyHeader(NamedTuple):
    """What a file says of its values."""

    dtype: np.dtype[Any]
    is_fortran: bool
    shape: tuple[int, ...]
    stop: int
    """The byte where the values start."""


def read_header(read: Callable[[int, int], bytes], size: int, shown: str) -> NpyHeader:
    """What a file says of its values.

    Args:
        read: Gives the bytes from one place up to before another; fewer where the file ends.
        size: Bytes of the file.
        shown: What to call it in an error.

    Raises:
        ShardCorruptError: It is no such file, or is cut.
        StorageError: As ``read`` does.
    """
    start = read(0, min(size, _FIRST_READ))
    if not start.startswith(_MAGIC):
        raise ShardCorruptError(f"{shown} does not begin as a .npy file does, but with {start[:8]!r}", path=shown)
    version = start[6:8]
    if version not in _LENGTHS:
        raise ShardCorruptError(
            f"{shown} is of version {tuple(version)} of .npy files; 1.0, 2.0 and 3.0 can be read", path=shown
        )
    length = _LENGTHS[version]
    begin = 8 + length.size
    stop = begin + (length.unpack_from(start, 8)[0] if len(start) >= begin else size)
    if stop > min(size, MOST_HEADER_BYTES):
        raise ShardCorruptError(
            f"{shown} has {size} bytes, but its header is to end at byte {stop}; the file is cut", path=shown
        )
    text = start[begin:stop] if stop <= len(start) else read(begin, stop)
    try:
        said = _Literal(text.decode("utf-8" if version[0] == 3 else "latin-1")).whole()
        dtype, is_fortran, shape = (said.pop(key) for key in ("descr", "fortran_order", "shape"))
        dtype = np.lib.format.descr_to_dtype(dtype)
    except Exception as error:  # a wrong text may raise almost anything in these
        raise ShardCorruptError(
            f"{shown} has a header that cannot be read: {shortened(repr(text))} ({type(error).__name__}: {error})",
            path=shown,
        ) from error
    if said or not isinstance(shape, tuple) or not all(type(one) is int and one >= 0 for one in shape):
        raise ShardCorruptError(
            f"{shown} has a header of shape {shortened(repr(shape))} and more: {shortened(repr(said))}", path=shown
        )
    return NpyHeader(dtype, bool(is_fortran), shape, stop)


def header_of(file: BinaryIO) -> NpyHeader:
    """What an open file of this machine says of its values; raises ShardCorruptError where it is no such file."""
    descriptor = file.fileno()

    def read(start: int, stop: int) -> bytes:
        return os.pread(descriptor, stop - start, start)

    return read_header(read, os.fstat(descriptor).st_size, file.name)


_PART = re.compile(r"""\s*('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|-?(?:0+|[1-9][0-9]*)L?|True|False|[][(){}:,])\s*""")
_DEEPEST = 32
"""Brackets within each other: fields of fields of fields."""


class _Literal:
    """Reads a text of Python: integers, texts and truth values, in tuples, lists and dicts.

    Args:
        text: The text.

    Raises:
        ValueError: It has something else.
    """

    def __init__(self, text: str) -> None:
        self._parts, at = list[str](), 0
        while at < len(text):
            found = _PART.match(text, at)
            if found is None:
                raise ValueError(f"{shortened(repr(text[at:]))} is not expected in a header")
            self._parts.append(found[1])
            at = found.end()
        self._parts.reverse()

    def whole(self) -> Any:
        """The value of the whole text; raises ValueError where there is none, or more."""
        value = self._value(_DEEPEST)
        if self._parts:
            raise ValueError(f"{self._parts[-1]!r} follows its end")
        return value

    def _value(self, depth: int) -> Any:
        part = self._taken()
        if part[0] in "'\"":
            # What stands for itself in Latin-1 does so for Python's escapes, too.
            return part[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape")
        if part in ("True", "False"):
            return part == "True"
        if part[-1].isdigit() or part[-1] == "L":  # which Python 2 wrote behind large numbers
            return int(part.rstrip("L"))
        if part == "{":
            return dict(self._items("}", depth, self._pair)[0])
        if part == "[":
            return self._items("]", depth, self._value)[0]
        if part == "(":
            items, has_comma = self._items(")", depth, self._value)
            return items[0] if len(items) == 1 and not has_comma else tuple(items)
        raise ValueError(f"{part!r} begins no value")

    def _pair(self, depth: int) -> tuple[Any, Any]:
        key = self._value(depth)
        if (part := self._taken()) != ":":
            raise ValueError(f"{part!r} stands where a colon should")
        return key, self._value(depth)

    def _items(self, closing: str, depth: int, item: Callable[[int], Any]) -> tuple[list[Any], bool]:
        """What is within brackets; and whether a comma follows the last."""
        if not depth:
            raise ValueError(f"there are more than {_DEEPEST} brackets within each other")
        items = list[Any]()
        while self._parts[-1:] != [closing]:
            items.append(item(depth - 1))
            if (part := self._taken()) == closing:
                return items, False
            if part != ",":
                raise ValueError(f"{part!r} stands where a comma should")
        self._taken()
        return items, True

    def _taken(self) -> str:
        if not self._parts:
            raise ValueError("it ends within brackets")
        return self._parts.pop()
