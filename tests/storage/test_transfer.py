from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import (
    AccessDeniedError,
    ConfigError,
    DownloadError,
    IntegrityError,
    ObjectNotFoundError,
    StorageError,
    StreamingError,
)
from lightning_streaming.storage import download, join_url, read_bytes, upload
from lightning_streaming.storage.listing import file_sizes
from lightning_streaming.storage.transfer import remove, upload_bytes
from tests.servers import HttpStore, S3Store, refused_port

DATA = bytes(range(256)) * 40


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "x.part"


@pytest.fixture
def object_url(http_store: HttpStore) -> str:
    (http_store.root / "x").write_bytes(DATA)
    return f"{http_store.url}/x"


def fetch(url: str, target: Path, options: dict[str, Any] | None = None, **settings: Any) -> None:
    download(url, options or {}, target, **{"expected_bytes": len(DATA), "retry": 2, "timeout": 5, **settings})


def test_an_object_goes_to_s3_and_comes_back(s3: S3Store, tmp_path: Path, target: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    url = f"{s3.make_bucket()}/a/b c.mds"
    upload(tmp_path / "x", url, s3.options)
    fetch(url, target, s3.options)
    assert target.read_bytes() == DATA == read_bytes(url, s3.options, retry=1, timeout=5)


def test_an_object_goes_to_a_directory_that_is_made_and_comes_back(tmp_path: Path, target: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    upload(tmp_path / "x", f"file://{tmp_path}/new/deep/y", {})
    fetch(str(tmp_path / "new/deep/y"), target)
    assert target.read_bytes() == DATA
    assert [path.name for path in (tmp_path / "new/deep").iterdir()] == ["y"]


def test_an_object_comes_over_http(object_url: str, target: Path) -> None:
    fetch(object_url, target)
    assert target.read_bytes() == DATA


@pytest.mark.parametrize(
    ("fault", "status"),
    [("status", 503), ("status", 500), ("status", 429), ("truncate", 0), ("short", 0)],
)
def test_a_fault_that_passes_heals(
    http_store: HttpStore, object_url: str, target: Path, fault: str, status: int
) -> None:
    http_store.fail("x", fault, times=1, status=status)
    fetch(object_url, target)
    assert target.read_bytes() == DATA
    assert http_store.requests() == ["x", "x"]


def test_two_failures_heal_in_three_attempts(http_store: HttpStore, object_url: str, target: Path) -> None:
    http_store.fail("x", "status", times=2, status=503)
    fetch(object_url, target, retry=3)
    assert target.read_bytes() == DATA


def test_a_stalled_answer_is_given_up_after_the_timeout(http_store: HttpStore, object_url: str, target: Path) -> None:
    http_store.fail("x", "stall", times=1)
    fetch(object_url, target, timeout=0.5)
    assert target.read_bytes() == DATA


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("status", DownloadError),
        ("reset", DownloadError),
        ("truncate", DownloadError),
        ("stall", DownloadError),
        ("short", IntegrityError),
    ],
)
def test_a_fault_that_stays_fails_and_leaves_nothing(
    http_store: HttpStore, object_url: str, target: Path, fault: str, kind: type[StreamingError]
) -> None:
    http_store.fail("x", fault)
    with pytest.raises(kind, match=f"{object_url}.* 2"):
        fetch(object_url, target, timeout=0.5)
    assert list(target.parent.iterdir()) == []


def test_a_missing_object_is_asked_for_once(http_store: HttpStore, target: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=f"{http_store.url}/missing"):
        fetch(f"{http_store.url}/missing", target, retry=5)
    assert http_store.requests() == ["missing"]


def test_a_refused_object_is_asked_for_once(http_store: HttpStore, object_url: str, target: Path) -> None:
    http_store.fail("x", "status", status=403)
    with pytest.raises(AccessDeniedError):
        fetch(object_url, target, retry=5)
    assert http_store.requests() == ["x"]


def test_a_refused_connection_is_tried_again_and_told(target: Path) -> None:
    with refused_port() as port, pytest.raises(DownloadError, match="2 attempts"):
        fetch(f"http://127.0.0.1:{port}/x", target)


def test_a_store_that_is_not_there_is_told_of_s3_too(target: Path) -> None:
    with refused_port() as port, pytest.raises(DownloadError, match="2 attempts"):
        fetch("s3://bucket/x", target, {"endpoint_url": f"http://127.0.0.1:{port}"})


