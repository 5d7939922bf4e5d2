from __future__ import annotations

import asyncio
import errno
import importlib
import pickle
import random
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from math import inf
from typing import Any

import aiohttp
import pytest
from aiohttp.http_exceptions import ContentLengthError
from fsspec.exceptions import FSTimeoutError
from gcsfs.retry import HttpError
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from lightning_streaming.errors import (
    AccessDeniedError,
    ConfigError,
    DownloadError,
    IntegrityError,
    MissingDependencyError,
    ObjectNotFoundError,
    ShardCorruptError,
    StorageError,
    StreamingError,
)
from lightning_streaming.storage import requests, retries
from lightning_streaming.storage.requests import RefusedError
from lightning_streaming.storage.retries import (
    SLOWEST_RATE,
    Attempts,
    Deadline,
    Series,
    StallClock,
    longest_series,
    run_watched,
    watched,
)
from tests.helpers import assert_error

botocore_errors = importlib.import_module("botocore.exceptions")  # which has no types


def _http(status: int) -> aiohttp.ClientResponseError:
    url = URL("http://host/x")
    request = aiohttp.RequestInfo(url, "GET", CIMultiDictProxy(CIMultiDict()), url)
    return aiohttp.ClientResponseError(request, (), status=status)


def _s3(status: int, error: Exception | None = None, code: str = "Any") -> Exception:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = error or OSError(errno.EIO, "from the store")
    error.__cause__ = botocore_errors.ClientError(answer, "GetObject")
    return error


def _truncated_body() -> Exception:
    error = aiohttp.ClientPayloadError("not completed")
    error.__cause__ = ContentLengthError("not enough data")  # whose code is 400, though no server said so
    return error


@pytest.mark.parametrize(
    "error",
    [
        _http(500), _http(503), _http(429), _http(408), RefusedError(503, {}, "x"),
        _s3(500), _s3(503), _s3(429),
        HttpError({"code": 503}), HttpError({"code": "429"}),
        _s3(400, TimeoutError("RequestTimeout")),
        _truncated_body(),
        FSTimeoutError(), ConnectionResetError(), EOFError(), OSError("odd"),
        aiohttp.ServerDisconnectedError(),
        botocore_errors.EndpointConnectionError(endpoint_url="http://host"),
        IntegrityError("short"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    assert retries._permanent_class(error) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (_http(404), ObjectNotFoundError),
        (_http(401), AccessDeniedError),
        (_http(403), AccessDeniedError),
        (_http(416), StorageError),
        (RefusedError(403, {}, "x"), AccessDeniedError),
        (RefusedError(400, {}, "requester pays"), StorageError),
        (_s3(400), StorageError),
        (_s3(403), AccessDeniedError),
        (_s3(400, PermissionError("ExpiredToken")), AccessDeniedError),
        (HttpError({"code": 401}), AccessDeniedError),
        (OSError("Forbidden: bucket/x"), AccessDeniedError),
        (FileNotFoundError("x"), ObjectNotFoundError),
        (botocore_errors.NoCredentialsError(), AccessDeniedError),
        (botocore_errors.ProfileNotFound(profile="x"), ConfigError),
        (TypeError("unexpected keyword"), ConfigError),
        (ValueError("bad"), ConfigError),
        (NotImplementedError(), ConfigError),
        (ModuleNotFoundError("x"), MissingDependencyError),
        (ShardCorruptError("x"), ShardCorruptError),
    ],
)
def test_what_cannot_heal_is_told_at_once(error: Exception, kind: type[StreamingError]) -> None:
    assert retries._permanent_class(error) is kind


@given(st.integers(1, 200), st.floats(0, 1, exclude_max=True))
def test_waits_double_up_to_a_limit_and_vary_by_half(failed: int, jitter: float) -> None:
    longest = min(retries._LONGEST_WAIT, 0.5 * 2.0 ** (failed - 1))
    assert longest / 2 <= retries._wait_seconds(failed, jitter) <= longest


@pytest.mark.parametrize(
    ("attempts", "size", "seconds"),
    [
        (1, 0, 10.0),
        (2, 0, 20.5 + retries._LONGEST_REQUESTED_WAIT),
        (3, 0, 31.5 + 2 * retries._LONGEST_REQUESTED_WAIT),
        (2, SLOWEST_RATE * 100, 220.5 + retries._LONGEST_REQUESTED_WAIT),
    ],
)
def test_the_longest_series_counts_attempts_waits_and_bytes(attempts: int, size: int, seconds: float) -> None:
    assert longest_series(attempts, 10, size) == seconds


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (_s3(404), None),
        (_s3(404, FileNotFoundError(), "NoSuchBucket"), "bucket"),
        (_s3(404, FileNotFoundError(), "NoSuchKey"), "object"),
        (RefusedError(404, {}, "The specified bucket does not exist."), "bucket"),
        (RefusedError(404, {}, "NoSuchKey: The specified key does not exist."), "object"),
        (RefusedError(404, {}, "No such object: bucket/x"), "object"),
        (RefusedError(404, {}, "Not Found"), None),
        (FileNotFoundError("http://host/x"), None),
    ],
    ids=repr,
)
def test_what_is_missing_is_told_if_the_store_told(error: Exception, what: str | None) -> None:
    assert retries._what_is_missing(error) == what


NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        (" 7 ", 7),
        ("0.5", 0.5),
        ("86400", retries._LONGEST_REQUESTED_WAIT),
        (formatdate(NOW + 20, usegmt=True), 20),
        (formatdate(NOW - 20, usegmt=True), 0),
        (formatdate(NOW + 86400, usegmt=True), retries._LONGEST_REQUESTED_WAIT),
        ("Tue, 14 Nov 2023 22:13:30 -0000", 10),  # no zone is UTC
        ("-5", None),
        ("soon", None),
        ("", None),
        ("1e3", None),
        ("٣", None),
    ],
)
def test_seconds_and_dates_are_understood(value: str, seconds: float | None) -> None:
    assert retries._parse_retry_after(value, NOW) == seconds


@pytest.mark.nightly
@given(st.text(max_size=40))
def test_any_value_gives_a_wait_that_can_be_waited_or_none(value: str) -> None:
    seconds = retries._parse_retry_after(value, NOW)
    assert seconds is None or 0 <= seconds <= retries._LONGEST_REQUESTED_WAIT


def _aiohttp(headers: dict[str, str]) -> Exception:
    url = URL("http://host/x")
    request = aiohttp.RequestInfo(url, "GET", CIMultiDictProxy(CIMultiDict()), url)
    return aiohttp.ClientResponseError(request, (), status=429, headers=CIMultiDictProxy(CIMultiDict(headers)))


def _s3_asking(headers: dict[str, str]) -> Exception:
    error = OSError("from s3fs")
    answer = {"ResponseMetadata": {"HTTPHeaders": {name.lower(): value for name, value in headers.items()}}}
    error.__cause__ = importlib.import_module("botocore.exceptions").ClientError(answer, "GetObject")
    return error


@pytest.mark.parametrize("make", [_aiohttp, _s3_asking, lambda headers: RefusedError(429, headers, "")])
def test_the_wait_is_found_in_the_errors_of_every_store(make: type[Exception]) -> None:
    assert retries._requested_wait(make({"Retry-After": "9"})) == 9
    assert retries._requested_wait(make({"Retry-After": "whenever"})) == 0
    assert retries._requested_wait(make({"Other": "9"})) == 0


def test_other_errors_ask_for_no_wait() -> None:
    assert retries._requested_wait(OSError()) == 0


