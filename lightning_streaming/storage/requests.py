"""Asks a store for bytes of an object and hands them over as they arrive, in one round trip.

fsspec's own ways to read return whole parts, tell nothing of the answer's status, and add requests and retries of
their own. So the stores that matter are asked through their filesystem's session or client; any other asynchronous
filesystem through ``cat_file``.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_streaming.errors import IntegrityError
from lightning_streaming.escaping import in_one_line
from lightning_streaming.storage.retries import SLOWEST_RATE, headers_of, status_of
from lightning_streaming.storage.versions import NO_PIN, Pin, answered_versions, bare_etag

Span = tuple[int, int]
_Read = Callable[[], Awaitable[bytes]]

_READ_BYTES = 1 << 20
_WORDS_BYTES = 2000
_AZURE_BYTES = 32 << 20
"""What its client asks for at once of an object whose end it was not told."""
_AZURE_CONNECT_SECONDS = 10
_PARTIAL_CONTENT = 206
_NOT_SATISFIABLE = 416
_CONTENT_RANGE = re.compile(r"bytes\s+(\d+)-(?:\d+/(\d+))?")
_XML = re.compile(r"<Code>([^<]*)</Code>.*?<Message>([^<]*)</Message>", re.DOTALL)
_LONGEST_WORDS = 200


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes on their way."""

    start: int
    """Where in the object they begin: not where they were asked for, if the store ignores ranges."""
    is_whole: bool
    """Whether they are the whole object, asked for or not."""
    read: _Read
    """Gives the next ones; none at the end."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object on an asynchronous filesystem."""

    filesystem: Any
    path: str
    """Where in it."""
    kind: str
    """``"http"``, ``"s3"``, ``"gcs"``, ``"azure"``, or ``"other"``."""
    shown: str
    """Its URL as it may be shown."""
    timeout: float
    """Seconds in which something must arrive, for a client that watches that itself."""
    pin: Pin = NO_PIN
    """The version that its bytes must come from."""

    def open(self, span: Span | None) -> AbstractAsyncContextManager[Body]:
        """Ask for it.

        Args:
            span: The first byte wanted, and the one after the last, which may be beyond the object's end; None for
                the whole object.
        """
        return _OPENERS[self.kind](self, span)

    def silence(self, span: Span | None) -> float:
        """Seconds in which nothing need be seen to arrive, beyond what the user allows for a stall."""
        if self.kind == "azure":  # whose client says nothing before all is there, and itself cuts what has stalled
            return (_AZURE_BYTES if span is None else span[1] - span[0]) / SLOWEST_RATE
        return 0.0 if self.kind != "other" or span is None else (span[1] - span[0]) / SLOWEST_RATE

    async def size(self) -> int | None:
        """Its size where that must be known to read it in pieces; None where it comes as a stream anyway."""
        if self.kind != "other":
            return None
        found = (await self.filesystem._info(self.path)).get("size")
        return None if found is None else int(found)


@asynccontextmanager
async def _open_http(wanted: RemoteObject, span: Span | None) -> AsyncIterator[Body]:
    filesystem = wanted.filesystem
    session = await filesystem.set_session()
    settings = {"read_bufsize": _READ_BYTES, **filesystem.kwargs}
    settings["headers"] = {**(settings.get("headers") or {}), **_range_headers(span)}
    async with session.get(filesystem.encode_url(wanted.path), **settings) as answer:
        yield await _body_of(wanted, answer, span)


@asynccontextmanager
async def _open_gcs(wanted: RemoteObject, span: Span | None) -> AsyncIterator[Body]:
    filesystem = wanted.filesystem
    await filesystem._set_session()
    settings = {
        "params": filesystem._get_params({}),
        "headers": filesystem._get_headers(_range_headers(span)),
        "timeout": filesystem.requests_timeout,
        "read_bufsize": _READ_BYTES,
    }
    async with filesystem.session.get(filesystem.url(wanted.path), **settings) as answer:
        yield await _body_of(wanted, answer, span)


async def _body_of(wanted: RemoteObject, answer: Any, span: Span | None) -> Body:
    if answer.status == _NOT_SATISFIABLE and span is not None:
        raise _too_short(wanted, span)
    if answer.status >= 400:
        text = (await answer.content.read(_WORDS_BYTES)).decode(errors="replace")
        told = answer.headers.get("X-Error-Message")  # of the hub, which has a code beside it
        words = _words_of(text, answer.reason or "") if told is None else _first_words(told, answer.reason or "")
        said = filter(None, (answer.headers.get("X-Error-Code"), words))
        raise RefusedError(answer.status, answer.headers, ": ".join(said))
    headers = answer.headers
    versions = answered_versions(headers, tuple(one.headers for one in answer.history))
    wanted.pin.check(wanted.shown, versions, _size_of_object(answer.status, headers))
    return _make_body(wanted, span, answer.status, headers.get("Content-Range"), answer.content.readany)


@asynccontextmanager
async def _open_s3(wanted: RemoteObject, span: Span | None) -> AsyncIterator[Body]:
    filesystem = wanted.filesystem
    bucket, key, version = filesystem.split_path(wanted.path)
    request = {"Bucket": bucket, "Key": key, **_range_headers(span)}
    if version:
        request["VersionId"] = version
    try:
        answer = await filesystem._call_s3("get_object", filesystem.req_kw, **request)
    except OSError as error:
        if span is not None and status_of(error) == _NOT_SATISFIABLE:
            raise _too_short(wanted, span) from error
        raise
    try:
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        sent = {"Content-Range": answer.get("ContentRange", ""), "Content-Length": str(answer.get("ContentLength", ""))}
        versions = {"etag": bare_etag(answer.get("ETag") or "")}
        wanted.pin.check(wanted.shown, versions, _size_of_object(status, sent))
        read = partial(answer["Body"].read, _READ_BYTES)
        yield _make_body(wanted, span, status, answer.get("ContentRange"), read)
    finally:
        answer["Body"].close()


