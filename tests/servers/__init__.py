"""Real servers on the loopback interface, each in a process of its own, and faults in their answers.

    http_server(root)         files of a directory
    s3_server()               S3, in memory
    gcs_server()              Google Cloud Storage, in memory
    fault_proxy(upstream)     before one of the last two, with the same faults as the first

All are also there for benchmarks and from the command line: ``python -m tests.servers --help``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.processes import gcs_emulator, python_server, refused_port
from tests.servers.stores import (
    FaultyStore,
    GcsBucket,
    GcsStore,
    HttpStore,
    Logged,
    S3Bucket,
    S3Store,
    change_link,
    fresh_store,
)

__all__ = [
    "FaultyStore",
    "GcsBucket",
    "GcsStore",
    "HttpStore",
    "Logged",
    "S3Bucket",
    "S3Store",
    "change_link",
    "fault_proxy",
    "fresh_store",
    "gcs_server",
    "http_server",
    "refused_port",
    "s3_server",
]


@contextmanager
def http_server(root: Path, *, latency: float = 0.0, per_connection: float = 0.0, total: float = 0.0) -> Iterator[str]:
    """Serve a directory over HTTP; gives the server's URL. Stores of single tests are made by :func:`fresh_store`.

    Args:
        root: The directory.
        latency: Seconds before each answer.
        per_connection: Bytes a second of each connection; 0 for no cap.
        total: Bytes a second of all connections together; 0 for no cap.
    """
    with python_server("http", str(root), *_link(latency, per_connection, total)) as url:
        yield url


@contextmanager
def fault_proxy(
    upstream: str, *, latency: float = 0.0, per_connection: float = 0.0, total: float = 0.0
) -> Iterator[str]:
    """Serve what another server has, with faults; gives the URL. The arguments are those of :func:`http_server`."""
    with python_server("proxy", upstream, *_link(latency, per_connection, total)) as url:
        yield url


@contextmanager
def s3_server() -> Iterator[S3Store]:
    """An S3 server."""
    with python_server("s3") as url:
        yield S3Store(url=url)


@contextmanager
def gcs_server() -> Iterator[GcsStore]:
    """A server of Google Cloud Storage."""
    with gcs_emulator() as url:
        yield GcsStore(url=url)


def _link(latency: float, per_connection: float, total: float) -> list[str]:
    return ["--latency", str(latency), "--per-connection", str(per_connection), "--total", str(total)]
