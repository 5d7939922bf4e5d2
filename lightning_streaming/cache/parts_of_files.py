"""Makes raw files of parts of stored ones, as of row groups of Parquet, and keeps what is to be known of the latter."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from lightning_streaming.errors import FormatError
from lightning_streaming.files import disk_errors
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.formats.shard import range_readable_format
from lightning_streaming.formats.shard_format import RangedFile

_MOST_KNOWN = 64
"""Files of which is kept what is to be known: of Parquet the footer, of a megabyte at most as a rule."""


class Unpacked(NamedTuple):
    """What was done for a raw file."""

    num_bytes: int
    """That were read of the stored file."""
    read_until: int
    """When the last of them had been read, by ``perf_counter_ns``; then the raw file was made of them."""


class PartsOfFiles:
    """The stored files of one stream. A copy in another process knows none. May be used by several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def unpack(self, shard: ShardInfo, stored: RangedFile, destination: Path, *, version: str = "") -> Unpacked:
        """Make a shard's raw file.

        A file that does not go with what was known of it, or with the index, is looked at once more.

        Args:
            shard: The shard, a part of a file.
            stored: That file.
            destination: The raw file.
            version: Of that file: what is known of another version is not used.

        Raises:
            FormatError: The stored file is damaged, or another one than when the index was made.
            DiskFullError: There is no room for the raw file.
            StorageError: The stored file could not be read, or the raw one not be written.
        """
        parts = range_readable_format(shard)
        assert parts is not None, "or it is no part of a file"
        watched, key = _WatchedFile(stored), (stored.shown, version)
        with disk_errors(destination):
            known = self._take(key)
            if known is not None:
                # What is known may be of another file that was there before.
                with suppress(FormatError):
                    num_bytes = parts.unpack(shard, known, watched, destination)
                    return Unpacked(num_bytes, watched.read_until)
            known = parts.read_metadata(watched)
            num_bytes = parts.unpack(shard, known, watched, destination)
            self._keep(key, known)
            return Unpacked(num_bytes, watched.read_until)

    def _take(self, key: tuple[str, str]) -> Any:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def _keep(self, key: tuple[str, str], known: Any) -> None:
        with self._lock:
            self._known[key] = known
            self._known.move_to_end(key)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)


class _WatchedFile:
    """A stored file, and when the last of it was read."""

    def __init__(self, stored: RangedFile) -> None:
        self._stored, self.shown, self.size = stored, stored.shown, stored.size
        self.read_until = perf_counter_ns()

    def read(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes | memoryview]:
        """The bytes of some ranges; see :class:`RangedFile`."""
        found = self._stored.read(ranges)
        self.read_until = perf_counter_ns()
        return found
