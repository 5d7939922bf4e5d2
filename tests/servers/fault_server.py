"""The object server: sound answers from a source, spoiled by rules, over a link of a certain speed, with a log."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import re
import socket
import time
import traceback
from email.utils import formatdate
from itertools import count
from typing import Any

from tests.servers.delivery import Delivery, Ending, cut, delivery_of, send
from tests.servers.link import Link, Pace
from tests.servers.messages import Answer, Reader, Request, plain, refusal
from tests.servers.rules import Fault, Rules
from tests.servers.upstreams import Source

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
