from __future__ import annotations

import sys

import pytest

from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError
from lightning_streaming.formats.encodings import encode_value, encoding, is_unsafe


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
    with pytest.raises(ConfigError, match=r"but got"):
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
