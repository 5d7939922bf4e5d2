"""How much a dataset's directories may hold, who waits when that is full, and what goes.

Readers who wait for room queue: only one at a time looks through the files, and who fetches ahead stands back. The
file ``.queue``, whose lock is the queue, also says when somebody last waited in vain: others need not find out again.
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
from lightning_streaming.cache.usage import CacheEntry, UsageCount, read_number, write_number
from lightning_streaming.errors import ConfigError, StorageError
from lightning_streaming.escaping import package_logger
from lightning_streaming.formats.shard import narrowed
from lightning_streaming.formats.shard_table import PART, ShardTable
from lightning_streaming.units import format_bytes

_logger = package_logger(__name__)

_WAIT_SECONDS = 30.0
"""How long a reader waits for others to let go of shards before it exceeds the limit."""
_LONGEST_PAUSE = 0.05
"""Seconds between two looks for room; each may go through all files."""
_QUEUE_PAUSE = 0.004
"""Seconds between two looks whether it is our turn."""
_IN_VAIN_NANOSECONDS = 600 * 10**9
"""For so long after somebody waited in vain nobody waits: workers of the next epoch would, each for itself."""

Demand = tuple[StagingFile, int]
"""A staging file, and the bytes it will have."""


class CacheQuota:
    """The directories of a dataset's streams, and the bytes they may hold together.

    Everybody who uses a directory shares its count, so the limits of several jobs hold side by side.

    Args:
        directories: The directories.
        limit: Most bytes they may hold, files on their way and indexes included; None for no limit.
    """

    def __init__(self, directories: Iterable[CacheDirectory], limit: int | None = None) -> None:
        by_path = {directory.path: directory for directory in directories}
        # Everybody takes the locks of several directories in one order.
        self._directories = [by_path[path] for path in sorted(by_path)]
        self._allowed = limit  # for readers: more, after one of this process had to exceed it
        self._has_warned = False
        self._comfortable = 0
        self.limit = limit
        """Most bytes; None for no limit."""
        self.limit_name = "cache_limit"
        """What the limit is called where it is configured."""

    def expect(self, readers: int, shard_bytes: int) -> None:
        """Say how many processes of a job will read shards of at most this size, for words about a limit."""
        self._comfortable = 2 * readers * shard_bytes

    def usage(self) -> int:
        """Bytes of what is ours in the directories."""
        return sum(directory.usage() for directory in self._directories)

    def fixed_bytes(self) -> int:
        """Bytes of the indexes and selections, which no eviction makes room of."""
        return sum(directory.fixed_bytes() for directory in self._directories)

    def forget_fixed_bytes(self) -> None:
        """Count the indexes and selections anew when they are asked for: some were added."""
        for directory in self._directories:
            directory.forget_fixed_bytes()

    def somebody_waits(self) -> bool:
        """Whether a reader waits for room, under a limit or on a full disk, who should get it before others."""
        return any(
            shared_files.is_locked(directory.path / QUEUE_BASENAME, shared=True) for directory in self._directories
        )

    def is_scarce(self, size: int) -> bool:
        """Whether a reader waits for room, or one of the disks has fewer bytes left than ``size``."""
        found = (directory.path for directory in self._directories if shared_files.is_reachable(directory.path))
        return self.somebody_waits() or any(_free_bytes(directory) < size for directory in found)

    @property
    def num_directories(self) -> int:
        """Directories that are counted."""
        return len(self._directories)

    def reserve(
        self,
        directory: CacheDirectory,
        demands: Sequence[Demand],
        *,
        release: Callable[[], object] | None = None,
        spare_since: int | None = None,
    ) -> bool:
        """Make room for files and give each its size.

        Who fetches ahead waits for nobody. For a reader, who needs the files to go on, what is unused goes; then what
        it can do without; then others get time to let go of theirs. In the end the limit is exceeded, with one warning;
        this reader then keeps to what it took. For a while after that nobody who uses the directory waits again:
        readers that hold shards longer than others wait would stop them each time.

        Args:
            directory: The directory that the files are for, which is there.
            demands: The files.
            release: Closes what a reader has open; None for who fetches ahead.
            spare_since: For who fetches ahead, nothing used at this time or later is removed; None for no such time.

        Returns:
            Whether there is room now, as always for a reader; if not, nothing was changed but for what was removed in
            vain.

        Raises:
            ConfigError: There is a limit, and the filesystem has no locks to keep it by.
            StorageError: The directory is gone, or may not be written to.
        """
        if release is None:
            return not self.somebody_waits() and self._reserve_within(self.limit, directory, demands, spare_since)
        if not self.somebody_waits() and self._reserve_again(directory, demands):
            return True
        release()
        if not self._reserve_waiting(directory, demands):
            self._exceed(directory, demands)
        return True

    def _reserve_waiting(self, directory: CacheDirectory, demands: Sequence[Demand]) -> bool:
        if _was_in_vain(directory.path):
            return self._reserve_again(directory, demands)
        with WaitQueue(directory.path) as queue:
            deadline = time.monotonic() + _WAIT_SECONDS
            queue.wait(_WAIT_SECONDS)
            for _ in shared_files.pauses(deadline - time.monotonic(), _LONGEST_PAUSE):
                if self._reserve_again(directory, demands):
                    return True
                if _was_in_vain(directory.path):
                    break
        return False

    def trim(self) -> None:
        """Remove what is unused where the directories hold more than the limit, as after a run with a larger one.

        Raises:
            ConfigError: The limit is exceeded, and the filesystem has no locks to keep it by.
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
        """Remove what was used longest ago, because the disk is full.

        Args:
            size: Bytes that are needed.
            spare_since: Nothing used at this time or later is removed; None where all that is unused may be.

        Returns:
            Bytes freed; 0 if nothing could go.
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
        """Try again something for which the disk was too full, when there is more room.

        Who fetches ahead stands back for readers, and tries it once: a full disk is like a limit that was reached. A
        reader, who needs it to go on, tries whenever there is more room: what is unused goes, what it can do without
        first, and others get time to let go of theirs.

        Args:
            directory: The directory that the files are for.
            demands: The files, reserved already; what they take on the disk is given back until it is tried again.
            attempt: Makes the files; gives False if the disk is too full for it.
            release: As for :meth:`reserve`.
            spare_since: As for :meth:`reserve`.

        Returns:
            Whether it was done; False if the disk is full of what nobody lets go of.

        Raises:
            StorageError: The directory is gone, or may not be written to.
        """
        needed = sum(size for _, size in demands)
        if release is None:
            return not self.somebody_waits() and self.make_space(needed, spare_since) > 0 and attempt()
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
        """Let files that are counted already take no room on the disk, until they are written to again."""
        with directory.locked():
            for staging, size in demands:
                if staging.is_unpublished():
                    staging.resize(0)
                    staging.resize(size)

    def _reserve_again(self, directory: CacheDirectory, demands: Sequence[Demand]) -> bool:
        """As :meth:`_reserve_within` for a reader: within the limit if that is possible again, or what it took."""
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
        _note_in_vain(directory.path)
        enough = max(needed, self.fixed_bytes() + self._comfortable)
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "all of %s in %s is in use, so the cache_limit of %s is exceeded, from now on without waiting; "
                "%d bytes (%s) would do, or more where several jobs share the directory",
                format_bytes(needed - _wanted(demands)),
                directory.path,
                format_bytes(self.limit),
                enough,
                format_bytes(enough),
            )
        self._allowed = max(needed, self._allowed or 0)

    @contextmanager
    def _held(self) -> Iterator[_Held]:
        """Hold the usage locks of all directories that are there; without a limit, of those that have locks."""
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
                            hint="keep the cache on a local disk, or leave cache_limit out",
                            option="cache_limit",
                            path=str(directory.path),
                        )
                    held[directory.path] = (directory, count)
            yield held


_Held = dict[Path, tuple[CacheDirectory, UsageCount]]
_Owners = dict[CacheEntry, Path]


def _count_of(held: _Held, directory: CacheDirectory) -> UsageCount:
    if directory.path not in held:
        raise shared_files.directory_gone(directory.path)
    return held[directory.path][1]


def _free_bytes(directory: Path) -> int:
    try:
        found = os.statvfs(directory)
    except FileNotFoundError:
        raise shared_files.directory_gone(directory) from None
    return found.f_bavail * found.f_frsize


def _counted(held: _Held) -> int:
    return sum(count.used + directory.fixed_bytes() for directory, count in held.values())


def _count_again(held: _Held) -> _Owners:
    """Mend the counts, which are too big where somebody was killed, and remove what dead writers left.

    Returns:
        All files that are ours, and the directory that each is in.
    """
    owners: _Owners = {}
    for directory, count in held.values():
        directory.sweep(count)
        found = directory.scan()
        count.used = found.bytes
        owners.update(dict.fromkeys(found.files, directory.path))
    return owners


def _evict(held: _Held, owners: _Owners, enough: int, spare_since: int | None, why: str) -> int:
    def remove(file: CacheEntry) -> int:
        directory, count = held[owners[file]]
        return file.size if directory.remove_unused(count, [file], why) else 0

    return evict(iter(coldest_first(owners, spare_since)), enough, remove)


def _wanted(demands: Sequence[Demand]) -> int:
    return sum(size - staging.size for staging, size in demands)


def _take(count: UsageCount | None, demands: Sequence[Demand]) -> None:
    """Count the files, then give them their sizes. Must be called while holding the usage lock."""
    if count is not None:
        count.used += _wanted(demands)
    for staging, size in demands:
        staging.resize(size)


class WaitQueue:
    """A directory in the queue of a cache directory, given back at the end of the block or when this process dies."""

    def __init__(self, root: Path) -> None:
        """Queue up.

        Raises:
            StorageError: The directory is gone, or may not be written to.
        """
        self._descriptor = shared_files.open_shared(root / QUEUE_BASENAME, root)

    def wait(self, seconds: float) -> bool:
        """Wait until it is this reader's turn; False if it does not come in time.

        All look equally often, so that who came first has no worse a chance than who comes last.
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


