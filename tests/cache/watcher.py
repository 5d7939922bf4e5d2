"""Watching a cache directory from outside: how big it gets, and what comes and goes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lightning_streaming.cache.layout import ARRIVING_BASENAME, PARSED_INDEX_PREFIX, USAGE_BASENAME

_IN_MOVED_TO, _IN_DELETE = 0x80, 0x200
_EVENT = struct.Struct("iIII")
_SECONDS = 0.05


class Watcher:
    """In a thread, for the length of a block: measures a directory every 50 ms, and counts what appears and vanishes.

    Sizes change only while somebody holds the ledger, so holding it is a look at one moment.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.largest = 0
        """Most bytes there were: the index, whole files and parts."""
        self.looks = 0
        """How often it was measured."""
        self.appeared: Counter[str] = Counter()
        """How often each file came in, by name."""
        self.removed: Counter[str] = Counter()
        """How often each file was removed, by name."""
        self._ended = threading.Event()
        self._events = ctypes.CDLL(None, use_errno=True).inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._events >= 0

    def __enter__(self) -> Watcher:
        watch = ctypes.CDLL(None).inotify_add_watch(self._events, bytes(self.root), _IN_MOVED_TO | _IN_DELETE)
        assert watch >= 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._read_events()
        os.close(self._events)

    def _watch(self) -> None:
        while not self._ended.wait(_SECONDS):
            self.largest = max(self.largest, measured(self.root))
            self.looks += 1
            self._read_events()

    def _read_events(self) -> None:
        while True:
            try:
                data = os.read(self._events, 2**16)
            except BlockingIOError:
                return
            place = 0
            while place < len(data):
                _, mask, _, length = _EVENT.unpack_from(data, place)
                name = data[place + _EVENT.size : place + _EVENT.size + length].rstrip(b"\0").decode()
                (self.appeared if mask & _IN_MOVED_TO else self.removed)[name] += 1
                place += _EVENT.size + length


def measured(root: Path) -> int:
    """Bytes of a cache directory at one moment: the index, whole files and parts; not what says how full it is."""
    with (root / USAGE_BASENAME).open("ab") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        sizes: dict[int, int] = {}
        for folder in (root / ARRIVING_BASENAME, root):  # a part that is published meanwhile keeps its number
            for path in list(folder.iterdir()) if folder.exists() else []:
                with suppress(FileNotFoundError):
                    found = path.stat()
                    if path.is_file() and (path.name[0] != "." or path.name.startswith(PARSED_INDEX_PREFIX)):
                        sizes[found.st_ino] = found.st_size
        # Not just closed: children forked meanwhile have copies of the file.
        fcntl.flock(ledger, fcntl.LOCK_UN)
    return sum(sizes.values())
