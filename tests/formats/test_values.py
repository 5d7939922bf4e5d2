from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, from_dtype
from numpy.typing import NDArray

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.encodings import encoding

INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "float32", "float64")
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=10,
)


def there_and_back(name: str, value: Any) -> Any:
    """A value encoded, and decoded from a slice as a reader has it."""
    return encoding(name).decode(memoryview(encoding(name).encode(value)))


@given(
    st.one_of(
        st.tuples(st.just("bytes"), st.binary()),
        st.tuples(st.just("str"), st.text()),
        st.tuples(st.just("int"), st.integers(-(2**63), 2**63 - 1)),
        st.tuples(st.just("str_int"), st.integers(-(10**50), 10**50)),
        st.tuples(st.just("str_float"), st.floats(allow_nan=False)),
        st.tuples(st.just("str_decimal"), st.decimals(allow_nan=False)),
        st.tuples(st.just("json"), JSON_VALUES),
    )
)
def test_python_values_come_back_as_they_were(case: tuple[str, Any]) -> None:
    name, value = case
    found = there_and_back(name, value)
    assert found == value
    assert type(found) is type(value)


@given(st.sampled_from(INTEGERS), st.data())
def test_numpy_integers_come_back_as_they_were(name: str, data: st.DataObject) -> None:
    limits = np.iinfo(name)
    value = data.draw(st.integers(int(limits.min), int(limits.max)))
    found = there_and_back(name, value)
    assert found == value
    assert found.dtype == name


@given(st.sampled_from(FLOATS), st.data())
def test_numpy_floats_come_back_bit_for_bit(name: str, data: st.DataObject) -> None:
    value = data.draw(from_dtype(np.dtype(name)))
    found = there_and_back(name, value)
    assert found.tobytes() == value.tobytes()
    assert found.dtype == name


@pytest.mark.parametrize(
    ("name", "value", "payload"),
    [
        ("int", -2, "feffffffffffffff"),
        ("int", True, "0100000000000000"),
        ("uint16", 258, "0201"),
        ("uint8", 3.7, "03"),
        ("int8", np.int64(-1), "ff"),
        ("float32", 1.5, "0000c03f"),
        ("float16", 1, "003c"),
        ("str", "é", "c3a9"),
        ("str_int", True, b"1".hex()),
        ("str_float", np.float64(0.1), b"0.1".hex()),
        ("str_float", 1e20, b"1e+20".hex()),
        ("str_float", -math.inf, b"-inf".hex()),
        ("str_decimal", Decimal("1.50"), b"1.50".hex()),
        ("json", {"é": [1, None]}, b'{"\\u00e9": [1, null]}'.hex()),
        ("json", math.nan, b"NaN".hex()),
        ("json", {"a": np.arange(4).reshape(2, 2)}, b'{"a": [[0, 1], [2, 3]]}'.hex()),
        ("json", OrderedDict(b=1, a=2), b'{"b": 1, "a": 2}'.hex()),
    ],
)
def test_payloads_are_these_bytes(name: str, value: Any, payload: str) -> None:
    assert encoding(name).encode(value).hex() == payload


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("bytes", "text", "expected bytes, but got str 'text'"),
        ("bytes", bytearray(b"x"), "expected bytes, but got bytearray"),
        ("str", 3, "expected str, but got int 3"),
        ("str", "\ud800", "expected text that UTF-8 can hold"),
        ("int", np.int64(3), "expected int, but got int64"),
        ("int", 3.0, "expected int, but got float 3.0"),
        ("int", 2**63, "expected a signed integer of 64 bits, but got 9223372036854775808"),
        ("uint8", 256, "expected an unsigned integer of 8 bits, but got 256"),
        ("uint8", np.int64(256), "expected an unsigned integer of 8 bits, but got 256"),  # numpy alone would wrap
        ("uint8", -1, "expected an unsigned integer of 8 bits, but got -1"),
        ("int32", None, "expected a number for int32, but got NoneType"),
        ("int32", math.nan, "expected a number for int32, but got float nan"),
        ("int32", [1, 2], "expected a number for int32, but got list"),
        ("float32", None, "expected a number for float32, but got NoneType"),  # numpy alone would write NaN
        ("float32", [1.0], "expected a number for float32, but got list"),
        ("float32", "one", "expected a number for float32, but got str 'one'"),
        ("str_int", 1.0, "expected int, but got float"),
        ("str_float", 1, "expected float, but got int"),
        ("str_decimal", 1.0, "expected Decimal, but got float"),
        ("json", {1, 2}, "expected a value that JSON can represent, but got {1, 2}"),
        ("json", np.int64(1), "expected a value that JSON can represent"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_words(name: str, value: Any, words: str) -> None:
    with pytest.raises(EncodingError) as caught:
        encoding(name).encode(value)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["int", "int64", "str_int", "str", "json"])
