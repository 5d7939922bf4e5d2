from __future__ import annotations

import importlib
from email.utils import formatdate

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from lightning_streaming.storage.refusals import RefusedError
from lightning_streaming.storage.retry_after import LONGEST_ASKED_WAIT, asked_wait, parse_retry_after

botocore_errors = importlib.import_module("botocore.exceptions")  # which has no types
NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        (" 7 ", 7),
        ("0.5", 0.5),
        ("86400", LONGEST_ASKED_WAIT),
        (formatdate(NOW + 20, usegmt=True), 20),
        (formatdate(NOW - 20, usegmt=True), 0),
        (formatdate(NOW + 86400, usegmt=True), LONGEST_ASKED_WAIT),
        ("Tue, 14 Nov 2023 22:13:30 -0000", 10),  # no zone is UTC
        ("-5", None),
        ("soon", None),
        ("", None),
        ("1e3", None),
        ("٣", None),
    ],
)
def test_seconds_and_dates_are_understood(value: str, seconds: float | None) -> None:
    assert parse_retry_after(value, NOW) == seconds


@given(st.text(max_size=40))
def test_any_value_gives_a_wait_that_can_be_waited_or_none(value: str) -> None:
    seconds = parse_retry_after(value, NOW)
    assert seconds is None or 0 <= seconds <= LONGEST_ASKED_WAIT


def _aiohttp(headers: dict[str, str]) -> Exception:
    url = URL("http://host/x")
    request = aiohttp.RequestInfo(url, "GET", CIMultiDictProxy(CIMultiDict()), url)
    return aiohttp.ClientResponseError(request, (), status=429, headers=CIMultiDictProxy(CIMultiDict(headers)))


def _s3(headers: dict[str, str]) -> Exception:
    error = OSError("from s3fs")
    answer = {"ResponseMetadata": {"HTTPHeaders": {name.lower(): value for name, value in headers.items()}}}
    error.__cause__ = botocore_errors.ClientError(answer, "GetObject")
    return error


@pytest.mark.parametrize("make", [_aiohttp, _s3, lambda headers: RefusedError(429, headers, "")])
def test_the_wait_is_found_in_the_errors_of_every_store(make: type[Exception]) -> None:
    assert asked_wait(make({"Retry-After": "9"})) == 9
    assert asked_wait(make({"Retry-After": "whenever"})) == 0
    assert asked_wait(make({"Other": "9"})) == 0


def test_other_errors_ask_for_no_wait() -> None:
    assert asked_wait(OSError()) == 0
