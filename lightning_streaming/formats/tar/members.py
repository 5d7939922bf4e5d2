"""The members of a tar file: what each is called, and where its bytes lie. Nothing is ever extracted.

A tar file is blocks of 512 bytes: a header before each member, and at the end a block of zeros::

    bytes      of a header
    0-99       name, up to a zero byte
    124-135    size of what follows, in octal digits; or, where the first bit is set, in binary
    148-155    sum of all bytes of the header, these eight counted as spaces, in octal digits
    156        kind
    257-262    b"ustar" and a zero byte, where the name may go on
    345-499    what comes before the name and a slash

Members of some kinds say something of the next one: a longer name (GNU, kind ``L``), or records like
``21 path=a long name`` and a line break (PAX, kind ``x``; kind ``g`` for all that follow). Writers that note times to
less than a second put one before every member, so these are passed by quickly.

Headers are walked one by one, as each says where the next one is; checksums and names of many are looked at together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.formats.values import brief

BLOCK = 512
"""Bytes of a header; members begin and end where as many go on."""

Window = Callable[[int, int], memoryview]
"""Gives bytes of a file: (the first of them, how many are needed) to so many or more; fewer at the end of the file."""

_SIZE_AND_KIND = struct.Struct("124x12s20xc")
_PLAIN, _OLD_PLAIN, _CONTIGUOUS, _SPARSE, _GLOBAL = b"0", b"\0", b"7", b"S", b"g"
_WITHOUT_BYTES = (b"1", b"2", b"3", b"4", b"5", b"6")
"""Links, devices, directories and pipes: whatever size their header has, nothing follows it."""
_LONG_NAME, _LONG_LINK = b"L", b"K"
_ABOUT_NEXT = (b"x", _LONG_NAME, _LONG_LINK, b"X", _GLOBAL)
_MOST_ABOUT_NEXT = 2**20
"""Bytes of a long name, or of PAX records; no writer makes more."""
_AT_ONCE = 4096
"""Headers that are looked at together: 2 MiB."""


class Members(NamedTuple):
    """Some members that follow each other: those that are plain files."""

    names: list[str]
    """Their paths; bytes that are not UTF-8 as lone surrogates."""
    starts: list[int]
    """Where in the file each one's bytes begin."""
    sizes: list[int]
    """Bytes of each."""


def read_members(window: Window, shown: str) -> Iterator[Members]:
    """Walk through a tar file up to the mark of its end; what follows that is not looked at.

    Args:
        window: Gives its bytes; asked for ever later ones.
        shown: What to call it in an error.

    Yields:
        What the bytes of one window tell. Once all is read, every member lies within the file.

    Raises:
        ShardCorruptError: It is not a tar file, or damaged, or cut off; names the member.
    """
    walk = _Walk()
    while not walk.is_done:
        data = window(walk.offset, walk.needed)
        if len(data) < walk.needed:
            raise ShardCorruptError(_how_it_ends(walk, shown, len(data)), path=shown)
        walk.step(data)
        names, bad_sum = _checked_names(data, walk.heads)
        found = [names[row] for row in walk.rows if row < len(names)]
        for number, name in walk.names.items():
            found[number : number + 1] = [name][: len(found) - number]
        texts = [name.decode("utf-8", "surrogateescape") for name in found]
        walk.last_name = texts[-1] if texts else walk.last_name
        refused = bad_sum or walk.refused
        if refused and walk.last_name is None:
            raise ShardCorruptError(f"{shown} is not a tar file, or its first header is damaged: {refused}", path=shown)
        if refused:
            raise ShardCorruptError(
                f"{shown}: the header after member {walk.last_name!r} is damaged: {refused}", path=shown
            )
        yield Members(texts, walk.starts, walk.sizes)


def _how_it_ends(walk: _Walk, shown: str, left: int) -> str:
    """What is wrong with a file that has so few bytes from the next header on."""
    if not walk.offset:
        return f"{shown} must be a tar file, but has {left} bytes"
    return (
        f"{shown} was cut off, or its writer was not closed: it must have at least {walk.offset + walk.needed} bytes, "
        f"and then the mark of its end; its last member is {walk.last_name!r}"
    )


