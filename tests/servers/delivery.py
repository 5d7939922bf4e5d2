"""How a body goes out: whole, or as a fault wants it."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from tests.servers.link import Pace
from tests.servers.messages import Answer, head_of
from tests.servers.rules import Fault

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
