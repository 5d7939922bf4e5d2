"""The contract of a location, over every store, and what single stores do."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from lightning_streaming.errors import AccessDeniedError, IntegrityError, ObjectNotFoundError, StorageError
from lightning_streaming.storage import Location, retries
from lightning_streaming.storage.location import upload_seconds
from tests.helpers import assert_error
from tests.servers import AzureStore, GcsBucket, GcsStore, HttpStore, S3Bucket, S3Store, refused_port

WRITABLE = ["local", "memory", "s3", "gcs", "azure"]
STORES = [*WRITABLE, "http", "hub"]
DATA = bytes(range(256)) * 40


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty directory on the store that a test is run for."""
    kind: str = request.param
    if kind == "local":
        return Location(str(tmp_path / "root"))
    if kind == "memory":
        return Location(f"memory://{uuid4().hex}/root")
    if kind == "http":
        return Location(request.getfixturevalue("http_store").url)
    if kind == "hub":
        dataset = request.getfixturevalue("hub")
        return Location(dataset.url, dataset.options)
    store: S3Store | GcsStore | AzureStore = request.getfixturevalue(kind)
    return Location(f"{store.make_bucket()}/root", store.options)


def fill(root: Location, request: pytest.FixtureRequest, *names: str) -> None:
    """Store ``DATA`` under these names; over HTTP and on the hub past the location, which cannot."""
    past = {"http": "http_store", "hf": "hub"}.get(root.url.partition(":")[0])
    for name in names:
        if past:
            request.getfixturevalue(past).put(name, DATA)
        else:
            (root / name).put(DATA)


