"""Fetches an object into a sink: in parts, at once, each tried again by itself, on fsspec's event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from lightning_streaming.errors import IntegrityError, StreamingError
from lightning_streaming.storage.attempts import Attempts
from lightning_streaming.storage.bodies import RemoteObject
from lightning_streaming.storage.lanes import lanes_of_process
from lightning_streaming.storage.progress import Progress, watched
from lightning_streaming.storage.ranges import Part, cut
from lightning_streaming.storage.retry import longest_attempt
from lightning_streaming.storage.sinks import Sink


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """One object on its way."""

    wanted: RemoteObject
    """The object."""
    sink: Sink
    """Where its bytes go, at the offsets they have in it, less ``origin``."""
    attempts: Attempts
    """How often each part is tried."""
    timeout: float
    """Seconds in which something must arrive."""
    origin: int = 0
    """The byte of the object that goes to the beginning of the sink."""
    turn: int | None = None
    """Its place in the queue for lanes; None to use none."""
    connections: int = 1
    """Parts at once, counted over the process."""

    async def whole(self, size: int) -> None:
        """Fetch an object that must have ``size`` bytes.

        Raises:
            StreamingError: It cannot be fetched, or is longer or shorter.
        """
        parts = cut(size)
        if len(parts) > 1:
            try:
                await _all_or_none([self._part(part, size, is_alone=False) for part in parts])
            except _WholeBodyError:
                parts = [Part(0, size, is_last=True, at=0)]
            else:
                return
        await self._part(parts[0], size, is_alone=True)

    async def span(self, start: int, stop: int) -> None:
        """Fetch the bytes of an object from ``start`` up to, not including, ``stop``; at least one.

        Raises:
            StreamingError: They cannot be fetched, or the object ends before.
        """
        await self._part(Part(start, stop, is_last=False, at=start), stop, is_alone=True)

    async def unknown(self) -> None:
        """Fetch an object of any size.

        Raises:
            StreamingError: It cannot be fetched.
        """

        async def find_size() -> int | None:
            return await watched(self.wanted.size(), Progress(), self.timeout, self._left())

        async def attempt() -> None:
            async with self._lane():
                progress = Progress()
                await watched(self._drain(progress), progress, self.timeout, self._left())

        size = await self.attempts.run_async(find_size)
        if size is None:
            await self.attempts.run_async(attempt)
        else:
            self.sink.resize(size)
            await self.whole(size)

    async def _part(self, part: Part, size: int, *, is_alone: bool) -> None:
        async def attempt() -> None:
            async with self._lane():
                if part.at == part.stop:
                    part.at = part.start  # all of it came, and yet something was wrong
                progress = Progress()
                timeout = self.timeout + self.wanted.silence(part.span)
                longest = min(longest_attempt(self.timeout, part.stop - part.start), self._left())
                await watched(self._receive(part, size, is_alone, progress), progress, timeout, longest)

        await self.attempts.run_async(attempt)

    async def _receive(self, part: Part, size: int, is_alone: bool, progress: Progress) -> None:
        async with self.wanted.open(part.span) as body:
            progress.mark()
            if body.is_whole and not is_alone:
                raise _WholeBodyError
            unwanted = part.at - body.start
            while data := await body.read():
                fresh = memoryview(data)[unwanted:]
                unwanted = max(unwanted - len(data), 0)
                room = part.stop - part.at
                if len(fresh) > room and part.is_last:
                    raise IntegrityError(f"the index promises {size} bytes of {self.wanted.shown}, but more arrived")
                self.sink.write(part.at - self.origin, fresh[:room])
                part.at += min(len(fresh), room)
                progress.mark()
                if len(fresh) > room:  # of a whole body, more is not wanted
                    return
        if part.at < part.stop:
            raise IntegrityError(
                f"the index promises {size} bytes of {self.wanted.shown}, but none arrived beyond the first {part.at}"
            )

    async def _drain(self, progress: Progress) -> None:
        self.sink.resize(0)
        size = 0
        async with self.wanted.open(None) as body:
            progress.mark()
            while data := await body.read():
                self.sink.write(size, data)
                size += len(data)
                progress.mark()

    @asynccontextmanager
    async def _lane(self) -> AsyncIterator[None]:
        lanes = nullcontext() if self.turn is None else lanes_of_process().one(self.turn, self.connections)
        async with lanes:
            if self.attempts.deadline is not None:
                self.attempts.deadline.begin()
            yield

    def _left(self) -> float:
        return math.inf if self.attempts.deadline is None else self.attempts.deadline.left()


class _WholeBodyError(StreamingError):
    """A store that ignores ranges, which no other attempt would change."""


async def _all_or_none(work: list[Coroutine[Any, Any, None]]) -> None:
    """Await some work; when one piece fails, cancel the others, and raise its error."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
