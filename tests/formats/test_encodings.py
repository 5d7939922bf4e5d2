"""Encodings by name, those of users, values that would come back as others, and samples that come back from a file."""

from __future__ import annotations

import math
import re
import struct
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, from_dtype
from PIL import Image

from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError
from lightning_streaming.formats import encodings
from lightning_streaming.formats.encodings import (
    _ENCODINGS,
    _IMAGE_ENCODINGS,
    encode_value,
    encoding,
    find_check,
    is_unsafe,
    parse_exact_float,
    register_encoding,
    registered_encodings,
)
from lightning_streaming.formats.mds import compile_layout
from lightning_streaming.formats.shard import check_shard, open_shard
from tests.formats.small_shards import put_shard
from tests.helpers import assert_error
from tests.tiers import examples


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("bytes", None),
        ("str", None),
        ("int", 8),
        ("uint8", 1),
        ("int16", 2),
        ("float32", 4),
        ("float64", 8),
        ("str_int", None),
        ("json", None),
        ("ndarray", None),
        ("ndarray:", None),
        ("ndarray:int32", None),
        ("ndarray:int32:2,3", 24),
    ],
)
def test_each_encoding_knows_its_size(name: str, size: int | None) -> None:
    assert encoding(name).size == size


@pytest.mark.parametrize(
    "name",
    [
        "",
        "text",
        "INT",
        "int:8",  # only ndarray takes a config
        "float",  # a column type of the split formats, not of MDS
        "bool",
        "list[int]",
        "ndarray:bool",
        "ndarray:int32:",
        "ndarray:int32:0",
        "ndarray:int32:2, 3",
        "ndarray::2,3",  # no name says a shape without a dtype
        "ndarray:int32:2:3",
        "ndarray:uint8:" + ",".join(["1"] * 64),
    ],
)
def test_an_unknown_encoding_is_refused(name: str) -> None:
    with assert_error(ConfigError, option="columns"):
        encoding(name)


@pytest.mark.parametrize(
    "name", ["pil", "jpeg", "png", "jpeg_array", "jpegarray", "list[pil]", "list[jpeg]", "list[png]"]
)
def test_images_need_pillow_and_say_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert encoding(name).size is None
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'lightning-streaming\[images\]'"):
        encoding(name)


def test_only_pickle_is_unsafe() -> None:
    assert is_unsafe("pkl")
    assert not is_unsafe("json")


@pytest.mark.parametrize("name", ["str", "json", "str_int", "ndarray", "bytes", "pkl", "jpeg", "pil"])
def test_bytes_are_stored_as_they_are_whatever_the_encoding(name: str) -> None:
    assert encode_value(encoding(name), b"\xff any") == b"\xff any"


@pytest.mark.parametrize("name", ["int", "float64", "ndarray:int16:4"])
def test_bytes_of_a_fixed_size_column_must_have_its_size(name: str) -> None:
    assert encode_value(encoding(name), b"12345678") == b"12345678"
    with pytest.raises(EncodingError, match="expected 8 bytes, but found 7"):
        encode_value(encoding(name), b"1234567")


class Point:
    """Two floats in 16 bytes."""

    size = 16

    def encode(self, value: complex) -> bytes:
        return struct.pack("<dd", value.real, value.imag)

    def decode(self, data: bytes) -> complex:
        assert type(data) is bytes
        return complex(*struct.unpack("<dd", data))


class Words:
    size = None

    def encode(self, value: list[str]) -> Any:
        return " ".join(value).encode() if value else "no bytes"

    def decode(self, data: bytes) -> list[str]:
        return data.decode().split()


class NeedsAnArgument(Words):
    def __init__(self, separator: str) -> None: ...


class NoDecode:
    size = None

    def encode(self, value: Any) -> bytes:
        return b""


class NoSize:
    encode = decode = Words.encode


class OddSize(Words):
    size: Any = 1.5


class NegativeSize(Words):
    size: Any = -1


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "_REGISTERED", {})


def test_a_registered_encoding_writes_and_reads_a_column(tmp_path: Any) -> None:
    register_encoding("point", Point)
    register_encoding("words", Words)
    assert (encoding("point").size, encoding("words").size) == (16, None)
    assert not is_unsafe("point")
    sample = {"at": 1 + 2j, "id": 3, "said": ["a", "é"]}
    columns = {"at": "point", "id": "int", "said": "words"}
    info = put_shard(tmp_path, [sample], columns)
    assert info.schema["column_sizes"] == (16, 8, None)
    reader = open_shard(info, tmp_path)
    assert reader[0] == sample
    reader.close()


def test_an_encoding_is_unknown_until_it_is_registered() -> None:
    with assert_error(ConfigError, option="columns") as caught:
        compile_layout(("a",), ("point",))
    assert "'point'" in str(caught.value)
    register_encoding("point", Point)
    assert compile_layout(("a",), ("point",)).sizes == (16,)


def test_saying_the_same_twice_changes_nothing() -> None:
    register_encoding("point", Point)
    register_encoding("point", Point)
    assert registered_encodings() == {"point": Point}


