"""Requests for bytes of an object, streamed as they arrive, in one round trip; and the version that these must have.

fsspec's methods to read return whole parts, hide the status of the response, and add requests and retries. So HTTP, S3,
Google Cloud Storage and Azure are read through the session or client of their filesystem; any other asynchronous
filesystem through ``cat_file``.

A version is a text ``kind:value``, like ``etag:5d41402a``, of the strongest kind that the store reports in a listing.
Each response with bytes reports its version, so comparing the two takes no further request.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from lightning_streaming.errors import IntegrityError
from lightning_streaming.escaping import in_one_line
from lightning_streaming.files import change_time
from lightning_streaming.storage.retries import SLOWEST_RATE, headers_of, status_of

_KINDS = ("generation", "blob", "etag", "size", "mtime", "modified")
"""The kinds of versions that responses report, the strongest first."""
MODIFIED_KEYS = ("LastModified", "last_modified", "Last-Modified", "updated", "timeModified", "modified")
"""Keys of the modification time in entries of fsspec's listings, except that of local files."""


class ReplacedError(IntegrityError):
    """An error for a stored file that was replaced since it was listed."""

    fix = (
        "start the run again, so that the data is indexed again; if there is an index.json with the data, write it "
        "again with: lightning-streaming index"
    )


@dataclass(frozen=True, slots=True)
class Pin:
    """The version of a file that bytes must come from."""

    size: int | None = None
    """Bytes of the file; None if unknown."""
    version: str = ""
    """Its version, as :func:`listed_version` returns it; "" if unknown."""
    first: dict[str, str] | None = field(default=None, compare=False, repr=False)
    """The versions of first responses, by file, which :meth:`check` records, to compare later ones with. None records
    none."""

    def check(self, shown: str, answered: Mapping[str, str], size: int | None = None) -> None:
        """Compare with the version of a response. Kinds that only one of them reports are not compared.

        Args:
            shown: The file's URL or path, for the error.
            answered: Values of the response's version, by kind.
            size: Bytes of the whole file, as the response reports them.

        Raises:
            ReplacedError: They differ.
        """
        _compare(self.version, shown, answered, "it was indexed: the index has")
        if self.first is not None:
            strongest = next((f"{kind}:{value}" for kind in _KINDS if (value := answered.get(kind))), "")
            if strongest:
                known = self.first.setdefault(shown, strongest)  # one step: several threads may read the file
                _compare(known, shown, answered, "it was first read: it had")
        if None not in (self.size, size) and size != self.size:
            raise ReplacedError(
                f"{shown} was replaced since it was indexed: the index has {self.size} bytes, but the file now has "
                f"{size}",
                path=shown,
            )

    def forget(self) -> None:
        """Forget the versions of first responses."""
        if self.first is not None:
            self.first.clear()


NO_PIN = Pin()


def _compare(version: str, shown: str, answered: Mapping[str, str], before: str) -> None:
    kind, _, value = version.partition(":")
    latest = answered.get(kind)
    if value and latest and latest != value and not (kind == "blob" and len(latest) != len(value)):
        raise ReplacedError(
            f"{shown} was replaced since {before} {kind} {value}, but the file now has {kind} {latest}", path=shown
        )


def listed_version(entry: Mapping[str, Any]) -> str:
    """Return the version of a file by its entry in a listing of fsspec; "" if the store reports none."""
    if entry.get("generation"):  # of Google Cloud Storage
        return f"generation:{entry['generation']}"
    if entry.get("blob_id"):  # of the hub: the SHA-256 of a large file, the git object id of a small one
        lfs = entry.get("lfs")
        large = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
        return f"blob:{large or entry['blob_id']}"
    if etag := entry.get("ETag") or entry.get("etag"):
        return f"etag:{bare_etag(str(etag))}"
    if isinstance(entry.get("mtime"), (int, float)):  # of a local file
        return f"mtime:{entry['mtime']!r}"
    modified = next((entry[key] for key in MODIFIED_KEYS if entry.get(key)), "")
    text = modified.isoformat() if isinstance(modified, datetime) else str(modified)
    return text and f"modified:{text}"


