"""How fast bytes may go: a clock for each connection, and one that all connections share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

_LARGEST_PIECE = 256 << 10
_SECONDS_PER_PIECE = 0.02
_SLACK = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The link between the server and its clients."""

    latency: float = 0.0
    """Seconds before each answer."""
    per_connection: float = 0.0
    """Bytes a second of each connection; 0 for no cap."""
    total: float = 0.0
    """Bytes a second of all connections together; 0 for no cap."""


class Pace:
    """Lets bytes pass at a rate on average.

    Whoever sends takes the next free stretch of time for its bytes and waits until that begins, so connections that
    share a pace take turns. Waits are never exact; a stretch that was missed by less than the slack may still be used.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_from = 0.0

    @property
    def piece(self) -> int:
        """Bytes to send at a time."""
        return max(1, min(_LARGEST_PIECE, int(self.rate * _SECONDS_PER_PIECE)))

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes may be sent."""
        now = asyncio.get_running_loop().time()
        begins = max(self._free_from, now - _SLACK)
        self._free_from = begins + size / self.rate
        if begins > now:
            await asyncio.sleep(begins - now)