class _Walk:
    """A walk from header to header: where it is, and what the last step found."""

    def __init__(self) -> None:
        self.offset = 0  # where in the file the next header is
        self.needed = BLOCK  # bytes without which that cannot be read
        self.is_done = False
        self.refused = ""  # what is wrong with the last of the heads
        self.last_name: str | None = None  # of the last member
        self.heads: list[int] = []  # where in the window each header begins
        self.rows: list[int] = []  # which of them are of members
        self.starts: list[int] = []
        self.sizes: list[int] = []
        self.names: dict[int, bytes] = {}  # of members whose header has another, by their number
        self._next: dict[str, bytes] = {}  # what was said of the next member

    def step(self, data: memoryview) -> None:
        """Go as far as the data goes, which begins with a header."""
        self.heads, self.rows, self.starts, self.sizes, self.names = [], [], [], [], {}
        self.needed, place, last = BLOCK, 0, len(data) - BLOCK
        heads, rows, starts, sizes, contents = self.heads, self.rows, self.starts, self.sizes, self.offset + BLOCK
        try:
            while place <= last:
                size_text, kind = _SIZE_AND_KIND.unpack_from(data, place)
                if kind == _OLD_PLAIN and not any(data[place : place + BLOCK]):
                    _check_end(data[place + BLOCK : place + 2 * BLOCK])
                    self.is_done = True
                    break
                heads.append(place)
                digits = size_text[:11]  # as most writers write a number: eleven of them and a zero byte
                size = int(digits, 8) if digits.isdigit() and size_text[11] == 0 else _number(size_text)
                if kind in _ABOUT_NEXT:
                    if not self._has_noted(kind, data, place + BLOCK, size):
                        heads.pop()
                        break
                elif kind == _PLAIN and not self._next:
                    rows.append(len(heads) - 1)
                    starts.append(contents + place)
                    sizes.append(size)
                else:
                    size = self._look(kind, size, contents + place)
                place += BLOCK + (size + BLOCK - 1) // BLOCK * BLOCK
        except ValueError as error:
            self.refused = str(error)
        self.offset += place

    def _look(self, kind: bytes, size: int, start: int) -> int:
        """Take in a header of any kind but those that are about the next; gives the bytes that follow it."""
        about, self._next = self._next, {}
        if kind == _SPARSE:
            raise ValueError("it is of a sparse file, which is not read here")
        if kind in _WITHOUT_BYTES:
            return 0
        size = int(about.get("size", size))
        if size < 0:
            raise ValueError(f"its size is {size}")
        if kind in (_PLAIN, _OLD_PLAIN, _CONTIGUOUS):
            if "path" in about:
                self.names[len(self.rows)] = about["path"]
            self.rows.append(len(self.heads) - 1)
            self.starts.append(start)
            self.sizes.append(size)
        return size

    def _has_noted(self, kind: bytes, data: memoryview, start: int, size: int) -> bool:
        """Take in what is said of the next member; False if the data ends before."""
        if size > _MOST_ABOUT_NEXT:
            raise ValueError(f"it says {size} bytes of the next member, more than anybody has to say")
        if start + size > len(data):
            self.needed = BLOCK + size
            return False
        said = bytes(data[start : start + size])
        if kind == _LONG_NAME:
            self._next["path"] = said.partition(b"\0")[0]
        elif kind != _LONG_LINK and (b"path=" in said or b"size=" in said or b"GNU.sparse" in said):
            records = _pax_records(said)
            if kind == _GLOBAL and records:
                raise ValueError(f"it says {brief(records)} of all members that follow, which is not read here")
            self._next.update(records)
        return True


def _check_end(block: memoryview) -> None:
    """Refuse what follows a block of zeros, as far as it is here: the mark of an end is two of them.

    Raises:
        ValueError: It is something else, so that the zeros are a header that was lost.
    """
    if any(block):
        raise ValueError("it is all zeros, but the file goes on after it")


