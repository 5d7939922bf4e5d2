"""Real servers on the loopback interface, each in a process of its own.

A server in a thread of the test process would not do: children forked by a test inherit its connections, and a
connection that was cut looks stalled until they exit.

Run as a script, this file is such a process. It prints its port and serves until its standard input ends, so it cannot
outlive the tests.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpStore:
    """A directory served over HTTP, whose answers can be made to fail."""

    url: str
    """Where the directory is served."""
    root: Path
    """The directory."""

    def fail(self, match: str, fault: str, *, times: int = -1, skip: int = 0, status: int = 503) -> None:
        """Spoil answers to requests.

        Args:
            match: Regular expression searched for in the name of the file that is asked for.
            fault: ``status`` answers with ``status``; ``reset`` cuts the connection before an answer; ``truncate``
                ends the body early; ``corrupt`` changes its first byte; ``short`` leaves out its last byte, with the
                right length in the header; ``stall`` sends half of the body, then nothing for 30 seconds.
            times: How many requests to spoil; -1 for all.
            skip: How many requests to serve well before.
            status: HTTP status for ``status``.
        """
        rule = {
            "match": f"^/{self.root.name}/.*{match}",
            "fault": fault,
            "times": times,
            "skip": skip,
            "status": status,
        }
        self._control("fail", json.dumps(rule).encode())

    def requests(self) -> list[str]:
        """Names of the files asked for, in order, relative to :attr:`root`."""
        prefix = f"/{self.root.name}/"
        paths: list[str] = json.loads(self._control("log"))
        return [path[len(prefix) :].partition("?")[0] for path in paths if path.startswith(prefix)]

    def _control(self, what: str, data: bytes | None = None) -> bytes:
        host = self.url.rpartition("/")[0]
        with urllib.request.urlopen(f"{host}/__{what}", data=data, timeout=10) as answer:
            body: bytes = answer.read()
            return body


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Store:
    """An S3 server that keeps objects in memory."""

    url: str
    """Its endpoint."""

    @property
    def options(self) -> dict[str, Any]:
        """Storage options that reach it."""
        return {"key": "testing-key", "secret": "testing-secret", "endpoint_url": self.url}

    def make_bucket(self) -> str:
        """Make an empty bucket, and return its URL."""
        bucket = f"bucket-{uuid4().hex[:12]}"
        request = urllib.request.Request(f"{self.url}/{bucket}", method="PUT")  # an S3 client would do no more
        urllib.request.urlopen(request, timeout=10).close()
        return f"s3://{bucket}"


@contextmanager
def http_server(root: Path) -> Iterator[str]:
    """Serve a directory over HTTP; gives the server's URL. Stores of single tests are made by :func:`fresh_store`."""
    with _server_process("http", str(root)) as url:
        yield url


def fresh_store(server_url: str, root: Path) -> HttpStore:
    """An empty directory of its own under the directory that a server serves."""
    name = uuid4().hex[:12]
    (root / name).mkdir()
    return HttpStore(url=f"{server_url}/{name}", root=root / name)


@contextmanager
def s3_server() -> Iterator[S3Store]:
    """An S3 server."""
    with _server_process("s3") as url:
        yield S3Store(url=url)


@contextmanager
def refused_port() -> Iterator[int]:
    """A port of the loopback interface that refuses connections."""
    with socket.socket() as taken:  # bound, so that nobody else gets it, but not listening
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        yield port


@contextmanager
def _server_process(*arguments: str) -> Iterator[str]:
    command = [sys.executable, __file__, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().decode().strip()
            if not port:
                raise RuntimeError(f"{' '.join(command)} ended with {process.wait()} before it served")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


class _Faults:
    """Rules and request log of the HTTP server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[dict[str, Any]] = []
        self.log: list[str] = []

    def add(self, rule: dict[str, Any]) -> None:
        with self._lock:
            self._rules.append(rule)

    def next_for(self, path: str) -> dict[str, Any]:
        """Log a request, and give the rule that spoils it, if any."""
        with self._lock:
            self.log.append(path)
            for rule in self._rules:
                if not re.search(rule["match"], path) or rule["times"] == 0:
                    continue
                if rule["skip"] > 0:
                    rule["skip"] -= 1
                else:
                    rule["times"] -= 1
                    return rule
        return {"fault": "none"}


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: _Faults

    def do_GET(self) -> None:
        if self.path == "/__log":
            self._send(json.dumps(self.faults.log).encode())
            return
        rule = self.faults.next_for(self.path)
        if rule["fault"] == "status":
            self.send_error(rule["status"])
            return
        if rule["fault"] == "reset":
            self._reset()
            return
        path = Path(self.translate_path(self.path))
        if path.is_file():
            self._send(path.read_bytes(), rule["fault"])
        else:
            self.send_error(404)

    def do_HEAD(self) -> None:
        self.send_error(405)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/__fail":
            self.faults.add(json.loads(data))
            self._send(b"")
        else:
            self.send_error(405)

    def _send(self, body: bytes, fault: str = "none") -> None:
        if fault == "short":
            body = body[:-1]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "corrupt":
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault in ("truncate", "stall"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            time.sleep(30 if fault == "stall" else 0)
            self.close_connection = True
        else:
            self.wfile.write(body)

    def _reset(self) -> None:
        linger = struct.pack("ii", 1, 0)  # closing then sends RST instead of FIN
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        """Stay quiet."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def _serve_http(root: str) -> None:
    handler = type("Handler", (_Handler,), {"faults": _Faults()})
    server = _Server(("127.0.0.1", 0), lambda *args: handler(*args, directory=root))
    _announce(server.server_port)
    server.serve_forever()


def _serve_s3() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    _announce(server.port)
    server.serve_forever()


def _announce(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


def _serve_until_input_ends(arguments: list[str]) -> None:
    kind, *rest = arguments
    servers: dict[str, Callable[..., None]] = {"http": _serve_http, "s3": _serve_s3}
    threading.Thread(target=lambda: servers[kind](*rest), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    _serve_until_input_ends(sys.argv[1:])
