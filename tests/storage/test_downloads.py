"""Objects that come in parts."""

from __future__ import annotations

import errno
import random
import signal
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import (
    AccessDeniedError,
    ConfigError,
    DiskFullError,
    DownloadError,
    IntegrityError,
    ObjectNotFoundError,
    StorageError,
    StreamingError,
)
from lightning_streaming.storage import Location, StorageOptions, retries
from tests.helpers import assert_error
from tests.servers import FaultyStore, GcsBucket, HttpStore, S3Bucket, S3Store, refused_port

DATA = bytes(range(256)) * 40


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "x.part"


@pytest.fixture
def object_url(http_store: HttpStore) -> str:
    (http_store.root / "x").write_bytes(DATA)
    return f"{http_store.url}/x"


def fetch(url: str, target: Path, options: Mapping[str, Any] | None = None, **settings: Any) -> None:
    location = Location(url, options or {}, settings.pop("attempts", 2), settings.pop("timeout", 5))
    location.download(target, **{"size": len(DATA), **settings})


def test_an_object_goes_to_s3_and_comes_back(s3: S3Store, tmp_path: Path, target: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    url = f"{s3.make_bucket()}/a/b c.mds"
    Location(url, s3.options).upload(tmp_path / "x")
    fetch(url, target, s3.options)
    assert target.read_bytes() == DATA == Location(url, s3.options, attempts=1, timeout=5).read()


def test_an_object_goes_to_a_directory_that_is_made_and_comes_back(tmp_path: Path, target: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    Location(f"file://{tmp_path}/new/deep/y").upload(tmp_path / "x")
    fetch(str(tmp_path / "new/deep/y"), target)
    assert target.read_bytes() == DATA
    assert [path.name for path in (tmp_path / "new/deep").iterdir()] == ["y"]


def test_an_object_comes_over_http(object_url: str, target: Path) -> None:
    fetch(object_url, target)
    assert target.read_bytes() == DATA


@pytest.mark.rotate(2)
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
    fetch(object_url, target, attempts=3)
    assert target.read_bytes() == DATA


def test_a_stalled_answer_is_given_up_after_the_timeout(http_store: HttpStore, object_url: str, target: Path) -> None:
    http_store.fail("x", "stall", times=1)
    fetch(object_url, target, timeout=0.5)
    assert target.read_bytes() == DATA


@pytest.mark.rotate(2)
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
    with assert_error(kind, path=object_url):
        fetch(object_url, target, timeout=0.5)
    assert list(target.parent.iterdir()) == []


def test_a_missing_object_is_asked_for_once(http_store: HttpStore, target: Path) -> None:
    with assert_error(ObjectNotFoundError, path="missing"):
        fetch(f"{http_store.url}/missing", target, attempts=5)
    assert http_store.requests() == ["missing"]


def test_a_refused_object_is_asked_for_once(http_store: HttpStore, object_url: str, target: Path) -> None:
    http_store.fail("x", "status", status=403)
    with pytest.raises(AccessDeniedError):
        fetch(object_url, target, attempts=5)
    assert http_store.requests() == ["x"]


def test_a_refused_connection_is_tried_again_and_told(target: Path) -> None:
    with refused_port() as port, assert_error(DownloadError, path="/x") as caught:
        fetch(f"http://127.0.0.1:{port}/x", target)
    assert "2 attempts" in str(caught.value)


def test_a_store_that_is_not_there_is_told_of_s3_too(target: Path) -> None:
    with refused_port() as port, assert_error(DownloadError, path="/x") as caught:
        fetch("s3://bucket/x", target, {"endpoint_url": f"http://127.0.0.1:{port}"})
    assert "2 attempts" in str(caught.value)


@pytest.mark.parametrize("fault", ["status", "truncate"])
def test_each_attempt_at_s3_is_one_request(http_store: HttpStore, target: Path, fault: str) -> None:
    (http_store.root / "bucket").mkdir()
    (http_store.root / "bucket" / "x").write_bytes(DATA)
    http_store.fail("bucket/x", fault)
    with assert_error(DownloadError, path="/x") as caught:
        fetch("s3://bucket/x", target, {"endpoint_url": http_store.url}, timeout=60)
    assert "2 attempts" in str(caught.value)
    assert http_store.requests() == ["bucket/x", "bucket/x"]


@pytest.mark.parametrize(
    ("key", "words"), [("/missing", "has no such object"), ("-missing/x", "the bucket does not exist")]
)
def test_what_is_missing_on_s3_is_told(s3: S3Store, target: Path, key: str, words: str) -> None:
    with pytest.raises(ObjectNotFoundError, match=words):
        fetch(s3.make_bucket() + key, target, s3.options)


def test_s3_without_the_right_to_read_is_denied(s3: S3Store, tmp_path: Path, target: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    url = f"{s3.make_bucket()}/x"
    Location(url, s3.options).upload(tmp_path / "x")
    options: dict[str, Any] = {"endpoint_url": s3.url, "anon": True}
    for passed, option in (
        (options, "storage_options"),
        (StorageOptions(options, "storage.options"), "storage.options"),
    ):
        with assert_error(AccessDeniedError, path="/x", hint=f"credentials in {option} or"):
            fetch(url, target, passed)


def test_options_that_a_store_does_not_know_are_refused(s3: S3Store, target: Path) -> None:
    with assert_error(ConfigError, path="s3://bucket/x", hint="storage_options") as caught:
        fetch("s3://bucket/x", target, {**s3.options, "bogus": 1})
    assert "bogus" in str(caught.value)


def test_a_failed_check_fetches_again(http_store: HttpStore, object_url: str, target: Path) -> None:
    http_store.fail("x", "corrupt", times=1)

    def check(path: Path) -> None:
        if path.read_bytes() != DATA:
            raise IntegrityError("other bytes")

    fetch(object_url, target, check=check)
    assert target.read_bytes() == DATA
    assert http_store.requests() == ["x", "x"]


def test_a_place_that_cannot_be_written_is_not_blamed_on_the_store(object_url: str, tmp_path: Path) -> None:
    with assert_error(StorageError, path="/x") as caught:
        fetch(object_url, tmp_path / "missing" / "x")
    assert "write" in str(caught.value)


def test_a_disk_that_is_full_is_told(object_url: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no disk that is always full")
    with assert_error(DiskFullError, path="full"):
        fetch(object_url, Path("/dev/full"), size=None, attempts=9)


def test_a_check_that_finds_the_disk_full_is_not_tried_again(
    http_store: HttpStore, object_url: str, target: Path
) -> None:
    def check(path: Path) -> None:
        raise OSError(errno.ENOSPC, "full", str(path.with_name("unpacked")))

    with assert_error(DiskFullError, path="x.part"):
        fetch(object_url, target, attempts=9, check=check)
    assert http_store.requests() == ["x"]


def test_connections_are_counted_from_one(object_url: str, target: Path) -> None:
    with assert_error(ConfigError, option="connections"):
        fetch(object_url, target, connections=0)


def test_a_small_object_is_one_request_without_a_range(
    gcs_bucket: GcsBucket, s3_bucket: S3Bucket, target: Path
) -> None:
    for store in (gcs_bucket, s3_bucket):
        store.put("x", DATA)
        fetch(f"{store.url}/x", target, store.options)
        assert target.read_bytes() == DATA
        assert Location(f"{store.url}/x", store.options, attempts=1, timeout=5).read() == DATA
        assert Location(f"{store.url}/x", store.options, attempts=1, timeout=5).read_range(5, 9) == DATA[5:9]
        assert [(one.method, one.range) for one in store.log()] == [("GET", None), ("GET", None), ("GET", "bytes=5-8")]


def test_an_empty_object_is_looked_at(http_store: HttpStore, target: Path) -> None:
    http_store.put("empty", b"")
    fetch(f"{http_store.url}/empty", target, size=0)
    assert target.read_bytes() == b""
    with pytest.raises(ObjectNotFoundError):
        fetch(f"{http_store.url}/missing", target, size=0)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("fault", ["status", "truncate", "hang"])
def test_each_attempt_at_gcs_is_one_request(gcs_bucket: GcsBucket, target: Path, fault: str) -> None:
    gcs_bucket.put("x", DATA)
    gcs_bucket.fail("x", fault)
    with assert_error(DownloadError, path="/x") as caught:
        fetch(f"{gcs_bucket.url}/x", target, gcs_bucket.options, timeout=0.5)
    assert "2 attempts" in str(caught.value)
    assert gcs_bucket.requests() == ["x", "x"]


@pytest.mark.rotate(1)
@pytest.mark.parametrize("date", [False, True])
def test_the_store_says_when_to_come_back(http_store: HttpStore, object_url: str, target: Path, date: bool) -> None:
    http_store.fail("x", "status", times=1, status=429, retry_after=1.0, retry_date=date)
    fetch(object_url, target)
    first, second = http_store.log()
    assert second.begun - first.begun >= 0.9  # dates are in whole seconds, and taken by another clock


@pytest.mark.rotate(2)
@pytest.mark.parametrize("kind", ["http", "s3", "gcs"])
@pytest.mark.parametrize("fault", ["status", "reset", "truncate", "short", "hang"])
def test_no_credential_is_in_any_error(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    target: Path, kind: str, fault: str,
) -> None:  # fmt: skip
    store = request.getfixturevalue({"http": "http_store", "s3": "s3_bucket", "gcs": "gcs_bucket"}[kind])
    store.put("x", DATA)
    store.fail("x", fault, status=400)
    secret = "hunter" + "2-hunter2"  # in two pieces, because a traceback prints the lines of this file
    monkeypatch.setenv("STORE_SECRET", f"{secret}-env")
    secrets: dict[str, dict[str, Any]] = {
        "http": {"headers": {"X-Token": "${STORE_SECRET}"}},
        "s3": {"secret": "${STORE_SECRET}", "key": f"{secret}-key", "token": f"{secret}-token"},
        "gcs": {"project": "${STORE_SECRET}", "requester_pays": True},
    }
    url = f"{store.url}/x"
    if kind == "http":
        url = url.replace("http://", f"http://user:{secret}-word@") + f"?X-Amz-Signature={secret}-signature"
    with pytest.raises(StorageError) as caught:
        fetch(url, target, {**store.options, **secrets[kind]}, timeout=0.5)
    assert secret not in "".join(traceback.format_exception(caught.value)) + repr(caught.value) + caplog.text
    assert f"{store.url}/x" in str(caught.value)


def test_no_secret_is_printed_with_a_failure(http_store: HttpStore, object_url: str, target: Path) -> None:
    secret = "hunt" + "er"  # in two halves, because a traceback prints the lines of this file
    http_store.fail("x", "status", status=403)
    with pytest.raises(AccessDeniedError) as caught:
        fetch(f"{object_url}?sig={secret}", target, {"headers": {"Authorization": f"Bearer {secret}"}})
    assert secret not in "".join(traceback.format_exception(caught.value))
    assert object_url in str(caught.value)


LARGE = random.Random(0).randbytes((20 << 20) + 7)
SECOND = 107 << 16
"""The first byte of the second of three parts."""


@pytest.fixture(params=["http", "s3", "gcs"])
def store(request: pytest.FixtureRequest) -> FaultyStore:
    name = {"http": "http_store", "s3": "s3_bucket", "gcs": "gcs_bucket"}[request.param]
    store: FaultyStore = request.getfixturevalue(name)
    store.put("x", LARGE)
    return store


@pytest.fixture
def http(http_store: HttpStore) -> HttpStore:
    http_store.put("x", LARGE)
    return http_store


def fetch_large(store: FaultyStore, target: Path, **settings: Any) -> bytes:
    location = Location(store.url, store.options, settings.pop("attempts", 2), settings.pop("timeout", 20)) / "x"
    location.download(target, **{"size": len(LARGE), **settings})
    return target.read_bytes()


def ranges(store: FaultyStore) -> list[str | None]:
    return [entry.range for entry in store.log()]


@pytest.mark.rotate(2)
def test_parts_come_in_one_request_each_and_the_last_asks_for_one_byte_more(store: FaultyStore, tmp_path: Path) -> None:
    assert fetch_large(store, tmp_path / "x") == LARGE
    assert sorted(map(str, ranges(store))) == [
        f"bytes=0-{SECOND - 1}",
        f"bytes={2 * SECOND}-{len(LARGE)}",
        f"bytes={SECOND}-{2 * SECOND - 1}",
    ]
    assert {entry.method for entry in store.log()} == {"GET"}


def test_a_file_that_is_there_is_written_to_in_place_and_stays_after_a_failure(http: HttpStore, tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"?" * (len(LARGE) + 5))
    before = target.stat().st_ino
    assert fetch_large(http, target) == LARGE
    http.fail("x", "status", status=403)
    with pytest.raises(AccessDeniedError):
        fetch_large(http, target)
    assert target.stat().st_ino == before


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("fault", "more"),
    [
        ("status", {"status": 503}),
        ("status", {"status": 429, "retry_after": 0.1}),
        ("reset", {}),
        ("reset_body", {}),
        ("truncate", {}),
        ("short", {}),
    ],
)
def test_each_part_heals_by_itself(store: FaultyStore, tmp_path: Path, fault: str, more: dict[str, Any]) -> None:
    store.fail("x", fault, times=1, **more)
    assert fetch_large(store, tmp_path / "x") == LARGE
    assert len(ranges(store)) <= 5  # aiohttp asks once more by itself after a reset


@pytest.mark.rotate(2)
def test_a_store_that_is_asked_too_often_is_asked_later(
    store: FaultyStore, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT", 0.01)
    store.fail("x", "status", times=3, status=429)
    assert fetch_large(store, target, attempts=1) == LARGE
    assert len(ranges(store)) <= 6


def test_a_part_goes_on_where_it_was_cut(http: HttpStore, tmp_path: Path) -> None:
    http.fail("x", "truncate", times=1, skip=1, at=1000)
    assert fetch_large(http, tmp_path / "x") == LARGE
    begins = [int(str(one).removeprefix("bytes=").partition("-")[0]) for one in ranges(http)]
    assert sum(begin % SECOND == 1000 for begin in begins) == 1


@pytest.mark.nightly
def test_a_part_that_stalls_is_asked_for_again(http: HttpStore, tmp_path: Path) -> None:
    http.fail("x", "stall", times=2)
    assert fetch_large(http, tmp_path / "x", timeout=1) == LARGE


@pytest.mark.nightly
def test_a_part_that_is_slow_is_waited_for(http: HttpStore, tmp_path: Path) -> None:
    http.fail("x", "slow", times=1, rate=SECOND / 1.5)
    assert fetch_large(http, tmp_path / "x", timeout=0.7, attempts=1) == LARGE


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [("truncate", DownloadError), ("short", IntegrityError), ("long", IntegrityError), ("stall", DownloadError)],
)
def test_a_part_that_stays_bad_ends_it(
    store: FaultyStore, tmp_path: Path, fault: str, kind: type[StreamingError]
) -> None:
    if fault == "stall" and not isinstance(store, HttpStore):
        pytest.skip("the same code reads all of them")
    store.fail("x", fault)
    with assert_error(kind, path=f"{store.url}/x"):
        fetch_large(store, tmp_path / "x", timeout=1 if fault == "stall" else 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rotate(1)
def test_an_object_of_another_length_is_noticed(store: FaultyStore, tmp_path: Path) -> None:
    for expected in (len(LARGE) - 1, len(LARGE) + 1, len(LARGE) * 2):
        with assert_error(IntegrityError, path=f"{store.url}/x"):
            fetch_large(store, tmp_path / "x", size=expected, attempts=1)
    for expected in (0, 1000):
        with assert_error(IntegrityError, path="/x") as caught:
            fetch_large(store, tmp_path / "x", size=expected, attempts=1)
        assert "has more bytes" in str(caught.value)


@pytest.mark.rotate(2)
def test_a_store_that_ignores_ranges_sends_the_whole(store: FaultyStore, tmp_path: Path) -> None:
    store.fail("x", "ignore_range")
    assert fetch_large(store, tmp_path / "x") == LARGE
    assert ranges(store)[-1] is None
    assert len(ranges(store)) == 4
    start = len(LARGE) - 5000
    assert (
        Location(f"{store.url}/x", store.options, attempts=1, timeout=20).read_range(start, start + 100)
        == LARGE[start:][:100]
    )


def test_a_failed_check_fetches_all_parts_again(http: HttpStore, tmp_path: Path) -> None:
    http.fail("x", "corrupt", times=1, skip=1)

    def check(path: Path) -> None:
        if path.read_bytes() != LARGE:
            raise IntegrityError(f"{path} is damaged")

    assert fetch_large(http, tmp_path / "x", check=check) == LARGE
    assert len(ranges(http)) == 6
    http.fail("x", "corrupt")
    with pytest.raises(IntegrityError, match=r"is damaged \(attempt 2 of 2\)"):
        fetch_large(http, tmp_path / "y", check=check)


def test_no_more_parts_than_connections_are_in_flight(http: HttpStore, tmp_path: Path) -> None:
    http.fail("x", "hang")
    with assert_error(DownloadError, path="/x") as caught:
        fetch_large(http, tmp_path / "x", timeout=1, attempts=1, connections=1)
    assert "nothing arrived" in str(caught.value)
    assert len(http.log()) <= 2  # the second may begin when the first is given up


def test_the_object_that_began_first_comes_first(http: HttpStore, tmp_path: Path) -> None:
    for name in "ab":
        http.put(name, LARGE)
    http.fail("x", "slow", times=1, rate=SECOND * 2)

    def one(name: str) -> None:
        Location(f"{http.url}/{name}", attempts=1, timeout=20).download(tmp_path / name, size=len(LARGE), connections=1)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(one, "x")
        while not http.log():
            assert not first.done()
        for done in [pool.submit(one, "a"), pool.submit(one, "b"), first]:
            done.result()
    names = "".join(http.requests())
    assert (names[:3], sorted(names[3:])) == ("xxx", ["a", "a", "a", "b", "b", "b"])
    assert names[3:] in ("aaabbb", "bbbaaa")


@pytest.mark.rotate(2)
def test_an_object_of_unknown_size_comes_in_one_stream(store: FaultyStore, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"?" * (len(LARGE) + 9))
    store.fail("x", "truncate", times=1)
    assert fetch_large(store, tmp_path / "x", size=None) == LARGE
    assert ranges(store) == [None, None]


def test_an_interrupted_download_writes_no_more(http: HttpStore, tmp_path: Path) -> None:
    http.fail("x", "slow", rate=1 << 20)
    target = tmp_path / "x"
    target.touch()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.7)
    try:
        with pytest.raises(KeyboardInterrupt):
            fetch_large(http, target)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    target.write_bytes(b"mine now")
    http.heal()
    assert fetch_large(http, tmp_path / "y") == LARGE  # over the loop that the first one was on
    assert target.read_bytes() == b"mine now"
