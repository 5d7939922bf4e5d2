"""An object server: sound answers from a source, spoiled by rules, over a link of a certain speed, with a log."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import re
import socket
import struct
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import formatdate
from enum import Enum, auto
from itertools import count
from typing import Any

from tests.servers.messages import Answer, Reader, Request, Source, head_of, plain, refusal

FAULTS = (
    "auth",
    "corrupt",
    "hang",
    "ignore_range",
    "long",
    "reset",
    "reset_body",
    "short",
    "slow",
    "stall",
    "status",
    "truncate",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One way to spoil answers; what each does is told at :meth:`tests.servers.stores.FaultyStore.fail`."""

    match: str
    """Regular expression searched for in the decoded path of a request, without its query."""
    fault: str
    times: int = -1
    """How many requests to spoil; -1 for all."""
    skip: int = 0
    """How many requests to serve well before."""
    share: float = 1.0
    """Which part of the requests to spoil, drawn at random."""
    seed: int = 0
    """Of what is drawn."""
    each: bool = False
    """Whether every path has ``times`` and ``skip`` of its own."""
    method: str = "GET"
    """Regular expression for the method."""
    status: int = 503
    retry_after: float | None = None
    """Seconds told in a Retry-After header."""
    retry_date: bool = False
    """Whether that header holds a date rather than seconds."""
    at: int | None = None
    """Byte of the body where it happens, from the end if negative. None: the first for ``corrupt``, else the middle."""
    anywhere: bool = False
    """Whether it happens at a random byte instead."""
    rate: float = 0.0
    """Bytes a second for ``slow``."""
    seconds: float = 30.0
    """How long ``stall`` and ``hang`` last."""
    authorization: str = ""
    """What the header must be for ``auth`` to let a request pass."""

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ValueError(f"fault must be one of {', '.join(FAULTS)}, but got {self.fault!r}")

    def place(self, length: int, draw: random.Random) -> int:
        """The byte of a body of ``length`` bytes where it happens."""
        if length == 0:
            return 0
        if self.anywhere:
            return draw.randrange(length)
        if self.at is None:
            return 0 if self.fault == "corrupt" else length // 2
        return max(0, min(length - 1, self.at if self.at >= 0 else length + self.at))


