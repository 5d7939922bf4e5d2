"""The HTTP server of the pages: for one user on this machine, behind a secret, without anything to run or to write.

Each request must name this server as its host, and its path must start with the secret. So neither other users nor
pages of other sites can read the data: they do not know the secret, and a foreign domain that resolves to this machine
is not an accepted host.

A page is found by its path, see :data:`_ROUTES`; errors are shown in the page.
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

from lightning_streaming.errors import ConfigError, SampleIndexError, StreamingError
from lightning_streaming.escaping import package_logger
from lightning_streaming.tools.commands import ENDING_SIGNALS
from lightning_streaming.tools.console import print_note
from lightning_streaming.tools.report.pages import icon, style
from lightning_streaming.tools.viewing import pages, sample_pages
from lightning_streaming.tools.viewing.pages import Frame, Request, Response, Viewed

_HOST = "127.0.0.1"
_CONCURRENT_PAGES = 8
"""Number of pages of one stream that are created at a time, and of those of no stream."""
_STREAM_PATH = re.compile(r"s/([0-9]{1,18})/.*")
_PATHS_OF_ALL_STREAMS = ("batches",)
_GRACE = 1.0
"""Seconds that pages in progress have when the server ends."""
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

_ROUTES: list[tuple[re.Pattern[str], Callable[..., Response | None]]] = [
    (re.compile(path.replace("#", r"([0-9]{1,18})")), page)
    for path, page in (
        ("", pages.front),
        (r"style\.css", lambda _, __: Response(data=style().encode(), content_type="text/css")),
        (r"icon\.svg", lambda _, __: Response(data=icon(), content_type="image/svg+xml")),
        ("s/#/", pages.overview),
        ("s/#/samples", sample_pages.samples),
        ("s/#/sample/#", sample_pages.sample),
        ("s/#/file/#/#/#", sample_pages.file),
        ("s/#/columns", pages.columns),
        ("s/#/shards", pages.shards),
        ("find", sample_pages.find),
        ("order", pages.order),
        ("batches", sample_pages.batches),
        ("checkpoint", pages.checkpoint),
    )
]
"""Page of each path; ``#`` is a number that the page receives."""


class Pages(Frame):
    """All pages of a dataset or run."""

    def respond(self, request: Request) -> Response | None:
        """Return a page or a file; None if the path has none."""
        for pattern, page in _ROUTES:
            match = pattern.fullmatch(request.path)
            if match is None:
                continue
            try:
                return page(self, request, *map(int, match.groups()))
            except SampleIndexError as error:
                return self.show_error(request, error, 404)
            except (StreamingError, OSError) as error:
                return self.show_error(request, error)
        return None


def serve(viewed: Viewed, port: int, *, open_browser: bool) -> None:
    """Serve pages until a signal ends this process; their address is printed.

    Args:
        viewed: The dataset or run that they show.
        port: Port of this machine; 0 for any free one.
        open_browser: Whether to open the page in a browser.

    Raises:
        ConfigError: The port is not available.
        KeyboardInterrupt: Ctrl-C was pressed.
        SystemExit: A signal ended the process.
    """
    asyncio.run(_serve(Pages(viewed), port, open_browser))


