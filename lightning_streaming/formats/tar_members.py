"""Members of a tar file: their names and the positions of their bytes. Nothing is ever extracted.

A tar file is blocks of 512 bytes: a header before each member, and at the end a block of zeros::

    bytes      of a header
    0-99       name, up to a zero byte
    124-135    size of what follows, in octal digits; or, where the first bit is set, in binary
    148-155    sum of all bytes of the header, these eight counted as spaces, in octal digits
    156        kind
    257-262    b"ustar" and a zero byte, if the name may have a prefix
    345-499    prefix of the name, before a slash

Members of some kinds describe the next one: a longer name (GNU, kind ``L``), or records like ``21 path=a long name``
and a line break (PAX, kind ``x``; kind ``g`` for all that follow). Writers that record fractions of seconds put one
before every member, so these are skipped quickly.

Headers are walked one by one, as each states the position of the next; checksums and names of many are read together.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.formats.shard_format import StoredFiles
from lightning_streaming.formats.values import brief

BLOCK = 512
"""Bytes of a header; members begin and end at multiples of it."""

Window = Callable[[int, int], memoryview]
"""Returns bytes of a file: (first byte, number needed) to that many or more; fewer at the end of the file."""

_SIZE_AND_KIND = struct.Struct("124x12s20xc")
_PLAIN, _OLD_PLAIN, _CONTIGUOUS, _SPARSE, _GLOBAL = b"0", b"\0", b"7", b"S", b"g"
_WITHOUT_BYTES = (b"1", b"2", b"3", b"4", b"5", b"6")
"""Links, devices, directories and pipes: no bytes follow their header, whose size is ignored."""
_LONG_NAME, _LONG_LINK = b"L", b"K"
_ABOUT_NEXT = (b"x", _LONG_NAME, _LONG_LINK, b"X", _GLOBAL)
_MAX_ABOUT_NEXT = 2**20
"""Most bytes of a long name, or of PAX records; no writer needs more."""
_AT_ONCE = 4096
"""Headers that are checked together: 2 MiB."""


class Members(NamedTuple):
    """Some consecutive members: those that are plain files."""

    names: list[str]
    """Their paths; bytes that are not UTF-8 as lone surrogates."""
    starts: list[int]
    """Position of each one's first byte in the file."""
    sizes: list[int]
    """Bytes of each."""


def read_members(window: Window, shown: str) -> Iterator[Members]:
    """Yield the members of a tar file up to the mark of its end; bytes after that are not read.

    Args:
        window: Returns its bytes; called with increasing positions.
        shown: Name of the file in errors.

    Yields:
        The members of one window. After the last window, every member is known to be within the file.

    Raises:
        ShardCorruptError: It is not a tar file, or damaged, or truncated; names the member.
    """
    walk = _Walk()
    while not walk.is_done:
        data = window(walk.offset, walk.needed)
        if len(data) < walk.needed:
            if not walk.offset:
                raise ShardCorruptError(f"{shown} must be a tar file, but has {len(data)} bytes", path=shown)
            raise ShardCorruptError(
                f"{shown} is truncated, or its writer was not closed: it must have at least "
                f"{walk.offset + walk.needed} bytes and the mark of its end; its last member is {walk.last_name!r}",
                path=shown,
            )
        walk.step(data)
        names, bad_sum = _checked_names(data, walk.heads)
        members = [names[row] for row in walk.rows if row < len(names)]
        for number, name in walk.names.items():
            members[number : number + 1] = [name][: len(members) - number]
        texts = [name.decode("utf-8", "surrogateescape") for name in members]
        walk.last_name = texts[-1] if texts else walk.last_name
        problem = bad_sum or walk.problem
        if problem and walk.last_name is None:
            raise ShardCorruptError(f"{shown} is not a tar file, or its first header is damaged: {problem}", path=shown)
        if problem:
            raise ShardCorruptError(
                f"{shown}: the header after member {walk.last_name!r} is damaged: {problem}", path=shown
            )
        yield Members(texts, walk.starts, walk.sizes)


