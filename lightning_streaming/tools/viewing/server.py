"""The server of pages for one person: on this machine alone, behind a secret, with nothing to run and nothing to write.

Whoever asks must name this server as the host and begin every path with the secret. So neither another user nor a page
of another site gets at the data: it knows no secret, and where it points a name of its own at this machine, the host is
wrong.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import secrets
import signal
import sys
import threading
import webbrowser
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from aiohttp import web

from lightning_streaming.errors import ConfigError
from lightning_streaming.escaping import package_logger
from lightning_streaming.tools.commands import ENDING_SIGNALS
from lightning_streaming.tools.console import print_note
from lightning_streaming.tools.viewing.page import Answer, Request
from lightning_streaming.tools.viewing.view_pages import Pages
from lightning_streaming.tools.viewing.viewed import Viewed

_HOST = "127.0.0.1"
_AT_ONCE = 8
"""Pages that are made of a stream at a time; so many more of all streams, and of none."""
_OF_STREAM = re.compile(r"s/([0-9]{1,18})/.*")
_OF_ALL_STREAMS = ("batches",)
"""Pages that read samples of any stream."""
_GRACE = 1.0
"""Seconds for pages under way when the server ends."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; media-src 'self'; style-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "lightning-streaming",  # no versions
}
_Result = TypeVar("_Result")
_logger = package_logger(__name__)


def serve(viewed: Viewed, port: int, *, opens_browser: bool) -> None:
    """Give out pages until this process is told to end; their address is printed.

    Args:
        viewed: What they show.
        port: Of this machine; 0 for one that is free.
        opens_browser: Whether to open the page.

    Raises:
        ConfigError: The port is taken.
        KeyboardInterrupt: Ctrl-C was pressed.
        SystemExit: The process was told to end.
    """
    asyncio.run(_serve(Pages(viewed), port, opens_browser))


async def _serve(pages: Pages, port: int, opens_browser: bool) -> None:
    ended = _ending_signal()
    door = _Door(pages, secrets.token_urlsafe(24))
    runner = web.ServerRunner(_Server(door.answer), shutdown_timeout=_GRACE)
    await runner.setup()
    try:
        site = web.TCPSite(runner, _HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"port {port} of {_HOST} cannot be had: {error.strerror}", hint="leave --port out", option="--port"
            ) from error
        door.port = int(runner.addresses[0][1])
        url = f"http://{_HOST}:{door.port}/{door.token}/"
        print(url, flush=True)
        print_note("view", "Ctrl-C ends it; whoever has the address can look at the data, on this machine only")
        with TemporaryDirectory(prefix="lightning_streaming_", ignore_cleanup_errors=True) as private:
            if opens_browser and not await _in_thread(lambda: _open(url, Path(private))):
                print_note("view", "no browser could be opened; open the address in one")
            sys.exit(128 + await ended)
    finally:
        await runner.cleanup()


def _ending_signal() -> asyncio.Future[int]:
    """Return the number of the signal that will end this process.

    The handlers of :func:`~lightning_streaming.tools.commands.run_command` raise in the code that is running, also in
    the task of a connection, whose exception asyncio would report. So the event loop handles these signals.
    """
    loop = asyncio.get_running_loop()
    number = loop.create_future()

    def resolve(received: int) -> None:
        if not number.done():
            number.set_result(received)

    if threading.current_thread() is threading.main_thread():  # which alone may handle signals
        for ending in ENDING_SIGNALS:
            if callable(signal.getsignal(ending)):
                loop.add_signal_handler(ending, resolve, ending)
    return number


