"""Real servers on the loopback interface, each in a process of its own, and faults in their answers.

    http_server(root)         files of a directory
    s3_server()               S3, in memory
    gcs_server()              Google Cloud Storage, in memory
    azure_server()            Azure's blobs, in memory; where Azurite is installed
    fault_proxy(upstream)     before one of the last three, with the same faults as the first
    hub_server(root)          a stand-in for the Hugging Face hub, with these faults too
    oci_server(root)          a stand-in for Oracle's object storage, with these faults too

All are also there for benchmarks and from the command line: ``python -m tests.servers --help``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.processes import (
    azure_emulator,
    azurite,
    gcs_command,
    gcs_emulator,
    python_command,
    python_server,
    refused_port,
    wait_for_gcs,
)
from tests.servers.shared import Launch, end_servers, shared_server
from tests.servers.stores import (
    AzureContainer,
    AzureStore,
    FaultyStore,
    GcsBucket,
    GcsStore,
    HttpStore,
    HubDataset,
    Logged,
    S3Bucket,
    S3Store,
    change_link,
    fresh_store,
    hub_dataset,
)

__all__ = [
    "AzureContainer",
    "AzureStore",
    "FaultyStore",
    "GcsBucket",
    "GcsStore",
    "HttpStore",
    "HubDataset",
    "Logged",
    "S3Bucket",
    "S3Store",
    "azure_server",
    "azurite",
    "change_link",
    "end_servers",
    "fault_proxy",
    "fresh_store",
    "gcs_launch",
    "gcs_server",
    "http_server",
    "hub_dataset",
    "hub_server",
    "oci_server",
    "python_launch",
    "refused_port",
    "s3_server",
    "shared_server",
]


def python_launch(*arguments: str) -> Launch:
    """Return how ``python -m tests.servers`` is started for a whole run."""
    return Launch(python_command(*arguments))


def gcs_launch() -> Launch:
    """Return how the server of Google Cloud Storage is started for a whole run."""
    command, url = gcs_command()

    def wait() -> str:
        wait_for_gcs(url)
        return url

    return Launch(command, wait)


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


@contextmanager
def azure_server() -> Iterator[AzureStore]:
    """Azurite, which must be there (:func:`azurite`)."""
    with azure_emulator() as url:
        yield AzureStore(url=url)


@contextmanager
def hub_server(root: Path) -> Iterator[str]:
    """Serve the datasets under a directory as the Hugging Face hub does; gives the URL."""
    with python_server("hub", str(root)) as url:
        yield url


@contextmanager
def oci_server(root: Path) -> Iterator[str]:
    """Serve the objects under a directory as Oracle's object storage does; gives the URL."""
    with python_server("oci", str(root)) as url:
        yield url


def _link(latency: float, per_connection: float, total: float) -> list[str]:
    return ["--latency", str(latency), "--per-connection", str(per_connection), "--total", str(total)]