def test_a_number_that_python_cannot_write_in_digits_is_refused_too(name: str) -> None:
    with pytest.raises(EncodingError, match="expected"):
        encoding(name).encode(10**5000)


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("str", b"\xff"),
        ("int", b"1234567"),
        ("uint16", b"1234"),
        ("float64", b""),
        ("str_int", b"1.5"),
        ("str_float", b"one"),
        ("str_float", b"\xff"),
        ("str_decimal", b"1..2"),
        ("json", b"{"),
        ("json", b"\xff"),
        ("json", b""),
        ("json", b" "),
        ("json", b"1 2"),
        ("json", b"\xef\xbb\xbf1"),  # a byte order mark
        ("json", b"1" * 5000),  # more digits than Python reads
        ("json", b"[" * 100_000),
    ],
)
def test_a_payload_that_is_none_is_refused(name: str, payload: bytes) -> None:
    with pytest.raises(EncodingError, match="expected"):
        encoding(name).decode(memoryview(payload))


@pytest.mark.parametrize("payload", [b" 7", b"7\n", b"\t 7 \r\n"])
def test_json_may_have_spaces_around_it(payload: bytes) -> None:
    assert encoding("json").decode(memoryview(payload)) == 7


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda children: st.lists(children) | st.tuples(children, children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)


class Touchy:
    """Cannot be pickled, and its pickle cannot be read."""

    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise LookupError("not here")


class Unwritable:
    def __reduce__(self) -> Any:
        raise LookupError("not here")


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = encoding("pkl").decode(memoryview(encoding("pkl").encode(value)))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", [lambda: None, Unwritable()])
def test_a_value_that_cannot_be_pickled_is_refused_in_words(value: Any) -> None:
    with pytest.raises(EncodingError, match="expected a value that pickle can write, but got"):
        encoding("pkl").encode(value)


@pytest.mark.parametrize(
    "payload", [b"", b"x", pickle.dumps([1] * 9)[:-3], pickle.dumps(Touchy()), b"cno.module\nx\n."]
)
def test_a_payload_that_is_no_pickle_is_refused(payload: bytes) -> None:
    with pytest.raises(EncodingError, match="expected a pickle, but found"):
        encoding("pkl").decode(memoryview(payload))


DTYPES = ("uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64", "int64", "float64")
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda name: arrays(name, array_shapes(max_dims=5, max_side=4)))


def names_for(array: NDArray[Any]) -> list[str]:
    """The three encodings that hold this array."""
    shape = ",".join(map(str, array.shape))
    return ["ndarray", f"ndarray:{array.dtype}", f"ndarray:{array.dtype}:{shape}"]


@given(ARRAYS, st.sampled_from("CF"))
def test_arrays_come_back_as_they_were_in_every_form(array: NDArray[Any], order: Any) -> None:
    for name in names_for(array):
        payload = encoding(name).encode(np.asarray(array, order=order))
        found = encoding(name).decode(memoryview(payload))
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tobytes() == array.tobytes()
        assert encoding(name).size in (None, len(payload))