class _Walk:
    """A walk from header to header: its position, and the members of the last step."""

    def __init__(self) -> None:
        self.offset = 0  # position of the next header in the file
        self.needed = BLOCK  # bytes that are needed to read it
        self.is_done = False
        self.problem = ""  # why the last of the heads is invalid
        self.last_name: str | None = None  # of the last member
        self.heads: list[int] = []  # position of each header in the window
        self.rows: list[int] = []  # numbers of those that are of members
        self.starts: list[int] = []
        self.sizes: list[int] = []
        self.names: dict[int, bytes] = {}  # names that differ from the header, by number of the member
        self._next: dict[str, bytes] = {}  # description of the next member

    def step(self, data: memoryview) -> None:
        """Walk to the end of the data, which begins with a header."""
        self.heads, self.rows, self.starts, self.sizes, self.names = [], [], [], [], {}
        self.needed, place, last = BLOCK, 0, len(data) - BLOCK
        heads, rows, starts, sizes, contents = self.heads, self.rows, self.starts, self.sizes, self.offset + BLOCK
        try:
            while place <= last:
                size_text, kind = _SIZE_AND_KIND.unpack_from(data, place)
                if kind == _OLD_PLAIN and not any(data[place : place + BLOCK]):
                    if any(data[place + BLOCK : place + 2 * BLOCK]):  # the mark of an end is two blocks of zeros
                        raise ValueError("it is all zeros, but bytes follow it")  # noqa: TRY301
                    self.is_done = True
                    break
                heads.append(place)
                digits = size_text[:11]  # the usual number: eleven of them and a zero byte
                size = int(digits, 8) if digits.isdigit() and size_text[11] == 0 else _number(size_text)
                if kind in _ABOUT_NEXT:
                    if not self._read_description(kind, data, place + BLOCK, size):
                        heads.pop()
                        break
                elif kind == _PLAIN and not self._next:
                    rows.append(len(heads) - 1)
                    starts.append(contents + place)
                    sizes.append(size)
                else:
                    size = self._read_other(kind, size, contents + place)
                place += BLOCK + (size + BLOCK - 1) // BLOCK * BLOCK
        except ValueError as error:
            self.problem = str(error)
        self.offset += place

    def _read_other(self, kind: bytes, size: int, start: int) -> int:
        """Read a header of any kind except descriptions of the next; return the bytes that follow it."""
        about, self._next = self._next, {}
        if kind == _SPARSE:
            raise ValueError("it is of a sparse file, which is not supported")
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

    def _read_description(self, kind: bytes, data: memoryview, start: int, size: int) -> bool:
        """Read a description of the next member; return False if the data ends before its end."""
        if size > _MAX_ABOUT_NEXT:
            raise ValueError(f"it describes the next member in {size} bytes, more than any writer needs")
        if start + size > len(data):
            self.needed = BLOCK + size
            return False
        text = bytes(data[start : start + size])
        if kind == _LONG_NAME:
            self._next["path"] = text.partition(b"\0")[0]
        elif kind != _LONG_LINK and (b"path=" in text or b"size=" in text or b"GNU.sparse" in text):
            records = _pax_records(text)
            if kind == _GLOBAL and records:
                raise ValueError(f"it describes all members that follow by {brief(records)}, which is not supported")
            self._next.update(records)
        return True


