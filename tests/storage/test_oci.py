"""Oracle's object storage, through its own client, from a stand-in that speaks its protocol."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from lightning_streaming import MDSWriter
from lightning_streaming.errors import (
    AccessDeniedError,
    ConfigError,
    DownloadError,
    IntegrityError,
    ObjectNotFoundError,
    StorageError,
)
from lightning_streaming.storage import Location, StorageOptions, retries
from lightning_streaming.storage.filesystems import kind_of, open_filesystem
from tests.helpers import ids, make_loader, write_dataset
from tests.servers import FaultyStore, oci_server, refused_port

pytest.importorskip("ocifs", reason="ocifs is not installed: pip install 'lightning-streaming[oci]'")
_KEY = rsa.generate_private_key(65537, 2048).private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
)
CONFIG = {
    "user": "ocid1.user.oc1..aaaaexample",
    "tenancy": "ocid1.tenancy.oc1..aaaaexample",
    "fingerprint": "20:3b:97:13:55:1c:5b:0d:d3:37:d8:50:4e:c5:3a:34",
    "region": "us-phoenix-1",
    "key_content": _KEY.decode(),
}


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    root = tmp_path_factory.mktemp("oci")
    with oci_server(root) as url:
        yield url, root


@pytest.fixture
def bucket(_server: tuple[str, Path]) -> FaultyStore:
    """An empty bucket, with a log and faults of its own."""
    url, root = _server
    name = f"bucket-{uuid4().hex[:12]}"
    (root / "namespace" / name).mkdir(parents=True)
    options = {"config": CONFIG, "config_kwargs": {"service_endpoint": url}}
    prefix = f"/n/namespace/b/{name}/o/"
    return FaultyStore(url=f"oci://{name}@namespace", options=options, server=url, prefix=prefix)


def at(bucket: FaultyStore, name: str) -> Location:
    return Location(f"{bucket.url}/{name}", bucket.options, attempts=2, timeout=10)


def test_objects_are_stored_read_listed_and_removed(bucket: FaultyStore, tmp_path: Path) -> None:
    one = at(bucket, "a/b c.mds")
    for data in (b"12345", b"other"):
        one.put(data)
        assert one.read() == one.read_if_there() == data
    assert one.read_range(1, 3) == b"th"
    one.download(tmp_path / "x", size=5)
    assert (tmp_path / "x").read_bytes() == b"other"
    at(bucket, "d").upload(tmp_path / "x")
    assert one.stat().size == 5
    assert one.stat().version
    assert {name: file.size for name, file in at(bucket, "").walk_files().items()} == {"a/b c.mds": 5, "d": 5}
    assert at(bucket, "a").sizes() == {"b c.mds": 5}
    assert at(bucket, "nothing").sizes() == {}
    for _ in range(2):
        one.remove()
    assert at(bucket, "").walk() == ["d"]


def test_what_is_not_there_or_has_another_size_is_told(bucket: FaultyStore, tmp_path: Path) -> None:
    assert at(bucket, "x").read_if_there() is None
    with pytest.raises(ObjectNotFoundError, match="could not read the metadata of"):
        at(bucket, "x").stat()
    with pytest.raises(ObjectNotFoundError, match="the bucket does not exist"):
        Location("oci://missing@namespace/x", bucket.options).read()
    at(bucket, "x").put(b"12345")
    for size in (4, 6):
        with pytest.raises(IntegrityError):
            at(bucket, "x").download(tmp_path / "x", size=size)


def test_no_byte_of_a_large_object_is_asked_for_twice(bucket: FaultyStore, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 12
    at(bucket, "x").put(data)
    begun = len(bucket.log())
    at(bucket, "x").download(tmp_path / "x", size=len(data))
    assert (tmp_path / "x").read_bytes() == data
    assert sum(entry.sent or 0 for entry in bucket.log()[begun:] if entry.method == "GET") == len(data)


def test_an_upload_that_fails_leaves_what_was_there(bucket: FaultyStore, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 11
    (tmp_path / "x").write_bytes(data)
    stores: list[Callable[[], None]] = [
        lambda: at(bucket, "x").put(data),
        lambda: at(bucket, "x").upload(tmp_path / "x"),
    ]
    for store in stores:
        bucket.fail("x", "status", method="PUT")
        with pytest.raises(StorageError, match="2 attempts"):
            store()
        bucket.heal()
        assert at(bucket, "").walk() == []
    for store in stores:
        bucket.fail("x", "status", method="PUT", times=1)
        store()
        assert at(bucket, "x").read() == data
        at(bucket, "x").remove()


@pytest.mark.parametrize("status", [503, 429])
def test_each_attempt_is_one_request(bucket: FaultyStore, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_MAX_POSTPONED", 0)  # so that all count
    at(bucket, "x").put(b"12345")
    bucket.fail("x", "status", status=status, times=1)
    assert at(bucket, "x").read() == b"12345"
    bucket.fail("x", "status", status=status)
    with pytest.raises(DownloadError, match="2 attempts"):
        at(bucket, "x").read()
    assert len(bucket.requests()) == 4


def test_refused_access_is_told(bucket: FaultyStore) -> None:
    bucket.fail("x", "status", status=401, method=".*")
    asks: list[Any] = [Location.read, Location.stat]
    for ask in asks:
        with pytest.raises(AccessDeniedError, match="give config"):
            ask(at(bucket, "x"))


def test_a_dataset_is_written_and_read(bucket: FaultyStore, tmp_path: Path) -> None:
    url, options = f"{bucket.url}/data", bucket.options
    with MDSWriter(out=url, columns={"id": "int"}, size_limit=230, storage_options=options) as written:
        for number in range(29):
            written.write({"id": number})
    loader = make_loader(url, storage_options=options, local=str(tmp_path / "cache"))
    assert ids(loader) == ids(make_loader(write_dataset(tmp_path / "data")))


def test_a_store_that_does_not_answer_is_tried_as_often_as_it_is_told_to() -> None:
    with refused_port() as port:
        options = {"config": CONFIG, "config_kwargs": {"service_endpoint": f"http://127.0.0.1:{port}"}}
        one = Location("oci://bucket@namespace/x", options, attempts=2, timeout=10)
        begun = time.monotonic()
        for ask in (one.read, one.stat, lambda: one.put(b"1")):
            with pytest.raises(StorageError, match=r"oci://bucket@namespace/x: 2 attempts .*refused") as caught:
                ask()
            assert isinstance(caught.value, DownloadError) == (ask == one.read)
            assert CONFIG["fingerprint"] not in str(caught.value)
        assert time.monotonic() - begun < 9  # its client alone would go on for minutes


def test_its_filesystem_blocks_and_leaves_attempts_to_us() -> None:
    filesystem, path = open_filesystem("oci://bucket@namespace/a/x", {"config": CONFIG})
    assert kind_of(filesystem, "oci://bucket@namespace/a/x") is None
    assert path == "bucket@namespace/a/x"
    assert type(filesystem.oci_client.retry_strategy).__name__ == "NoneRetryStrategy"
    assert open_filesystem("oci://bucket@namespace/b", {"config": CONFIG})[0] is filesystem


def test_a_url_without_a_namespace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"oci://bucket/x names no namespace; write oci://BUCKET@NAMESPACE/path"):
        Location("oci://bucket/x", {"config": CONFIG}).read()


@pytest.mark.parametrize("options", [{}, {"config": "/no/such/config"}])
def test_without_credentials_the_options_are_asked_for(options: dict[str, str]) -> None:
    with pytest.raises(AccessDeniedError, match=r"give config \(a file, like ~/.oci/config\) and profile, or iam_type"):
        Location("oci://bucket@namespace/x", options, attempts=3).read()


@pytest.mark.parametrize("change", [{"key_content": "hush-hush"}, {"user": None}, {"fingerprint": "hush-hush"}])
def test_credentials_that_cannot_be_are_final_and_not_shown(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="check the URL and storage_options") as caught:
        Location("oci://bucket@namespace/x", {"config": {**CONFIG, **change}}, attempts=3).read()
    assert "hush" not in f"{caught.value} {caught.value.__cause__}"


def test_the_namespace_and_the_region_make_another_key_and_are_shown() -> None:
    one, other, third = (
        Location(url, {"config": {**CONFIG, "region": region}})
        for url, region in (("oci://b@n/x", "one"), ("oci://b@m/x", "one"), ("oci://b@n/x", "other"))
    )
    assert len({one.key, other.key, third.key}) == 3
    assert str(one) == "oci://b@n/x"
    shown = repr(StorageOptions({"config": CONFIG, "region": "us-phoenix-1"}))
    assert "'region': 'us-phoenix-1'" in shown
    assert all(CONFIG[name] not in shown for name in ("user", "tenancy", "fingerprint"))
    assert "PRIVATE" not in shown