class Rules:
    """The faults of a server, in the order in which they were added; the first that applies to a request spoils it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []

    def add(self, description: dict[str, Any]) -> None:
        """Add the fault of these fields."""
        with self._lock:
            self._rules.append(_Rule(Fault(**description)))

    def remove(self, beginning: str) -> None:
        """Remove the faults whose expressions begin so."""
        with self._lock:
            self._rules = [rule for rule in self._rules if not rule.fault.match.startswith(beginning)]

    def next_for(self, method: str, path: str, authorization: str) -> tuple[Fault, random.Random] | None:
        """What spoils this request, with the generator it draws from."""
        with self._lock:
            for rule in self._rules:
                if rule.applies(method, path, authorization):
                    return rule.fault, rule.draw
        return None


class _Rule:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.draw = random.Random(fault.seed)
        self._path = re.compile(fault.match)
        self._method = re.compile(fault.method)
        self._seen: Counter[str] = Counter()
        self._spoiled: Counter[str] = Counter()

    def applies(self, method: str, path: str, authorization: str) -> bool:
        """Whether the fault spoils this request; counts it if so."""
        fault = self.fault
        if not (self._method.fullmatch(method) and self._path.search(path)):
            return False
        if fault.fault == "auth" and authorization == fault.authorization:
            return False
        whose = path if fault.each else ""
        if 0 <= fault.times <= self._spoiled[whose]:
            return False
        self._seen[whose] += 1
        if self._seen[whose] <= fault.skip or self.draw.random() >= fault.share:
            return False
        self._spoiled[whose] += 1
        return True


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


_SMALL = 64 << 10
_EXTRA = b"\0"


class Ending(Enum):
    """What becomes of the connection after an answer."""

    KEEP = auto()
    CLOSE = auto()
    RESET = auto()
    STALL = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """What is told and sent of a body."""

    declared: int
    """The Content-Length that is told."""
    sent: int
    """Bytes of the body that are sent."""
    flipped: int | None = None
    """Byte of the body that is sent with its lowest bit changed."""
    extra: bytes = b""
    """Sent after them."""
    ending: Ending = Ending.KEEP


def delivery_of(length: int, fault: Fault | None, draw: random.Random) -> Delivery:
    """How to send a body of ``length`` bytes. Faults that are not about its bytes leave it whole."""
    if fault is None or length == 0:
        return Delivery(declared=length, sent=length)
    place = fault.place(length, draw)
    match fault.fault:
        case "short":
            return Delivery(declared=length - 1, sent=length - 1)
        case "long":
            return Delivery(declared=length + 1, sent=length, extra=_EXTRA)
        case "corrupt":
            return Delivery(declared=length, sent=length, flipped=place)
        case "truncate":
            return Delivery(declared=length, sent=place, ending=Ending.CLOSE)
        case "reset_body":
            return Delivery(declared=length, sent=place, ending=Ending.RESET)
        case "stall":
            return Delivery(declared=length, sent=place, ending=Ending.STALL)
    return Delivery(declared=length, sent=length)


async def send(connection: socket.socket, answer: Answer, delivery: Delivery, paces: Sequence[Pace]) -> None:
    """Send the head, and the body at the slowest of some paces."""
    head = head_of(answer.status, answer.headers, delivery.declared)
    loop = asyncio.get_running_loop()
    if not paces and delivery.sent <= _SMALL:
        await loop.sock_sendall(connection, head + _spoiled(answer, 0, delivery.sent, delivery) + delivery.extra)
        return
    await loop.sock_sendall(connection, head)
    piece = min((pace.piece for pace in paces), default=delivery.sent)
    for start in range(0, delivery.sent, piece):
        stop = min(delivery.sent, start + piece)
        for pace in paces:
            await pace.take(stop - start)
        await _send_piece(connection, answer, start, stop, delivery)
    await loop.sock_sendall(connection, delivery.extra)


def cut(connection: socket.socket) -> None:
    """End a connection with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


async def _send_piece(connection: socket.socket, answer: Answer, start: int, stop: int, delivery: Delivery) -> None:
    loop = asyncio.get_running_loop()
    flipped = delivery.flipped
    if answer.file is None or stop - start <= _SMALL:
        await loop.sock_sendall(connection, _spoiled(answer, start, stop, delivery))
    elif flipped is not None and start <= flipped < stop:
        await _send_piece(connection, answer, start, flipped, delivery)
        await _send_piece(connection, answer, flipped, flipped + 1, delivery)
        await _send_piece(connection, answer, flipped + 1, stop, delivery)
    else:
        await loop.sock_sendfile(connection, answer.file, answer.offset + start, stop - start)


def _spoiled(answer: Answer, start: int, stop: int, delivery: Delivery) -> bytes:
    data = bytearray(answer.read(start, stop))
    if delivery.flipped is not None and start <= delivery.flipped < stop:
        data[delivery.flipped - start] ^= 1
    return bytes(data)


_CONTROL = "/__"
_NO_DRAW = random.Random(0)


