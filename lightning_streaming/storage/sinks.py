"""Where bytes that arrive are put, and what is said where this machine refuses them.

Once a sink is closed nothing is put there, not even by who was given up on.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from lightning_streaming.errors import DiskFullError, StorageError, StreamingError
from lightning_streaming.files import file_named_by

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Sink(Protocol):
    """Takes bytes at offsets."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes at an offset."""

    def resize(self, size: int) -> None:
        """Make it ``size`` bytes long."""


class FileSink:
    """A file, made if there is none; one that is there keeps its inode. Several threads may write."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            DiskFullError: There is no room to make it.
            StorageError: It cannot be opened to write.
        """
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self.is_new = not path.exists()
        with disk_errors(path):
            # Not through a symbolic link, which another user of a cache directory may have put there.
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def __enter__(self) -> FileSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file; after an error remove it, if it was not there before."""
        if kind is not None and self.is_new:
            self._path.unlink(missing_ok=True)
        self.close()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes at an offset.

        Raises:
            DiskFullError: There is no room.
            StorageError: They cannot be written, or the file was closed.
        """
        left = memoryview(data)
        with self._lock, disk_errors(self._path):
            while left:
                written = os.pwrite(self._opened(), left, offset)
                offset, left = offset + written, left[written:]

    def resize(self, size: int) -> None:
        """Make the file ``size`` bytes long; what is added takes no room yet.

        Raises:
            DiskFullError: As for :meth:`write`.
            StorageError: As for :meth:`write`.
        """
        with self._lock, disk_errors(self._path):
            if os.fstat(self._opened()).st_size != size:
                os.ftruncate(self._opened(), size)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _opened(self) -> int:
        # The number of a closed descriptor may be another file's by now.
        if self._descriptor is None:
            raise StorageError(
                f"{self._path} is not written to any more: its download was given up", path=str(self._path)
            )
        return self._descriptor


class Gate:
    """The way of one attempt to a sink; shut once the attempt is given up, though its thread may go on."""

    def __init__(self, sink: Sink) -> None:
        self._sink: Sink | None = sink
        self._lock = threading.Lock()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes at an offset.

        Raises:
            StorageError: The gate was closed, or as for the sink.
        """
        with self._lock:
            self._opened().write(offset, data)

    def resize(self, size: int) -> None:
        """Make the sink ``size`` bytes long.

        Raises:
            StorageError: As for :meth:`write`.
        """
        with self._lock:
            self._opened().resize(size)

    def close(self) -> None:
        """Let nothing more through."""
        with self._lock:
            self._sink = None

    def _opened(self) -> Sink:
        if self._sink is None:
            raise StorageError("this attempt was given up")
        return self._sink


class MemorySink:
    """Bytes in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes at an offset."""
        self.data[offset : offset + len(data)] = data

    def resize(self, size: int) -> None:
        """Cut off what is beyond ``size``, or make room up to there."""
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))


@contextmanager
def system_errors(
    doing: str, hint: str = "change that, or choose another place", path: Path | None = None
) -> Iterator[None]:
    """Tell in words where this machine, not a store, fails in the block, or in the function that this decorates.

    Args:
        doing: What could not be done, for example ``"list a directory"``; the system names the path.
        hint: How to fix it.
        path: The file or directory. None: the one that the system names.

    Raises:
        DiskFullError: There is no room.
        StorageError: The system refused for another reason.
    """
    try:
        yield
    except StreamingError:  # some are an OSError too
        raise
    except OSError as error:
        shown = file_named_by(error) if path is None else str(path)
        if error.errno in DISK_FULL:
            raise DiskFullError(
                f"no room left to {doing}: {error}", hint="make room there, or choose another directory", path=shown
            ) from error
        raise StorageError(f"could not {doing}: {error}", hint=hint, path=shown) from error


def disk_errors(path: Path, doing: str = "write") -> AbstractContextManager[None]:
    """Like :func:`system_errors`, where a file is written."""
    return system_errors(f"{doing} {path}", "make it writable, or choose another directory", path)
