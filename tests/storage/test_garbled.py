"""Answers that are no HTTP, or not the store's, pass: the object is asked for again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.index_cache import IndexCache
from lightning_streaming.errors import DownloadError, IntegrityError
from lightning_streaming.storage import Location, retries
from tests.helpers import assert_error, write_dataset

DATA = bytes(range(256)) * 4
PORTAL = b"<!DOCTYPE html><html>Please log in</html>"


def _ok(data: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
GARBLED = {
    "status line": b"HTP/9 what\r\n\r\n",
    "status": b"HTTP/1.1 2OO OK\r\n\r\n",
    "not http": b"\x16\x03\x01\x00\xff\xfe" * 20,
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n" + DATA,
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1024\r\nContent-Length: 5\r\n\r\n" + DATA,
    "chunk size": _CHUNKED + b"zz\r\n" + DATA,
    "chunk end": _CHUNKED + b"400\r\n" + DATA + b"!!",
    "header": b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n" + DATA,
    "long header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n" + DATA,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 60_000 + b"\r\n" + DATA,
    "nothing": b"",
    "portal": _ok(PORTAL),
}


class RawServer:
    """Sends the bytes of :attr:`answers`, one to each connection, and the last to all that follow."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.asked = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """End it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                head = b""
                while b"\r\n\r\n" not in head and (data := connection.recv(4096)):
                    head += data
                if head:
                    answer = self.answers[min(self.asked, len(self.answers) - 1)]
                    self.asked += 1
                    try:
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(4096):
                            pass
                    except OSError:
                        pass  # the client has seen enough


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RawServer]:
    monkeypatch.setattr(retries, "_FIRST_WAIT", 0.001)
    found = RawServer()
    yield found
    found.close()


def test_one_garbled_answer_ends_nothing(server: RawServer, tmp_path: Path) -> None:
    for what, answer in GARBLED.items():
        server.asked, server.answers = 0, [answer, _ok(DATA)]
        Location(f"{server.url}/x", attempts=2, timeout=20).download(tmp_path / "x", size=len(DATA))
        assert (tmp_path / "x").read_bytes() == DATA, what
        assert server.asked == 2 or what == "many headers", what  # which older versions of aiohttp take


def test_garbled_answers_for_ever_are_an_error_that_says_how_often(server: RawServer) -> None:
    server.answers = [GARBLED["status line"]]
    with assert_error(DownloadError, path="/x"):
        Location(f"{server.url}/x", attempts=3, timeout=20).read()
    assert server.asked == 3


def test_a_page_in_place_of_an_index_passes(server: RawServer, tmp_path: Path) -> None:
    index = (write_dataset(tmp_path / "data") / "index.json").read_bytes()
    server.answers = [_ok(PORTAL), _ok(b"\n " + PORTAL), _ok(index)]
    found = IndexCache(CacheConfig(name="0", remote=server.url, local=tmp_path / "cache")).read()
    assert found.num_samples == 29
    server.asked, server.answers = 0, [_ok(PORTAL)]
    with assert_error(IntegrityError, path="index.json", hint="proxy"):
        IndexCache(CacheConfig(name="0", remote=server.url, local=tmp_path / "other")).read()
    assert server.asked == 3


def test_what_arrived_of_another_version_is_not_continued(server: RawServer, tmp_path: Path) -> None:
    half, old = len(DATA) // 2, bytes(len(DATA))
    cut = b'HTTP/1.1 200 OK\r\nETag: "old"\r\nContent-Length: %d\r\n\r\n%s' % (len(DATA), old[:half])
    rest = b'HTTP/1.1 206 Partial Content\r\nConnection: close\r\nETag: "new"\r\nContent-Range: bytes %d-%d/%d\r\n'
    rest = rest % (half, len(DATA) - 1, len(DATA)) + b"Content-Length: %d\r\n\r\n%s" % (half, DATA[half:])
    server.answers = [cut, rest, _ok(DATA)]
    Location(f"{server.url}/x", attempts=3, timeout=20).download(tmp_path / "x", size=len(DATA))
    assert (tmp_path / "x").read_bytes() == DATA
    assert server.asked == 3
