from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats import mds_sample
from lightning_streaming.formats.encodings import encode_value, encoding
from lightning_streaming.formats.mds_sample import compile_layout

LAYOUT = compile_layout(("a", "b", "c"), ("str", "uint8", "bytes"))
NUMBERS = ("int", "int8", "int32", "uint16", "uint64", "float32", "float64")
VALUES = st.one_of(
    st.integers(),
    st.integers(-(2**7), 2**7 - 1),
    st.floats(),
    st.floats(width=32).map(np.float32),
    st.integers(0, 2**16 - 1).map(np.uint16),
    st.booleans(),
    st.binary(min_size=8, max_size=8),
    st.sampled_from(["3.5", "x", None, Decimal("1.5"), [1.0]]),
)


def test_sizes_of_varying_columns_come_first() -> None:
    encoded = LAYOUT.encode({"c": b"cc", "b": 7, "a": "a"})
    assert encoded == bytes.fromhex("01000000 02000000") + b"a" + b"\x07" + b"cc"


def test_what_is_beside_the_columns_is_left_out() -> None:
    assert LAYOUT.encode({"a": "", "b": 0, "c": b"", "d": object()}) == bytes(9)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(EncodingError, match="column 'b' is missing; the sample has 'a', 'c'"):
        LAYOUT.encode({"a": "", "c": b""})


def test_the_column_of_a_wrong_value_is_named() -> None:
    with pytest.raises(EncodingError, match="column 'b': expected an unsigned integer of 8 bits, but got 256"):
        LAYOUT.encode({"a": "", "b": 256, "c": b""})


def test_a_sample_of_4_gib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mds_sample, "MAX_RAW_BYTES", 10)
    assert LAYOUT.encode({"a": "12345", "b": 0, "c": b"6789"})
    with pytest.raises(EncodingError, match="a sample can have 10 bytes, but got 11"):
        LAYOUT.encode({"a": "12345", "b": 0, "c": b"67890"})


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, where a float becomes infinite
@given(st.lists(st.tuples(st.sampled_from(NUMBERS), VALUES), min_size=1, max_size=4))
@example([("int", 2**63)])
@example([("float32", 1e300)])
@example([("uint16", True), ("int", np.int64(1))])
@example([("int", 1), ("int32", np.int32(-1)), ("float32", np.float32(0.1)), ("float64", np.float64(0.1))])
@example([("int", 1), ("float32", np.frombuffer(b"\1\0\x80\x7f", "<f4")[0])])  # a NaN that arithmetic would change
@example([("uint8", np.uint8(255)), ("float32", np.float32("inf")), ("float32", np.float32("-inf"))])
def test_samples_of_numbers_are_written_as_their_columns_are(columns: list[tuple[str, Any]]) -> None:
    """The quick way for numbers alone, beside the careful one."""
    layout = compile_layout(tuple(map(str, range(len(columns)))), tuple(name for name, _ in columns))
    sample = {str(place): value for place, (_, value) in enumerate(columns)}
    try:
        expected = b"".join(encode_value(encoding(name), value) for name, value in columns)
    except EncodingError:
        with pytest.raises(EncodingError, match="column '"):
            layout.encode(sample)
    else:
        assert layout.encode(sample) == expected


@pytest.mark.parametrize("encoding_name", ["ndarray", "ndarray:uint16", "ndarray:uint16:2,3"])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<u2").reshape(2, 3),
        np.arange(6, dtype=">u2").reshape(2, 3),
        np.arange(6, dtype="<u2").reshape(3, 2).T,
        np.arange(12, dtype="<u2").reshape(2, 6)[:, ::2],
        np.arange(6, dtype="<u2").reshape(2, 3).view(np.matrix),
        np.zeros((2, 0), np.uint16),
        np.zeros(3, np.complex64),
        [1, 2],
    ],
)
def test_a_sample_of_one_array_is_written_as_its_column_is(encoding_name: str, array: Any) -> None:
    layout = compile_layout(("a",), (encoding_name,))
    assert _outcome(lambda: layout.encode({"a": array})) == _outcome(lambda: _payload(encoding_name, array))


def _outcome(encode: Callable[[], bytes]) -> bytes | str:
    try:
        return encode()
    except EncodingError as error:
        return str(error)


def _payload(encoding_name: str, array: Any) -> bytes:
    try:
        payload = encode_value(encoding(encoding_name), array)
    except EncodingError as error:
        raise EncodingError(f"column 'a': {error}") from None
    return payload if encoding(encoding_name).size else len(payload).to_bytes(4, "little") + payload


def test_an_array_beside_other_columns_is_written_as_its_encoding_writes_it() -> None:
    array = np.arange(12, dtype=">u2").reshape(2, 6)[:, ::2]
    sample = {"a": array, "b": array, "c": "ä", "d": array.tobytes()}
    names = ("ndarray", "ndarray:uint16:2,3", "str", "ndarray:uint16:2,3")
    payloads = [encode_value(encoding(name), value) for name, value in zip(names, sample.values(), strict=True)]
    sizes = [len(payloads[place]).to_bytes(4, "little") for place in (0, 2)]
    assert compile_layout(tuple(sample), names).encode(sample) == b"".join([*sizes, *payloads])


@pytest.mark.parametrize("sample", [{"b": 1}, defaultdict(int, b=1)])
def test_a_missing_number_is_not_made_up(sample: dict[str, int]) -> None:
    with pytest.raises(EncodingError, match="column 'a' is missing; the sample has 'b'"):
        compile_layout(("a", "b"), ("int", "int")).encode(sample)
    assert list(sample) == ["b"]


def test_bytes_are_stored_as_they_are_where_they_have_the_columns_size() -> None:
    layout = compile_layout(("a", "b"), ("float32", "str"))
    assert layout.encode({"a": b"1234", "b": b"\xff"}) == b"\1\0\0\0" + b"1234" + b"\xff"
    with pytest.raises(EncodingError, match="column 'a': expected 4 bytes, but found 5"):
        layout.encode({"a": b"12345", "b": ""})


@pytest.mark.parametrize(
    ("names", "encoding_names"), [((), ()), (("a",), ()), (("a", "a"), ("int", "int")), (("a",), ("text",))]
)
def test_columns_that_cannot_be_are_refused(names: Any, encoding_names: Any) -> None:
    with pytest.raises(ConfigError):
        compile_layout(names, encoding_names)
