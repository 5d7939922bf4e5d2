"""Downloads of an object into a sink: concurrent chunks on one event loop, or one stream from blocking filesystems.

Once a sink is closed nothing is written to it, not even by an attempt that was given up and still runs.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from lightning_streaming.errors import IntegrityError, StorageError, StreamingError
from lightning_streaming.files import disk_errors
from lightning_streaming.storage.filesystems import abandon, kind_of, open_to_read, run_on_loop
from lightning_streaming.storage.requests import NO_PIN, Pin, RemoteObject, ReplacedError, Span, version_of_open
from lightning_streaming.storage.retries import Attempts, Deadline, StallClock, longest_attempt, run_watched, watched
from lightning_streaming.storage.urls import mask_url

CONNECTIONS = 16
"""Default number of chunks in flight."""
_CONNECTIONS_OF_NODE = 64
"""Chunks in flight of all processes of a node that share connections, see :func:`share_connections`."""
_MIN_CONNECTIONS = 2
_CHUNK_BYTES = 8 << 20
"""Approximate size of a chunk: large enough that a request costs little, small enough to split an object."""
_ALIGNMENT = 64 << 10
_READ_BYTES = 1 << 20


class Sink(Protocol):
    """A destination that takes bytes at offsets."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at an offset."""

    def resize(self, size: int) -> None:
        """Make it ``size`` bytes long."""


class FileSink:
    """A file, created if there is none; an existing one keeps its inode. Several threads may write."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            DiskFullError: There is no room to create it.
            StorageError: It cannot be opened to write.
        """
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self.is_new = not path.exists()
        with disk_errors(path):
            # Not through a symbolic link, which another user of a cache directory may have created.
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def __enter__(self) -> FileSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file; after an error remove it, if it did not exist before."""
        if kind is not None and self.is_new:
            self._path.unlink(missing_ok=True)
        self.close()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at an offset.

        Raises:
            DiskFullError: There is no room.
            StorageError: They cannot be written, or the file was closed.
        """
        rest = memoryview(data)
        with self._lock, disk_errors(self._path):
            while rest:
                written = os.pwrite(self._opened(), rest, offset)
                offset, rest = offset + written, rest[written:]

    def resize(self, size: int) -> None:
        """Make the file ``size`` bytes long; added bytes take no disk space yet.

        Raises:
            DiskFullError: There is no room.
            StorageError: The system refused, or the file was closed.
        """
        with self._lock, disk_errors(self._path):
            if os.fstat(self._opened()).st_size != size:
                os.ftruncate(self._opened(), size)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _opened(self) -> int:
        # The number of a closed descriptor may be another file's by now.
        if self._descriptor is None:
            raise StorageError(f"{self._path} is closed: its download was given up", path=str(self._path))
        return self._descriptor


