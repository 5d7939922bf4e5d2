"""Which values would come back as others."""

from __future__ import annotations

import math
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.exact import find_check, parse_exact_float

INTEGERS = ["int", *(f"{kind}{width}" for kind in ("int", "uint") for width in (8, 16, 32, 64)), "str_int"]
FLOATS = ["float16", "float32", "float64", "str_float"]


def refused(name: str, value: Any) -> str:
    check = find_check(name)
    assert check is not None
    with pytest.raises(EncodingError) as told:
        check(value)
    return str(told.value)


def taken(name: str, value: Any) -> bool:
    check = find_check(name)
    assert check is not None
    check(value)
    return True


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.5, 3.0, "3", True, np.True_, np.float32(3), b"3", None, math.nan, np.array(3)])
def test_only_integers_are_integers(name: str, value: Any) -> None:
    assert "expected an integer, but got " in refused(name, value)
    assert "convert it yourself if that is meant" in refused(name, value)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_taken(name: str) -> None:
    assert taken(name, 3)
    assert taken(name, np.uint8(3))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", ["1.5", True, np.False_, b"12345678", None, [1.5], np.array(1.5), Decimal("1.5"), 1j])
def test_only_numbers_are_floats(name: str, value: Any) -> None:
    assert "expected a number, but got " in refused(name, value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("float32", 1e300, "too large for float32, where it would be inf"),
        ("float32", -1e39, "too large for float32, where it would be -inf"),
        ("float16", 70000.0, "too large for float16"),
        ("float16", np.float32(1e6), "too large for float16"),
        ("float32", 1e-300, "too small for float32, where it would be 0"),
        ("float16", 1e-9, "too small for float16"),
        ("float32", 2**24 + 1, "16777217 would lose digits as float32"),
        ("float16", 2049, "would lose digits as float16"),
        ("float16", 10**6, "would lose digits as float16"),
        ("float64", 2**53 + 1, "would lose digits as float64"),
        ("float64", 10**400, "would lose digits as float64"),
        ("float64", np.int64(2**53 + 1), "would lose digits as float64"),
    ],
)
def test_floats_that_would_be_others_are_refused(name: str, value: Any, words: str) -> None:
    assert words in refused(name, value)


@pytest.mark.parametrize("value", [0, -1, 0.1, 1 / 3, math.nan, math.inf, -math.inf, -0.0, 2048, np.float64(0.1)])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_may_be_rounded_to_their_width_and_say_what_they_are(name: str, value: Any) -> None:
    assert taken(name, value)


@pytest.mark.parametrize(
    "value",
    [math.nan, [math.inf], {"a": [{"b": -math.inf}]}, (1, 2), {1: 2}, {True: 1}, {None: 1}, [np.int64(1)], b"x"],
)
def test_json_that_would_be_other_json_is_refused(value: Any) -> None:
    assert "expected a" in refused("json", value)


def test_json_that_comes_back_is_taken() -> None:
    value = {"a": [1, 2.5, "x", None, True, {"": []}], "b": 10**30}
    assert taken("json", value)
    assert encoding("json").decode(encoding("json").encode(value)) == value
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "too deep" in refused("json", deep)


def test_a_payload_is_not_text_and_an_image_file_must_be_whole() -> None:
    assert "expected text" in refused("str", b"\xff")
    assert "cut off" in refused("png", b"\x89PNG\r\n\x1a\n")
    assert taken("png", object())  # the encoding says what it is not


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_what_programs_write_of_a_float_is_taken(number: float) -> None:
    for text in (repr(number), f"{number:.16e}", f"{number:.17g}", f"{number:.25e}", str(Decimal(number))):
        assert struct.pack("d", parse_exact_float(text)) == struct.pack("d", number)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=15))
def test_what_is_taken_has_all_its_digits(number: Decimal) -> None:
    text = str(number)
    try:
        found = parse_exact_float(text)
    except EncodingError:
        assert len(text.strip("-0").replace(".", "")) > 15
        return
    digits = len("".join(map(str, number.as_tuple().digits)).strip("0")) or 1
    assert Decimal(f"{found:.{digits - 1}e}") == number


@pytest.mark.parametrize(
    "text",
    [
        "1e400",
        "-1e400",
        "1e-400",
        "9007199254740993.0",
        "3.14159265358979323846",
        "0.12345678901234567891",
        "1." + "3" * 2000,
    ],
)
def test_digits_that_a_float_cannot_hold_are_refused(text: str) -> None:
    with pytest.raises(EncodingError, match=r"too large for a float|would lose digits as a float"):
        parse_exact_float(text)


@pytest.mark.parametrize("text", ["inf", "-Infinity", "nan"])
def test_what_is_no_number_says_so_itself(text: str) -> None:
    assert not math.isfinite(parse_exact_float(text))
