"""Brings an object into a sink: in chunks at once over one event loop, or as one stream from filesystems that block."""

from __future__ import annotations

import asyncio
import heapq
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from lightning_streaming.errors import IntegrityError, StreamingError
from lightning_streaming.storage.filesystems import abandon, kind_of, open_to_read, run_on_loop
from lightning_streaming.storage.requests import RemoteObject, Span
from lightning_streaming.storage.retries import Attempts, Deadline, StallClock, longest_attempt, run_watched, watched
from lightning_streaming.storage.sinks import Gate, Sink
from lightning_streaming.storage.urls import mask_url
from lightning_streaming.storage.versions import NO_PIN, Pin, ReplacedError, version_of_open

CONNECTIONS = 16
"""Chunks in flight, unless a caller says otherwise."""
_OF_NODE = 64
"""Chunks in flight of all processes of a node that have said how many they are."""
_LEAST = 2
_CHUNK_BYTES = 8 << 20
"""About how long a chunk is: long enough that its request costs little, short enough that several share an object."""
_ALIGNMENT = 64 << 10
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Download:
    """One object to fetch, whichever kind of filesystem it is on."""

    url: str
    options: Mapping[str, Any] = field(repr=False)
    sink: Sink
    """Where its bytes go."""
    attempts: Attempts
    """How often each chunk is tried."""
    deadline: Deadline
    """When all of it must be there; the attempts know it too."""
    timeout: float
    """Seconds in which something must arrive."""
    ticket: int | None = None
    """Its place in the queue for connection slots; None to use none."""
    connections: int = CONNECTIONS
    """Chunks at once, counted over the process."""
    pin: Pin = NO_PIN
    """The version of the object that bytes must come from; all must come from that of the first answer as well."""
    seen: dict[str, str] = field(default_factory=dict, repr=False)
    """The version that the first answer reported, by URL, where the pin has no such versions."""

    def whole(self, size: int | None) -> None:
        """Fetch all of it; None if its size is not known.

        Raises:
            StreamingError: It cannot be fetched, or is longer or shorter.
        """
        if size is None:
            self._run(_Transfer.unknown, _drain)
        else:
            self._run(partial(_Transfer.whole, size=size), partial(_receive, start=0, stop=size, is_last=True))

    def spans(self, spans: Sequence[Span]) -> None:
        """Fetch some ranges, which lie end to end in the sink; with a ticket, long ones in chunks.

        Args:
            spans: Of each the first byte, and the one after the last; never empty.

        Raises:
            StreamingError: They cannot be fetched, or the object ends before.
        """
        self._run(partial(_Transfer.spans, spans=spans), partial(_receive_spans, spans=spans))

    def _run(self, on_loop: Callable[[_Transfer], Any], in_thread: Callable[..., None]) -> None:
        filesystem, path = self.attempts.run(partial(open_to_read, self.url, self.options))
        kind = kind_of(filesystem, self.url)
        if kind is None:
            self.attempts.run(partial(self._run_in_thread, in_thread))
        else:
            wanted = RemoteObject(filesystem, path, kind, mask_url(self.url), self.timeout, self._pin())
            run_on_loop(filesystem, on_loop(_Transfer(self, wanted)))

    def _pin(self) -> Pin:
        if self.pin.first is not None:
            return self.pin
        self.seen.clear()
        return replace(self.pin, first=self.seen)

    def _run_in_thread(self, read: Callable[..., None]) -> None:
        filesystem, path = open_to_read(self.url, self.options)
        self.deadline.begin()
        gate, clock = Gate(self.sink), StallClock()
        source = _BlockingObject(filesystem, path, mask_url(self.url), clock, self._pin())
        try:
            run_watched(partial(read, source, gate), clock, self.timeout, self.deadline.left())
        except TimeoutError:
            abandon(filesystem)
            raise
        finally:
            gate.close()


@dataclass(slots=True)
class _Chunk:
    """A run of an object's bytes that one request at a time fetches."""

    start: int
    """Its first byte."""
    stop: int
    """The byte after its last."""
    is_last: bool
    """Whether the object must end where it does."""
    at: int
    """The first byte that has not arrived yet."""
    origin: int = 0
    """The byte of the object that would go to the beginning of the sink."""

    @property
    def span(self) -> Span | None:
        """The first byte to ask for, and the one after the last; None for the whole object.

        For the last chunk one byte more than there should be, so that a longer object is noticed. Never empty.
        """
        if self.at == 0 and self.is_last:
            return None
        return self.at, self.stop + self.is_last