class Gate:
    """A sink for one attempt; closed once the attempt is given up, though its thread may still run."""

    def __init__(self, sink: Sink) -> None:
        self._sink: Sink | None = sink
        self._lock = threading.Lock()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at an offset.

        Raises:
            StorageError: The gate was closed, or the sink raises it.
        """
        with self._lock:
            self._opened().write(offset, data)

    def resize(self, size: int) -> None:
        """Make the sink ``size`` bytes long.

        Raises:
            StorageError: The gate was closed, or the sink raises it.
        """
        with self._lock:
            self._opened().resize(size)

    def close(self) -> None:
        """Refuse all further writes."""
        with self._lock:
            self._sink = None

    def _opened(self) -> Sink:
        if self._sink is None:
            raise StorageError("this attempt was given up")
        return self._sink


class MemorySink:
    """Bytes in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at an offset."""
        self.data[offset : offset + len(data)] = data

    def resize(self, size: int) -> None:
        """Truncate the bytes to ``size``, or fill up to it with zeros."""
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))


@dataclass(frozen=True, slots=True)
class Download:
    """One object to fetch from a filesystem of any kind."""

    url: str
    options: Mapping[str, Any] = field(repr=False)
    sink: Sink
    """Destination of its bytes."""
    attempts: Attempts
    """The attempts at each chunk."""
    deadline: Deadline
    """The deadline of the whole download, which the attempts have as well."""
    timeout: float
    """Seconds without progress after which an attempt fails."""
    ticket: int | None = None
    """Its position in the queue for connection slots; None to use none."""
    connections: int = CONNECTIONS
    """Chunks in flight, counted over the process."""
    pin: Pin = NO_PIN
    """The version of the object that bytes must come from; all must come from that of the first answer as well."""
    seen: dict[str, str] = field(default_factory=dict, repr=False)
    """The version that the first answer reported, by URL, where the pin has no such versions."""

    def whole(self, size: int | None) -> None:
        """Fetch the whole object; ``size`` is None if it is unknown.

        Raises:
            StreamingError: It cannot be fetched, or is longer or shorter.
        """
        if size is None:
            self._run(_Transfer.unknown, _drain)
        else:
            self._run(partial(_Transfer.whole, size=size), partial(_receive, start=0, stop=size, is_last=True))

    def spans(self, spans: Sequence[Span]) -> None:
        """Fetch some ranges, which follow each other in the sink; with a ticket, long ones in chunks.

        Args:
            spans: First byte of each range, and the one after its last; none is empty.

        Raises:
            StreamingError: They cannot be fetched, or the object ends before.
        """
        self._run(partial(_Transfer.spans, spans=spans), partial(_receive_spans, spans=spans))

    def _run(self, on_loop: Callable[[_Transfer], Any], in_thread: Callable[..., None]) -> None:
        filesystem, path = self.attempts.run(partial(open_to_read, self.url, self.options))
        kind = kind_of(filesystem, self.url)
        if kind is not None:
            remote = RemoteObject(filesystem, path, kind, mask_url(self.url), self.timeout, self._pin())
            run_on_loop(filesystem, on_loop(_Transfer(self, remote)))
            return

        def attempt() -> None:
            filesystem, path = open_to_read(self.url, self.options)
            self.deadline.begin()
            gate, clock = Gate(self.sink), StallClock()
            source = _BlockingObject(filesystem, path, mask_url(self.url), clock, self._pin())
            try:
                run_watched(partial(in_thread, source, gate), clock, self.timeout, self.deadline.left())
            except TimeoutError:
                abandon(filesystem)
                raise
            finally:
                gate.close()

        self.attempts.run(attempt)

    def _pin(self) -> Pin:
        if self.pin.first is not None:
            return self.pin
        self.seen.clear()
        return replace(self.pin, first=self.seen)


@dataclass(slots=True)
class _Chunk:
    """A range of an object's bytes that one request at a time fetches."""

    start: int
    """Its first byte."""
    stop: int
    """The byte after its last."""
    is_last: bool
    """Whether the object must end at ``stop``."""
    at: int
    """The first byte that has not arrived yet."""
    origin: int = 0
    """The byte of the object that belongs at the beginning of the sink."""

    @property
    def span(self) -> Span | None:
        """The range to request: first byte, and the one after the last; None for the whole object. Never empty.

        For the last chunk one byte more than expected, so that a longer object is detected.
        """
        if self.at == 0 and self.is_last:
            return None
        return self.at, self.stop + self.is_last


