"""A headless Chromium that opens pages, and tells what it saw: through its own protocol, with nothing but aiohttp."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest

_ON_MACOS = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
_BINARIES = ("chromium", "chromium-browser", "google-chrome", "chrome", _ON_MACOS)
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-port=0",
)
_SECONDS = 60.0
_TOLD = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
_KEYS = {"Tab": 9, "Enter": 13}
_BINARY = next(filter(None, map(shutil.which, _BINARIES)), None)
needs_chromium = pytest.mark.skipif(_BINARY is None, reason="no Chromium is installed")
"""Mark of tests that open pages."""


class Browser:
    """One tab.

    Args:
        loop: Runs what talks to the browser.
        socket: To the browser.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        self._loop, self._socket, self._number = loop, socket, 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """All that the browser told."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go to a page, and wait until all of it is loaded."""
        self._call("Page.navigate", url=url)
        self._run(self._until("Page.loadEventFired"))

    def size(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Give the page a window of so many pixels, light or dark."""
        told = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **told)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, script: str) -> Any:
        """What a line of JavaScript gives, run by us: pages of ours have none."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key: "Tab" or "Enter"."""
        told: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        if key == "Enter":
            told["text"] = "\r"
        self._call("Input.dispatchKeyEvent", type="keyDown", **told)
        self._call("Input.dispatchKeyEvent", type="keyUp", **{**told, "text": ""})

    def wait_for_load(self) -> None:
        """Wait until the next page is loaded, as after a click."""
        self._run(self._until("Page.loadEventFired"))

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what is in the window, or the whole page, as PNG."""
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Everything on the console, and every failure, since the browser began."""
        self.evaluate("1")  # what was under way is told before the answer
        return [str(one["params"]) for one in self.events if one["method"] in _TOLD]

    def hosts(self) -> set[str]:
        """The hosts that were asked for anything."""
        urls = [one["params"]["request"]["url"] for one in self.events if one["method"] == "Network.requestWillBeSent"]
        return {found[1] for url in urls if (found := re.match(r"\w+://([^/]*)", url))}

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def _call(self, method: str, **told: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._run(self._answered(method, told))
        return found

    def _run(self, what: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(what, _SECONDS))

    async def _answered(self, method: str, told: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        to = {} if self._session is None else {"sessionId": self._session}
        await self._socket.send_json({"id": self._number, "method": method, "params": told, **to})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message)
                return dict(message["result"])
            self.events.append(message)

    async def _until(self, event: str) -> None:
        # Page.navigate answers before the page is loaded, so the event of this page is still to come.
        while True:
            message = await self._socket.receive_json()
            self.events.append(message)
            if message.get("method") == event:
                return


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, gone in the end."""
    assert _BINARY is not None
    loop = asyncio.new_event_loop()
    with TemporaryDirectory(prefix="chromium_") as profile:
        environment = {**os.environ, "HOME": profile}
        command = [_BINARY, *_ARGUMENTS, f"--user-data-dir={profile}/data"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
        reader: threading.Thread | None = None
        try:
            assert process.stderr is not None
            url = next(found[1] for line in process.stderr if (found := re.search(rb"listening on (ws://\S+)", line)))
            reader = threading.Thread(target=process.stderr.read)  # what else it says must not fill the pipe
            reader.start()
            client = loop.run_until_complete(_client())
            try:
                socket = loop.run_until_complete(client.ws_connect(url.decode(), max_msg_size=0))
                yield Browser(loop, socket)
                loop.run_until_complete(socket.close())
            finally:
                loop.run_until_complete(client.close())
        finally:
            process.terminate()
            process.wait(timeout=_SECONDS)
            if reader is not None:
                reader.join(_SECONDS)
            assert process.stderr is not None
            process.stderr.close()
            loop.close()


async def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()