S3 = """<?xml version="1.0"?><Error><Code>SignatureDoesNotMatch</Code><Message>It does not match</Message>
<AWSAccessKeyId>AKIDEXAMPLE</AWSAccessKeyId><StringToSign>AWS4 secret</StringToSign></Error>"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (S3, "SignatureDoesNotMatch: It does not match"),
        (
            '{"error": {"code": 400, "message": "Bucket is a requester pays bucket"}}',
            "Bucket is a requester pays bucket",
        ),
        ("No such object:\n  bucket/x", "No such object: bucket/x"),
        ("<html><body>sorry</body></html>", "the reason"),
        ('{"error": "odd"}', "the reason"),
        ('["odd"]', "the reason"),
        ("", "the reason"),
        ("long " * 1000, ("long " * 40).strip()),
        ("word " + "0123456789" * 100, "word"),  # half of a secret would be shown, not knowing that it is one
        ("0123456789" * 100, "the reason"),
    ],
)
def test_only_words_for_people_are_taken_from_an_answer(text: str, words: str) -> None:
    assert requests._message_in(text, "the reason") == words


def test_a_refusal_tells_status_and_words() -> None:
    assert str(RefusedError(404, {}, "no such object")) == "status 404, no such object"
    assert str(RefusedError(404, {}, "")) == "status 404"


def attempts(*, total: int = 2, options: dict[str, object] | None = None, deadline: Deadline | None = None) -> Attempts:
    return Attempts(
        purpose="download s3://bucket/x",
        options=options or {},
        total=total,
        timeout=60,
        failure=DownloadError,
        deadline=deadline,
        hidden=("hidden-text",),
    )


def failing(*errors: Exception) -> Callable[[], str]:
    """An action that raises these, one a call, and then succeeds."""
    left = list(errors)

    def action() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return action


def test_a_passing_failure_heals() -> None:
    assert attempts(total=2).run(failing(ConnectionResetError())) == "done"


def test_retry_is_the_number_of_all_attempts() -> None:
    with pytest.raises(DownloadError, match="2 attempts"):
        attempts(total=2).run(failing(OSError(), OSError()))


def test_the_last_failure_names_object_attempts_cause_and_way_out() -> None:
    with pytest.raises(DownloadError) as caught:
        attempts(total=1).run(failing(ConnectionResetError("peer went away")))
    for words in ["s3://bucket/x", "1 attempt of up to 60 s", "ConnectionResetError: peer went away", "download_retry"]:
        assert words in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionResetError)


def test_the_same_holds_on_an_event_loop() -> None:
    def run(total: int, *errors: Exception) -> str:
        action = failing(*errors)

        async def act() -> str:
            return action()

        return asyncio.run(attempts(total=total).run_async(act))

    assert run(2, ConnectionResetError()) == "done"
    with pytest.raises(DownloadError, match="2 attempts"):
        run(2, OSError(), OSError())
    with pytest.raises(ObjectNotFoundError):
        run(5, FileNotFoundError())


def test_the_store_is_given_the_time_it_asked_for() -> None:
    pause = Series(attempts(total=2)).pause_after(RefusedError(429, {"Retry-After": "20"}, ""))
    assert 20 < pause <= 20 + retries._LONGEST_WAIT


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    "error",
    [
        _http(429),
        _s3(429),
        HttpError({"code": "429"}),
        _s3(503, code="SlowDown"),
        RefusedError(503, {}, "Slow Down"),
        RefusedError(503, {"Retry-After": "1"}, ""),
    ],
)
def test_a_store_that_is_asked_too_often_fails_no_attempt(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(retries, "_requested_wait", lambda _: 0.001)
    put_off = [error] * retries._MAX_POSTPONED
    assert attempts(total=1).run(failing(*put_off)) == "done"
    assert attempts(total=2).run(failing(*put_off[1:], OSError(), error)) == "done"
    with pytest.raises(DownloadError, match=r"9 attempts .* failed, .*; check which other programs send requests"):
        attempts(total=1).run(failing(*put_off, error))
    with pytest.raises(DownloadError, match=r"3 attempts .* failed, .*; check the network and the store"):
        attempts(total=2).run(failing(error, OSError(), OSError()))


@pytest.mark.parametrize(
    "error", [_http(503), _s3(503, code="InternalError"), RefusedError(500, {"Retry-After": "0"}, "")]
)
def test_a_store_that_is_broken_fails_attempts(error: Exception) -> None:
    with pytest.raises(DownloadError, match="1 attempt of"):
        attempts(total=1).run(failing(error))


def test_no_put_off_outlasts_the_deadline() -> None:
    deadline = Deadline(5, time.monotonic() + 5)
    with pytest.raises(DownloadError, match="1 attempt of up to 60 s, within 5 s in all, failed"):
        attempts(total=9, deadline=deadline).run(failing(RefusedError(429, {"Retry-After": "20"}, "")))


def test_there_is_no_attempt_that_the_deadline_leaves_no_time_for() -> None:
    deadline = Deadline(3600)
    assert deadline.left() == 3600
    deadline.begin()
    assert Series(attempts(total=9, deadline=deadline)).pause_after(OSError()) > 0
    deadline.end = time.monotonic()
    with pytest.raises(DownloadError, match="1 attempt of up to 60 s, within 3600 s in all, failed"):
        attempts(total=9, deadline=deadline).run(failing(OSError()))
    deadline.begin()
    assert deadline.left() < 0


@pytest.mark.parametrize(
    ("words", "wrong", "hint"),
    [
        ("The specified bucket does not exist", "the bucket does not exist", "check its name"),
        ("No such object: b/x", "the bucket has no such object", "check the path"),
        ("Not Found", "not found", "check the bucket, the path"),
    ],
)
def test_what_is_missing_is_named(words: str, wrong: str, hint: str) -> None:
    with assert_error(ObjectNotFoundError, hint=hint) as caught:
        attempts().run(failing(RefusedError(404, {}, words)))
    assert f": {wrong} (" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(), ObjectNotFoundError),
        (PermissionError(), AccessDeniedError),
        (TypeError(), ConfigError),
        (ImportError(), MissingDependencyError),
    ],
)
def test_a_final_failure_is_not_tried_again(error: Exception, kind: type[StreamingError]) -> None:
    with pytest.raises(kind, match="could not download s3://bucket/x"):
        attempts(total=5).run(failing(error))


def test_our_own_errors_keep_their_words() -> None:
    with pytest.raises(StorageError, match=r"^no room$"):
        attempts(total=5).run(failing(StorageError("no room")))


def test_damage_counts_as_passing_until_the_last_attempt() -> None:
    assert attempts(total=2).run(failing(IntegrityError("short"))) == "done"
    with pytest.raises(IntegrityError, match="short \\(attempt 2 of 2\\)"):
        attempts(total=2).run(failing(IntegrityError("long"), IntegrityError("short")))


def test_no_secret_is_in_the_printed_error() -> None:
    secret = "hunt" + "er"  # in two halves, because a traceback prints the lines of this file
    store = attempts(total=1, options={"secret": f"{secret}2"})
    with pytest.raises(DownloadError) as caught:
        store.run(failing(OSError(f"{secret}2 at https://user:{secret}3@host/?sig={secret}4 hidden-" + "text")))
    assert "hidden-" + "text" not in "".join(traceback.format_exception(caught.value)) + repr(store)
    assert secret not in "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(store)


def test_errors_pickle() -> None:
    with pytest.raises(DownloadError) as caught:
        attempts(total=1).run(failing(OSError()))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is DownloadError
    assert str(copied) == str(caught.value)


def test_waiting_draws_no_number_of_the_programs_generator() -> None:
    random.seed(1)
    attempts(total=2).run(failing(OSError()))
    drawn = random.random()
    random.seed(1)
    assert drawn == random.random()


Run = Callable[[Callable[[StallClock], Any], float, float], Any]


def test_what_ends_in_time_gives_its_result_or_raises() -> None:
    async def work(error: Exception | None) -> str:
        if error:
            raise error
        return "done"

    assert asyncio.run(watched(work(None), StallClock(), 5, 5)) == "done"
    with pytest.raises(KeyError):
        asyncio.run(watched(work(KeyError("x")), StallClock(), 5, 5))
    assert run_watched(lambda: "done", StallClock(), inf, inf) == "done"
    with pytest.raises(KeyError):
        run_watched({}.popitem, StallClock(), 5, 5)


async def _marking(progress: StallClock, stopped: list[bool]) -> None:
    try:
        for _ in range(40):
            await asyncio.sleep(0.05)
            progress.mark()
    except asyncio.CancelledError:
        stopped.append(True)
        raise


def test_what_stalls_is_cancelled() -> None:
    ended: list[bool] = []

    async def stall() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(TimeoutError, match=r"nothing arrived for 0\.1 s"):
        asyncio.run(watched(stall(), StallClock(), 0.1, inf))
    assert ended


@pytest.mark.nightly
def test_what_is_slow_is_not_cancelled() -> None:
    progress, stopped = StallClock(), list[bool]()
    asyncio.run(watched(_marking(progress, stopped), progress, 1.5, inf))
    assert not stopped


def test_what_is_too_slow_is_cancelled_in_the_end() -> None:
    progress, stopped = StallClock(), list[bool]()
    with pytest.raises(TimeoutError, match=r"not done after 0\.2 s"):
        asyncio.run(watched(_marking(progress, stopped), progress, 60, 0.2))
    assert stopped


def test_a_cancelled_watch_cancels_what_it_watches() -> None:
    progress, stopped = StallClock(), list[bool]()

    async def cancel(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel(watched(_marking(progress, stopped), progress, 60, inf)))
    assert stopped


@pytest.mark.parametrize(("timeout", "longest", "words"), [(0.1, inf, "nothing arrived"), (inf, 0.1, "not done")])
def test_a_thread_that_stalls_is_left_behind(timeout: float, longest: float, words: str) -> None:
    release, ended = threading.Event(), threading.Event()

    def stall() -> None:
        release.wait()
        ended.set()

    with pytest.raises(TimeoutError, match=words):
        run_watched(stall, StallClock(), timeout, longest)
    assert not ended.is_set()
    release.set()
    assert ended.wait(10)


def test_a_thread_that_is_slow_is_waited_for() -> None:
    progress, pause = StallClock(), threading.Event()

    def work() -> str:
        for _ in range(20):
            pause.wait(0.05)
            progress.mark()
        return "done"

    assert run_watched(work, progress, 0.9, inf) == "done"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [('"api";r=0;t=55', 55.0), ('"api";r=0;t=5000', 60.0), ('"api";r=489;t=55', 0.0), ("odd", 0.0), ("", 0.0)],
)
def test_a_quota_that_is_used_up_says_when_it_is_renewed(header: str, seconds: float) -> None:
    assert retries._requested_wait(RefusedError(429, {"RateLimit": header}, "x")) == seconds