async def _serve(pages: Pages, port: int, open_browser: bool) -> None:
    ended = _ending_signal()
    handler = _RequestHandler(pages, secrets.token_urlsafe(24))
    runner = web.ServerRunner(_Server(handler.respond), shutdown_timeout=_GRACE)
    await runner.setup()
    try:
        site = web.TCPSite(runner, _HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"port {port} of {_HOST} is not available: {error.strerror}",
                hint="choose another --port, or omit it",
                option="--port",
            ) from error
        handler.port = int(runner.addresses[0][1])
        url = f"http://{_HOST}:{handler.port}/{handler.token}/"
        print(url, flush=True)
        print_note("view", "press Ctrl-C to end; every user of this machine who knows the address can see the data")
        with TemporaryDirectory(prefix="lightning_streaming_", ignore_cleanup_errors=True) as private:
            if open_browser and not await _in_thread(lambda: _open(url, Path(private))):
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
    """Open a page in a browser by a file that only this user can read: all users see the arguments of processes.

    Args:
        url: Address of the page.
        private: An empty directory that exists as long as the browser may read it.

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
    """Creates a :class:`_Connection` for each client."""

    def __call__(self) -> web.RequestHandler:
        """See :class:`web.Server`."""
        silent = logging.Logger("lightning_streaming.requests", logging.CRITICAL)  # the response contains the error
        return _Connection(self, loop=asyncio.get_running_loop(), access_log=silent, logger=silent)


class _Connection(web.RequestHandler):
    """Refuses invalid HTTP like other requests: without versions, and without repeating what was sent."""

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
        refused = _refuse(status, HTTPStatus(status).phrase.lower())
        refused.force_close()
        return refused


class _RequestHandler:
    """Checks requests and answers them with pages.

    Args:
        pages: The pages.
        token: The secret with which every path must start.
    """

    def __init__(self, pages: Pages, token: str) -> None:
        self._pages = pages
        # A store that does not respond blocks only the pages of that stream.
        self._semaphores: dict[int | str | None, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_CONCURRENT_PAGES)
        )
        self.token = token
        self.port = 0

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the response to a request."""
        if request.host not in (f"{_HOST}:{self.port}", f"localhost:{self.port}"):
            return _refuse(403, "this server answers to its own address only")
        token, slash, path = request.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            return _refuse(404, "there is nothing here")
        if request.method not in ("GET", "HEAD"):
            return _refuse(405, "pages are read-only", Allow="GET, HEAD")
        parsed = Request(root=f"/{self.token}/", path=path, query=dict(request.query))
        if not slash:
            return _redirect(parsed.root)
        if path in ("style.css", "icon.svg"):
            response = self._render(parsed)
        else:
            match = _STREAM_PATH.fullmatch(path)
            key = int(match[1]) if match and int(match[1]) < len(self._pages.viewed.streams) else None
            async with self._semaphores[path if path in _PATHS_OF_ALL_STREAMS else key]:
                response = await _in_thread(lambda: self._render(parsed))
        if response.location is not None:
            return _redirect(response.location)
        headers = {**_HEADERS, "Content-Type": response.content_type}
        if response.content_type.startswith("text/"):
            headers["Content-Type"] += "; charset=utf-8"
            return web.Response(body=response.data, status=response.status, headers=headers)
        # An image or audio file, or the requested part of it: players that can seek request parts.
        headers["Accept-Ranges"] = "bytes"
        part = slice(None)
        if request.method == "GET" and "If-Range" not in request.headers:  # we send no version to compare with
            with suppress(ValueError):  # several parts: send the whole file
                part = request.http_range
        if part.start is None and part.stop is None:
            return web.Response(body=response.data, status=response.status, headers=headers)
        size = len(response.data)
        start, stop, _ = part.indices(size)
        if start >= stop:
            return _refuse(416, "there is no such part", **{"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return web.Response(body=response.data[start:stop], status=206, headers=headers)

    def _render(self, request: Request) -> Response:
        try:
            return self._pages.respond(request) or self._pages.show_error(
                request, "No page has this address.", 404, title="There is no such page"
            )
        except Exception:
            # A page that fails neither ends the server nor shows our code in the browser.
            _logger.exception("the page %s could not be created", request.path)
            text = b"This page could not be created; the terminal shows the error."
            return Response(data=text, content_type="text/plain", status=500)


def _refuse(status: int, words: str, **headers: str) -> web.Response:
    return web.Response(status=status, text=f"{status}: {words}\n", headers={**_HEADERS, **headers})


def _redirect(location: str) -> web.Response:
    return web.Response(status=303, headers={**_HEADERS, "Location": location})


async def _in_thread(work: Callable[[], _Result]) -> _Result:
    """Return the result of a daemon thread: the process ends without waiting for a store that may take minutes."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def resolve(result: _Result | None, error: BaseException | None) -> None:
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
        except Exception as error:  # noqa: BLE001  raised where the result is awaited
            failure = error
        with suppress(RuntimeError):  # the server has ended in the meantime
            loop.call_soon_threadsafe(resolve, result, failure)

    threading.Thread(target=run, daemon=True, name="lightning_streaming-view").start()
    return await done
