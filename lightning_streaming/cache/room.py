"""Room for shards: how much a dataset's directories may hold, and who has to go when that is full."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightning_streaming.cache.arrival import Part
from lightning_streaming.cache.eviction import bytes_to_free, coldest_first
from lightning_streaming.cache.ledger import Ledger
from lightning_streaming.cache.locks import pauses
from lightning_streaming.cache.place import CachePlace
from lightning_streaming.cache.scan import Entry
from lightning_streaming.cache.turns import Turn, somebody_waits
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
        self._allowed = limit  # for readers: more, once one of this process had to exceed it
        self.limit = limit
        """Most bytes; None for no limit."""

    def usage(self) -> int:
        """Bytes of what is ours in the directories."""
        return sum(place.usage() for place in self._places)

    def fixed_bytes(self) -> int:
        """Bytes of the indexes, which no eviction makes room of."""
        return sum(place.fixed_bytes() for place in self._places)

    def somebody_waits(self) -> bool:
        """Whether a reader waits for room, who should get it before anybody fetches ahead."""
        return self.limit is not None and any(somebody_waits(place.directory) for place in self._places)

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
        return self._reserve(self.limit, place, demands, spare_since)

    def reserve_now(self, place: CachePlace, demands: Sequence[Demand], let_go: Callable[[], object]) -> None:
        """Make room for files that a reader needs to go on, and give each its size.

        What is unused goes; then what this reader can do without; then others get time to let go of theirs. In the end
        the limit is exceeded, with one warning; this reader then keeps to what it took.

        Args:
            place: The directory that the files are for, which is there.
            demands: The files.
            let_go: Closes what this reader has open.

        Raises:
            ConfigError: There is a limit, and the filesystem has no locks to keep it by.
            StorageError: The directory is gone, or may not be written to.
        """
        if self._reserve(self._allowed, place, demands, None):
            return
        assert self._allowed is not None
        let_go()
        with Turn(place.directory) as turn:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            turn.wait(_PATIENCE_SECONDS)
            for _ in pauses(deadline - time.monotonic(), _LONGEST_PAUSE):
                if self._reserve_within(self._allowed, place, demands, None):
                    return
            self._exceed(place, demands)

    def make_space(self, size: int) -> int:
        """Remove what was used longest ago, because the disk is full; gives the bytes freed, 0 if nothing could go."""
        with self._held() as held:
            return _evict(held, _count_again(held), size, None)

    def _reserve(
        self, limit: int | None, place: CachePlace, demands: Sequence[Demand], spare_since: int | None
    ) -> bool:
        if limit is None:
            with place.held() as ledger:
                _take(ledger, demands)
            return True
        return not self.somebody_waits() and self._reserve_within(limit, place, demands, spare_since)

    def _reserve_within(
        self, limit: int, place: CachePlace, demands: Sequence[Demand], spare_since: int | None
    ) -> bool:
        with self._held() as held:
            wanted = _wanted(demands)
            if bytes_to_free(_counted(held), wanted, limit):
                owners = _count_again(held)
                _evict(held, owners, bytes_to_free(_counted(held), wanted, limit), spare_since)
                if _counted(held) + wanted > limit:
                    return False
            _take(held[place.directory][1], demands)
            return True

    def _exceed(self, place: CachePlace, demands: Sequence[Demand]) -> None:
        assert self.limit is not None
        with self._held() as held:
            _count_again(held)
            needed = _counted(held) + _wanted(demands)
            _take(held[place.directory][1], demands)
        if self._allowed == self.limit:
            _logger.warning(
                "all of %s in %s is in use, so the cache_limit of %s is exceeded; %d bytes (%s) would do",
                format_bytes(needed - _wanted(demands)),
                place.directory,
                format_bytes(self.limit),
                needed,
                format_bytes(needed),
            )
        self._allowed = max(needed, self._allowed or 0)

    @contextmanager
    def _held(self) -> Iterator[_Held]:
        """Hold the ledgers of all directories that are there."""
        with ExitStack() as stack:
            held: _Held = {}
            for place in self._places:
                if place.directory.is_dir():
                    ledger = stack.enter_context(place.held())
                    if ledger is None:
                        raise ConfigError(
                            f"cache_limit needs file locks, which the filesystem of {place.directory} does not have; "
                            "keep the cache on a local disk, or leave cache_limit out"
                        )
                    held[place.directory] = (place, ledger)
            yield held


_Held = dict[Path, tuple[CachePlace, Ledger]]
_Owners = dict[Entry, Path]


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