@pytest.mark.parametrize("root", STORES, indirect=True)
def test_an_object_is_read_in_every_way(root: Location, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    fill(root, request, "a b.mds")
    one = root / "a b.mds"
    assert one.read() == one.read_if_there() == DATA
    assert one.read_range(5, 9) == DATA[5:9]
    assert one.read_range(5, 5) == b""
    for size in (None, len(DATA)):
        one.download(tmp_path / "copy", size=size)
        assert (tmp_path / "copy").read_bytes() == DATA
    assert one.size() == one.stat().size == len(DATA)


@pytest.mark.parametrize("root", STORES, indirect=True)
def test_an_object_that_is_not_there_is_told(root: Location, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    fill(root, request, "other")
    missing = replace(root / "missing", attempts=1)
    assert missing.read_if_there() is None
    assert missing.size() is None
    for ask in (
        missing.read,
        missing.stat,
        lambda: missing.read_range(0, 5),
        lambda: missing.download(tmp_path / "copy"),
    ):
        with assert_error(ObjectNotFoundError, path="missing"):
            ask()
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("root", STORES, indirect=True)
def test_what_has_another_size_or_fails_its_check_is_refused(
    root: Location, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    fill(root, request, "x")
    one = replace(root / "x", attempts=1)

    def refuse(path: Path) -> None:
        assert path.read_bytes() == DATA
        raise IntegrityError("damaged")

    for wrong in ({"size": len(DATA) - 1}, {"size": len(DATA) + 1}, {"check": refuse}):
        with pytest.raises(IntegrityError):
            one.download(tmp_path / "copy", **wrong)
        assert not (tmp_path / "copy").exists()
    with pytest.raises(IntegrityError):
        one.read_range(len(DATA) - 5, len(DATA) + 5)


@pytest.mark.parametrize("root", WRITABLE, indirect=True)
def test_objects_are_stored_listed_and_removed(root: Location, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assert root.sizes() == {}
    assert root.walk() == []
    fill(root, request, "a b.mds", "c/d", "c/e/f")
    (tmp_path / "file").write_bytes(b"12345")
    (root / "g").upload(tmp_path / "file")
    assert root.sizes() == {"a b.mds": len(DATA), "g": 5}
    assert (root / "c").sizes() == {"d": len(DATA)}
    assert root.walk() == ["a b.mds", "c/d", "c/e/f", "g"]
    before = (root / "g").stat()
    (root / "g").put(b"pieces ", memoryview(b"together"))
    assert (root / "g").read() == b"pieces together"
    assert (root / "g").stat() != before
    for _ in range(2):  # one that is not there is no error
        (root / "g").remove()
    assert root.sizes() == {"a b.mds": len(DATA)}


@pytest.mark.parametrize("root", STORES, indirect=True)
def test_a_location_is_a_value_that_shows_no_secrets(root: Location) -> None:
    assert root / "a" == replace(root, url=(root / "a").url)
    assert pickle.loads(pickle.dumps(root)) == root
    assert hash(root) == hash(replace(root))
    assert (root / "a").key != root.key == (root / "").key
    signed = Location("https://me:hush-hush@host/x?sig=hush-hush", {"secret": "hush-hush"})
    assert "hush" not in f"{signed} {signed!r} {signed / 'a'}"
    assert (signed / "a b").url == "https://me:hush-hush@host/x/a%20b?sig=hush-hush"


def files(root: Path) -> Path:
    for name in ("b/x", "a", "b/c/d e"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_files_of_a_directory_are_found_at_any_depth(tmp_path: Path) -> None:
    root = files(tmp_path / "root")
    (root / "empty").mkdir()
    for location in (str(root), f"{root}/", f"file://{root}"):
        assert Location(location, attempts=1, timeout=5).walk() == ["a", "b/c/d e", "b/x"]


def test_objects_under_a_url_are_found_also_those_of_others(s3: S3Store, tmp_path: Path) -> None:
    bucket, root = s3.make_bucket(), files(tmp_path)
    for name in ("root/a", "root/b/c/d e", "rootless/x"):
        Location(f"{bucket}/{name}", s3.options).upload(root / "a")
    for location in (f"{bucket}/root", f"{bucket}/root/"):
        assert Location(location, s3.options, attempts=2, timeout=10).walk() == ["a", "b/c/d e"]
    Location(f"{bucket}/root/new", {**s3.options, "use_listings_cache": False}).upload(
        root / "a"
    )  # a filesystem of its own
    assert Location(f"{bucket}/root", s3.options, attempts=2, timeout=10).walk() == ["a", "b/c/d e", "new"]
    assert Location(bucket, s3.options, attempts=2, timeout=10).walk()[-1] == "rootless/x"


def test_an_object_that_came_after_a_listing_can_be_read(s3: S3Store, tmp_path: Path) -> None:
    bucket, root = s3.make_bucket(), files(tmp_path)
    Location(f"{bucket}/root/a", s3.options).upload(root / "a")
    assert Location(f"{bucket}/root", s3.options, attempts=1, timeout=10).walk() == ["a"]
    Location(f"{bucket}/root/new", {**s3.options, "use_listings_cache": False}).upload(root / "a")
    assert Location(f"{bucket}/root/new", s3.options, attempts=1, timeout=10).read() == b"a"


def test_nothing_there_is_no_file(s3: S3Store, tmp_path: Path) -> None:
    assert Location(str(tmp_path / "missing"), attempts=1, timeout=5).walk() == []
    assert Location(f"{s3.make_bucket()}/missing", s3.options, attempts=2, timeout=10).walk() == []


def test_a_store_that_does_not_answer_is_an_error_without_secrets() -> None:
    with refused_port() as port:
        options = {"key": "k", "secret": "hush-hush", "endpoint_url": f"http://127.0.0.1:{port}"}
        with assert_error(StorageError, path="/x") as caught:
            Location("s3://bucket/x", options, attempts=1, timeout=5).walk()
        assert "list" in str(caught.value)
    assert "hush" not in str(caught.value)
    assert not isinstance(caught.value, AccessDeniedError)


def test_the_size_of_an_object_is_told_as_it_is_now(s3: S3Store, tmp_path: Path) -> None:
    url = f"{s3.make_bucket()}/x"
    assert Location(url, s3.options, attempts=2, timeout=10).size() is None
    for text in ("short", "longer than that"):
        (tmp_path / "x").write_text(text)
        Location(url, {**s3.options, "use_listings_cache": False}).upload(tmp_path / "x")  # a filesystem of its own
        assert Location(url, s3.options, attempts=2, timeout=10).size() == len(text)
    assert Location(str(tmp_path / "x"), attempts=1, timeout=5).size() == len(text)
    assert Location(str(tmp_path / "missing"), attempts=1, timeout=5).size() is None


def test_a_size_that_a_store_does_not_tell_is_an_error_without_secrets() -> None:
    with refused_port() as port:
        options = {"key": "k", "secret": "hush-hush", "endpoint_url": f"http://127.0.0.1:{port}"}
        with assert_error(StorageError, path="/x") as caught:
            Location("s3://bucket/x", options, attempts=1, timeout=5).size()
        assert "read the metadata" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_the_size_over_http_tells_none_from_a_server_that_fails(http_store: HttpStore) -> None:
    http_store.put("x", b"12345")
    assert Location(f"{http_store.url}/x", attempts=1, timeout=10).size() == 5
    assert Location(f"{http_store.url}/missing", attempts=1, timeout=10).size() is None
    http_store.fail("z", "status", status=503)  # answers to GET, which is asked after HEAD was refused
    with assert_error(StorageError, path="/z") as caught:
        Location(f"{http_store.url}/z", attempts=1, timeout=10).size()
    assert "503" in str(caught.value)
    http_store.fail("y", "status", status=403)
    with pytest.raises(AccessDeniedError):
        Location(f"{http_store.url}/y", attempts=1, timeout=10).size()
    with refused_port() as port, assert_error(StorageError, path="/x") as caught:
        Location(f"http://127.0.0.1:{port}/x", attempts=1, timeout=10).size()
    assert "read the metadata" in str(caught.value)


def test_an_object_goes_to_a_directory_that_is_made(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    Location(f"file://{tmp_path}/new/deep/y").upload(tmp_path / "x")
    assert (tmp_path / "new/deep/y").read_bytes() == DATA
    assert [path.name for path in (tmp_path / "new/deep").iterdir()] == ["y"]


def test_what_cannot_be_written_to_its_end_leaves_what_was_there(tmp_path: Path) -> None:
    place = Location(str(tmp_path / "x"))
    place.put(b"old")
    lost = memoryview(b"new")
    lost.release()
    with pytest.raises(ValueError, match="released"):
        place.put(b"new", lost)
    assert (place.read(), list(tmp_path.iterdir())) == (b"old", [tmp_path / "x"])


def test_an_upload_that_stalls_is_given_up(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    s3_bucket.fail("x", "hang", method="PUT")
    (tmp_path / "x").write_bytes(DATA)
    with assert_error(StorageError, path="/x") as caught:
        Location(f"{s3_bucket.url}/x", s3_bucket.options, attempts=2, timeout=0.3).upload(tmp_path / "x")
    assert "attempts" in str(caught.value)


def test_an_upload_is_given_time_by_its_size() -> None:
    assert upload_seconds(0) == 120
    assert upload_seconds(64 << 20) == 120 + 2048


@pytest.mark.parametrize("status", [503, 429])
def test_each_attempt_to_list_gcs_is_one_request(
    gcs_bucket: GcsBucket, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_MAX_POSTPONED", 0)  # so that all count
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
    with assert_error(StorageError, path="data") as caught:
        Location(f"{listed.url}/data", listed.options, attempts=2).sizes()
    assert "2 attempts" in str(caught.value)
    assert len(listed.log()) == 2


def test_uploads_to_a_missing_bucket_are_told(s3: S3Store, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    url = f"{s3.make_bucket()}-missing/x"
    with assert_error(ObjectNotFoundError, path="/x"):
        Location(url, s3.options).upload(tmp_path / "x")


def test_an_upload_of_bytes_to_a_bucket_that_is_not_there_says_so(s3: S3Store) -> None:
    with assert_error(ObjectNotFoundError, path="/x"):
        Location("s3://no-such-bucket/x", s3.options).put(b"abc")


def test_a_store_that_does_not_answer_is_named() -> None:
    with refused_port() as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}
        location = Location("s3://bucket/x", options, attempts=1)
        for call, what in ((location.remove, "remove"), (location.sizes, "list"), (location.stat, "metadata")):
            with assert_error(StorageError, path="s3://bucket/x") as caught:
                call()
            assert what in str(caught.value)