def _cut_chunks(size: int, chunk_bytes: int = _CHUNK_BYTES) -> list[_Chunk]:
    """Cut an object into chunks of nearly equal length; one of up to 1.5 times a chunk's size stays whole.

    Args:
        size: Bytes of the object.
        chunk_bytes: Target size of a chunk.
    """
    number = max(1, (size + chunk_bytes // 2) // chunk_bytes)
    length = max(1, math.ceil(size / number / _ALIGNMENT) * _ALIGNMENT)
    starts = range(0, max(size, 1), length)
    return [_Chunk(start, min(start + length, size), start + length >= size, start) for start in starts]


def _chunks_of_spans(spans: Sequence[Span], *, is_cut: bool) -> list[_Chunk]:
    """Return the chunks of some ranges, whose bytes follow each other in the sink; a chunk per range unless cut."""
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
    """A download on fsspec's event loop, with separate attempts for each chunk."""

    download: Download
    remote: RemoteObject

    async def whole(self, size: int) -> None:
        await self._fetch(_cut_chunks(size), [_Chunk(0, size, is_last=True, at=0)], size)

    async def spans(self, spans: Sequence[Span]) -> None:
        uncut = _chunks_of_spans(spans, is_cut=False)
        chunks = uncut if self.download.ticket is None else _chunks_of_spans(spans, is_cut=True)
        await self._fetch(chunks, uncut)

    async def _fetch(self, chunks: list[_Chunk], uncut: list[_Chunk], size: int | None = None) -> None:
        """Fetch chunks concurrently; from a store that ignores ranges, the uncut ones one after another."""
        if len(chunks) > 1:
            try:
                await _all_or_none([self._chunk(chunk, size, is_alone=False) for chunk in chunks])
            except _WholeBodyError:
                chunks = [replace(chunk, at=chunk.start) for chunk in uncut]
            else:
                return
        for chunk in chunks:
            await self._chunk(chunk, size, is_alone=True)

    async def unknown(self) -> None:
        async def find_size() -> int | None:
            return await watched(self.remote.size(), StallClock(), self.download.timeout, self.download.deadline.left())

        async def drain(clock: StallClock) -> None:
            self.download.sink.resize(0)
            size = 0
            async with self.remote.open(None) as body:
                clock.mark()
                while data := await body.read():
                    self.download.sink.write(size, data)
                    size += len(data)
                    clock.mark()

        async def attempt() -> None:
            async with self._slot():
                clock = StallClock()
                await watched(drain(clock), clock, self.download.timeout, self.download.deadline.left())

        size = await self.download.attempts.run_async(find_size)
        if size is None:
            await self.download.attempts.run_async(attempt)
        else:
            self.download.sink.resize(size)
            await self.whole(size)

    async def _chunk(self, chunk: _Chunk, size: int | None, *, is_alone: bool) -> None:
        expected = chunk.stop if size is None else size

        async def receive(clock: StallClock) -> None:
            async with self.remote.open(chunk.span) as body:
                clock.mark()
                if body.is_whole and not is_alone:
                    raise _WholeBodyError
                to_skip = chunk.at - body.start
                while data := await body.read():
                    fresh = memoryview(data)[to_skip:]
                    to_skip = max(to_skip - len(data), 0)
                    missing = chunk.stop - chunk.at
                    if len(fresh) > missing and chunk.is_last:
                        raise _too_long(self.remote.shown, expected)
                    self.download.sink.write(chunk.at - chunk.origin, fresh[:missing])
                    chunk.at += min(len(fresh), missing)
                    clock.mark()
                    if len(fresh) > missing:  # the rest of a whole body is not needed
                        return
            if chunk.at < chunk.stop:
                at, chunk.at = chunk.at, chunk.start  # a whole response that is too short may be an HTML page
                raise _too_short(self.remote.shown, expected, at)

        async def attempt() -> None:
            async with self._slot():
                if chunk.at == chunk.stop:
                    chunk.at = chunk.start  # all of it arrived, and yet the attempt failed
                clock = StallClock()
                timeout = self.download.timeout + self.remote.silence(chunk.span)
                longest = longest_attempt(self.download.timeout, chunk.stop - chunk.start)
                longest = min(longest, self.download.deadline.left())
                try:
                    await watched(receive(clock), clock, timeout, longest)
                except ReplacedError:
                    if chunk.start == 0 and chunk.is_last and self.download.pin.first is None:
                        chunk.at = 0  # the whole object is in this chunk, so it starts over with the new version
                        self.remote.pin.forget()
                    raise

        await self.download.attempts.run_async(attempt)

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        ticket, connections = self.download.ticket, self.download.connections
        async with nullcontext() if ticket is None else _slots_of_process().acquire(ticket, connections):
            self.download.deadline.begin()
            yield


class _WholeBodyError(StreamingError):
    """An error of a store that ignores ranges, which another attempt would not change."""


async def _all_or_none(work: list[Coroutine[Any, Any, None]]) -> None:
    """Await some coroutines; when one fails, cancel the others, and raise its error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
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
    """Its path in the filesystem."""
    shown: str
    """Its masked URL."""
    clock: StallClock
    """Marked when something arrives."""
    pin: Pin = NO_PIN
    """The version that its bytes must come from."""


def _receive_spans(source: _BlockingObject, sink: Sink, *, spans: Sequence[Span]) -> None:
    """Read some ranges, one after another."""
    before = 0
    for start, stop in spans:
        _receive(source, sink, start=start, stop=stop, is_last=False, origin=start - before)
        before += stop - start


def _receive(source: _BlockingObject, sink: Sink, *, start: int, stop: int, is_last: bool, origin: int = 0) -> None:
    """Read the bytes from ``start`` up to, not including, ``stop``; with ``is_last`` the object must end there."""
    at = start
    with source.filesystem.open(source.path, "rb") as stream:
        source.pin.check(source.shown, version_of_open(stream))
        if is_last and hasattr(stream, "prefetch"):
            stream.prefetch()  # of paramiko, which otherwise requests 32 KiB at a time
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
    """Limit of the chunks that a process fetches at once, over all its downloads; the oldest download has priority.

    For the thread of its event loop only.
    """

    in_flight: int = 0
    total: int = CONNECTIONS
    """Slots of the process, which limits callers that request more."""
    _waiting: list[tuple[int, int, int, asyncio.Future[None]]] = field(default_factory=list)
    _arrivals: count[int] = field(default_factory=count)

    @asynccontextmanager
    async def acquire(self, ticket: int, connections: int) -> AsyncIterator[None]:
        """Hold a slot, once fewer than ``connections`` are in use.

        Args:
            ticket: Lower ones have priority; see :func:`next_ticket`.
            connections: Limit of this caller, at least 1.
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
                if self.in_flight >= min(connections, self.total):
                    return
                self.in_flight += 1
                granted.set_result(None)
            heapq.heappop(self._waiting)


_tickets = count()
# Keyed by process: slots that a forked child inherits count chunks that only its parent has in flight.
_slots: dict[int, _ConnectionSlots] = {}


def next_ticket() -> int:
    """Return a number for a download that starts now, higher than those before."""
    return next(_tickets)


def _slots_of_process() -> _ConnectionSlots:
    """Return the slots of this process."""
    return _slots.setdefault(os.getpid(), _ConnectionSlots())


def share_connections(processes: int) -> None:
    """Share the node's connections among this many of its processes, this one included."""
    _slots_of_process().total = max(_MIN_CONNECTIONS, min(CONNECTIONS, _CONNECTIONS_OF_NODE // processes))