def _cut_chunks(size: int, chunk_bytes: int = _CHUNK_BYTES) -> list[_Chunk]:
    """Cut an object into chunks of nearly equal length; one up to half as long again as a chunk stays whole.

    Args:
        size: Bytes of the object.
        chunk_bytes: Bytes a chunk should have.
    """
    number = max(1, (size + chunk_bytes // 2) // chunk_bytes)
    length = max(1, math.ceil(size / number / _ALIGNMENT) * _ALIGNMENT)
    starts = range(0, max(size, 1), length)
    return [_Chunk(start, min(start + length, size), start + length >= size, start) for start in starts]


def _chunks_of_spans(spans: Sequence[Span], *, is_cut: bool) -> list[_Chunk]:
    """The chunks of some ranges, whose bytes lie end to end in the sink; of whole ranges, unless they are cut."""
    chunks, before = list[_Chunk](), 0
    for start, stop in spans:
        parts = _cut_chunks(stop - start) if is_cut else [_Chunk(0, stop - start, is_last=True, at=0)]
        for part in parts:
            begin, end = start + part.start, start + part.stop
            chunks.append(_Chunk(begin, end, is_last=False, at=begin, origin=start - before))
        before += stop - start
    return chunks


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A download on fsspec's event loop, each chunk of it tried again by itself."""

    download: Download
    wanted: RemoteObject

    async def whole(self, size: int) -> None:
        chunks = _cut_chunks(size)
        if len(chunks) > 1:
            try:
                await _all_or_none([self._chunk(chunk, size, is_alone=False) for chunk in chunks])
            except _WholeBodyError:
                chunks = [_Chunk(0, size, is_last=True, at=0)]
            else:
                return
        await self._chunk(chunks[0], size, is_alone=True)

    async def spans(self, spans: Sequence[Span]) -> None:
        chunks = _chunks_of_spans(spans, is_cut=self.download.ticket is not None)
        if len(chunks) > 1:
            try:
                await _all_or_none([self._chunk(chunk, chunk.stop, is_alone=False) for chunk in chunks])
            except _WholeBodyError:
                chunks = _chunks_of_spans(spans, is_cut=False)
            else:
                return
        for chunk in chunks:
            await self._chunk(chunk, chunk.stop, is_alone=True)

    async def unknown(self) -> None:
        async def find_size() -> int | None:
            return await watched(self.wanted.size(), StallClock(), self.download.timeout, self.download.deadline.left())

        async def attempt() -> None:
            async with self._slot():
                clock = StallClock()
                await watched(self._drain(clock), clock, self.download.timeout, self.download.deadline.left())

        size = await self.download.attempts.run_async(find_size)
        if size is None:
            await self.download.attempts.run_async(attempt)
        else:
            self.download.sink.resize(size)
            await self.whole(size)

    async def _chunk(self, chunk: _Chunk, size: int, *, is_alone: bool) -> None:
        async def attempt() -> None:
            async with self._slot():
                if chunk.at == chunk.stop:
                    chunk.at = chunk.start  # all of it came, and yet something was wrong
                clock = StallClock()
                timeout = self.download.timeout + self.wanted.silence(chunk.span)
                longest = longest_attempt(self.download.timeout, chunk.stop - chunk.start)
                longest = min(longest, self.download.deadline.left())
                try:
                    await watched(self._receive(chunk, size, is_alone, clock), clock, timeout, longest)
                except ReplacedError:
                    if chunk.start == 0 and chunk.is_last and self.download.pin.first is None:
                        chunk.at = 0  # the whole object is in this chunk, so it starts over with the new version
                        self.wanted.pin.forget()
                    raise

        await self.download.attempts.run_async(attempt)

    async def _receive(self, chunk: _Chunk, size: int, is_alone: bool, clock: StallClock) -> None:
        async with self.wanted.open(chunk.span) as body:
            clock.mark()
            if body.is_whole and not is_alone:
                raise _WholeBodyError
            unwanted = chunk.at - body.start
            while data := await body.read():
                fresh = memoryview(data)[unwanted:]
                unwanted = max(unwanted - len(data), 0)
                room = chunk.stop - chunk.at
                if len(fresh) > room and chunk.is_last:
                    raise _too_long(self.wanted.shown, size)
                self.download.sink.write(chunk.at - chunk.origin, fresh[:room])
                chunk.at += min(len(fresh), room)
                clock.mark()
                if len(fresh) > room:  # of a whole body, more is not wanted
                    return
        if chunk.at < chunk.stop:
            at, chunk.at = chunk.at, chunk.start  # a whole answer that is too short may be a page for people
            raise _too_short(self.wanted.shown, size, at)

    async def _drain(self, clock: StallClock) -> None:
        self.download.sink.resize(0)
        size = 0
        async with self.wanted.open(None) as body:
            clock.mark()
            while data := await body.read():
                self.download.sink.write(size, data)
                size += len(data)
                clock.mark()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        ticket, connections = self.download.ticket, self.download.connections
        async with nullcontext() if ticket is None else _slots_of_process().one(ticket, connections):
            self.download.deadline.begin()
            yield


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


@dataclass(frozen=True, slots=True)
class _BlockingObject:
    """An object on a filesystem that blocks, like sftp and the local one."""

    filesystem: Any
    path: str
    """Where in it."""
    shown: str
    """Its URL as it may be shown."""
    clock: StallClock
    """Marked when something arrives."""
    pin: Pin = NO_PIN
    """The version that its bytes must come from."""


def _receive_spans(source: _BlockingObject, sink: Sink, *, spans: Sequence[Span]) -> None:
    """Read some ranges, one after the other."""
    before = 0
    for start, stop in spans:
        _receive(source, sink, start=start, stop=stop, is_last=False, origin=start - before)
        before += stop - start


def _receive(source: _BlockingObject, sink: Sink, *, start: int, stop: int, is_last: bool, origin: int = 0) -> None:
    """Read the bytes from ``start`` up to, not including, ``stop``, where the object must end if they are the last."""
    at = start
    with source.filesystem.open(source.path, "rb") as stream:
        source.pin.check(source.shown, version_of_open(stream))
        if is_last and hasattr(stream, "prefetch"):
            stream.prefetch()  # of paramiko, which otherwise asks for each 32 KiB only when the last have come
        if start:
            stream.seek(start)
        while at < stop:
            data = stream.read(min(_READ_BYTES, stop - at))
            if not data:
                raise _too_short(source.shown, stop, at)
            sink.write(at - origin, data)
            at += len(data)
            source.clock.mark()
        if is_last and stream.read(1):
            raise _too_long(source.shown, stop)


def _drain(source: _BlockingObject, sink: Sink) -> None:
    """Read a whole object of any size."""
    sink.resize(0)
    size = 0
    with source.filesystem.open(source.path, "rb") as stream:
        while data := stream.read(_READ_BYTES):
            sink.write(size, data)
            size += len(data)
            source.clock.mark()


def _too_long(shown: str, size: int) -> IntegrityError:
    return IntegrityError(f"{shown} has more bytes than the {size} that index.json says", path=shown)


def _too_short(shown: str, size: int, at: int) -> IntegrityError:
    return IntegrityError(f"{shown} has {at} bytes, but index.json says {size}", path=shown)


@dataclass
class _ConnectionSlots:
    """How many chunks a process fetches at once, over all its downloads: the one that began first goes first.

    To be used in the thread of its event loop only.
    """

    in_flight: int = 0
    most: int = CONNECTIONS
    """Slots there are, whatever whoever asks knows of."""
    _waiting: list[tuple[int, int, int, asyncio.Future[None]]] = field(default_factory=list)
    _arrivals: count[int] = field(default_factory=count)

    @asynccontextmanager
    async def one(self, ticket: int, connections: int) -> AsyncIterator[None]:
        """Hold one slot, once there are fewer than ``connections`` in use.

        Args:
            ticket: Lower ones go first; see :func:`next_ticket`.
            connections: Slots that whoever asks knows of, at least 1.
        """
        granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (ticket, next(self._arrivals), connections, granted))
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


_tickets = count()
# Keyed by process: what a forked child inherits counts chunks that only its parent has in flight.
_slots: dict[int, _ConnectionSlots] = {}


def next_ticket() -> int:
    """A number for a download that begins now, higher than those before."""
    return next(_tickets)


def _slots_of_process() -> _ConnectionSlots:
    """The slots of this process."""
    return _slots.setdefault(os.getpid(), _ConnectionSlots())


def share_connections(processes: int) -> None:
    """Say among how many processes of this node the connections are to be shared, this one included."""
    _slots_of_process().most = max(_LEAST, min(CONNECTIONS, _OF_NODE // processes))
