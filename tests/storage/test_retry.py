from __future__ import annotations

import errno
import importlib

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
    IntegrityError,
    MissingDependencyError,
    ObjectNotFoundError,
    ShardCorruptError,
    StorageError,
    StreamingError,
)
from lightning_streaming.storage.refusals import RefusedError
from lightning_streaming.storage.retry import (
    LONGEST_WAIT,
    SLOWEST_RATE,
    final_class,
    longest_series,
    wait_seconds,
    what_is_missing,
)
from lightning_streaming.storage.retry_after import LONGEST_ASKED_WAIT

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
    assert final_class(error) is None


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
    assert final_class(error) is kind


@given(st.integers(1, 200), st.floats(0, 1, exclude_max=True))
def test_waits_double_up_to_a_limit_and_vary_by_half(failed: int, jitter: float) -> None:
    longest = min(LONGEST_WAIT, 0.5 * 2.0 ** (failed - 1))
    assert longest / 2 <= wait_seconds(failed, jitter) <= longest


@pytest.mark.parametrize(
    ("retry", "size", "seconds"),
    [
        (1, 0, 10.0),
        (2, 0, 20.5 + LONGEST_ASKED_WAIT),
        (3, 0, 31.5 + 2 * LONGEST_ASKED_WAIT),
        (2, SLOWEST_RATE * 100, 220.5 + LONGEST_ASKED_WAIT),
    ],
)
def test_the_longest_series_counts_attempts_waits_and_bytes(retry: int, size: int, seconds: float) -> None:
    assert longest_series(retry, 10, size) == seconds


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
    assert what_is_missing(error) == what
