"""What the fault server does to answers, as a plain HTTP client sees it, and what its log says."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError

import pytest
from s3fs import S3FileSystem

from tests.reading.processes import wait_until
from tests.servers import (
    FaultyStore,
    GcsBucket,
    HttpStore,
    Logged,
    S3Bucket,
    change_link,
    end_servers,
    fault_proxy,
    fresh_store,
    http_server,
    python_launch,
    shared_server,
)

REPOSITORY = Path(__file__).parents[1]
DATA = bytes(range(256)) * 400
CUT = (http.client.IncompleteRead, ConnectionResetError)


class Got(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes


@pytest.fixture
def store(http_store: HttpStore) -> HttpStore:
    http_store.put("x", DATA)
    return http_store


@contextmanager
def connected(store: FaultyStore, timeout: float = 10) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(store.server.removeprefix("http://"), timeout=timeout)
    try:
        yield connection
    finally:
        connection.close()


def ask(connection: http.client.HTTPConnection, store: FaultyStore, method: str = "GET", **headers: str) -> Got:
    path = f"{store.prefix}x" + ("?alt=media" if isinstance(store, GcsBucket) else "")
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return Got(answer.status, dict(answer.getheaders()), answer.read())


def get(store: FaultyStore, timeout: float = 10, **headers: str) -> Got:
    with connected(store, timeout) as connection:
        return ask(connection, store, **headers)


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=102390-", 102390, 102400),
        ("bytes=-7", 102393, 102400),
        ("bytes=102399-200000", 102399, 102400),  # clipped
    ],
)
def test_a_range_is_served(store: HttpStore, asked: str, start: int, stop: int) -> None:
    got = get(store, Range=asked)
    assert got.status == 206
    assert got.headers["Content-Range"] == f"bytes {start}-{stop - 1}/102400"
    assert got.body == DATA[start:stop]


def test_a_range_beyond_the_object_is_refused(store: HttpStore) -> None:
    got = get(store, Range="bytes=102400-102500")
    assert (got.status, got.headers["Content-Range"]) == (416, "bytes */102400")


@pytest.mark.parametrize("asked", ["bytes=20-10", "bytes=-", "bytes=1-2,5-6", "lines=1-2"])
def test_a_range_without_meaning_is_ignored(store: HttpStore, asked: str) -> None:
    assert get(store, Range=asked)[::2] == (200, DATA)


def test_what_is_not_there_is_not_found(store: HttpStore) -> None:
    store.put("x", DATA)
    (store.root / "x").unlink()
    assert get(store).status == 404
    (store.root.parent / "x").write_bytes(DATA)
    with connected(store) as connection:
        connection.request("GET", f"{store.prefix}%2e%2e/x")
        assert connection.getresponse().status == 404


def test_a_connection_serves_many_requests_and_the_log_has_them_all(store: HttpStore) -> None:
    with connected(store) as connection:
        whole, head = ask(connection, store), ask(connection, store, "HEAD")
        ask(connection, store, Range="bytes=5-6")
    assert (whole.status, whole.body) == (200, DATA)
    assert (head.status, head.body, head.headers) == (200, b"", whole.headers)
    log = store.log()
    assert [(one.method, one.name, one.range, one.status, one.sent, one.fault) for one in log] == [
        ("GET", "x", None, 200, 102400, None),
        ("HEAD", "x", None, 200, 0, None),
        ("GET", "x", "bytes=5-6", 206, 2, None),
    ]
    assert len({one.connection for one in log}) == 1
    assert store.requests() == ["x", "x"]
    store.put("x", DATA)
    assert get(store).headers["ETag"] != whole.headers["ETag"]


def test_the_log_of_a_store_is_its_own(store: HttpStore, tmp_path: Path) -> None:
    with http_server(tmp_path) as url:
        mine, other = fresh_store(url, tmp_path), fresh_store(url, tmp_path)
        mine.put("x", DATA)
        other.put("x", DATA)
        mine.fail("x", "status")
        assert (get(mine).status, get(other).status) == (503, 200)
        assert (len(mine.log()), len(other.log())) == (1, 1)


def test_statuses_are_answered_a_number_of_times(store: HttpStore) -> None:
    store.fail("x", "status", times=2, skip=1, status=429)
    assert [get(store).status for _ in range(5)] == [200, 429, 429, 200, 200]


def test_a_store_heals_alone(store: HttpStore, tmp_path: Path) -> None:
    with http_server(tmp_path) as url:
        mine, other = fresh_store(url, tmp_path), fresh_store(url, tmp_path)
        for one in (mine, other):
            one.put("x", DATA)
            one.fail("x", "status")
        mine.heal()
        assert (get(mine).status, get(other).status) == (200, 503)


def test_faults_of_each_object_are_counted_apart(store: HttpStore) -> None:
    store.fail("", "status", times=1, each=True)
    assert [get(store).status for _ in range(2)] == [503, 200]
    with connected(store) as connection:
        connection.request("GET", f"{store.prefix}other")
        assert connection.getresponse().status == 503


def test_a_share_of_answers_is_spoiled_as_drawn(store: HttpStore) -> None:
    store.fail("x", "status", share=0.3, seed=1)
    with connected(store) as connection:
        statuses = [ask(connection, store).status for _ in range(60)]
    assert set(statuses) == {200, 503}
    assert 5 < statuses.count(503) < 35


def test_a_wait_is_asked_for_in_seconds_or_as_a_date(store: HttpStore) -> None:
    store.fail("x", "status", times=1, retry_after=7)
    store.fail("x", "status", times=1, retry_after=7, retry_date=True)
    assert get(store).headers["Retry-After"] == "7"
    asked = time.time()
    until = parsedate_to_datetime(get(store).headers["Retry-After"]).timestamp()
    assert asked + 7 <= until <= time.time() + 8


def test_only_the_right_credentials_pass(store: HttpStore) -> None:
    store.fail("x", "auth", status=401, authorization="Bearer right")
    assert get(store).status == 401
    assert get(store, Authorization="Bearer wrong").status == 401
    assert get(store, Authorization="Bearer right").body == DATA


def test_a_connection_is_cut_before_an_answer(store: HttpStore) -> None:
    store.fail("x", "reset", times=1)
    with pytest.raises(ConnectionResetError):
        get(store)
    (logged,) = store.log()
    assert (logged.status, logged.sent, logged.fault) == (None, None, "reset")
    assert get(store).body == DATA


@pytest.mark.parametrize("fault", ["truncate", "reset_body"])
def test_a_body_ends_early(store: HttpStore, fault: str) -> None:
    store.fail("x", fault, times=1, at=1000)
    with pytest.raises(CUT) as caught:
        get(store)
    if fault == "truncate":
        assert isinstance(caught.value, http.client.IncompleteRead)
        assert caught.value.partial == DATA[:1000]
    assert get(store).body == DATA


@pytest.mark.parametrize(
    ("fault", "body"), [("short", DATA[:-1]), ("long", DATA + b"\0"), ("corrupt", b"\1" + DATA[1:])]
)
def test_wrong_bytes_come_with_a_length_that_fits(store: HttpStore, fault: str, body: bytes) -> None:
    store.fail("x", fault, times=1)
    assert get(store).body == body
    assert get(store).body == DATA


@pytest.mark.rotate(2)
@pytest.mark.parametrize("rate", [0, 1e8])  # sent from memory, or from the file piece by piece
@pytest.mark.parametrize("at", [0, 70_000, -1])
def test_one_byte_is_wrong_where_it_should_be(store: HttpStore, at: int, rate: float, tmp_path: Path) -> None:
    with http_server(tmp_path, per_connection=rate) as url:
        store = fresh_store(url, tmp_path)
        store.put("x", DATA * 5)
        store.fail("x", "corrupt", at=at)
        body = get(store).body
    assert [place for place, (one, other) in enumerate(zip(body, DATA * 5, strict=True)) if one != other] == [
        at % len(body)
    ]


def test_one_byte_is_wrong_anywhere(store: HttpStore) -> None:
    store.fail("x", "corrupt", anywhere=True)
    places = set()
    for _ in range(3):
        (place,) = (place for place, pair in enumerate(zip(get(store).body, DATA, strict=True)) if pair[0] != pair[1])
        places.add(place)
    assert len(places) > 1


@pytest.mark.parametrize("fault", ["hang", "stall"])
def test_an_answer_stands_still(store: HttpStore, fault: str) -> None:
    store.fail("x", fault, times=1)
    with pytest.raises(TimeoutError):
        get(store, timeout=0.2)
    (logged,) = store.log()
    assert (logged.fault, logged.sent) == (fault, len(DATA) // 2 if fault == "stall" else None)
    assert get(store).body == DATA


def test_an_answer_that_stood_still_ends(store: HttpStore) -> None:
    store.fail("x", "stall", seconds=0.1)
    with pytest.raises(http.client.IncompleteRead):
        get(store)


def test_a_server_ignores_ranges(store: HttpStore) -> None:
    store.fail("x", "ignore_range", times=1)
    assert get(store, Range="bytes=5-6")[::2] == (200, DATA)
    assert get(store, Range="bytes=5-6")[::2] == (206, DATA[5:7])


def test_a_fault_that_does_not_exist_is_refused(store: HttpStore) -> None:
    with pytest.raises(HTTPError, match="400"):
        store.fail("x", "bogus")
    assert get(store).body == DATA


def test_a_server_ends_with_its_input_even_if_answers_stall(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    command = [sys.executable, "-m", "tests.servers", "http", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        store = HttpStore(url=url, server=url, prefix="/", root=tmp_path)
        store.fail("x", "hang")
        with connected(store) as connection:
            connection.request("GET", "/x")
            assert wait_until(lambda: bool(store.log()))
            process.stdin.close()
            assert process.wait(10) == 0


def test_the_emulator_ends_with_the_process_that_started_it() -> None:
    program = "from tests.servers import gcs_server\nwith gcs_server() as gcs: print(gcs.url, flush=True); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().decode().strip().removeprefix("http://").partition(":")
        socket.create_connection((host, int(port))).close()
        process.kill()
    assert wait_until(lambda: not is_open(host, int(port)))


_JOIN = """
import sys
from pathlib import Path
from tests.servers import python_launch, shared_server
with shared_server(Path(sys.argv[1]), "http", lambda: python_launch("http", sys.argv[1])) as url:
    print(url, flush=True)
    input()
