from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError
from lightning_streaming.units import check_truth, format_bytes, parse_bytes, parse_count
from tests.helpers import assert_error


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("100", 100),
        ("100b", 100),
        ("64mb", 64 * 1024**2),
        ("1.5 GB", 3 * 1024**3 // 2),
        (" .5kb ", 512),
        ("1.kb", 1024),
        ("1.0009kb", 1024),  # truncated
        ("9007199254740993kb", 9007199254740993 * 1024),  # exact beyond what a float holds
        (7, 7),
        (7.9, 7),
    ],
)
def test_sizes_are_read_in_powers_of_1024(text: str | float, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("11k", 11_000),
        ("1.5M", 1_500_000),
        ("2b", 2 * 10**9),
        ("1t", 10**12),
        ("53", 53),
        (10**6, 10**6),
        (1e6, 10**6),
        (np.int32(7), 7),
        ("1.001k", 1001),
    ],
)
def test_counts_are_read_in_powers_of_1000(text: str | float, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "value", ["", "mb", "-1kb", "1e3", "1 2", "1xb", "1,5kb", "1.5", "1.5b", -1, float("nan"), float("inf")]
)
def test_what_is_no_size_is_refused(value: str | float) -> None:
    with assert_error(ConfigError, option="cache_limit") as caught:
        parse_bytes(value, "cache_limit")
    assert "cache_limit must be" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["1kb", "1.5", "-5", -5, 12.5, "1.0005k", True, [5], None, np.float32(0.5), 2**62, "9999999999t",
     pytest.param(10**400, id="10**400")],
)  # fmt: skip
def test_what_is_no_count_is_refused(value: Any) -> None:
    with assert_error(ConfigError, option="epoch_size") as caught:
        parse_count(value, "epoch_size")
    assert "epoch_size must be" in str(caught.value)


@pytest.mark.parametrize("value", [True, [5], None, pytest.param(10**400, id="10**400"), b"64mb"])
def test_sizes_are_numbers_or_texts(value: Any) -> None:
    with assert_error(ConfigError, option="cache_limit") as caught:
        parse_bytes(value, "cache_limit")
    assert "cache_limit must be" in str(caught.value)


@given(number=st.integers(0, 10**18))
def test_a_number_is_itself_in_digits_and_in_units_of_one(number: int) -> None:
    assert parse_bytes(str(number)) == parse_bytes(f"{number}b") == parse_count(str(number)) == number


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KB"), (1.4 * 1024**3, "1.4 GB"), (2048 * 1024**4, "2.0 PB")],
)
def test_sizes_are_said_as_people_say_them(size: float, words: str) -> None:
    assert format_bytes(size) == words


def test_a_truth_value_is_no_text() -> None:
    for value in (True, False, None, 1, 0, np.True_, np.bool_(0)):
        check_truth("shuffle", value)
    for wrong in ("false", "True", "", [], [0], 2, 0.5, float("nan"), object()):
        with assert_error(ConfigError, option="shuffle"):
            check_truth("shuffle", wrong)