def answered_versions(headers: Mapping[str, str], redirects: tuple[Mapping[str, str], ...] = ()) -> dict[str, str]:
    """Return the versions that the headers of an HTTP response report, by kind.

    Args:
        headers: Headers of the response.
        redirects: Headers of the redirects before it. The hub reports the version of a large file in the first.
    """
    etag = bare_etag(headers.get("ETag", ""))
    linked = next((tag for sent in (*redirects, headers) if (tag := sent.get("X-Linked-Etag"))), None)
    versions = {
        "etag": etag,
        "blob": etag if linked is None else bare_etag(linked),
        "generation": headers.get("x-goog-generation", ""),
        "modified": headers.get("Last-Modified", ""),
    }
    return {kind: value for kind, value in versions.items() if value}


def version_of_open(stream: Any) -> dict[str, str]:
    """Return the versions of a file that a blocking filesystem has opened, by kind, without another request."""
    details = getattr(stream, "__dict__", {}).get("_details")
    if not isinstance(details, Mapping):
        try:
            return _local_version(os.fstat(stream.fileno()))
        except (AttributeError, OSError, TypeError):
            return {}
    kind, _, value = listed_version(details).partition(":")
    return {kind: value}


def check_local(pin: Pin, shown: str, status: os.stat_result) -> None:
    """Compare a local file that is read in place with the version that was indexed.

    Raises:
        IntegrityError: They differ.
    """
    try:
        pin.check(shown, _local_version(status), status.st_size)
    except ReplacedError as error:
        raise IntegrityError(str(error.args[0]), hint=error.fix, path=shown) from None


def _local_version(status: os.stat_result) -> dict[str, str]:
    """Return the versions of a local file. No inode: some filesystems in user space change it."""
    state = f"{status.st_size}, mtime {status.st_mtime_ns}, ctime {change_time(status)}"
    return {"mtime": repr(status.st_mtime), "size": state}


def bare_etag(etag: str) -> str:
    """Return an ETag without quotes and the mark of a weak one, which listings and responses write differently."""
    return etag.removeprefix("W/").strip('"')


Span = tuple[int, int]
_Read = Callable[[], Awaitable[bytes]]

_READ_BYTES = 1 << 20
_ERROR_BYTES = 2000
_AZURE_BYTES = 32 << 20
"""Size of the first request of its client for an object whose range is not limited."""
_AZURE_CONNECT_SECONDS = 10
_PARTIAL_CONTENT = 206
_NOT_SATISFIABLE = 416
_CONTENT_RANGE = re.compile(r"bytes\s+(\d+)-(?:\d+/(\d+))?")
_XML = re.compile(r"<Code>([^<]*)</Code>.*?<Message>([^<]*)</Message>", re.DOTALL)
_LONGEST_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of a response."""

    start: int
    """Offset of the first in the object: not the requested one, if the store ignores ranges."""
    is_whole: bool
    """Whether they are the whole object, requested or not."""
    read: _Read
    """Function that returns the next bytes; empty at the end."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object on an asynchronous filesystem."""

    filesystem: Any
    path: str
    """Its path in the filesystem."""
    kind: str
    """``"http"``, ``"s3"``, ``"gcs"``, ``"azure"``, or ``"other"``."""
    shown: str
    """Its masked URL."""
    timeout: float
    """Seconds without progress, for a client with a timeout for that."""
    pin: Pin = NO_PIN
    """The version that its bytes must come from."""

    def open(self, span: Span | None) -> AbstractAsyncContextManager[Body]:
        """Request bytes of it.

        Args:
            span: First byte, and the one after the last, which may be beyond the object's end; None for the whole
                object.
        """
        return _OPENERS[self.kind](self, span)

    def silence(self, span: Span | None) -> float:
        """Return how many seconds may pass without visible progress, in addition to the user's timeout."""
        if self.kind == "azure":  # whose client returns nothing before all has arrived, and has a timeout for stalls
            return (_AZURE_BYTES if span is None else span[1] - span[0]) / SLOWEST_RATE
        return 0.0 if self.kind != "other" or span is None else (span[1] - span[0]) / SLOWEST_RATE

    async def size(self) -> int | None:
        """Return its size where that must be known to read it in pieces; None where it arrives as a stream anyway."""
        if self.kind != "other":
            return None
        size = (await self.filesystem._info(self.path)).get("size")
        return None if size is None else int(size)