"""


def test_a_shared_server_is_started_once_and_ends_with_the_last_process_that_uses_it(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _JOIN, str(tmp_path)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY)

    with start() as first, start() as second:
        assert first.stdout is not None
        assert second.stdout is not None
        urls = {one.readline().decode().strip() for one in (first.stdout, second.stdout)}
        (url,) = urls
        host, _, port = url.removeprefix("http://").partition(":")
        first.kill()
        first.wait()
        assert is_open(host, int(port))
        second.kill()
    assert wait_until(lambda: not is_open(host, int(port)))
    with shared_server(tmp_path, "http", lambda: python_launch("http", str(tmp_path))) as again:
        assert again not in urls
        end_servers(tmp_path)
        host, _, port = again.removeprefix("http://").partition(":")
        assert wait_until(lambda: not is_open(host, int(port)))


def is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except ConnectionRefusedError:
        return False
    return True


def seconds_of(log: list[Logged]) -> float:
    """From the first request to the end of the last answer."""
    return max(one.ended or 0 for one in log) - min(one.begun for one in log)


def test_a_slow_answer_comes_in_small_pieces_at_its_rate(store: HttpStore) -> None:
    store.fail("x", "slow", rate=500e3)
    connection = http.client.HTTPConnection(store.server.removeprefix("http://"))
    connection.request("GET", f"{store.prefix}x")
    answer, pieces = connection.getresponse(), []
    while piece := answer.read1():
        pieces.append(piece)
    connection.close()
    assert b"".join(pieces) == DATA
    assert len(pieces) >= 3
    assert seconds_of(store.log()) > 0.8 * len(DATA) / 500e3


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("link", "readers", "seconds"),
    [
        ({"per_connection": 1e6}, 1, 0.1),
        ({"total": 2e6}, 4, 0.2),
        ({"per_connection": 1e6, "total": 2e6}, 4, 0.2),
        ({"latency": 0.1}, 4, 0.1),
    ],
)
def test_the_link_is_as_slow_as_it_should_be(
    tmp_path: Path, link: dict[str, float], readers: int, seconds: float
) -> None:
    with http_server(tmp_path) as url:
        store = fresh_store(url, tmp_path)
        store.put("x", DATA)
        change_link(url, **link)
        with ThreadPoolExecutor(readers) as pool:
            assert {got.body for got in pool.map(get, [store] * readers)} == {DATA}
        assert seconds_of(store.log()) > 0.7 * seconds


@pytest.fixture(params=["s3", "gcs"])
def bucket(request: pytest.FixtureRequest) -> S3Bucket | GcsBucket:
    found: S3Bucket | GcsBucket = request.getfixturevalue(f"{request.param}_bucket")
    found.put("x", DATA)
    return found


KEY = "AWS4-HMAC-SHA256 Credential=k/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


def test_answers_of_a_real_server_are_spoiled_alike(bucket: FaultyStore) -> None:
    bucket.fail("x", "short", times=1)
    bucket.fail("x", "ignore_range", times=1)
    bucket.fail("x", "status", times=1)
    assert get(bucket, Authorization=KEY).body == DATA[:-1]
    assert get(bucket, Authorization=KEY, Range="bytes=5-6")[::2] == (200, DATA)
    assert get(bucket, Authorization=KEY).status == 503
    assert get(bucket, Authorization=KEY, Range="bytes=5-6")[::2] == (206, DATA[5:7])
    assert [one.status for one in bucket.log()] == [200, 200, 503, 206]
    assert bucket.requests() == ["x"] * 4


def test_a_proxy_has_a_link_too(s3_bucket: S3Bucket) -> None:
    s3_bucket.put("x", DATA)
    with fault_proxy(s3_bucket.s3.url, per_connection=1e6) as url:
        store = s3_bucket.s3.bucket_behind(url)
        store.put("x", DATA)
        assert get(store, Authorization=KEY).body == DATA
        assert seconds_of(store.log()) > 0.07


def test_directories_are_listed_as_buckets(tmp_path: Path) -> None:
    for name in ("bucket/a/1", "bucket/a/2", "bucket/a/b/3", "bucket/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"123")
    with http_server(tmp_path) as url:
        filesystem = S3FileSystem(key="key", secret="secret", endpoint_url=url)
        assert filesystem.find("bucket") == ["bucket/a/1", "bucket/a/2", "bucket/a/b/3", "bucket/c"]
        assert sorted(filesystem.ls("bucket/a", detail=False)) == ["bucket/a/1", "bucket/a/2", "bucket/a/b"]
        assert filesystem.info("bucket/a/1")["size"] == 3
