from __future__ import annotations

from pathlib import Path

import pytest

from lightning_streaming.errors import AccessDeniedError, StorageError
from lightning_streaming.storage import read_bytes, upload
from lightning_streaming.storage.listing import list_files, object_size
from tests.servers import HttpStore, S3Store, refused_port


def files(root: Path) -> Path:
    for name in ("b/x", "a", "b/c/d e"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_files_of_a_directory_are_found_at_any_depth(tmp_path: Path) -> None:
    root = files(tmp_path / "root")
    (root / "empty").mkdir()
    for location in (str(root), f"{root}/", f"file://{root}"):
        assert list_files(location, {}, retry=1, timeout=5) == ["a", "b/c/d e", "b/x"]


def test_objects_under_a_url_are_found_also_those_of_others(s3: S3Store, tmp_path: Path) -> None:
    bucket, root = s3.make_bucket(), files(tmp_path)
    for name in ("root/a", "root/b/c/d e", "rootless/x"):
        upload(root / "a", f"{bucket}/{name}", s3.options)
    for location in (f"{bucket}/root", f"{bucket}/root/"):
        assert list_files(location, s3.options, retry=2, timeout=10) == ["a", "b/c/d e"]
    upload(root / "a", f"{bucket}/root/new", {**s3.options, "use_listings_cache": False})  # a filesystem of its own
    assert list_files(f"{bucket}/root", s3.options, retry=2, timeout=10) == ["a", "b/c/d e", "new"]
    assert list_files(bucket, s3.options, retry=2, timeout=10)[-1] == "rootless/x"


def test_an_object_that_came_after_a_listing_can_be_read(s3: S3Store, tmp_path: Path) -> None:
    bucket, root = s3.make_bucket(), files(tmp_path)
    upload(root / "a", f"{bucket}/root/a", s3.options)
    assert list_files(f"{bucket}/root", s3.options, retry=1, timeout=10) == ["a"]
    upload(root / "a", f"{bucket}/root/new", {**s3.options, "use_listings_cache": False})
    assert read_bytes(f"{bucket}/root/new", s3.options, retry=1, timeout=10) == b"a"


def test_nothing_there_is_no_file(s3: S3Store, tmp_path: Path) -> None:
    assert list_files(str(tmp_path / "missing"), {}, retry=1, timeout=5) == []
    assert list_files(f"{s3.make_bucket()}/missing", s3.options, retry=2, timeout=10) == []


def test_a_store_that_does_not_answer_is_an_error_without_secrets() -> None:
    with refused_port() as port:
        options = {"key": "k", "secret": "hush-hush", "endpoint_url": f"http://127.0.0.1:{port}"}
        with pytest.raises(StorageError, match="could not list s3://bucket/x") as caught:
            list_files("s3://bucket/x", options, retry=1, timeout=5)
    assert "hush" not in str(caught.value)
    assert not isinstance(caught.value, AccessDeniedError)


def test_the_size_of_an_object_is_told_as_it_is_now(s3: S3Store, tmp_path: Path) -> None:
    url = f"{s3.make_bucket()}/x"
    assert object_size(url, s3.options, retry=2, timeout=10) is None
    for text in ("short", "longer than that"):
        (tmp_path / "x").write_text(text)
        upload(tmp_path / "x", url, {**s3.options, "use_listings_cache": False})  # a filesystem of its own
        assert object_size(url, s3.options, retry=2, timeout=10) == len(text)
    assert object_size(str(tmp_path / "x"), {}, retry=1, timeout=5) == len(text)
    assert object_size(str(tmp_path / "missing"), {}, retry=1, timeout=5) is None


def test_a_size_that_a_store_does_not_tell_is_an_error_without_secrets() -> None:
    with refused_port() as port:
        options = {"key": "k", "secret": "hush-hush", "endpoint_url": f"http://127.0.0.1:{port}"}
        with pytest.raises(StorageError, match="could not look at s3://bucket/x") as caught:
            object_size("s3://bucket/x", options, retry=1, timeout=5)
    assert "hush" not in str(caught.value)


def test_the_size_over_http_tells_none_from_a_server_that_fails(http_store: HttpStore) -> None:
    http_store.put("x", b"12345")
    assert object_size(f"{http_store.url}/x", {}, retry=1, timeout=10) == 5
    assert object_size(f"{http_store.url}/missing", {}, retry=1, timeout=10) is None
    http_store.fail("z", "status", status=503)  # answers to GET, which is asked after HEAD was refused
    with pytest.raises(StorageError, match=r"could not look at .*503"):
        object_size(f"{http_store.url}/z", {}, retry=1, timeout=10)
    http_store.fail("y", "status", status=403)
    with pytest.raises(AccessDeniedError):
        object_size(f"{http_store.url}/y", {}, retry=1, timeout=10)
    with refused_port() as port, pytest.raises(StorageError, match="could not look at"):
        object_size(f"http://127.0.0.1:{port}/x", {}, retry=1, timeout=10)
