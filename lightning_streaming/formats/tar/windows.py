"""The bytes of a tar file, wherever it lies, as :func:`read_members` asks for them: in windows, ever later ones.

What lies elsewhere is read by ranges. Where members are small their headers are everywhere, so that reading all of them
is quickest; where they are large, each header is fetched alone. What tells the two apart is the way a walk goes: a
window is twice as long as the last one while the walk goes on close behind it, and short again after a jump.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator

from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.formats.shard_format import StoredFiles

_SHORT, _LONG = 2**16, 2**23
"""Bytes of a window: after a jump, and at most."""
_WORTH_A_JUMP = 2**19
"""Bytes that are rather not read: about as long as it takes to ask a store for others."""
_PIECE_BYTES = 2**20


class StoredWindow:
    """Windows of a file that is read by ranges.

    Args:
        files: Where it lies.
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
    """Windows of a file that is stored compressed by gzip, which is read from its start to its end.

    Args:
        files: Where it lies.
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
            ShardCorruptError: The file is not sound gzip data.
            StorageError: It cannot be read.
        """
        while self._start + len(self._held) < start + needed and (piece := next(self._pieces, b"")):
            skipped = min(max(start - self._start, 0), len(self._held))
            self._held = self._held[skipped:] + piece
            self._start += skipped
        return memoryview(self._held)[max(start - self._start, 0) :]

    def raw_bytes(self) -> int:
        """Bytes of the whole file, unpacked; nothing can be asked for afterwards.

        Raises:
            ShardCorruptError: The file is not sound gzip data.
            StorageError: It cannot be read.
        """
        return self._start + len(self._held) + sum(map(len, self._pieces))

    def _unpacked(self, files: StoredFiles, name: str, size: int) -> Iterator[bytes]:
        import gzip

        stored = io.BufferedReader(_StoredFile(files, name, size), _PIECE_BYTES)
        try:
            with gzip.GzipFile(fileobj=stored) as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ShardCorruptError(f"{self._shown} is not sound gz data ({error})", path=self._shown) from None


class _StoredFile(io.RawIOBase):
    """A file that is read by ranges, one after another."""

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