@pytest.mark.parametrize("fault", ["status", "truncate"])
def test_each_attempt_at_s3_is_one_request(http_store: HttpStore, target: Path, fault: str) -> None:
    (http_store.root / "bucket").mkdir()
    (http_store.root / "bucket" / "x").write_bytes(DATA)
    http_store.fail("bucket/x", fault)
    with pytest.raises(DownloadError, match="2 attempts"):
        fetch("s3://bucket/x", target, {"endpoint_url": http_store.url})
    assert http_store.requests() == ["bucket/x", "bucket/x"]


@pytest.mark.parametrize("key", ["/missing", "-missing/x"], ids=["object", "bucket"])
def test_what_is_missing_on_s3_is_told(s3: S3Store, target: Path, key: str) -> None:
    with pytest.raises(ObjectNotFoundError, match="check the bucket"):
        fetch(s3.make_bucket() + key, target, s3.options)


def test_s3_without_the_right_to_read_is_denied(s3: S3Store, tmp_path: Path, target: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    url = f"{s3.make_bucket()}/x"
    upload(tmp_path / "x", url, s3.options)
    with pytest.raises(AccessDeniedError, match="credentials"):
        fetch(url, target, {"endpoint_url": s3.url, "anon": True})


def test_options_that_a_store_does_not_know_are_refused(s3: S3Store, target: Path) -> None:
    with pytest.raises(ConfigError, match=r"storage_options.*bogus"):
        fetch("s3://bucket/x", target, {**s3.options, "bogus": 1})


def test_a_failed_check_fetches_again(http_store: HttpStore, object_url: str, target: Path) -> None:
    http_store.fail("x", "corrupt", times=1)

    def check(path: Path) -> None:
        if path.read_bytes() != DATA:
            raise IntegrityError("other bytes")

    fetch(object_url, target, check=check)
    assert target.read_bytes() == DATA
    assert http_store.requests() == ["x", "x"]


def test_a_place_that_cannot_be_written_is_not_blamed_on_the_store(object_url: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not write"):
        fetch(object_url, tmp_path / "missing" / "x")


def test_no_secret_is_printed_with_a_failure(http_store: HttpStore, object_url: str, target: Path) -> None:
    secret = "hunt" + "er"  # in two halves, because a traceback prints the lines of this file
    http_store.fail("x", "status", status=403)
    with pytest.raises(AccessDeniedError) as caught:
        fetch(f"{object_url}?sig={secret}", target, {"headers": {"Authorization": f"Bearer {secret}"}})
    assert secret not in "".join(traceback.format_exception(caught.value))
    assert object_url in str(caught.value)


def test_uploads_to_a_missing_bucket_are_told(s3: S3Store, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    url = f"{s3.make_bucket()}-missing/x"
    with pytest.raises(ObjectNotFoundError, match=f"could not upload {tmp_path}/x to {url}"):
        upload(tmp_path / "x", url, s3.options)


def test_objects_of_a_bucket_are_stored_listed_and_removed(s3: S3Store) -> None:
    root = f"{s3.make_bucket()}/data"
    assert file_sizes(root, s3.options) == {}
    for name in ("a b.mds", "c/d", "e"):
        upload_bytes(DATA[: len(name)], join_url(root, name), s3.options)
    assert file_sizes(root, s3.options) == {"a b.mds": 7, "e": 1}
    assert file_sizes(f"{root}/c", s3.options) == {"d": 3}
    upload_bytes(DATA, join_url(root, "e"), s3.options)
    for _ in range(2):  # one that is not there is no error
        remove(join_url(root, "a b.mds"), s3.options)
    assert file_sizes(root, s3.options) == {"e": len(DATA)}
    assert read_bytes(join_url(root, "e"), s3.options, retry=1, timeout=5) == DATA


def test_an_upload_of_bytes_to_a_bucket_that_is_not_there_says_so(s3: S3Store) -> None:
    with pytest.raises(ObjectNotFoundError, match="could not upload 3 bytes to s3://no-such-bucket/x: not found"):
        upload_bytes(b"abc", "s3://no-such-bucket/x", s3.options)


def test_a_store_that_does_not_answer_is_named() -> None:
    with refused_port() as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}
        for call, what in ((remove, "remove"), (file_sizes, "list")):
            with pytest.raises(StorageError, match=f"could not {what} s3://bucket/x: 1 attempt"):
                call("s3://bucket/x", options, retry=1)