@asynccontextmanager
async def _open_http(remote: RemoteObject, span: Span | None) -> AsyncIterator[Body]:
    filesystem = remote.filesystem
    session = await filesystem.set_session()
    settings = {"read_bufsize": _READ_BYTES, **filesystem.kwargs}
    settings["headers"] = {**(settings.get("headers") or {}), **_range_headers(span)}
    async with session.get(filesystem.encode_url(remote.path), **settings) as response:
        yield await _body_of(remote, response, span)


@asynccontextmanager
async def _open_gcs(remote: RemoteObject, span: Span | None) -> AsyncIterator[Body]:
    filesystem = remote.filesystem
    await filesystem._set_session()
    settings = {
        "params": filesystem._get_params({}),
        "headers": filesystem._get_headers(_range_headers(span)),
        "timeout": filesystem.requests_timeout,
        "read_bufsize": _READ_BYTES,
    }
    async with filesystem.session.get(filesystem.url(remote.path), **settings) as response:
        yield await _body_of(remote, response, span)


async def _body_of(remote: RemoteObject, response: Any, span: Span | None) -> Body:
    status, headers, reason = response.status, response.headers, response.reason or ""
    if status == _NOT_SATISFIABLE and span is not None:
        raise _too_short(remote, span)
    if status >= 400:
        text = (await response.content.read(_ERROR_BYTES)).decode(errors="replace")
        message = headers.get("X-Error-Message")  # of the hub, which sends a code as well
        message = _message_in(text, reason) if message is None else _cut_message(message, reason)
        raise RefusedError(status, headers, ": ".join(filter(None, (headers.get("X-Error-Code"), message))))
    versions = answered_versions(headers, tuple(redirect.headers for redirect in response.history))
    remote.pin.check(remote.shown, versions, _size_of_object(status, headers))
    return _make_body(remote, span, status, headers.get("Content-Range"), response.content.readany)


@asynccontextmanager
async def _open_s3(remote: RemoteObject, span: Span | None) -> AsyncIterator[Body]:
    filesystem = remote.filesystem
    bucket, key, version = filesystem.split_path(remote.path)
    request = {"Bucket": bucket, "Key": key, **_range_headers(span)}
    if version:
        request["VersionId"] = version
    try:
        answer = await filesystem._call_s3("get_object", filesystem.req_kw, **request)
    except OSError as error:
        if span is not None and status_of(error) == _NOT_SATISFIABLE:
            raise _too_short(remote, span) from error
        raise
    try:
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        content_range = answer.get("ContentRange", "")
        headers = {"Content-Range": content_range, "Content-Length": str(answer.get("ContentLength", ""))}
        versions = {"etag": bare_etag(answer.get("ETag") or "")}
        remote.pin.check(remote.shown, versions, _size_of_object(status, headers))
        yield _make_body(remote, span, status, content_range, partial(answer["Body"].read, _READ_BYTES))
    finally:
        answer["Body"].close()


@asynccontextmanager
async def _open_azure(remote: RemoteObject, span: Span | None) -> AsyncIterator[Body]:
    filesystem = remote.filesystem
    container, name, version = filesystem.split_path(remote.path)
    limits = {} if span is None else {"offset": span[0], "length": span[1] - span[0]}
    seconds = {"connection_timeout": _AZURE_CONNECT_SECONDS, "read_timeout": remote.timeout}
    async with filesystem.service_client.get_blob_client(container, name) as client:
        try:
            stream = await client.download_blob(version_id=version, max_concurrency=1, **limits, **seconds)
        except Exception as error:
            status = status_of(error)
            if status == _NOT_SATISFIABLE and span is not None:
                raise _too_short(remote, span) from error
            if status is None:  # the store sent no response
                raise
            headers = headers_of(error)
            message = (str(headers.get("x-ms-error-code", "")), str(error).partition("\n")[0])
            raise RefusedError(status, headers, ": ".join(filter(None, message))) from error
        versions = {"etag": bare_etag(stream.properties.etag or "")}
        remote.pin.check(remote.shown, versions)
        pieces = stream.chunks()

        async def read() -> bytes:
            piece: bytes = await anext(pieces, b"")
            return piece

        yield Body(0, True, read) if span is None else Body(span[0], False, read)


