"""What the processes of a loader fetch before its first batch is there, told to whoever shows that to people.

A pipe from all processes that read to a thread of the loader's own. It is there only where somebody looks on, and only
until the first batch: who writes into it never waits, and what nobody reads is dropped.
"""

from __future__ import annotations

import multiprocessing
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

_RECORD = struct.Struct("=qq")
_AT_ONCE = 256
"""Records read together; each is written whole, so none is cut."""
_END = -1


class Fetched(NamedTuple):
    """What was fetched so far."""

    begun: int
    """Shards that were asked for, those that are here included."""
    here: int
    """Shards that have arrived."""
    of: int
    """Shards of the whole dataset."""
    bytes: int
    """Of those that have arrived, as they are stored."""
    seconds: float
    """Since the first was asked for."""


LookOn = Callable[[Fetched | None], object]
"""Is told what was fetched so far, in a thread of its own, and None at the end."""


class Arrivals:
    """The pipe of one pass.

    Args:
        look_on: Who is told.
        of: Shards of the whole dataset.
    """

    def __init__(self, look_on: LookOn, of: int) -> None:
        self._receiver, self._sender = multiprocessing.Pipe(duplex=False)
        os.set_blocking(self._sender.fileno(), False)
        self._lock, self._is_closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._listen, args=(look_on, of), name="arrivals", daemon=True)
        self._thread.start()

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned writes only.
        return {"_sender": self._sender}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _is_closed=False)

    def tell(self, begun: int, num_bytes: int) -> None:
        """Say in any process that a shard is asked for, or has arrived.

        Args:
            begun: 1 for a shard that is asked for, 0 for one that is here.
            num_bytes: What was fetched of the latter.
        """
        with self._lock:
            if not self._is_closed:
                with suppress(BlockingIOError, BrokenPipeError):  # nobody reads any more, or not as fast
                    os.write(self._sender.fileno(), _RECORD.pack(begun, num_bytes))

    def close(self) -> None:
        """The first batch is there, or will not come: whoever looks on is told so before this returns."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.set_blocking(self._sender.fileno(), True)  # the thread reads until it finds the end
        os.write(self._sender.fileno(), _RECORD.pack(_END, 0))
        self._thread.join()
        self._sender.close()
        self._receiver.close()

    def _listen(self, look_on: LookOn, of: int) -> None:
        begun = here = total = 0
        began = perf_counter()
        try:
            while True:
                for is_begun, num_bytes in _RECORD.iter_unpack(
                    os.read(self._receiver.fileno(), _AT_ONCE * _RECORD.size)
                ):
                    if is_begun == _END:
                        return
                    began = began if begun else perf_counter()
                    begun, here, total = begun + is_begun, here + 1 - is_begun, total + num_bytes
                look_on(Fetched(begun, here, of, total, perf_counter() - began))
        finally:
            look_on(None)
