"""Which files in a cache directory can be used as they are, and holding them so that nobody removes them meanwhile."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_streaming.cache.locks import LocksUnsupportedError, pauses, try_lock, unlock_and_close
from lightning_streaming.cache.place import CachePlace
from lightning_streaming.cache.sources import InPlaceSource, RemoteSource
from lightning_streaming.cache.stamps import stamp_used
from lightning_streaming.errors import IntegrityError, StorageError
from lightning_streaming.files import join_under
from lightning_streaming.formats.index import FileInfo, ShardInfo

_logger = logging.getLogger(__name__)

_REMOVAL_SECONDS = 5.0
"""More than anybody needs to remove a file that is locked for that."""


class Held:
    """Files that are here and stay here until :meth:`close`."""

    def __init__(self, directory: Path, descriptors: list[int]) -> None:
        self.directory = directory
        """Where they are."""
        self._descriptors = descriptors

    def stamp(self) -> None:
        """Say that they are in use now."""
        for descriptor in self._descriptors:
            stamp_used(descriptor)

    def close(self) -> None:
        """Let go of them."""
        while self._descriptors:
            unlock_and_close(self._descriptors.pop())


class Presence:
    """Judges files under the names of a stream's shards in its cache directory."""

    def __init__(self, place: CachePlace, source: InPlaceSource | RemoteSource) -> None:
        self._place = place
        self._source = source
        # Files that are right, but whose time could not be set to say so: basename -> what tells them from others.
        self._accepted: dict[str, tuple[int, int, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_accepted": {}}

    def hold(self, shard: ShardInfo) -> Held | None:
        """Hold a shard's raw files if they are here, whole and checked; None if one is not."""
        descriptors: list[int] = []
        with _closing_if_raised(descriptors):
            for raw, compressed in shard.files:
                descriptor = _open_locked(join_under(self._place.directory, raw.basename))
                if descriptor is None:
                    break
                descriptors.append(descriptor)
                if not self._is_right(raw, compressed, os.fstat(descriptor)):
                    break
            else:
                return Held(self._place.directory, descriptors)
        Held(self._place.directory, descriptors).close()
        return None

    def hold_kept(self, compressed: FileInfo) -> Held | None:
        """Hold a compressed file that was kept, if it is right; one that is wrong is removed.

        Must be called while holding the part of its shard.
        """
        if not self.settle(compressed, None):
            return None
        descriptor = _open_locked(join_under(self._place.directory, compressed.basename))
        if descriptor is None:
            return None
        held = Held(self._place.directory, [descriptor])
        if os.fstat(descriptor).st_nlink:
            return held
        held.close()
        return None

    def settle(self, file: FileInfo, compressed: FileInfo | None) -> bool:
        """Whether a file is here and right; one that is wrong is removed.

        A file that somebody else put there, or changed, is checked by its hash and then remembered. Without a recorded
        hash it is wrong, as it may be another dataset's of the same size; but for a file that came here with this very
        index, and that is stored like this. Must be called while holding the part of its shard.

        Args:
            file: A raw file, or a compressed one that was kept.
            compressed: What the raw file is made from, if the shards are compressed.

        Raises:
            ConfigError: The hash to check by is not recorded.
            StorageError: A wrong one may not be removed.
        """
        path = join_under(self._place.directory, file.basename)
        try:
            found = path.stat()
        except FileNotFoundError:
            return False
        if os.access(path, os.R_OK):
            if self._is_right(file, compressed, found):
                return True
            if found.st_size == file.bytes and self._is_verified(path, file, is_stored=compressed is None):
                return True
        self._place.remove(path)
        if _is_still(path, found):
            raise StorageError(
                f"{path} is not what the index promises, or may not be read, and belongs to user {found.st_uid}, whose "
                "file may not be removed; have it removed, or choose another directory"
            )
        return False

    def _is_right(self, file: FileInfo, compressed: FileInfo | None, found: os.stat_result) -> bool:
        if found.st_size != file.bytes or not found.st_nlink:
            return False
        if self._source.marks_right(found.st_mtime_ns, self._place.own, compressed):
            return True
        return self._accepted.get(file.basename) == _identity(found)

    def _is_verified(self, path: Path, file: FileInfo, *, is_stored: bool) -> bool:
        if isinstance(self._source, InPlaceSource):
            return False  # made from an original that has changed since
        try:
            if not self._source.check(file, path) and not (is_stored and self._place.own.came_with_index):
                _logger.info("%s is fetched again: somebody else put it there, and no hash tells what it is", path)
                return False
        except FileNotFoundError:  # removed just now
            return False
        except IntegrityError as error:
            _logger.warning("%s is not what the index promises, so it is fetched again: %s", path, error)
            return False
        with suppress(OSError):  # another user's
            found = path.stat()
            os.utime(path, ns=(found.st_atime_ns, self._place.own.confirmed(found.st_mtime_ns)))
        with suppress(FileNotFoundError):
            self._accepted[file.basename] = _identity(path.stat())
        return True


def _open_locked(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    with suppress(LocksUnsupportedError):
        # Who has it for themselves is about to remove it.
        any(try_lock(descriptor, shared=True) for _ in pauses(_REMOVAL_SECONDS))
    return descriptor


def _is_still(path: Path, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), found)
    except FileNotFoundError:
        return False


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextmanager
def _closing_if_raised(descriptors: list[int]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        Held(Path(), descriptors).close()
        raise
