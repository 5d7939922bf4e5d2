from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.encodings import encoding

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
def test_payloads_are_these_bytes(name: str, array: NDArray[Any], payload: str) -> None:
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
def test_a_value_that_does_not_fit_is_refused_in_words(name: str, value: Any, words: str) -> None:
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
def test_a_payload_that_is_none_is_refused(name: str, payload: str) -> None:
    with pytest.raises(EncodingError, match="expected"):
        encoding(name).decode(bytes.fromhex(payload))
