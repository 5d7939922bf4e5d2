from __future__ import annotations

from pathlib import Path

import pytest

from lightning_streaming.errors import ObjectNotFoundError, StorageError
from lightning_streaming.storage import join_url, read_bytes, upload
from lightning_streaming.storage.listing import file_sizes
from lightning_streaming.storage.transfer import remove, upload_bytes, upload_seconds
from tests.servers import GcsBucket, S3Bucket, S3Store, refused_port

DATA = bytes(range(256)) * 40


def test_an_object_goes_to_a_directory_that_is_made(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    upload(tmp_path / "x", f"file://{tmp_path}/new/deep/y", {})
    assert (tmp_path / "new/deep/y").read_bytes() == DATA
    assert [path.name for path in (tmp_path / "new/deep").iterdir()] == ["y"]


def test_an_upload_that_stalls_is_given_up(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    s3_bucket.fail("x", "hang", method="PUT")
    (tmp_path / "x").write_bytes(DATA)
    with pytest.raises(StorageError, match=r"2 attempts failed, the last with TimeoutError: not done after 0\.3 s"):
        upload(tmp_path / "x", f"{s3_bucket.url}/x", s3_bucket.options, retry=2, timeout=0.3)


def test_an_upload_is_given_time_by_its_size() -> None:
    assert upload_seconds(0) == 120
    assert upload_seconds(64 << 20) == 120 + 2048


@pytest.mark.parametrize("status", [503, 429])
def test_each_attempt_to_list_gcs_is_one_request(gcs_bucket: GcsBucket, status: int) -> None:
    # A listing is not under the prefix of the bucket's objects.
    bucket = gcs_bucket.url.removeprefix("gs://")
    listed = GcsBucket(
        url=gcs_bucket.url,
        options=gcs_bucket.options,
        server=gcs_bucket.server,
        prefix=f"/storage/v1/b/{bucket}/o",
        gcs=gcs_bucket.gcs,
    )
    listed.fail("", "status", status=status)
    with pytest.raises(StorageError, match="2 attempts"):
        file_sizes(f"{listed.url}/data", listed.options, retry=2)
    assert len(listed.log()) == 2


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
    with pytest.raises(
        ObjectNotFoundError, match="could not upload 3 bytes to s3://no-such-bucket/x: the bucket does not"
    ):
        upload_bytes(b"abc", "s3://no-such-bucket/x", s3.options)


def test_a_store_that_does_not_answer_is_named() -> None:
    with refused_port() as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}
        for call, what in ((remove, "remove"), (file_sizes, "list")):
            with pytest.raises(StorageError, match=f"could not {what} s3://bucket/x: 1 attempt"):
                call("s3://bucket/x", options, retry=1)
