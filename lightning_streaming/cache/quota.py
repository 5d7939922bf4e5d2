"""The limit of a dataset's cache directories: counting, waiting for room, evictions.

Readers that wait for room queue, so only one at a time scans the files, and prefetches give way to them. The lock of
the file ``.queue`` is the queue. Its content is the time when a reader last waited in vain, so that others do not wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from lightning_streaming.cache import shared_files
from lightning_streaming.cache.config import QUEUE_BASENAME
from lightning_streaming.cache.eviction import bytes_to_free, coldest_first, evict
from lightning_streaming.cache.file_states import CacheDirectory, StagingFile
from lightning_streaming.cache.records import CacheEntry, UsageCount, read_number, write_number
from lightning_streaming.errors import ConfigError, StorageError
from lightning_streaming.escaping import package_logger
from lightning_streaming.formats.shard import narrowed
from lightning_streaming.formats.shard_table import PART, ShardTable
from lightning_streaming.units import format_bytes

_logger = package_logger(__name__)

_WAIT_SECONDS = 30.0
"""Time that a reader waits for others to close shards before it exceeds the limit."""
_LONGEST_PAUSE = 0.05
"""Seconds between two searches for room, each of which may scan all files."""
_QUEUE_PAUSE = 0.004
"""Seconds between two attempts to lock the queue."""
_IN_VAIN_NANOSECONDS = 600 * 10**9
"""For this time after a reader waited in vain, no reader waits: each worker of the next epoch would do so again."""

Demand = tuple[StagingFile, int]
"""A staging file, and the bytes it will have."""


class CacheQuota:
    """The limit of the directories of a dataset's streams together.

    All processes that use a directory share its count, so the limits of several jobs apply together.

    Args:
        directories: The directories.
        limit: Maximum bytes, staging files and indexes included; None for no limit.
    """

    def __init__(self, directories: Iterable[CacheDirectory], limit: int | None = None) -> None:
        by_path = {directory.path: directory for directory in directories}
        # All processes take the locks of several directories in the same order.
        self._directories = [by_path[path] for path in sorted(by_path)]
        self._allowed = limit  # for readers; higher once one of this process had to exceed the limit
        self._has_warned = False
        self._comfortable = 0
        self.limit = limit
        """Maximum bytes; None for no limit."""
        self.limit_name = "cache_limit"
        """Name of the option that sets the limit."""

    def expect(self, readers: int, shard_bytes: int) -> None:
        """Set the number of processes of a job, and the size of their largest shard, for the hint of a warning."""
        self._comfortable = 2 * readers * shard_bytes

    def usage(self) -> int:
        """Return the bytes of files that are ours in the directories."""
        return sum(directory.usage() for directory in self._directories)

    def fixed_bytes(self) -> int:
        """Return the bytes of indexes and selections, which are never evicted."""
        return sum(directory.fixed_bytes() for directory in self._directories)

    def forget_fixed_bytes(self) -> None:
        """Count indexes and selections again at the next call, as some were added."""
        for directory in self._directories:
            directory.forget_fixed_bytes()

    def has_waiting_reader(self) -> bool:
        """Return whether a reader waits for room, under a limit or on a full disk; it takes precedence."""
        return any(
            shared_files.is_locked(directory.path / QUEUE_BASENAME, shared=True) for directory in self._directories
        )

    def is_scarce(self, size: int) -> bool:
        """Return whether a reader waits for room, or one of the disks has fewer bytes left than ``size``."""
        paths = (directory.path for directory in self._directories if shared_files.is_reachable(directory.path))
        return self.has_waiting_reader() or any(_free_bytes(path) < size for path in paths)

    @property
    def num_directories(self) -> int:
        """Number of directories."""
        return len(self._directories)

    def reserve(
        self,
        directory: CacheDirectory,
        demands: Sequence[Demand],
        *,
        release: Callable[[], object] | None = None,
        spare_since: int | None = None,
    ) -> bool:
        """Make room for files, and set the size of each.

        A prefetch does not wait. For a reader, which needs the files to continue, unused files are removed; then it
        closes its other shards; then it waits until others close theirs. In the end the limit is exceeded, with one
        warning, and this reader then keeps to the higher limit. For some time after that no process waits: readers
        that hold shards longer than others wait would stop them each time.

        Args:
            directory: The directory of the files, which exists.
            demands: The files.
            release: Closes the open shards of a reader; None for a prefetch.
            spare_since: For a prefetch, files used at this time or later are not removed; None for no such time.

        Returns:
            Whether there is room now, always True for a reader; if not, nothing was changed except that some files may
            have been removed in vain.

        Raises:
            ConfigError: There is a limit, and the filesystem has no locks, which it needs.
            StorageError: The directory is gone, or may not be written to.
        """
        if release is None:
            return not self.has_waiting_reader() and self._reserve_within(self.limit, directory, demands, spare_since)
        if not self.has_waiting_reader() and self._reserve_again(directory, demands):
            return True
        release()
        if _was_in_vain(directory.path):
            if not self._reserve_again(directory, demands):
                self._exceed(directory, demands)
            return True
        with WaitQueue(directory.path) as queue:
            deadline = time.monotonic() + _WAIT_SECONDS
            queue.wait(_WAIT_SECONDS)
            for _ in shared_files.pauses(deadline - time.monotonic(), _LONGEST_PAUSE):
                if self._reserve_again(directory, demands):
                    return True
                if _was_in_vain(directory.path):
                    break
        self._exceed(directory, demands)
        return True

    def trim(self) -> None:
        """Remove unused files if the directories exceed the limit, for example after a run with a larger one.

        Raises:
            ConfigError: The limit is exceeded, and the filesystem has no locks, which it needs.
        """
        if self.limit is None or self.usage() <= self.limit:
            return
        try:
            with self._held() as held:
                if _counted(held) > self.limit:
                    owners = _count_again(held)
                    _evict(
                        held, owners, bytes_to_free(_counted(held), 0, self.limit), None, f"cache_limit={self.limit}"
                    )
        except StorageError as error:  # a directory of another user
            _logger.warning("%s is exceeded, and nothing can be removed: %s", self.limit_name, error)

    def make_space(self, size: int, spare_since: int | None = None) -> int:
        """Remove the files that were used longest ago, because the disk is full.

        Args:
            size: Bytes that are needed.
            spare_since: Files used at this time or later are not removed; None to remove any that are unused.

        Returns:
            The bytes that were freed.
        """
        with self._held() as held:
            return _evict(held, _count_again(held), size, spare_since, "the disk is full")

    def retry_with_space(
        self,
        directory: CacheDirectory,
        demands: Sequence[Demand],
        attempt: Callable[[], bool],
        *,
        release: Callable[[], object] | None = None,
        spare_since: int | None = None,
    ) -> bool:
        """Try again to create files once a full disk has more room.

        A prefetch gives way to readers, and tries once. A reader, which needs the files to continue, tries whenever
        there is more room: unused files are removed, its other shards are closed, and others get time to close theirs.

        Args:
            directory: The directory of the files.
            demands: The files, reserved already; their room on the disk is given back between attempts.
            attempt: Creates the files; returns False if the disk is too full.
            release: As for :meth:`reserve`.
            spare_since: As for :meth:`reserve`.

        Returns:
            Whether they were created; False if the disk is full of files that are in use.

        Raises:
            StorageError: The directory is gone, or may not be written to.
        """
        needed = sum(size for _, size in demands)
        if release is None:
            return not self.has_waiting_reader() and self.make_space(needed, spare_since) > 0 and attempt()
        release()
        with WaitQueue(directory.path) as queue:
            self._give_back(directory, demands)
            queue.wait(_WAIT_SECONDS)
            deadline = time.monotonic() + _WAIT_SECONDS
            for _ in shared_files.pauses(longest=_LONGEST_PAUSE):
                freed = self.make_space(needed)
                if freed:
                    deadline = time.monotonic() + _WAIT_SECONDS
                elif time.monotonic() > deadline:
                    break
                if freed or _free_bytes(directory.path) >= needed:
                    if attempt():
                        return True
                    self._give_back(directory, demands)
        return False

    def _give_back(self, directory: CacheDirectory, demands: Sequence[Demand]) -> None:
        """Free the room of counted files on the disk until they are written to again."""
        with directory.locked():
            for staging, size in demands:
                if staging.is_unpublished():
                    staging.resize(0)
                    staging.resize(size)

    def _reserve_again(self, directory: CacheDirectory, demands: Sequence[Demand]) -> bool:
        """Reserve room for a reader: within the limit if that is possible again, else within what it took before."""
        if self._reserve_within(self.limit, directory, demands, None):
            self._allowed = self.limit
            return True
        return self._allowed != self.limit and self._reserve_within(self._allowed, directory, demands, None)

    def _reserve_within(
        self, limit: int | None, directory: CacheDirectory, demands: Sequence[Demand], spare_since: int | None
    ) -> bool:
        if limit is None:
            with directory.locked() as counted:
                _take(counted, demands)
            return True
        with self._held() as held:
            wanted = _wanted(demands)
            if bytes_to_free(_counted(held), wanted, limit):
                owners = _count_again(held)
                _evict(held, owners, bytes_to_free(_counted(held), wanted, limit), spare_since, f"cache_limit={limit}")
                if _counted(held) + wanted > limit:
                    return False
            _take(_count_of(held, directory), demands)
            return True

    def _exceed(self, directory: CacheDirectory, demands: Sequence[Demand]) -> None:
        assert self.limit is not None
        with self._held() as held:
            _count_again(held)
            needed = _counted(held) + _wanted(demands)
            _take(_count_of(held, directory), demands)
        _record_in_vain(directory.path)
        enough = max(needed, self.fixed_bytes() + self._comfortable)
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "all of %s in %s is in use, so the cache_limit of %s is exceeded, from now on without waiting; "
                "%d bytes (%s) are enough, or more if several jobs share the directory",
                format_bytes(needed - _wanted(demands)),
                directory.path,
                format_bytes(self.limit),
                enough,
                format_bytes(enough),
            )
        self._allowed = max(needed, self._allowed or 0)

    @contextmanager
    def _held(self) -> Iterator[_Held]:
        """Hold the usage locks of all existing directories; without a limit, of those on filesystems with locks."""
        with ExitStack() as stack:
            held: _Held = {}
            for directory in self._directories:
                if shared_files.is_reachable(directory.path):
                    count = stack.enter_context(directory.locked())
                    if count is None:
                        if self.limit is None:
                            continue
                        raise ConfigError(
                            f"cache_limit needs file locks, which the filesystem of {directory.path} does not have",
                            hint="use a cache on a local disk, or omit cache_limit",
                            option="cache_limit",
                            path=str(directory.path),
                        )
                    held[directory.path] = (directory, count)
            yield held


_Held = dict[Path, tuple[CacheDirectory, UsageCount]]
_Owners = dict[CacheEntry, Path]


def _count_of(held: _Held, directory: CacheDirectory) -> UsageCount:
    if directory.path not in held:
        raise shared_files.directory_removed(directory.path)
    return held[directory.path][1]


def _free_bytes(directory: Path) -> int:
    try:
        stat = os.statvfs(directory)
    except FileNotFoundError:
        raise shared_files.directory_removed(directory) from None
    return stat.f_bavail * stat.f_frsize


def _counted(held: _Held) -> int:
    return sum(count.used + directory.fixed_bytes() for directory, count in held.values())


def _count_again(held: _Held) -> _Owners:
    """Count again, as counts are too large after a process was killed, and remove staging files of dead writers.

    Returns:
        All files that are ours, with their directories.
    """
    owners: _Owners = {}
    for directory, count in held.values():
        directory.sweep(count)
        scan = directory.scan()
        count.used = scan.bytes
        owners.update(dict.fromkeys(scan.files, directory.path))
    return owners


def _evict(held: _Held, owners: _Owners, enough: int, spare_since: int | None, why: str) -> int:
    def remove(file: CacheEntry) -> int:
        directory, count = held[owners[file]]
        return file.size if directory.remove_unused(count, [file], why) else 0

    return evict(iter(coldest_first(owners, spare_since)), enough, remove)


def _wanted(demands: Sequence[Demand]) -> int:
    return sum(size - staging.size for staging, size in demands)


def _take(count: UsageCount | None, demands: Sequence[Demand]) -> None:
    """Count the files, then set their sizes. Must be called while holding the usage lock."""
    if count is not None:
        count.used += _wanted(demands)
    for staging, size in demands:
        staging.resize(size)


class WaitQueue:
    """A reader in the queue of a cache directory, until the end of the block or of this process."""

    def __init__(self, root: Path) -> None:
        """Open the queue.

        Raises:
            StorageError: The directory is gone, or may not be written to.
        """
        self._descriptor = shared_files.open_shared(root / QUEUE_BASENAME, root)

    def wait(self, seconds: float) -> bool:
        """Wait until it is this reader's turn; return False if it does not come in time.

        All readers try equally often, so the first has no worse chance than the last.
        """
        with suppress(shared_files.LocksUnsupportedError):
            return any(
                shared_files.try_lock(self._descriptor, shared=False)
                for _ in shared_files.pauses(seconds, _QUEUE_PAUSE)
            )
        return True

    def __enter__(self) -> WaitQueue:
        return self

    def __exit__(self, *_: object) -> None:
        shared_files.unlock_and_close(self._descriptor)


def _record_in_vain(root: Path) -> None:
    """Record that a reader has waited in vain for room in a cache directory."""
    with suppress(OSError):  # then others wait as well
        descriptor = shared_files.open_shared(root / QUEUE_BASENAME, root)
        try:
            write_number(descriptor, time.time_ns())
        finally:
            os.close(descriptor)


def _was_in_vain(root: Path) -> bool:
    """Return whether a reader has waited in vain for room a short time ago."""
    recorded = read_number(root / QUEUE_BASENAME)
    return recorded is not None and 0 <= time.time_ns() - recorded < _IN_VAIN_NANOSECONDS


def largest_shard_bytes(shards: ShardTable, columns: Sequence[str] | None = None) -> int:
    """Return the bytes that the largest shard takes while it is fetched, compressed and raw; 0 without shards.

    Args:
        shards: All shards.
        columns: The columns that are read, which they have; None for all.
    """
    if not len(shards):
        return 0
    sizes = np.add.reduceat(shards.sizes, shards.first_file[:-1])
    parts = [number for number, kind in enumerate(shards.kinds) if kind.example.compression == PART]
    if not parts:
        return int(sizes.max())
    # Of a stored file with several shards, only the part of one takes room.
    is_part = np.isin(shards.kind_of_shard, parts)
    part_sizes = shards.data_bytes() if columns is None else shards.wanted_bytes(columns)
    largest = shards[int(np.where(is_part, part_sizes, -1).argmax())]
    return max(narrowed(largest, columns).raw_data.bytes, int(sizes[~is_part].max(initial=0)))