@pytest.mark.parametrize("name", ["int", "ndarray", "pkl", "jpeg", "list[png]", "point", "", "ndarray:int8", "a:b", 3])
def test_a_name_that_is_taken_or_cannot_be_one_is_refused(name: Any) -> None:
    register_encoding("point", Point)
    with assert_error(ConfigError, option="name") as caught:
        register_encoding(name, Words)
    assert re.search(r"no colon|built-in|registered as Point already", str(caught.value))
    assert registered_encodings() == {"point": Point}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (NeedsAnArgument, "arguments"),
        (NoDecode, "decode"),
        (NoSize, "size must be"),
        (OddSize, "payload"),
        (NegativeSize, "payload"),
        (Words(), "given as a class"),
        (type("Local", (Words,), {"__qualname__": "f.<locals>.Local"}), "at the top of a module"),
    ],
)
def test_a_class_that_cannot_serve_is_refused(kind: Any, words: str) -> None:
    with assert_error(ConfigError, option="encoding_class") as caught:
        register_encoding("mine", kind)
    assert words in str(caught.value)
    assert registered_encodings() == {}


def test_what_its_methods_raise_names_them() -> None:
    register_encoding("point", Point)
    register_encoding("words", Words)
    with pytest.raises(EncodingError, match=r"Point\.encode raised AttributeError: .* \(for 'x'\)") as caught:
        encoding("point").encode("x")
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(EncodingError, match=r"Words\.decode raised UnicodeDecodeError"):
        encoding("words").decode(memoryview(b"\xff"))
    with pytest.raises(EncodingError, match=r"Words\.encode must return bytes, but returned 'no bytes'"):
        encoding("words").encode([])
    with pytest.raises(EncodingError, match="expected 16 bytes, but found 3"):
        encoding("point").decode(memoryview(b"abc"))


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
    assert "convert it explicitly if that is intended" in refused(name, value)


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


NUMPY_NUMBERS = (
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)
IMAGES = st.builds(
    lambda mode, size, color: Image.new(mode, size, color),
    st.sampled_from(["L", "RGB"]),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from(["black", "white", "gray"]),
)
BYTE_ORDERS = st.sampled_from("<>")
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bytes": st.binary(),
    "str": st.text(),
    "int": st.integers(-(2**63), 2**63 - 1) | st.booleans(),
    "str_int": st.integers(),
    "str_float": st.floats(),
    "str_decimal": st.decimals(),
    "json": st.dictionaries(st.text(), st.integers() | st.none() | st.floats() | st.text(), max_size=3),
    "pkl": st.tuples(st.text(), st.complex_numbers(), st.binary()),
    "pil": IMAGES,
    "jpeg": IMAGES,
    "png": IMAGES,
    "list[pil]": st.lists(IMAGES, max_size=2),
    "list[jpeg]": st.lists(IMAGES, max_size=2),
    "list[png]": st.lists(IMAGES, max_size=2),
    **{name: from_dtype(np.dtype(name)) for name in NUMPY_NUMBERS},
    "ndarray": st.tuples(st.sampled_from(NUMPY_NUMBERS), BYTE_ORDERS).flatmap(
        lambda kind: arrays(np.dtype(kind[0]).str.replace("<", kind[1]), array_shapes(max_dims=4, max_side=3))
    ),
    "ndarray:float32": BYTE_ORDERS.flatmap(lambda order: arrays(f"{order}f4", array_shapes(max_side=4))),
    "ndarray:uint16:2,3": BYTE_ORDERS.flatmap(lambda order: arrays(f"{order}u2", (2, 3))),
}


def same(found: Any, written: Any, encoding_name: str) -> bool:
    """Whether ``found`` is what a reader must make of ``written``."""
    if isinstance(written, list):
        return len(found) == len(written) and all(
            same(*pair, encoding_name) for pair in zip(found, written, strict=True)
        )
    if isinstance(written, Image.Image):
        exact = "jpeg" in encoding_name or found.tobytes() == written.tobytes()
        return bool(exact) and bool((found.mode, found.size) == (written.mode, written.size))
    if isinstance(written, np.ndarray):
        native = written.astype(written.dtype.newbyteorder("="))
        return bool((found.dtype, found.shape, found.tobytes()) == (native.dtype, native.shape, native.tobytes()))
    if isinstance(written, np.generic):
        return type(found) is type(written) and bytes(found.tobytes()) == written.tobytes()
    if isinstance(written, Decimal):
        return str(found) == str(written)
    if isinstance(written, bool):
        return type(found) is int and found == written
    return type(found) is type(written) and repr(found) == repr(written)  # so that a NaN equals itself


def test_every_encoding_has_its_values() -> None:
    others = {"jpeg_array", "jpegarray"}  # which give back images for files: see test_images
    assert VALUES.keys() >= {*_ENCODINGS, *_IMAGE_ENCODINGS} - others


@settings(max_examples=examples(150))
@given(st.data())
def test_any_samples_of_any_columns_come_back(data: st.DataObject) -> None:
    columns = data.draw(st.dictionaries(st.text(max_size=5), st.sampled_from(sorted(VALUES)), min_size=1, max_size=4))
    columns = {name: columns[name] for name in sorted(columns)}
    one = st.fixed_dictionaries({name: VALUES[encoding_name] for name, encoding_name in columns.items()})
    samples = data.draw(st.lists(one, max_size=3))
    with tempfile.TemporaryDirectory() as directory:
        info = put_shard(Path(directory), samples, columns)
        check_shard(info, allow_unsafe_types=True)
        reader = open_shard(info, Path(directory), allow_unsafe_types=True)
        assert len(reader) == len(samples)
        for index, written in enumerate(samples):
            found = reader[index]
            assert list(found) == list(columns)
            assert [name for name in columns if not same(found[name], written[name], columns[name])] == []
        reader.close()
