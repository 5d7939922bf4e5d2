"""HTTP/1.1 messages, and where sound answers come from: files under a directory, or another server."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_HEAD_END = b"\r\n\r\n"
_LONGEST_HEAD = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a client asks for."""

    method: str
    target: str
    """As it was sent: path and query."""
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes = b""

    @property
    def path(self) -> str:
        """The decoded path."""
        return unquote(self.target.partition("?")[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the server would say if nothing were spoiled."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """Without Content-Length and Connection."""
    data: bytes = b""
    """The body, if ``file`` is None."""
    file: BinaryIO | None = None
    """Where the body is read from."""
    offset: int = 0
    """Where it begins in ``file``."""
    length: int = 0
    """Bytes of the body, also of one that is only told of, as in answers to HEAD."""

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the body."""
        if self.file is None:
            return self.data[start:stop]
        self.file.seek(self.offset + start)
        return self.file.read(stop - start)


def plain(status: int, data: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
    """An answer whose body is in memory."""
    return Answer(status=status, headers=headers or {}, data=data, length=len(data))


def refusal(status: int, headers: Mapping[str, str] | None = None) -> Answer:
    """An error, in the words of S3. It tells nothing to people but that Azure's client cannot do without a message."""
    code = {
        401: "Unauthorized",
        403: "AccessDenied",
        404: "NoSuchKey",
        429: "TooManyRequests",
        503: "ServiceUnavailable",
    }
    word = code.get(status, "InternalError")
    body = f'<?xml version="1.0"?><Error><Code>{word}</Code><message>{status}</message></Error>'
    return plain(status, body.encode(), {"Content-Type": "application/xml", **(headers or {})})


def head_of(status: int, headers: Mapping[str, str], length: int) -> bytes:
    """The head of an answer."""
    words = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Unknown"
    lines = [f"HTTP/1.1 {status} {words}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode("latin-1")


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """What a Range header asks for of an object of ``size`` bytes.

    Returns:
        Start and end, the end not included; start and end alike if there are no such bytes. None for all of it, also
        if the header makes no sense, as the standard has it.
    """
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if asked is None or not any(asked.groups()):
        return None
    first, last = asked.groups()
    if not first:
        return max(0, size - int(last)), size
    start, stop = int(first), min(size, int(last) + 1) if last else size
    if last and int(last) < start:
        return None
    return (start, stop) if start < size else (size, size)


def parse_headers(lines: list[str]) -> dict[str, str]:
    """Headers by lower-case name."""
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


class Reader:
    """Reads the requests of one connection, one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    async def next_request(self) -> Request | None:
        """The next request; None once the client has ended the connection."""
        head = await self._until(_HEAD_END)
        if not head:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = parse_headers(lines)
        if headers.get("expect", "").lower() == "100-continue":
            await asyncio.get_running_loop().sock_sendall(self._connection, b"HTTP/1.1 100 Continue\r\n\r\n")
        return Request(method=method, target=target, headers=headers, body=await self._body(headers))

    async def _body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return await self._exactly(int(headers.get("content-length", 0)))
        chunks = []
        while size := int((await self._until(b"\r\n")).partition(b";")[0], 16):
            chunks.append(await self._exactly(size))
            await self._exactly(2)
        while await self._until(b"\r\n"):
            pass  # trailers
        return b"".join(chunks)

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            if not await self._more() or len(self._buffer) > _LONGEST_HEAD:
                return b""
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    async def _exactly(self, size: int) -> bytes:
        parts = [self._buffer]
        missing = size - len(self._buffer)
        while missing > 0:
            data = await asyncio.get_running_loop().sock_recv(self._connection, min(missing, 1 << 20))
            if not data:
                raise ConnectionError("the client left while it sent a body")
            parts.append(data)
            missing -= len(data)
        whole = b"".join(parts)
        self._buffer = whole[size:]
        return whole[:size]

    async def _more(self) -> bool:
        data = await asyncio.get_running_loop().sock_recv(self._connection, 64 << 10)
        self._buffer += data
        return bool(data)


Source = Callable[[Request], Awaitable[Answer]]

_HOP_BY_HOP = {"connection", "content-length", "expect", "host", "keep-alive", "transfer-encoding"}


def files_under(root: Path) -> Source:
    """Serves the files of a directory: whole, or ranges of them. Its directories are listed as buckets of S3."""

    async def answer(request: Request) -> Answer:
        if request.method not in ("GET", "HEAD"):
            return refusal(405)
        path = root / request.path.lstrip("/")
        if "list-type=2" in request.target and path.parent == root and path.is_dir():
            return listing(path, parse_qs(urlsplit(request.target).query))
        if ".." in path.parts or not path.is_file():
            return refusal(404)
        return of_file(path, request)

    return answer


def listing(bucket: Path, query: Mapping[str, list[str]]) -> Answer:
    """Return an answer to ListObjectsV2, in one page."""
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    entries, folders = list[str](), set[str]()
    for path in sorted(path for path in bucket.rglob("*") if path.is_file()):
        key = path.relative_to(bucket).as_posix()
        below = key.removeprefix(prefix)
        if not key.startswith(prefix):
            continue
        if delimiter and delimiter in below:
            folders.add(prefix + below.partition(delimiter)[0] + delimiter)
            continue
        status = path.stat()
        modified = datetime.fromtimestamp(int(status.st_mtime), timezone.utc).isoformat().replace("+00:00", ".000Z")
        fields = {"Key": escape(key), "LastModified": modified, "ETag": etag(status), "Size": status.st_size}
        entries.append("".join(f"<{name}>{value}</{name}>" for name, value in fields.items()))
    text = f"<Name>{bucket.name}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
    text += "".join(f"<Contents>{entry}</Contents>" for entry in entries)
    text += "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders))
    body = f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>{text}</ListBucketResult>'
    return plain(200, body.encode(), {"Content-Type": "application/xml"})


def etag(status: os.stat_result) -> str:
    """Return the ETag of a file."""
    return f'"{status.st_mtime_ns:x}-{status.st_size:x}"'


def of_file(path: Path, request: Request) -> Answer:
    """A file, or the range of it that is asked for."""
    status = path.stat()
    size = status.st_size
    headers = {"ETag": etag(status), "Accept-Ranges": "bytes"}
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