@asynccontextmanager
async def _open_azure(wanted: RemoteObject, span: Span | None) -> AsyncIterator[Body]:
    filesystem = wanted.filesystem
    container, name, version = filesystem.split_path(wanted.path)
    limits = {} if span is None else {"offset": span[0], "length": span[1] - span[0]}
    seconds = {"connection_timeout": _AZURE_CONNECT_SECONDS, "read_timeout": wanted.timeout}
    async with filesystem.service_client.get_blob_client(container, name) as client:
        try:
            stream = await client.download_blob(version_id=version, max_concurrency=1, **limits, **seconds)
        except Exception as error:
            refusal = _refusal_of_azure(error, wanted, span)
            if refusal is None:
                raise
            raise refusal from error
        versions = {"etag": bare_etag(stream.properties.etag or "")}
        wanted.pin.check(wanted.shown, versions)
        pieces = stream.chunks()

        async def read() -> bytes:
            piece: bytes = await anext(pieces, b"")
            return piece

        yield Body(0, True, read) if span is None else Body(span[0], False, read)


def _refusal_of_azure(error: Exception, wanted: RemoteObject, span: Span | None) -> Exception | None:
    """The store's answer that its client raised; None if it had none."""
    status = status_of(error)
    if status == _NOT_SATISFIABLE and span is not None:
        return _too_short(wanted, span)
    if status is None:
        return None
    headers = headers_of(error)
    words = (str(headers.get("x-ms-error-code", "")), str(error).partition("\n")[0])
    return RefusedError(status, headers, ": ".join(filter(None, words)))


@asynccontextmanager
async def _open_other(wanted: RemoteObject, span: Span | None) -> AsyncIterator[Body]:
    limits = {} if span is None else {"start": span[0], "end": span[1]}
    data: bytes = await wanted.filesystem._cat_file(wanted.path, **limits)
    left = [data]

    async def read() -> bytes:
        return left.pop() if left else b""

    if span is None or len(data) > span[1] - span[0]:
        yield Body(0, True, read)
    else:
        yield Body(span[0], False, read)


_OPENERS = {"http": _open_http, "s3": _open_s3, "gcs": _open_gcs, "azure": _open_azure, "other": _open_other}


def _make_body(
    wanted: RemoteObject,
    span: Span | None,
    status: int,
    content_range: str | None,
    read: _Read,
) -> Body:
    if span is None or status != _PARTIAL_CONTENT:
        return Body(0, True, read)
    start = _first_byte(content_range)
    if start not in (None, span[0]):
        raise IntegrityError(
            f"asked for {wanted.shown} from byte {span[0]} on, the store sent it from byte {start} on",
            path=wanted.shown,
        )
    return Body(span[0], False, read)


def _too_short(wanted: RemoteObject, span: Span) -> IntegrityError:
    return IntegrityError(
        f"{wanted.shown} must have more than {span[0]} bytes, but the store says it has not", path=wanted.shown
    )


def _size_of_object(status: int, headers: Mapping[str, str]) -> int | None:
    """Return the bytes of the whole object, as the headers of an answer report them; None if they do not."""
    if status == _PARTIAL_CONTENT:
        found = _CONTENT_RANGE.match(headers.get("Content-Range", ""))
        return int(found[2]) if found and found[2] else None
    length = headers.get("Content-Length", "")
    is_encoded = headers.get("Content-Encoding", "identity") not in ("", "identity")
    return int(length) if length.isdigit() and not is_encoded else None


def _range_headers(span: Span | None) -> dict[str, str]:
    """The Range header for bytes from ``span[0]`` up to, not including, ``span[1]``; none for the whole object."""
    return {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}


def _first_byte(content_range: str | None) -> int | None:
    """The first byte that a Content-Range header tells of; None without a usable one."""
    found = _CONTENT_RANGE.match(content_range or "")
    return int(found[1]) if found else None


class RefusedError(Exception):
    """A store's answer that is not the object."""

    def __init__(self, status: int, headers: Mapping[str, str], words: str) -> None:
        super().__init__(in_one_line(f"status {status}, {words}".rstrip(", ")))
        self.status = status
        self.headers = headers


def _words_of(text: str, reason: str) -> str:
    """The words of a store's refusal that are for people.

    Whole answers are not shown: they may be pages of HTML, or repeat the credentials that were sent.

    Args:
        text: The answer's body: XML as S3 writes it, JSON as Google does, plain text, or anything else.
        reason: What to say if there is nothing of use in it.
    """
    if xml := _XML.search(text):
        return _first_words(f"{xml[1]}: {xml[2]}", reason)
    try:
        error = json.loads(text)["error"]
        return _first_words(str(error["message"]), reason)
    except (ValueError, LookupError, TypeError):
        plain = " ".join(text.split())
    return reason if not plain or plain.startswith(("<", "{", "[")) else _first_words(plain, reason)


def _first_words(words: str, reason: str) -> str:
    """The first words. None is cut in two: half of a secret would not be known for one."""
    if len(words) <= _LONGEST_WORDS:
        return words
    return words[: _LONGEST_WORDS + 1].rpartition(" ")[0] or reason
