"""Which mark goes with an index: files that carry it were checked by that index, or by one that agrees with it.

The origin file ties a mark to the SHA-256 of an index. An index that only has more shards keeps the mark. Any other
takes the next one, so that jobs which began with the index before, and still publish files, do so under a mark that is
not believed any more. The steps are such that whoever is killed between two of them leaves files unchecked at worst.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from lightning_streaming.cache.index_changes import compare_files, extends
from lightning_streaming.cache.index_file import FoundIndex
from lightning_streaming.cache.marks import OwnTimes, make_mark, next_mark
from lightning_streaming.cache.origin import IndexCheck, Origin, read_origin, write_origin
from lightning_streaming.cache.place import CachePlace
from lightning_streaming.files import join_under


class IndexMarks:
    """The marks of a directory that holds files of a remote, changed by who holds the index's lock.

    Args:
        directory: The cache directory, which is there.
        scratch: A file in it that nobody else writes.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        self._directory = directory
        self._scratch = scratch

    def settle(self, origin: Origin, old: FoundIndex | None, new: FoundIndex) -> Origin:
        """Find the mark for an index that is in its place by now.

        Files that both indexes have keep their standing, if the old one is known to be what the mark went with; those
        that are others by now are removed. Without such an old one, all are to be checked again.

        Args:
            origin: What was known when the lock was taken.
            old: The index that was here; None if there was none that could be read.
            new: The one that is here.
        """
        is_known = old is not None and origin.digest == old.known.digest
        if origin.digest == new.known.digest or (old is not None and is_known and extends(old.index, new.index)):
            return origin
        renewed = self._renew(origin, new.known.digest)
        if old is not None and is_known and renewed.check is None:
            self._carry_over(origin, renewed, old, new)
        return renewed

    def note(self, origin: Origin, before: Origin, check: IndexCheck) -> Origin:
        """Tie a mark to an index.

        Args:
            origin: What :meth:`settle` gave.
            before: What that was given.
            check: Tells the index.
        """
        noted = replace(origin, check=check)
        with suppress(OSError), self._held(origin):  # else the remote is asked again next time
            latest = read_origin(self._directory)
            if latest is None or latest.mark != origin.mark:
                return noted  # another user was faster; we go on like a job that began before
            if latest.digest not in (before.digest, origin.digest, check.digest):
                noted = replace(noted, mark=next_mark(_mark_of(latest)))
            write_origin(self._directory, noted, self._scratch)
        return noted

    def _renew(self, origin: Origin, digest: str) -> Origin:
        try:
            with self._held(origin):
                latest = read_origin(self._directory) or origin
                if latest.mark != origin.mark and latest.digest == digest:
                    return latest  # another user adopted the same index just now
                renewed = replace(latest, mark=next_mark(_mark_of(latest)), check=None)
                write_origin(self._directory, renewed, self._scratch)
                return renewed
        except OSError:  # another user's file: nothing there is believed
            return replace(origin, mark=make_mark())

    def _carry_over(self, origin: Origin, renewed: Origin, old: FoundIndex, new: FoundIndex) -> None:
        own = OwnTimes(origin.mark)
        place = CachePlace(self._directory, lambda: own)
        for name, is_same in compare_files(old.index, new.index):
            path = join_under(self._directory, name)
            with suppress(FileNotFoundError):
                modified = path.stat().st_mtime_ns
                if is_same and modified == origin.mark:
                    _mark_again(path, modified, _mark_of(renewed))
                elif not is_same and own.include(modified):
                    place.remove(path)

    @contextmanager
    def _held(self, origin: Origin) -> Iterator[None]:
        """Hold the ledger, for moments: each user has an index lock of their own, but the origin file is one."""
        with CachePlace(self._directory, lambda: OwnTimes(_mark_of(origin))).held():
            yield


def _mark_of(origin: Origin) -> int:
    return make_mark() if origin.mark is None else origin.mark


def _mark_again(path: Path, before: int, mark: int) -> None:
    """Change a file's mark; by its descriptor, lest another one take its name meanwhile."""
    with suppress(OSError):  # gone, or another user's: it is checked when it is used
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = os.fstat(descriptor)
            if found.st_mtime_ns == before:
                os.utime(descriptor, ns=(found.st_atime_ns, mark))
        finally:
            os.close(descriptor)