@asynccontextmanager
async def _open_other(remote: RemoteObject, span: Span | None) -> AsyncIterator[Body]:
    limits = {} if span is None else {"start": span[0], "end": span[1]}
    data: bytes = await remote.filesystem._cat_file(remote.path, **limits)
    unread = [data]

    async def read() -> bytes:
        return unread.pop() if unread else b""

    if span is None or len(data) > span[1] - span[0]:
        yield Body(0, True, read)
    else:
        yield Body(span[0], False, read)


_OPENERS = {"http": _open_http, "s3": _open_s3, "gcs": _open_gcs, "azure": _open_azure, "other": _open_other}


def _make_body(remote: RemoteObject, span: Span | None, status: int, content_range: str | None, read: _Read) -> Body:
    if span is None or status != _PARTIAL_CONTENT:
        return Body(0, True, read)
    start = _first_byte(content_range)
    if start not in (None, span[0]):
        raise IntegrityError(
            f"requested {remote.shown} from byte {span[0]} on, but the store sent it from byte {start} on",
            path=remote.shown,
        )
    return Body(span[0], False, read)


def _too_short(remote: RemoteObject, span: Span) -> IntegrityError:
    return IntegrityError(
        f"{remote.shown} must have more than {span[0]} bytes, but the store says it has not", path=remote.shown
    )


def _size_of_object(status: int, headers: Mapping[str, str]) -> int | None:
    """Return the size of the whole object as the headers of a response report it; None if they do not."""
    if status == _PARTIAL_CONTENT:
        match = _CONTENT_RANGE.match(headers.get("Content-Range", ""))
        return int(match[2]) if match and match[2] else None
    length = headers.get("Content-Length", "")
    is_encoded = headers.get("Content-Encoding", "identity") not in ("", "identity")
    return int(length) if length.isdigit() and not is_encoded else None


def _range_headers(span: Span | None) -> dict[str, str]:
    """Return the Range header for bytes from ``span[0]`` up to, not including, ``span[1]``; none for all."""
    return {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}


def _first_byte(content_range: str | None) -> int | None:
    """Return the first byte that a Content-Range header reports; None without a usable one."""
    match = _CONTENT_RANGE.match(content_range or "")
    return int(match[1]) if match else None


class RefusedError(Exception):
    """An error for a response that is not the object."""

    def __init__(self, status: int, headers: Mapping[str, str], message: str) -> None:
        super().__init__(in_one_line(f"status {status}, {message}".rstrip(", ")))
        self.status = status
        self.headers = headers


def _message_in(text: str, reason: str) -> str:
    """Return the message in the body of an error response.

    Whole bodies are not shown: they may be pages of HTML, or repeat the credentials that were sent.

    Args:
        text: The body: XML as S3 writes it, JSON as Google does, plain text, or anything else.
        reason: Message to return if there is none in it.
    """
    if xml := _XML.search(text):
        return _cut_message(f"{xml[1]}: {xml[2]}", reason)
    try:
        error = json.loads(text)["error"]
        return _cut_message(str(error["message"]), reason)
    except (ValueError, LookupError, TypeError):
        plain = " ".join(text.split())
    return reason if not plain or plain.startswith(("<", "{", "[")) else _cut_message(plain, reason)


def _cut_message(message: str, reason: str) -> str:
    """Return the first words. No word is cut in two: half of a secret would not be recognised and masked."""
    if len(message) <= _LONGEST_MESSAGE:
        return message
    return message[: _LONGEST_MESSAGE + 1].rpartition(" ")[0] or reason
