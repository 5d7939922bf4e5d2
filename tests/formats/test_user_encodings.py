from __future__ import annotations

import struct
from typing import Any

import pytest

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.formats import encodings
from lightning_streaming.formats.encodings import encoding, is_unsafe, register_encoding, registered_encodings
from lightning_streaming.formats.mds_sample import compile_layout
from lightning_streaming.formats.shard import open_shard
from tests.formats.small_shards import put_shard


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
    with pytest.raises(ConfigError, match="but got 'point'; if it is your own, call register_encoding first"):
        compile_layout(("a",), ("point",))
    register_encoding("point", Point)
    assert compile_layout(("a",), ("point",)).sizes == (16,)


def test_saying_the_same_twice_changes_nothing() -> None:
    register_encoding("point", Point)
    register_encoding("point", Point)
    assert registered_encodings() == {"point": Point}


@pytest.mark.parametrize("name", ["int", "ndarray", "pkl", "jpeg", "list[png]", "point", "", "ndarray:int8", "a:b", 3])
def test_a_name_that_is_taken_or_cannot_be_one_is_refused(name: Any) -> None:
    register_encoding("point", Point)
    with pytest.raises(ConfigError, match=r"no colon|built-in|registered as Point already"):
        register_encoding(name, Words)
    assert registered_encodings() == {"point": Point}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (NeedsAnArgument, "must be made with no arguments"),
        (NoDecode, "must have a method decode"),
        (NoSize, "size must be"),
        (OddSize, r"size must be .* but is 1\.5"),
        (NegativeSize, "size must be .* but is -1"),
        (Words(), "given as a class"),
        (type("Local", (Words,), {"__qualname__": "f.<locals>.Local"}), "at the top of a module"),
    ],
)
def test_a_class_that_cannot_serve_is_refused(kind: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        register_encoding("mine", kind)
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
