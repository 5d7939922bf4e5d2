"""How many parts a process transfers at once: of all its downloads together, the one that began first going first."""

from __future__ import annotations

import asyncio
import heapq
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

CONNECTIONS = 16
"""Parts in flight, unless a caller says otherwise."""
_OF_NODE = 64
"""Parts in flight of all processes of a node that have said how many they are."""
_LEAST = 2


@dataclass
class Lanes:
    """The parts in flight of one process, and those that wait. To be used in the thread of its event loop only."""

    in_flight: int = 0
    most: int = CONNECTIONS
    """Lanes there are, whatever whoever asks knows of."""
    _waiting: list[tuple[int, int, int, asyncio.Future[None]]] = field(default_factory=list)
    _arrivals: count[int] = field(default_factory=count)

    @asynccontextmanager
    async def one(self, turn: int, connections: int) -> AsyncIterator[None]:
        """Hold one lane, once there are fewer than ``connections`` in use.

        Args:
            turn: Lower ones go first; see :func:`next_turn`.
            connections: Lanes that whoever asks knows of, at least 1.
        """
        granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turn, next(self._arrivals), connections, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self.in_flight -= 1
            granted.cancel()
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            _, _, connections, granted = self._waiting[0]
            if not granted.done():
                if self.in_flight >= min(connections, self.most):
                    return
                self.in_flight += 1
                granted.set_result(None)
            heapq.heappop(self._waiting)


_turns = count()
# Keyed by process: what a forked child inherits counts parts that only its parent has in flight.
_lanes: dict[int, Lanes] = {}


def next_turn() -> int:
    """A number for a download that begins now, higher than those before."""
    return next(_turns)


def lanes_of_process() -> Lanes:
    """The lanes of this process."""
    return _lanes.setdefault(os.getpid(), Lanes())


def share_connections(processes: int) -> None:
    """Say among how many processes of this node the connections are to be shared, this one included."""
    lanes_of_process().most = max(_LEAST, min(CONNECTIONS, _OF_NODE // processes))