def _number(text: bytes) -> int:
    """A number of a header: octal digits among spaces, up to a zero byte; or, where it is large, in base 256.

    Raises:
        ValueError: It is none.
    """
    if text[0] & 0x80:
        number = int.from_bytes(text, "big") - (0x80 << 8 * (len(text) - 1))
    else:
        digits = text.partition(b"\0")[0].strip(b" ")
        if digits.translate(None, b"01234567"):
            raise ValueError(f"its size is {brief(text)}")
        number = int(digits or b"0", 8)
    if not 0 <= number < 2**63:
        raise ValueError(f"its size is {brief(text)}")
    return number


def _pax_records(said: bytes) -> dict[str, bytes]:
    """The records that matter here.

    Raises:
        ValueError: They are damaged, or of a sparse file.
    """
    found, place = dict[str, bytes](), 0
    while place < len(said) and said[place]:
        length, space, _ = said[place : place + 20].partition(b" ")
        stop = place + int(length)
        name, equals, value = said[place + len(length) + 1 : stop - 1].partition(b"=")
        if not space or not equals or stop > len(said) or said[stop - 1 : stop] != b"\n":
            raise ValueError(f"its records are damaged: {brief(said[place:])}")
        if name.startswith(b"GNU.sparse"):
            raise ValueError("it is of a sparse file, which is not read here")
        if name in (b"path", b"size"):
            found[name.decode()] = value
        place = stop
    return found


def _checked_names(data: memoryview, heads: list[int]) -> tuple[list[bytes], str]:
    """The names in some headers up to the first whose checksum is wrong; and what is wrong with it, if one is."""
    blocks = np.frombuffer(data, np.uint8, len(data) // BLOCK * BLOCK).reshape(-1, BLOCK)
    names = list[bytes]()
    for first in range(0, len(heads), _AT_ONCE):
        rows = blocks[np.asarray(heads[first : first + _AT_ONCE]) // BLOCK]
        names += _names(rows)
        found, said = _sums(rows)
        if (wrong := np.flatnonzero(found != said)).size:
            row = int(wrong[0])
            return names[: first + row], f"its checksum must be {found[row]}, but is {said[row]}"
    return names, ""


def _names(rows: NDArray[np.uint8]) -> list[bytes]:
    """The names in some headers of shape (headers, 512)."""
    names = np.ascontiguousarray(rows[:, :100]).view("S100").ravel().tolist()
    names = [name.partition(b"\0")[0] if 0 in name else name for name in names]
    for row in np.flatnonzero(rows[:, 345]).tolist():
        head = rows[row].tobytes()
        if head[257:263] == b"ustar\0":
            names[row] = head[345:500].partition(b"\0")[0] + b"/" + names[row]
    return names


_DIGITS = np.asarray([8**place for place in (5, 4, 3, 2, 1, 0)])


def _sums(rows: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The checksums that headers of shape (headers, 512) must have, and those they have; -1 for what is no number."""
    field = rows[:, 148:156]
    halves = rows.reshape(-1, 2, BLOCK // 2).sum(axis=2, dtype=np.uint16)  # as far as that goes, which is quickest
    found = halves.sum(axis=1, dtype=np.int64) - field.sum(axis=1, dtype=np.int64) + 8 * ord(" ")
    digits = field[:, :6].astype(np.int64) - ord("0")
    said = digits @ _DIGITS
    unusual = ((digits < 0) | (digits > 7)).any(axis=1) | (field[:, 6] > ord(" ")) | (found != said)
    for row in np.flatnonzero(unusual).tolist():
        try:
            said[row] = _number(field[row].tobytes())
        except ValueError:
            said[row] = -1
        if found[row] != said[row]:  # some old writers counted bytes as signed
            signed = int(found[row]) - 256 * int((np.delete(rows[row], slice(148, 156)) > 127).sum())
            found[row] = said[row] if signed == said[row] else found[row]
    return found, said
