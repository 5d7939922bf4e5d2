"""Where sound answers come from: files under a directory, or another server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.servers.messages import Answer, Request, byte_range, parse_headers, refusal

Source = Callable[[Request], Awaitable[Answer]]

_HOP_BY_HOP = {"connection", "content-length", "expect", "host", "keep-alive", "transfer-encoding"}


def files_under(root: Path) -> Source:
    """Serves the files of a directory: whole, or ranges of them."""

    async def answer(request: Request) -> Answer:
        if request.method not in ("GET", "HEAD"):
            return refusal(405)
        path = root / request.path.lstrip("/")
        if ".." in path.parts or not path.is_file():
            return refusal(404)
        return _of_file(path, request)

    return answer


def _of_file(path: Path, request: Request) -> Answer:
    status = path.stat()
    size = status.st_size
    headers = {"ETag": f'"{status.st_mtime_ns:x}-{size:x}"', "Accept-Ranges": "bytes"}
    asked = byte_range(request.headers.get("range"), size)
    if asked is None:
        return Answer(status=200, headers=headers, file=path.open("rb"), length=size)
    start, stop = asked
    if start == stop:
        return refusal(416, {"Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Answer(status=206, headers=headers, file=path.open("rb"), offset=start, length=stop - start)


def server_at(url: str) -> Source:
    """Passes requests on to another server, one connection each."""
    host, _, port = url.removeprefix("http://").partition(":")

    async def answer(request: Request) -> Answer:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(_passed_on(request, f"{host}:{port}"))
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            body = await reader.read()
        finally:
            writer.close()
        first, *lines = head.strip().split("\r\n")
        headers = parse_headers(lines)
        length = int(headers.get("content-length", len(body)))
        if request.method != "HEAD" and length != len(body):
            raise ConnectionError(f"{url} sent {len(body)} bytes of {length}")
        kept = {name.title(): value for name, value in headers.items() if name not in _HOP_BY_HOP}
        return Answer(status=int(first.split()[1]), headers=kept, data=body, length=length)

    return answer


def _passed_on(request: Request, host: str) -> bytes:
    """The request in HTTP/1.0, which is answered in one piece and ends the connection."""
    headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP}
    headers |= {"host": host, "content-length": str(len(request.body))}
    lines = [f"{request.method} {request.target} HTTP/1.0", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + request.body