@pytest.mark.parametrize(
    ("name", "array", "payload"),
    [
        ("ndarray", np.array([1, 2], np.uint16), "10 04 02 0100 0200"),
        ("ndarray:uint16", np.array([1, 2], np.uint16), "04 02 0100 0200"),
        ("ndarray:uint16:2", np.array([1, 2], np.uint16), "0100 0200"),
        ("ndarray", np.array([[1], [2]], np.int8), "09 08 0201 01 02"),
        ("ndarray", np.array([1, 2], ">u2"), "10 04 02 0100 0200"),  # turned little-endian
        ("ndarray:uint16:2", np.array([1, 2], ">u2"), "0100 0200"),
    ],
)
def test_payloads_of_arrays_are_these_bytes(name: str, array: NDArray[Any], payload: str) -> None:
    assert encoding(name).encode(array) == bytes.fromhex(payload)


@pytest.mark.parametrize(("largest", "width"), [(255, 1), (256, 2), (65535, 2), (65536, 4)])
def test_dimensions_take_the_least_width_that_holds_the_largest(largest: int, width: int) -> None:
    payload = encoding("ndarray:uint8").encode(np.zeros((1, largest), np.uint8))
    assert len(payload) == 1 + 2 * width + largest
    assert encoding("ndarray:uint8").decode(payload).shape == (1, largest)


def test_what_is_read_is_writable_and_apart_from_the_shard() -> None:
    shard = bytearray(encoding("ndarray").encode(np.arange(3)))
    found = encoding("ndarray").decode(memoryview(shard))
    shard[-8:] = bytes(8)
    found[0] = 7
    assert found.tolist() == [7, 1, 2]


@pytest.mark.parametrize("name", ["ndarray", "ndarray:int32", "ndarray:int32:3"])
@pytest.mark.parametrize("mask", [False, [False, True, False]])
def test_an_array_with_a_mask_is_refused_as_the_mask_would_be_lost(name: str, mask: Any) -> None:
    masked = np.ma.masked_array(np.array([1, 2, 3], np.int32), mask=mask)
    with pytest.raises(EncodingError, match=r"MaskedArray; write value.filled\(...\)"):
        encoding(name).encode(masked)
    assert encoding(name).encode(masked.filled(7)) == encoding(name).encode(np.asarray(masked.filled(7)))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ndarray", [1, 2], "expected ndarray, but got list [1, 2]"),
        ("ndarray", np.array(3), "but got shape ()"),
        ("ndarray", np.zeros((2, 0)), "but got shape (2, 0)"),
        ("ndarray", np.array([True]), "but got bool"),
        ("ndarray", np.array([1j]), "but got complex128"),
        ("ndarray", np.array(["x"]), "but got str"),
        ("ndarray:int16", np.zeros(2, np.int32), "expected dtype int16, but got int32"),
        ("ndarray:int16:2,3", np.zeros((3, 2), np.int16), "expected shape (2, 3), but got (3, 2)"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_in_words(name: str, value: Any, words: str) -> None:
    with pytest.raises(EncodingError) as caught:
        encoding(name).encode(value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("ndarray", ""),
        ("ndarray", "07 04 01 00"),  # no dtype has this code
        ("ndarray", "08"),
        ("ndarray", "08 00 01"),  # no dimensions
        ("ndarray", "08 04 00"),  # a dimension of 0
        ("ndarray", "08 05 01"),  # the shape header ends early
        ("ndarray", "08 04 02 01"),  # a value is missing
        ("ndarray", "08 04 02 01 02 03"),  # a value too many
        ("ndarray:uint16", "04 02 0100 02"),
        ("ndarray:uint16:2", "0100 02"),
        ("ndarray:uint8", "07" + "ff" * 8 + "01"),  # would be 2^64 - 1 values
    ],
)
def test_a_payload_that_is_no_array_is_refused(name: str, payload: str) -> None:
    with pytest.raises(EncodingError, match="expected"):
        encoding(name).decode(bytes.fromhex(payload))
