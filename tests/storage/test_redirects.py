"""Headers, logins and cookies of a user go to the origin that was asked first, and to no other it redirects to."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Iterator
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import yarl
from multidict import CIMultiDict

from lightning_streaming.errors import ConfigError
from lightning_streaming.storage import Location
from lightning_streaming.storage.filesystems import guard_redirects
from tests.helpers import assert_error

DATA = bytes(range(256)) * 4
SECRET = "a-key-that-is-secret"
with warnings.catch_warnings():  # newer versions of aiohttp want a header instead
    warnings.simplefilter("ignore", DeprecationWarning)
    LOGIN = aiohttp.BasicAuth("user", SECRET)


class Origin:
    """A server that notes the headers it gets, and answers with :data:`DATA`, or a redirect."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.to: str | None = None
        origin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                origin.seen.append((self.command, self.path, {name.lower(): one for name, one in self.headers.items()}))
                if origin.to is not None and not self.path.startswith("/end"):
                    self.send_response(302)
                    self.send_header("Location", origin.to)
                    data = b""
                elif self.path.endswith("/"):
                    self.send_response(200)
                    data = f'<a href="{origin.url}/end/x">x</a>'.encode()
                else:
                    self.send_response(200)
                    data = DATA
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.scheme = "http"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server.server_port}"

    def secrets(self) -> list[dict[str, str]]:
        """Of each request the headers that hold the secret, or its base64."""
        hidden = (SECRET, LOGIN.encode())
        return [{name: one for name, one in found.items() if any(h in one for h in hidden)} for *_, found in self.seen]


@pytest.fixture
def origins() -> Iterator[tuple[Origin, Origin]]:
    pair = Origin(), Origin()
    yield pair
    for one in pair:
        one.server.shutdown()
        one.server.server_close()


OPTIONS: dict[str, dict[str, Any]] = {
    "headers": {"headers": {"X-Api-Key": SECRET, "Authorization": f"Bearer {SECRET}", "User-Agent": SECRET}},
    "session": {"client_kwargs": {"headers": {"Private-Token": SECRET}}},
    "login": {"client_kwargs": {"auth": LOGIN}},
    "cookies": {"client_kwargs": {"cookies": {"session": SECRET}}},
    "cookies of a request": {"cookies": {"session": SECRET}},
    "cookies beside others": {"headers": {"Cookie": "a=b"}, "cookies": {"session": SECRET}},
    "pairs of cookies": {"client_kwargs": {"cookies": [["session", SECRET]]}},
    "parsed cookies": {"client_kwargs": {"cookies": SimpleCookie(f"session={SECRET}")}},
}
WAYS: dict[str, Callable[[Location, Path], object]] = {
    "whole": lambda place, _: place.read(),
    "to a file": lambda place, directory: place.download(directory / "x", size=len(DATA)),
    "range": lambda place, _: place.read_range(5, 9),
    "ranges": lambda place, _: place.read_ranges([(0, 4), (100, 200)]),
    "size": lambda place, _: place.size(),
    "list": lambda place, _: Location(f"{place.url.removesuffix('x')}dir", place.options).walk_files(),
}


@pytest.mark.rotate(2)
@pytest.mark.parametrize("options", OPTIONS)
def test_no_secret_follows_a_redirect_to_another_port(
    options: str, origins: tuple[Origin, Origin], tmp_path: Path
) -> None:
    first, second = origins
    for way, act in WAYS.items():
        first.seen.clear()
        second.seen.clear()
        first.to = f"{second.url}/end/{'' if way == 'list' else 'x'}"
        act(Location(f"{first.url}/x", OPTIONS[options], attempts=1, timeout=20), tmp_path)
        assert first.seen, way
        assert second.seen, way
        assert all(first.secrets()), way
        assert not any(second.secrets()), way
    first.to, second.to = f"{second.url}/x", f"{first.url}/end/x"  # and back again
    first.seen.clear()
    assert Location(f"{first.url}/x", OPTIONS[options], attempts=1, timeout=20).read() == DATA
    assert [bool(one) for one in first.secrets()] == [True, False]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("options", OPTIONS)
def test_secrets_follow_a_redirect_to_the_same_origin(options: str, origins: tuple[Origin, Origin]) -> None:
    first, _ = origins
    first.to = "/end/x"
    assert Location(f"{first.url}/x", OPTIONS[options], attempts=1, timeout=20).read() == DATA
    assert all(first.secrets())
    assert len(first.seen) == 2


@pytest.mark.parametrize(
    ("cookies", "header"),
    [
        ({"a": "1", "b": 2}, "a=1; b=2"),
        ([("a", "1"), ["b", "2"]], "a=1; b=2"),
        (SimpleCookie("a=1; b=2"), "a=1; b=2"),
        ([("a", SimpleCookie("a=1")["a"])], "a=1"),
        ({}, None),
    ],
)
def test_cookies_of_every_form_become_a_header(cookies: Any, header: str | None) -> None:
    for found in (
        guard_redirects({"cookies": cookies}),
        guard_redirects({"client_kwargs": {"cookies": cookies}})["client_kwargs"],
    ):
        assert "cookies" not in found
        assert found.get("headers", {}).get("Cookie") == header
    beside = guard_redirects({"headers": {"cookie": "c=3"}, "cookies": cookies})["headers"]
    assert beside == {"cookie": "c=3" if header is None else f"c=3; {header}"}


@pytest.mark.parametrize("options", [{"auth": ["user", SECRET]}, {"auth": SECRET}, {"cookies": SECRET}, {"cookies": 5}])
def test_a_login_or_cookies_of_another_type_are_refused(options: dict[str, Any]) -> None:
    with assert_error(ConfigError, option="storage_options") as caught:
        guard_redirects({"client_kwargs": options})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "is_same"),
    [
        ("/y", True),
        ("https://host/y", True),
        ("https://HOST:443/y", True),
        ("http://host/y", False),
        ("//other/y", False),
        ("https://host:8443/y", False),
        ("https://host.other/y", False),
        ("https://[/y", False),
    ],
)
def test_an_origin_is_scheme_host_and_port(where: str, is_same: bool) -> None:
    (guard,) = guard_redirects({})["client_kwargs"]["trace_configs"]
    answer = SimpleNamespace(headers={"Location": where})
    sent = CIMultiDict({"X-Key": SECRET, "Range": "bytes=0-4"})
    params = SimpleNamespace(url=yarl.URL("https://host/x"), headers=sent, response=answer)
    request = guard.trace_config_ctx()
    asyncio.run(guard.on_request_start[0](None, request, params))
    asyncio.run(guard.on_request_redirect[0](None, request, params))
    assert ("x-key" in sent) is is_same
    assert sent["range"] == "bytes=0-4"
