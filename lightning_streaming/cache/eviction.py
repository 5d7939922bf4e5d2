"""What goes when there is no room: arithmetic on what a scan found."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_streaming.cache.scan import Entry

_SPARE_PART = 10
"""When something has to go, a tenth of the limit goes at once, so that not every shard costs a look at all others."""


def coldest_first(files: Iterable[Entry], spare_since: int | None) -> list[Entry]:
    """The files that may go, in the order in which they should.

    Args:
        files: Files that are ours.
        spare_since: Files used at this time or later stay, in nanoseconds; None for none.
    """
    return sorted((file for file in files if spare_since is None or file.stamp < spare_since), key=_by_stamp)


def bytes_to_free(used: int, wanted: int, limit: int) -> int:
    """How many bytes to remove so that ``wanted`` more fit; 0 if they do.

    For example with 995 of 1000 bytes used, 10 more need 5 bytes to go, and 95 go.

    Args:
        used: Bytes used now.
        wanted: Bytes to be added.
        limit: Most bytes there may be.
    """
    return 0 if used + wanted <= limit else used + max(wanted, limit // _SPARE_PART) - limit


def _by_stamp(file: Entry) -> tuple[int, str]:
    return file.stamp, file.path
