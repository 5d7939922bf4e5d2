"""Room for shards: how much a dataset's directories may hold, and who has to go when that is full."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightning_streaming.cache.arrival import Part, directory_gone
from lightning_streaming.cache.eviction import bytes_to_free, coldest_first
from lightning_streaming.cache.ledger import Ledger
from lightning_streaming.cache.locks import pauses
from lightning_streaming.cache.permissions import is_reachable
from lightning_streaming.cache.place import CachePlace
from lightning_streaming.cache.scan import Entry
from lightning_streaming.cache.turns import Turn, note_in_vain, somebody_waits, was_in_vain
from lightning_streaming.errors import ConfigError
from lightning_streaming.units import format_bytes

_logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 30.0
"""How long a reader waits for others to let go of shards before it exceeds the limit."""
_LONGEST_PAUSE = 0.05
"""Seconds between two looks for room; each may go through all files."""

Demand = tuple[Part, int]
"""A part and the bytes it will have."""


class CacheRoom:
    """The directories of a dataset's streams, and the bytes they may hold together.

    Everybody who uses a directory shares its count, so the limits of several jobs hold side by side.

    Args:
        places: The directories.
        limit: Most bytes they may hold, files on their way and indexes included; None for no limit.
    """

    def __init__(self, places: Iterable[CachePlace], limit: int | None = None) -> None:
        by_directory = {place.directory: place for place in places}
        # Everybody takes the locks of several directories in one order.
        self._places = [by_directory[directory] for directory in sorted(by_directory)]
        self._allowed = limit  # for readers: more, after one of this process had to exceed it
        self._has_warned = False
        self._comfortable = 0
        self.limit = limit
        """Most bytes; None for no limit."""

    def expect(self, readers: int, shard_bytes: int) -> None:
        """Say how many processes of a job will read shards of at most this size, for words about a limit."""
        self._comfortable = 2 * readers * shard_bytes

    def usage(self) -> int:
        """Bytes of what is ours in the directories."""
        return sum(place.usage() for place in self._places)

    def fixed_bytes(self) -> int:
        """Bytes of the indexes, which no eviction makes room of."""
        return sum(place.fixed_bytes() for place in self._places)

    def somebody_waits(self) -> bool:
        """Whether a reader waits for room, under a limit or on a full disk, who should get it before others."""
        return any(somebody_waits(place.directory) for place in self._places)

    def is_scarce(self, size: int) -> bool:
        """Whether a reader waits for room, or one of the disks has fewer bytes left than ``size``."""
        found = (place.directory for place in self._places if is_reachable(place.directory))
        return self.somebody_waits() or any(_free_bytes(directory) < size for directory in found)

    @property
    def num_places(self) -> int:
        """Directories that are counted."""
        return len(self._places)

    def reserve(self, place: CachePlace, demands: Sequence[Demand], *, spare_since: int | None) -> bool:
        """Make room for files and give each its size, without waiting for anybody to let go of others.

        Args:
            place: The directory that the files are for, which is there.
            demands: The files.
            spare_since: Nothing used at this time or later is removed; None where all that is unused may be.

        Returns:
            Whether there is room now; if not, nothing was changed but for what was removed in vain.

        Raises:
            ConfigError: There is a limit, and the filesystem has no locks to keep it by.
            StorageError: The directory is gone, or may not be written to.
        """
        return not self.somebody_waits() and self._reserve_within(self.limit, place, demands, spare_since)

    def reserve_now(self, place: CachePlace, demands: Sequence[Demand], let_go: Callable[[], object]) -> None:
        """Make room for files that a reader needs to go on, and give each its size.

        What is unused goes; then what this reader can do without; then others get time to let go of theirs. In the end
        the limit is exceeded, with one warning; this reader then keeps to what it took. For a while after that nobody
        who uses the directory waits again: readers that hold shards longer than others wait would stop them each time.

        Args:
            place: The directory that the files are for, which is there.
            demands: The files.
            let_go: Closes what this reader has open.

        Raises:
            ConfigError: There is a limit, and the filesystem has no locks to keep it by.
            StorageError: The directory is gone, or may not be written to.
        """
        if not self.somebody_waits() and self._reserve_again(place, demands):
            return
        let_go()
        if was_in_vain(place.directory):
            if not self._reserve_again(place, demands):
                self._exceed(place, demands)
            return
        with Turn(place.directory) as turn:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            turn.wait(_PATIENCE_SECONDS)
            for _ in pauses(deadline - time.monotonic(), _LONGEST_PAUSE):
                if self._reserve_again(place, demands):
                    return
                if was_in_vain(place.directory):
                    break
        self._exceed(place, demands)

    def make_space(self, size: int, spare_since: int | None = None) -> int:
        """Remove what was used longest ago, because the disk is full.

        Args:
            size: Bytes that are needed.
            spare_since: Nothing used at this time or later is removed; None where all that is unused may be.

        Returns:
            Bytes freed; 0 if nothing could go.
        """
        with self._held() as held:
            return _evict(held, _count_again(held), size, spare_since)

    def try_with_space(
        self, place: CachePlace, demands: Sequence[Demand], attempt: Callable[[], bool], let_go: Callable[[], object]
    ) -> bool:
        """Try something that a reader needs to go on, and for which the disk was too full, whenever there is more room.

        What is unused goes; what this reader can do without first. Others get time to let go of theirs.

        Args:
            place: The directory that the files are for.
            demands: The files, reserved already; what they take on the disk is given back until it is tried again.
            attempt: Makes the files; gives False if the disk is too full for it.
            let_go: Closes what this reader has open.

        Returns:
            Whether it was done; False if the disk is full of what nobody lets go of.

        Raises:
            StorageError: The directory is gone, or may not be written to.
        """
        let_go()
        needed = sum(size for _, size in demands)
        with Turn(place.directory) as turn:
            self._give_back(place, demands)
            turn.wait(_PATIENCE_SECONDS)
            deadline = time.monotonic() + _PATIENCE_SECONDS
            for _ in pauses(longest=_LONGEST_PAUSE):
                freed = self.make_space(needed)
                if freed:
                    deadline = time.monotonic() + _PATIENCE_SECONDS
                elif time.monotonic() > deadline:
                    break
                if freed or _free_bytes(place.directory) >= needed:
                    if attempt():
                        return True
                    self._give_back(place, demands)
        return False

    def _give_back(self, place: CachePlace, demands: Sequence[Demand]) -> None:
        """Let files that are counted already take no room on the disk, until they are written to again."""
        with place.held():
            for part, size in demands:
                if part.is_unpublished():
                    part.resize(0)
                    part.resize(size)

    def _reserve_again(self, place: CachePlace, demands: Sequence[Demand]) -> bool:
        """As :meth:`_reserve_within` for a reader: within the limit if that is possible again, or what it took."""
        if self._reserve_within(self.limit, place, demands, None):
            self._allowed = self.limit
            return True
        return self._allowed != self.limit and self._reserve_within(self._allowed, place, demands, None)

    def _reserve_within(
        self, limit: int | None, place: CachePlace, demands: Sequence[Demand], spare_since: int | None
    ) -> bool:
        if limit is None:
            with place.held() as counted:
                _take(counted, demands)
            return True
        with self._held() as held:
            wanted = _wanted(demands)
            if bytes_to_free(_counted(held), wanted, limit):
                owners = _count_again(held)
                _evict(held, owners, bytes_to_free(_counted(held), wanted, limit), spare_since)
                if _counted(held) + wanted > limit:
                    return False
            _take(_ledger_of(held, place), demands)
            return True

    def _exceed(self, place: CachePlace, demands: Sequence[Demand]) -> None:
        assert self.limit is not None
        with self._held() as held:
            _count_again(held)
            needed = _counted(held) + _wanted(demands)
            _take(_ledger_of(held, place), demands)
        note_in_vain(place.directory)
        enough = max(needed, self.fixed_bytes() + self._comfortable)
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "all of %s in %s is in use, so the cache_limit of %s is exceeded, from now on without waiting; "
                "%d bytes (%s) would do, or more where several jobs share the directory",
                format_bytes(needed - _wanted(demands)),
                place.directory,
                format_bytes(self.limit),
                enough,
                format_bytes(enough),
            )
        self._allowed = max(needed, self._allowed or 0)

    @contextmanager
    def _held(self) -> Iterator[_Held]:
        """Hold the ledgers of all directories that are there; without a limit, of those that have locks."""
        with ExitStack() as stack:
            held: _Held = {}
            for place in self._places:
                if is_reachable(place.directory):
                    ledger = stack.enter_context(place.held())
                    if ledger is None:
                        if self.limit is None:
                            continue
                        raise ConfigError(
                            f"cache_limit needs file locks, which the filesystem of {place.directory} does not have; "
                            "keep the cache on a local disk, or leave cache_limit out"
                        )
                    held[place.directory] = (place, ledger)
            yield held


_Held = dict[Path, tuple[CachePlace, Ledger]]
_Owners = dict[Entry, Path]


def _ledger_of(held: _Held, place: CachePlace) -> Ledger:
    if place.directory not in held:
        raise directory_gone(place.directory)
    return held[place.directory][1]


def _free_bytes(directory: Path) -> int:
    try:
        found = os.statvfs(directory)
    except FileNotFoundError:
        raise directory_gone(directory) from None
    return found.f_bavail * found.f_frsize


def _counted(held: _Held) -> int:
    return sum((ledger.used or 0) + place.fixed_bytes() for place, ledger in held.values())


def _count_again(held: _Held) -> _Owners:
    """Mend the counts, which are too big where somebody was killed, and remove the parts of the dead.

    Returns:
        All files that are ours, and the directory that each is in.
    """
    owners: _Owners = {}
    for place, ledger in held.values():
        place.sweep(ledger)
        found = place.scan()
        ledger.used = found.bytes
        owners.update(dict.fromkeys(found.files, place.directory))
    return owners


def _evict(held: _Held, owners: _Owners, enough: int, spare_since: int | None) -> int:
    freed = 0
    for file in coldest_first(owners, spare_since):
        if freed >= enough:
            break
        place, ledger = held[owners[file]]
        freed += file.size if place.remove_unused(ledger, [file]) else 0
    return freed


def _wanted(demands: Sequence[Demand]) -> int:
    return sum(size - part.size for part, size in demands)


def _take(ledger: Ledger | None, demands: Sequence[Demand]) -> None:
    """Count the files, then give them their sizes. Must be called while holding the ledger."""
    if ledger is not None and ledger.used is not None:
        ledger.used += _wanted(demands)
    for part, size in demands:
        part.resize(size)