def _note_in_vain(root: Path) -> None:
    """Say that a reader has waited for room in a cache directory, and got none."""
    with suppress(OSError):  # then others wait as well
        descriptor = shared_files.open_shared(root / QUEUE_BASENAME, root)
        try:
            write_number(descriptor, time.time_ns())
        finally:
            os.close(descriptor)


def _was_in_vain(root: Path) -> bool:
    """Whether a reader has waited for room in vain a short time ago."""
    noted = read_number(root / QUEUE_BASENAME)
    return noted is not None and 0 <= time.time_ns() - noted < _IN_VAIN_NANOSECONDS


def largest_shard_bytes(shards: ShardTable, columns: Sequence[str] | None = None) -> int:
    """Bytes that the largest shard takes while it is made: its files, compressed and raw; 0 where there is none.

    Args:
        shards: All shards.
        columns: The columns that are read, which they have; None for all.
    """
    if not len(shards):
        return 0
    sizes = np.add.reduceat(shards.sizes, shards.first_file[:-1])
    parts = [place for place, kind in enumerate(shards.kinds) if kind.example.compression == PART]
    if not parts:
        return int(sizes.max())
    # Of a stored file that holds several shards, only the part that is one of them takes room.
    is_part = np.isin(shards.kind_of_shard, parts)
    part_sizes = shards.data_bytes() if columns is None else shards.wanted_bytes(columns)
    largest = shards[int(np.where(is_part, part_sizes, -1).argmax())]
    return max(narrowed(largest, columns).raw_data.bytes, int(sizes[~is_part].max(initial=0)))