def _open(url: str, private: Path) -> bool:
    """Open a page by way of a file that only this user can read: all users see the arguments of a browser.

    Args:
        url: The page's address.
        private: An empty directory of this user's, which stays as long as the browser may read there.

    Returns:
        Whether there is a browser.
    """
    page = private / "view.html"
    text = f'''<!doctype html><meta charset="utf-8"><title>lightning-streaming view</title>
<meta http-equiv="refresh" content="0; url={url}"><a href="{url}">To the pages</a>
'''
    with os.fdopen(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    return webbrowser.open(page.as_uri())


class _Server(web.Server):
    """Makes a connection of ours for each who comes."""

    def __call__(self) -> web.RequestHandler:
        """See :class:`web.Server`."""
        quiet = logging.Logger("lightning_streaming.requests", logging.CRITICAL)  # what is wrong is told the sender
        return _Connection(self, loop=asyncio.get_running_loop(), access_log=quiet, logger=quiet)


class _Connection(web.RequestHandler):
    """Refuses what is no request as the door refuses requests: without versions, or what was sent."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See :class:`web.RequestHandler`."""
        super().handle_error(request, status, exc, message)
        refused = _refused(status, HTTPStatus(status).phrase.lower())
        refused.force_close()
        return refused


class _Door:
    """Who may come in, and what they are given.

    Args:
        pages: What there is.
        token: What every path must begin with.
    """

    def __init__(self, pages: Pages, token: str) -> None:
        self._pages = pages
        # A store that does not answer holds up the pages of its own stream alone.
        self._rooms: dict[int | str | None, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_AT_ONCE))
        self.token = token
        self.port = 0

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        if request.host not in (f"{_HOST}:{self.port}", f"localhost:{self.port}"):
            return _refused(403, "this server answers to its own address only")
        given, slash, path = request.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode()):
            return _refused(404, "there is nothing here")
        if request.method not in ("GET", "HEAD"):
            return _refused(405, "pages can be looked at only", Allow="GET, HEAD")
        asked = Request(root=f"/{self.token}/", path=path, query=dict(request.query))
        if not slash:
            return _redirect(asked.root)
        if path in ("style.css", "icon.svg"):
            found = self._made(asked)
        else:
            async with self._rooms[self._stream(path)]:
                found = await _in_thread(lambda: self._made(asked))
        if found.location is not None:
            return _redirect(found.location)
        if found.content_type.startswith("text/"):
            headers = {**_HEADERS, "Content-Type": f"{found.content_type}; charset=utf-8"}
            return web.Response(body=found.data, status=found.status, headers=headers)
        return _file(request, found)

    def _stream(self, path: str) -> int | str | None:
        """The stream that a page is of, or its path where it is of all; None of other pages."""
        if path in _OF_ALL_STREAMS:
            return path
        match = _OF_STREAM.fullmatch(path)
        return int(match[1]) if match and int(match[1]) < len(self._pages.viewed.streams) else None

    def _made(self, asked: Request) -> Answer:
        try:
            return self._pages.answer(asked) or self._pages.missing(asked)
        except Exception:
            # A page that we cannot make ends neither the server nor tells the browser where our code is.
            _logger.exception("the page %s could not be made", asked.path)
            return Answer(
                data=b"This page could not be made; the terminal says why.", content_type="text/plain", status=500
            )


def _file(request: web.BaseRequest, found: Answer) -> web.Response:
    """A picture or a sound, or the part of it that was asked for: a player that may jump asks for parts."""
    headers, size = {**_HEADERS, "Content-Type": found.content_type, "Accept-Ranges": "bytes"}, len(found.data)
    asked = slice(None)
    if request.method == "GET" and "If-Range" not in request.headers:  # we name no version that it could be of
        with suppress(ValueError):  # who asks for several parts is given the whole
            asked = request.http_range
    if asked.start is None and asked.stop is None:
        return web.Response(body=found.data, status=found.status, headers=headers)
    start, stop, _ = asked.indices(size)
    if start >= stop:
        return _refused(416, "there is no such part", **{"Content-Range": f"bytes */{size}"})
    told = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    return web.Response(body=found.data[start:stop], status=206, headers={**headers, **told})


def _refused(status: int, words: str, **headers: str) -> web.Response:
    return web.Response(status=status, text=f"{status}: {words}\n", headers={**_HEADERS, **headers})


def _redirect(location: str) -> web.Response:
    return web.Response(status=303, headers={**_HEADERS, "Location": location})


async def _in_thread(work: Callable[[], _Result]) -> _Result:
    """Do work in a thread that nobody waits for when the process ends: a store may take minutes to fail."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def tell(result: _Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def run() -> None:
        result: _Result | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  whoever waits is told
            failure = error
        with suppress(RuntimeError):  # the server has ended meanwhile, and nobody waits
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=run, daemon=True, name="lightning_streaming-view").start()
    return await done
