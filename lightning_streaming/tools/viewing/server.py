"""The server of pages for one person: on this machine alone, behind a secret, with nothing to run and nothing to write.

Whoever asks must name this server as the host and begin every path with the secret. So neither another user nor a page
of another site gets at the data: it knows no secret, and where it points a name of its own at this machine, the host is
wrong.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from aiohttp import web

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.console import print_note
from lightning_streaming.tools.viewing.view_pages import Answer, Pages, Request
from lightning_streaming.tools.viewing.viewed import Viewed

_HOST = "127.0.0.1"
_AT_ONCE = 8
"""Pages that are made at a time."""
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
}
_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)


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
    quiet = logging.Logger("lightning_streaming.requests", logging.CRITICAL)  # what is no request is told its sender
    door = _Door(pages, secrets.token_urlsafe(24))
    runner = web.ServerRunner(web.Server(door.answer, access_log=None, logger=quiet), shutdown_timeout=_GRACE)
    await runner.setup()
    try:
        site = web.TCPSite(runner, _HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"port {port} of {_HOST} cannot be had: {error.strerror}; leave --port out") from error
        door.port = int(runner.addresses[0][1])
        url = f"http://{_HOST}:{door.port}/{door.token}/"
        print(url, flush=True)
        print_note("view", "Ctrl-C ends it; whoever has the address can look at the data, on this machine only")
        if opens_browser:
            await _in_thread(lambda: webbrowser.open(url))
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


class _Door:
    """Who may come in, and what they are given.

    Args:
        pages: What there is.
        token: What every path must begin with.
    """

    def __init__(self, pages: Pages, token: str) -> None:
        self._pages = pages
        self._rooms = asyncio.Semaphore(_AT_ONCE)
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
        async with self._rooms:
            found = await _in_thread(lambda: self._made(asked))
        if found.location is not None:
            return _redirect(found.location)
        text = f"{found.content_type}; charset=utf-8" if found.content_type.startswith("text/") else found.content_type
        return web.Response(body=found.data, status=found.status, headers={**_HEADERS, "Content-Type": text})

    def _made(self, asked: Request) -> Answer:
        try:
            found = self._pages.answer(asked)
        except Exception:
            # A page that we cannot make ends neither the server nor tells the browser where our code is.
            _logger.exception("the page %s could not be made", asked.path)
            return Answer(
                data=b"This page could not be made; the terminal says why.", content_type="text/plain", status=500
            )
        return found or Answer(data=b"There is no such page.", content_type="text/plain", status=404)


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
