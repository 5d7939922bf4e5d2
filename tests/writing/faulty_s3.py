"""An S3 server whose answers can be made to fail: it passes requests on to a sound one."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.servers import S3Store


class FaultyS3:
    """What it does, and what it has seen."""

    def __init__(self, sound: S3Store) -> None:
        self._sound = sound
        self._lock = threading.Lock()
        self._rules: list[list[Any]] = []
        self.url = ""
        self.requests: list[str] = []
        """Method and path of each request, in order."""

    @property
    def options(self) -> dict[str, Any]:
        """Storage options that reach it."""
        return {**self._sound.options, "endpoint_url": self.url}

    @property
    def host(self) -> str:
        """Where the sound server listens."""
        return self._sound.url.removeprefix("http://")

    def fail(self, match: str, status: int, *, times: int = -1) -> None:
        """Answer requests whose ``"METHOD path"`` matches with an error; 0 cuts the connection. -1 times is always."""
        self._rules.append([match, status, times])

    def status_for(self, request: str) -> int | None:
        """Log a request; the error it is answered with, if any."""
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if re.search(rule[0], request) and rule[2] != 0:
                    rule[2] -= 1
                    status: int = rule[1]
                    return status
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faulty: FaultyS3

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status = self.faulty.status_for(f"{self.command} {self.path}")
        if status == 0:
            self.close_connection = True
            return
        if status is not None:
            self._answer(status, {}, b"<Error><Code>Failure</Code></Error>")
            return
        connection = http.client.HTTPConnection(self.faulty.host, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        self._answer(answer.status, dict(answer.getheaders()), data)
        connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        length = headers.pop("Content-Length", None) if self.command == "HEAD" else None
        for name, value in headers.items():
            if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def log_message(self, *args: object) -> None:
        """Stay quiet."""


@contextmanager
def faulty_s3(sound: S3Store) -> Iterator[FaultyS3]:
    """Serve before a sound S3 server."""
    faulty = FaultyS3(sound)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"faulty": faulty}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    faulty.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield faulty
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