def _number(text: bytes) -> int:
    """Return a number of a header: octal digits among spaces, up to a zero byte; or, if it is large, in base 256.

    Raises:
        ValueError: It is not a number.
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


def _pax_records(text: bytes) -> dict[str, bytes]:
    """Return the path and size records.

    Raises:
        ValueError: They are damaged, or of a sparse file.
    """
    records, place = dict[str, bytes](), 0
    while place < len(text) and text[place]:
        length, space, _ = text[place : place + 20].partition(b" ")
        stop = place + int(length)
        name, equals, value = text[place + len(length) + 1 : stop - 1].partition(b"=")
        if not space or not equals or stop > len(text) or text[stop - 1 : stop] != b"\n":
            raise ValueError(f"its records are damaged: {brief(text[place:])}")
        if name.startswith(b"GNU.sparse"):
            raise ValueError("it is of a sparse file, which is not supported")
        if name in (b"path", b"size"):
            records[name.decode()] = value
        place = stop
    return records


def _checked_names(data: memoryview, heads: list[int]) -> tuple[list[bytes], str]:
    """Return the names in some headers up to the first whose checksum is wrong; and the problem with that, if any."""
    blocks = np.frombuffer(data, np.uint8, len(data) // BLOCK * BLOCK).reshape(-1, BLOCK)
    names = list[bytes]()
    for first in range(0, len(heads), _AT_ONCE):
        rows = blocks[np.asarray(heads[first : first + _AT_ONCE]) // BLOCK]
        names += _names(rows)
        actual, stated = _sums(rows)
        if (wrong := np.flatnonzero(actual != stated)).size:
            row = int(wrong[0])
            return names[: first + row], f"its checksum must be {actual[row]}, but is {stated[row]}"
    return names, ""


def _names(rows: NDArray[np.uint8]) -> list[bytes]:
    """Return the names in some headers of shape (headers, 512)."""
    names = np.ascontiguousarray(rows[:, :100]).view("S100").ravel().tolist()
    names = [name.partition(b"\0")[0] if 0 in name else name for name in names]
    for row in np.flatnonzero(rows[:, 345]).tolist():
        head = rows[row].tobytes()
        if head[257:263] == b"ustar\0":
            names[row] = head[345:500].partition(b"\0")[0] + b"/" + names[row]
    return names


_DIGITS = np.asarray([8**place for place in (5, 4, 3, 2, 1, 0)])


def _sums(rows: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the checksums that headers of shape (headers, 512) must have, and those they state; -1 if not a number."""
    field = rows[:, 148:156]
    halves = rows.reshape(-1, 2, BLOCK // 2).sum(axis=2, dtype=np.uint16)  # the largest sum that fits, which is fastest
    actual = halves.sum(axis=1, dtype=np.int64) - field.sum(axis=1, dtype=np.int64) + 8 * ord(" ")
    digits = field[:, :6].astype(np.int64) - ord("0")
    stated = digits @ _DIGITS
    unusual = ((digits < 0) | (digits > 7)).any(axis=1) | (field[:, 6] > ord(" ")) | (actual != stated)
    for row in np.flatnonzero(unusual).tolist():
        try:
            stated[row] = _number(field[row].tobytes())
        except ValueError:
            stated[row] = -1
        if actual[row] != stated[row]:  # some old writers counted bytes as signed
            signed = int(actual[row]) - 256 * int((np.delete(rows[row], slice(148, 156)) > 127).sum())
            actual[row] = stated[row] if signed == stated[row] else actual[row]
    return actual, stated


# --- bytes of a stored file ---
#
# A remote file is read by ranges. If members are small their headers are everywhere, so reading all of them is fastest;
# if they are large, each header is fetched alone. A window is twice as long as the last one while it starts close to
# its end, and short again after a jump.

_SHORT, _LONG = 2**16, 2**23
"""Bytes of a window: after a jump, and at most."""
_WORTH_A_JUMP = 2**19
"""Bytes that are skipped rather than read: reading them takes about as long as another request."""
_PIECE_BYTES = 2**20


class StoredWindow:
    """Windows of a file that is read by ranges.

    Args:
        files: Files of its location.
        name: Its path there.
        size: Its bytes.
    """

    def __init__(self, files: StoredFiles, name: str, size: int) -> None:
        self._files, self._name, self._size = files, name, size
        self._stop, self._length = 0, _SHORT // 2

    def __call__(self, start: int, needed: int) -> memoryview:
        """See ``Window``."""
        is_close = start - self._stop < _WORTH_A_JUMP
        self._length = min(2 * self._length, _LONG) if is_close else _SHORT
        self._stop = min(start + max(self._length, needed), self._size)
        return memoryview(self._files.read_range(self._name, start, self._stop) if start < self._stop else b"")


class UnpackedWindow:
    """Windows of a file compressed by gzip, which is read from start to end.

    Args:
        files: Files of its location.
        name: Its path there.
        size: Its bytes.
    """

    def __init__(self, files: StoredFiles, name: str, size: int) -> None:
        self._shown = files.shown_file(name)
        self._pieces = self._unpacked(files, name, size)
        self._start, self._held = 0, b""

    def __call__(self, start: int, needed: int) -> memoryview:
        """See ``Window``.

        Raises:
            ShardCorruptError: The file is not valid gzip data.
            StorageError: It cannot be read.
        """
        while self._start + len(self._held) < start + needed and (piece := next(self._pieces, b"")):
            skipped = min(max(start - self._start, 0), len(self._held))
            self._held = self._held[skipped:] + piece
            self._start += skipped
        return memoryview(self._held)[max(start - self._start, 0) :]

    def raw_bytes(self) -> int:
        """Return the decompressed size of the file; no window can be read afterwards.

        Raises:
            ShardCorruptError: The file is not valid gzip data.
            StorageError: It cannot be read.
        """
        return self._start + len(self._held) + sum(map(len, self._pieces))

    def _unpacked(self, files: StoredFiles, name: str, size: int) -> Iterator[bytes]:
        stored = io.BufferedReader(_StoredFile(files, name, size), _PIECE_BYTES)
        try:
            with gzip.GzipFile(fileobj=stored) as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ShardCorruptError(f"{self._shown} is not valid gz data ({error})", path=self._shown) from None


class _StoredFile(io.RawIOBase):
    """A file that is read by consecutive ranges."""

    def __init__(self, files: StoredFiles, name: str, size: int) -> None:
        super().__init__()
        self._files, self._name, self._size, self._next = files, name, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        stop = min(self._next + len(buffer), self._size)
        data = self._files.read_range(self._name, self._next, stop) if stop > self._next else b""
        buffer[: len(data)] = data
        self._next += len(data)
        return len(data)
