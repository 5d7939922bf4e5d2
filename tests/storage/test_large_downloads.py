"""Objects that come in parts."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.errors import AccessDeniedError, DownloadError, IntegrityError, StreamingError
from lightning_streaming.storage import download, read_range
from tests.servers import FaultyStore, HttpStore

DATA = random.Random(0).randbytes((20 << 20) + 7)
SECOND = 107 << 16
"""The first byte of the second of three parts."""


@pytest.fixture(params=["http", "s3", "gcs"])
def store(request: pytest.FixtureRequest) -> FaultyStore:
    name = {"http": "http_store", "s3": "s3_bucket", "gcs": "gcs_bucket"}[request.param]
    store: FaultyStore = request.getfixturevalue(name)
    store.put("x", DATA)
    return store


@pytest.fixture
def http(http_store: HttpStore) -> HttpStore:
    http_store.put("x", DATA)
    return http_store


def fetch(store: FaultyStore, target: Path, **settings: Any) -> bytes:
    settings = {"expected_bytes": len(DATA), "retry": 2, "timeout": 20, **settings}
    download(f"{store.url}/x", store.options, target, **settings)
    return target.read_bytes()


def ranges(store: FaultyStore) -> list[str | None]:
    return [entry.range for entry in store.log()]


def test_parts_come_in_one_request_each_and_the_last_asks_for_one_byte_more(store: FaultyStore, tmp_path: Path) -> None:
    assert fetch(store, tmp_path / "x") == DATA
    assert sorted(map(str, ranges(store))) == [
        f"bytes=0-{SECOND - 1}",
        f"bytes={2 * SECOND}-{len(DATA)}",
        f"bytes={SECOND}-{2 * SECOND - 1}",
    ]
    assert {entry.method for entry in store.log()} == {"GET"}


def test_a_file_that_is_there_is_written_to_in_place_and_stays_after_a_failure(http: HttpStore, tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"?" * (len(DATA) + 5))
    before = target.stat().st_ino
    assert fetch(http, target) == DATA
    http.fail("x", "status", status=403)
    with pytest.raises(AccessDeniedError):
        fetch(http, target)
    assert target.stat().st_ino == before


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
    assert fetch(store, tmp_path / "x") == DATA
    assert len(ranges(store)) <= 5  # aiohttp asks once more by itself after a reset


def test_a_part_goes_on_where_it_was_cut(http: HttpStore, tmp_path: Path) -> None:
    http.fail("x", "truncate", times=1, skip=1, at=1000)
    assert fetch(http, tmp_path / "x") == DATA
    begins = [int(str(one).removeprefix("bytes=").partition("-")[0]) for one in ranges(http)]
    assert sum(begin % SECOND == 1000 for begin in begins) == 1


def test_a_part_that_stalls_is_asked_for_again(http: HttpStore, tmp_path: Path) -> None:
    http.fail("x", "stall", times=2)
    assert fetch(http, tmp_path / "x", timeout=1) == DATA


def test_a_part_that_is_slow_is_waited_for(http: HttpStore, tmp_path: Path) -> None:
    http.fail("x", "slow", times=1, rate=SECOND / 1.5)
    assert fetch(http, tmp_path / "x", timeout=0.7, retry=1) == DATA


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
    with pytest.raises(kind, match=f"{store.url}/x.* 2"):
        fetch(store, tmp_path / "x", timeout=1 if fault == "stall" else 20)
    assert list(tmp_path.iterdir()) == []


def test_an_object_of_another_length_is_noticed(store: FaultyStore, tmp_path: Path) -> None:
    for expected in (len(DATA) - 1, len(DATA) + 1, len(DATA) * 2):
        with pytest.raises(IntegrityError, match=f"{store.url}/x"):
            fetch(store, tmp_path / "x", expected_bytes=expected, retry=1)
    for expected in (0, 1000):
        with pytest.raises(IntegrityError, match="but more arrived"):
            fetch(store, tmp_path / "x", expected_bytes=expected, retry=1)


def test_a_store_that_ignores_ranges_sends_the_whole(store: FaultyStore, tmp_path: Path) -> None:
    store.fail("x", "ignore_range")
    assert fetch(store, tmp_path / "x") == DATA
    assert ranges(store)[-1] is None
    assert len(ranges(store)) == 4
    start = len(DATA) - 5000
    assert read_range(f"{store.url}/x", store.options, start, start + 100, retry=1, timeout=20) == DATA[start:][:100]


def test_a_failed_check_fetches_all_parts_again(http: HttpStore, tmp_path: Path) -> None:
    http.fail("x", "corrupt", times=1, skip=1)

    def check(path: Path) -> None:
        if path.read_bytes() != DATA:
            raise IntegrityError(f"{path} is damaged")

    assert fetch(http, tmp_path / "x", check=check) == DATA
    assert len(ranges(http)) == 6
    http.fail("x", "corrupt")
    with pytest.raises(IntegrityError, match=r"is damaged \(attempt 2 of 2\)"):
        fetch(http, tmp_path / "y", check=check)


def test_no_more_parts_than_connections_are_in_flight(http: HttpStore, tmp_path: Path) -> None:
    http.fail("x", "hang")
    with pytest.raises(DownloadError, match="nothing arrived"):
        fetch(http, tmp_path / "x", timeout=1, retry=1, connections=1)
    assert len(http.log()) <= 2  # the second may begin when the first is given up


def test_the_object_that_began_first_comes_first(http: HttpStore, tmp_path: Path) -> None:
    for name in "ab":
        http.put(name, DATA)
    http.fail("x", "slow", times=1, rate=SECOND * 2)

    def one(name: str) -> None:
        settings: dict[str, Any] = {"expected_bytes": len(DATA), "retry": 1, "timeout": 20, "connections": 1}
        download(f"{http.url}/{name}", {}, tmp_path / name, **settings)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(one, "x")
        while not http.log():
            assert not first.done()
        for done in [pool.submit(one, "a"), pool.submit(one, "b"), first]:
            done.result()
    names = "".join(http.requests())
    assert (names[:3], sorted(names[3:])) == ("xxx", ["a", "a", "a", "b", "b", "b"])
    assert names[3:] in ("aaabbb", "bbbaaa")


def test_an_object_of_unknown_size_comes_in_one_stream(store: FaultyStore, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"?" * (len(DATA) + 9))
    store.fail("x", "truncate", times=1)
    assert fetch(store, tmp_path / "x", expected_bytes=None) == DATA
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
            fetch(http, target)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    target.write_bytes(b"mine now")
    http.heal()
    assert fetch(http, tmp_path / "y") == DATA  # over the loop that the first one was on
    assert target.read_bytes() == b"mine now"
