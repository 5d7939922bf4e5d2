"""A cache directory as one process uses it: made once, cleared of the dead once, never made again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_streaming.cache.arrival import Part, arriving, lock_if_dead
from lightning_streaming.cache.layout import CACHE_VARIABLE
from lightning_streaming.cache.ledger import Ledger, held_ledger, read_ledger
from lightning_streaming.cache.locks import LocksUnsupportedError, open_to_lock, try_lock, unlock_and_close
from lightning_streaming.cache.marks import OwnTimes
from lightning_streaming.cache.permissions import is_reachable
from lightning_streaming.cache.scan import Entry, Scan, index_bytes, scan
from lightning_streaming.errors import StorageError


class CachePlace:
    """One stream's directory on this node. Making one touches nothing; it may be pickled, forked and shared by threads.

    Args:
        directory: Where it is.
        find_own: Tells which modification times are ours there, making the directory if need be.
    """

    def __init__(self, directory: Path, find_own: Callable[[], OwnTimes]) -> None:
        self.directory = directory
        self._find_own = find_own
        self._own: OwnTimes | None = None
        self._prepared_in: int | None = None
        self._index_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared_in": None}

    @property
    def own(self) -> OwnTimes:
        """Which modification times are ours here."""
        if self._own is None:
            self._own = self._find_own()
        return self._own

    def prepare(self) -> None:
        """Make the directory and remove what dead writers left, the first time in each process.

        Raises:
            StorageError: The directory cannot be made.
        """
        if self._prepared_in == os.getpid():
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{self.directory} cannot be made: {error}; give the stream another directory with local=, or set "
                f"{CACHE_VARIABLE} to another root"
            ) from error
        _ = self.own
        self._prepared_in = os.getpid()
        if os.access(self.directory, os.W_OK) and any(True for _ in arriving(self.directory)):
            with self.held() as ledger:
                if ledger is not None:
                    self.sweep(ledger)

    def is_gone(self) -> bool:
        """Whether somebody removed the directory since this process prepared it."""
        return self._prepared_in == os.getpid() and not is_reachable(self.directory)

    @contextmanager
    def held(self) -> Iterator[Ledger | None]:
        """Hold the ledger, see :func:`held_ledger`; None where the filesystem has no locks, and nothing is counted."""
        with ExitStack() as stack:
            try:
                ledger = stack.enter_context(held_ledger(self.directory, lambda: self.scan().bytes))
            except LocksUnsupportedError:
                ledger = None
            yield ledger

    def scan(self) -> Scan:
        """Look through the directory."""
        self._index_bytes = index_bytes(self.directory)
        return scan(self.directory, self.own)

    def usage(self) -> int:
        """Bytes of what is ours here, by the ledger; 0 if nothing ever was."""
        counted = read_ledger(self.directory)
        if counted is None:
            return self.scan().bytes + self._index_bytes if is_reachable(self.directory) else 0
        return counted + self.fixed_bytes()

    def fixed_bytes(self) -> int:
        """Bytes of the index, which no eviction makes room of."""
        if not self._index_bytes:
            self._index_bytes = index_bytes(self.directory)
        return self._index_bytes

    def sweep(self, ledger: Ledger) -> int:
        """Remove parts whose writers died, and count them. Must be called while holding the ledger."""
        swept = 0
        for entry in arriving(self.directory):
            descriptor = lock_if_dead(Path(entry.path))
            if descriptor is not None:
                swept += _unlink(ledger, entry.path, os.fstat(descriptor).st_size)
                unlock_and_close(descriptor)
        return swept

    def drop(self, parts: Iterable[Part]) -> None:
        """Give up files on their way; those that were published are only let go of."""
        parts = list(parts)
        try:
            unpublished = [part for part in parts if part.is_unpublished()]
            if unpublished:
                with self.held() as ledger:
                    for part in unpublished:
                        _unlink(ledger, str(part.path), part.size)
        finally:
            for part in parts:
                part.close()

    def discard_part(self, part: Part) -> None:
        """Remove a part that is not needed any more; it stays locked until it is dropped."""
        with self.held() as ledger:
            _unlink(ledger, str(part.path), part.size)

    def remove(self, path: Path) -> None:
        """Remove a file that is not what it should be."""
        with self.held() as ledger, suppress(FileNotFoundError):
            found = path.stat()
            ours = self.own.include(found.st_mtime_ns)
            _unlink(ledger, str(path), found.st_size if ours else 0)

    def remove_unused(self, ledger: Ledger, files: Sequence[Entry]) -> bool:
        """Remove files of ours unless somebody has one of them open. Must be called while holding the ledger.

        Returns:
            Whether they are gone; False if none was removed.
        """
        descriptors: list[int] = []
        try:
            for file in files:
                descriptors.append(open_to_lock(file.path))
                found = os.fstat(descriptors[-1])
                same = (found.st_size, found.st_mtime_ns) == (file.size, file.modified)
                if not same or not try_lock(descriptors[-1], shared=False):
                    return False
            return sum(_unlink(ledger, file.path, file.size) for file in files) == len(files)
        except OSError:  # gone, another user's, or a filesystem without locks
            return False
        finally:
            for descriptor in descriptors:
                unlock_and_close(descriptor)


def _unlink(ledger: Ledger | None, path: str, size: int) -> int:
    """Remove a file and take its bytes off the count; gives the number of files removed."""
    try:
        os.unlink(path)  # noqa: PTH108  thousands of them in a row
    except OSError:  # gone, or not ours to remove
        return 0
    if ledger is not None and ledger.used is not None:
        ledger.used -= size
    return 1