class FaultServer:
    """Serves connections until it is cancelled.

    Requests for paths that begin with ``/__`` are for the server itself: ``POST /__fail`` adds a rule, ``POST /__heal``
    removes those of a store, ``POST /__log`` gives the requests whose paths match, ``POST /__link`` changes the speed.
    """

    def __init__(self, source: Source, link: Link) -> None:
        self._source = source
        self._rules = Rules()
        self._log: list[dict[str, Any]] = []
        self._connections = count(1)
        self._change_link(link)

    async def serve(self, listener: socket.socket) -> None:
        """Serve whoever connects."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        serving: set[asyncio.Task[None]] = set()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = loop.create_task(self._serve_connection(connection))
            serving.add(task)
            task.add_done_callback(serving.discard)

    async def _serve_connection(self, connection: socket.socket) -> None:
        number, reader = next(self._connections), Reader(connection)
        with connection:
            try:
                while request := await reader.next_request():
                    if request.path.startswith(_CONTROL):
                        answer = self._control(request)
                        await send(connection, answer, Delivery(declared=answer.length, sent=answer.length), [])
                    elif not await self._serve_request(connection, request, number):
                        return
            except ConnectionError:
                pass  # the client left, as it may
            except Exception:  # noqa: BLE001 - one bad connection must not end the others
                traceback.print_exc()

    async def _serve_request(self, connection: socket.socket, request: Request, number: int) -> bool:
        """Answer a request; whether the connection can be used for another."""
        entry: dict[str, Any] = {
            "method": request.method,
            "path": request.path,
            "range": request.headers.get("range"),
            "begun": time.monotonic(),
            "connection": number,
        }
        self._log.append(entry)
        found = self._rules.next_for(request.method, request.path, request.headers.get("authorization", ""))
        fault, draw = found or (None, _NO_DRAW)
        entry["fault"] = fault and fault.fault
        await asyncio.sleep(self._link.latency)
        if fault and fault.fault in ("reset", "hang"):
            await _end(connection, Ending.RESET if fault.fault == "reset" else Ending.STALL, fault)
            return False
        answer = await self._answer(request, fault)
        delivery = delivery_of(answer.length, fault, draw)
        if request.method == "HEAD":
            delivery = Delivery(declared=answer.length, sent=0)
        entry |= {"status": answer.status, "declared": delivery.declared}
        try:
            await send(connection, answer, delivery, self._paces(fault))
        finally:
            if answer.file:
                answer.file.close()
        entry |= {"sent": delivery.sent + len(delivery.extra), "ended": time.monotonic()}
        await _end(connection, delivery.ending, fault)
        return delivery.ending is Ending.KEEP

    async def _answer(self, request: Request, fault: Fault | None) -> Answer:
        if fault and fault.fault in ("status", "auth"):
            return refusal(fault.status, _retry_header(fault))
        if fault and fault.fault == "ignore_range":
            headers = {name: value for name, value in request.headers.items() if name != "range"}
            request = dataclasses.replace(request, headers=headers)
        return await self._source(request)

    def _paces(self, fault: Fault | None) -> list[Pace]:
        paces = [self._total] if self._total else []
        if self._link.per_connection:
            paces.append(Pace(self._link.per_connection))
        if fault and fault.fault == "slow":
            paces.append(Pace(fault.rate))
        return paces

    def _control(self, request: Request) -> Answer:
        what, text = request.path.removeprefix(_CONTROL), request.body.decode()
        if what == "fail":
            try:
                self._rules.add(json.loads(text))
            except (TypeError, ValueError, re.error) as error:
                return plain(400, str(error).encode())
        elif what == "heal":
            self._rules.remove(text)
        elif what == "link":
            self._change_link(Link(**json.loads(text)))
        elif what == "log":
            return plain(200, json.dumps([entry for entry in self._log if re.search(text, entry["path"])]).encode())
        else:
            return refusal(404)
        return plain(200)

    def _change_link(self, link: Link) -> None:
        self._link = link
        self._total = Pace(link.total) if link.total else None


async def _end(connection: socket.socket, ending: Ending, fault: Fault | None) -> None:
    if ending is Ending.STALL and fault:
        try:  # a client that gives up need not be waited for
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 1), fault.seconds)
        except (TimeoutError, asyncio.TimeoutError):
            ending = Ending.CLOSE
    if ending is Ending.RESET:
        cut(connection)


def _retry_header(fault: Fault) -> dict[str, str]:
    if fault.retry_after is None:
        return {}
    if fault.retry_date:  # dates are told in whole seconds
        return {"Retry-After": formatdate(math.ceil(time.time() + fault.retry_after), usegmt=True)}
    return {"Retry-After": f"{fault.retry_after:g}"}
