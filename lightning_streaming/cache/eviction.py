"""Eviction policy of caches under a limit, as pure functions of sizes and access times.

``quota.py`` applies it to the files of cache directories, ``lightning-streaming plan`` to simulated shards.

The access time of a file says when it was last used. A shard that the plan of the epoch does not need again gets one
before the year 2000, the later the smaller. So sorting by access time puts first the shard that was finished last,
which is needed again last; then the one that was used longest ago.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import ceil
from typing import Protocol, TypeVar

from lightning_streaming.errors import ConfigError
from lightning_streaming.units import unit_as_written

FINISHED_BEFORE = 946_684_800 * 10**9
"""Access times from the year 2000 on, in nanoseconds, are of shards that may be needed again this epoch."""
_FAR = 4_102_444_800 * 10**9
"""Start of the year 2100, in nanoseconds."""
_SLOWER = 5
"""Access times of finished shards go back by a second in five: a shard finished in 2026 has one of the year 1984."""
_SPARE_PART = 10
"""An eviction frees at least a tenth of the limit, so that not every new shard has to scan all files."""


class _Evictable(Protocol):
    """A file with its access time in nanoseconds."""

    @property
    def path(self) -> str: ...

    @property
    def accessed(self) -> int: ...


_File = TypeVar("_File", bound=_Evictable)
_Item = TypeVar("_Item")


def finished_time(now: int) -> int:
    """Return the access time of a shard finished at ``now``; both in nanoseconds since 1970."""
    return max(0, (_FAR - now) // _SLOWER)


def last_used(accessed: int) -> int:
    """Return when a file with this access time was last used, finished or not; both in nanoseconds since 1970."""
    return accessed if accessed >= FINISHED_BEFORE else _FAR - _SLOWER * accessed


def is_spared(accessed: int, spare_since: int | None) -> bool:
    """Return whether a file stays because it was used at ``spare_since`` or later; None spares no file."""
    return spare_since is not None and accessed >= spare_since


def prefetch_spares_since(ahead_bytes: int, oldest: int | None, size: int, share: int | None) -> int | None:
    """Return the access time from which files stay when a reader prefetches one more shard; None if any may go.

    What the reader has prefetched and not opened yet stays. Beyond its share of the limit, it may only push out what no
    reader needs again this epoch.

    Args:
        ahead_bytes: Bytes of the shards that it has prefetched.
        oldest: When the first of them was fetched; None if there is none.
        size: Bytes of the shard to prefetch.
        share: Bytes that it may prefetch at the cost of other shards; None without a limit.
    """
    return FINISHED_BEFORE if share is not None and ahead_bytes + size > share else oldest


def coldest_first(files: Iterable[_File], spare_since: int | None) -> list[_File]:
    """Sort the files that may be evicted, the first to go first.

    Args:
        files: The files of a cache.
        spare_since: As for :func:`is_spared`.
    """
    allowed = (file for file in files if not is_spared(file.accessed, spare_since))
    return sorted(allowed, key=lambda file: (file.accessed, file.path))


def bytes_to_free(used: int, wanted: int, limit: int) -> int:
    """Return how many bytes to remove so that ``wanted`` more fit; 0 if they do.

    For example with 995 of 1000 bytes used, 10 more exceed the limit by 5 bytes, and 95 are freed.

    Args:
        used: Bytes used now.
        wanted: Bytes to be added.
        limit: Most bytes there may be.
    """
    return 0 if used + wanted <= limit else used + max(wanted, limit // _SPARE_PART) - limit


def evict(coldest: Iterator[_Item], enough: int, remove: Callable[[_Item], int]) -> int:
    """Remove one item after another until enough bytes are freed, and return how many were.

    Args:
        coldest: The items that may go, the first to go first.
        enough: Bytes to free.
        remove: Removes an item and returns its bytes; 0 if it is in use.
    """
    freed = 0
    while freed < enough and (item := next(coldest, None)) is not None:
        freed += remove(item)
    return freed


def least_limit(fixed_bytes: int, shard_bytes: int) -> int:
    """Return the smallest limit that can work: one shard in use, and the next one on its way.

    Args:
        fixed_bytes: Size of the indexes and selections, which are never evicted.
        shard_bytes: Bytes that the largest shard takes while it is fetched and decompressed.
    """
    return fixed_bytes + 2 * shard_bytes


def check_limit(limit: int | None, fixed_bytes: int, shard_bytes: int, name: str = "cache_limit") -> None:
    """Refuse a limit that cannot work.

    Args:
        limit: Most bytes that caches may hold; None for no limit.
        fixed_bytes: As for :func:`least_limit`.
        shard_bytes: As for :func:`least_limit`.
        name: Name of the option that sets the limit.

    Raises:
        ConfigError: It is too small; the message has the smallest that is not.
    """
    least = least_limit(fixed_bytes, shard_bytes)
    if limit is None or limit >= least:
        return
    unit, written = unit_as_written(least)
    fixed, shard = ceil(fixed_bytes / unit), ceil(shard_bytes / unit)
    value = next(f"{limit // size}{of}" for size, of in ((2**20, "mb"), (2**10, "kb"), (1, "b")) if not limit % size)
    raise ConfigError(
        f"{name} is {value}; at least "
        f"{fixed + 2 * shard}{written} is needed: {fixed}{written} for index and selections, and twice "
        f"{shard}{written}, which is the largest shard, raw and compressed. Selections of other runs count too: "
        "`lightning-streaming cache gc --older-than 7d` removes those that were long unused",
        option="cache_limit",
    )


def reader_share(limit: int, readers: int) -> int:
    """Return the bytes of shards that one reader may keep open, and may prefetch: half of the limit is for each use.

    Args:
        limit: Most bytes of all shards.
        readers: Processes that read the same dataset on this node.
    """
    return limit // (2 * readers)
