"""What tests hold of a server: places for objects, the faults of their answers, and the log of their requests."""

from __future__ import annotations

import json
import re
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote
from uuid import uuid4


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """One request, as the server saw it. An answer that was not finished has no ``sent`` and no ``ended``."""

    method: str
    name: str
    """Of the object, relative to the store."""
    begun: float
    """When the request was there, in seconds of :func:`time.monotonic`."""
    connection: int
    """Number of the connection."""
    range: str | None = None
    """The Range header."""
    fault: str | None = None
    """What spoiled the answer."""
    status: int | None = None
    declared: int | None = None
    """Content-Length of the answer."""
    sent: int | None = None
    """Bytes of the body that were sent."""
    ended: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultyStore:
    """A place for objects behind a fault server."""

    url: str
    """Where the objects are, as a dataset is told."""
    options: dict[str, Any] = field(default_factory=dict)
    """Storage options that reach them."""
    server: str
    """The fault server."""
    prefix: str
    """What the paths of requests for the objects begin with."""

    def put(self, name: str, data: bytes) -> None:
        """Store an object, past all faults."""
        raise NotImplementedError

    def put_all(self, directory: Path) -> None:
        """Store every file of a directory."""
        for path in directory.iterdir():
            self.put(path.name, path.read_bytes())

    def fail(self, match: str, fault: str, *, times: int = -1, skip: int = 0, status: int = 503, **more: Any) -> None:
        """Spoil answers to requests. Of several faults that could spoil an answer the one added first does.

        Args:
            match: Regular expression searched for in the name of the object that is asked for.
            fault: ``status`` answers with ``status``; ``auth`` does so unless the Authorization header is
                ``authorization``; ``reset`` cuts the connection before an answer, ``reset_body`` half way through the
                body; ``truncate`` ends the body early; ``corrupt`` changes one byte of it; ``short`` leaves out its
                last byte and ``long`` adds one, with a length in the header that fits; ``stall`` sends half of the
                body, then nothing for ``seconds``; ``hang`` sends nothing at all; ``slow`` sends ``rate`` bytes a
                second; ``ignore_range`` sends the whole object whatever was asked for.
            times: How many requests to spoil; -1 for all.
            skip: How many requests to serve well before.
            status: HTTP status for ``status`` and ``auth``.
            more: Further fields of :class:`tests.servers.fault_server.Fault`.
        """
        rule = {"match": f"^{re.escape(self.prefix)}.*{match}", "fault": fault, "times": times, "skip": skip}
        _post(f"{self.server}/__fail", json.dumps({**rule, "status": status, **more}).encode())

    def heal(self) -> None:
        """End all faults of this store."""
        _post(f"{self.server}/__heal", f"^{re.escape(self.prefix)}".encode())

    def log(self) -> list[Logged]:
        """Every request for objects of this store, in order."""
        entries = json.loads(_post(f"{self.server}/__log", f"^{re.escape(self.prefix)}".encode()))
        return [Logged(name=entry.pop("path")[len(self.prefix) :], **entry) for entry in entries]

    def requests(self) -> list[str]:
        """Names of the objects that were read, or whose reading was tried, in order."""
        return [entry.name for entry in self.log() if entry.method == "GET"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpStore(FaultyStore):
    """A directory served over HTTP, whose answers can be made to fail."""

    root: Path
    """The directory."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file of the directory."""
        (self.root / name).write_bytes(data)


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
        _send(f"{self.url}/{bucket}", "PUT")  # an S3 client would do no more
        return f"s3://{bucket}"

    def bucket_behind(self, server: str) -> S3Bucket:
        """An empty bucket, reached through a fault server before this one."""
        url = self.make_bucket()
        path = f"/{url.removeprefix('s3://')}/"
        return S3Bucket(url=url, options={**self.options, "endpoint_url": server}, server=server, prefix=path, s3=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Bucket(FaultyStore):
    """A bucket of S3 whose answers can be made to fail."""

    s3: S3Store

    def put(self, name: str, data: bytes) -> None:
        """Store an object."""
        # moto takes any key and any signature, but no anonymous writers.
        key = "AWS4-HMAC-SHA256 Credential=testing/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        _send(f"{self.s3.url}{self.prefix}{quote(name)}", "PUT", data, {"Authorization": key})


@dataclass(frozen=True, kw_only=True, slots=True)
class GcsStore:
    """A server of Google Cloud Storage that keeps objects in memory."""

    url: str
    """Its endpoint."""

    @property
    def options(self) -> dict[str, Any]:
        """Storage options that reach it."""
        return {"token": "anon", "endpoint_url": self.url}

    def make_bucket(self) -> str:
        """Make an empty bucket, and return its URL."""
        bucket = f"bucket-{uuid4().hex[:12]}"
        _send(f"{self.url}/storage/v1/b?project=test", "POST", json.dumps({"name": bucket}).encode())
        return f"gs://{bucket}"

    def bucket_behind(self, server: str) -> GcsBucket:
        """An empty bucket, reached through a fault server before this one."""
        url = self.make_bucket()
        path = f"/download/storage/v1/b/{url.removeprefix('gs://')}/o/"
        options = {**self.options, "endpoint_url": server}
        return GcsBucket(url=url, options=options, server=server, prefix=path, gcs=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class GcsBucket(FaultyStore):
    """A bucket of Google Cloud Storage whose answers can be made to fail."""

    gcs: GcsStore

    def put(self, name: str, data: bytes) -> None:
        """Store an object."""
        where = self.prefix.replace("/download/", "/upload/")
        _send(f"{self.gcs.url}{where}?uploadType=media&name={quote(name, safe='')}", "POST", data)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset(FaultyStore):
    """The main revision of a dataset on the hub, whose answers can be made to fail."""

    root: Path
    """The directory with the dataset's revisions."""

    def put(self, name: str, data: bytes, revision: str = "main") -> None:
        """Write a file of a revision."""
        path = self.root / quote(revision, safe="") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def at(self, revision: str) -> str:
        """The URL of a revision, which is put into it as it is."""
        return f"{self.url}@{revision}"


def hub_dataset(server: str, root: Path, name: str) -> HubDataset:
    """An empty dataset under the directory that a hub serves, with a number added to its name."""
    name = f"{name}-{uuid4().hex[:12]}"
    (root / "user" / name / "main").mkdir(parents=True)
    url, prefix = f"hf://datasets/user/{name}", f"/datasets/user/{name}/resolve/main/"
    return HubDataset(url=url, options={"endpoint": server}, server=server, prefix=prefix, root=root / "user" / name)


@dataclass(frozen=True, kw_only=True, slots=True)
class AzureStore:
    """Azurite, Azure's own emulator of its blobs."""

    url: str
    """Its endpoint."""

    # Known to everyone: each Azurite has them.
    ACCOUNT: ClassVar[str] = "devstoreaccount1"
    KEY: ClassVar[str] = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def options_at(self, server: str) -> dict[str, Any]:
        """Storage options that reach it through a server before it."""
        said = {"AccountName": self.ACCOUNT, "AccountKey": self.KEY, "BlobEndpoint": f"{server}/{self.ACCOUNT}"}
        connection = ["DefaultEndpointsProtocol=http", *(f"{name}={value}" for name, value in said.items())]
        return {"connection_string": ";".join(connection) + ";"}

    @property
    def options(self) -> dict[str, Any]:
        """Storage options that reach it."""
        return self.options_at(self.url)

    def make_bucket(self) -> str:
        """Make an empty container, and return its URL."""
        from azure.storage.blob import BlobServiceClient

        name = f"container-{uuid4().hex[:12]}"
        with BlobServiceClient.from_connection_string(self.options["connection_string"]) as client:
            client.create_container(name)
        return f"az://{name}"

    def bucket_behind(self, server: str) -> AzureContainer:
        """An empty container, reached through a fault server before this one."""
        url = self.make_bucket()
        path = f"/{self.ACCOUNT}/{url.removeprefix('az://')}/"
        return AzureContainer(url=url, options=self.options_at(server), server=server, prefix=path, azure=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class AzureContainer(FaultyStore):
    """A container of Azure whose answers can be made to fail."""

    azure: AzureStore

    def put(self, name: str, data: bytes) -> None:
        """Store a blob."""
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(self.azure.options["connection_string"]) as client:
            client.get_blob_client(self.url.removeprefix("az://"), name).upload_blob(data, overwrite=True)


def fresh_store(server_url: str, root: Path) -> HttpStore:
    """An empty directory of its own under the directory that a server serves."""
    name = uuid4().hex[:12]
    (root / name).mkdir()
    return HttpStore(url=f"{server_url}/{name}", root=root / name, server=server_url, prefix=f"/{name}/")


def change_link(server: str, *, latency: float = 0.0, per_connection: float = 0.0, total: float = 0.0) -> None:
    """Let a fault server answer at another speed from now on: seconds, and bytes a second; 0 for no cap."""
    link = {"latency": latency, "per_connection": per_connection, "total": total}
    _post(f"{server}/__link", json.dumps(link).encode())


def _post(url: str, data: bytes) -> bytes:
    return _send(url, "POST", data)


def _send(url: str, method: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    headers = {"Content-Type": "application/octet-stream", **(headers or {})}  # a form, if nothing were said
    request = urllib.request.Request(url, method=method, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
        return body
