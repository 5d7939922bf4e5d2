from __future__ import annotations

import sys
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    IndexFormatError,
    MissingDependencyError,
    ShardCorruptError,
)
from lightning_streaming.formats.encodings import encoding
from lightning_streaming.formats.mds_decoder import SampleDecoder, read_decoder
from lightning_streaming.formats.mds_sample import compile_layout
from tests.formats.small_shards import shard_info

VALUES = {
    "bytes": st.binary(),
    "str": st.text(),
    "int": st.integers(-(2**63), 2**63 - 1),
    "uint16": st.integers(0, 2**16 - 1),
    "json": st.lists(st.integers(), max_size=3),
}
COLUMNS = {"a": "str", "b": "uint8", "c": "bytes"}
SAMPLE = {"a": "x", "b": 7, "c": b"yz"}


def encode(columns: dict[str, str], sample: dict[str, Any]) -> memoryview:
    return memoryview(compile_layout(tuple(columns), tuple(columns.values())).encode(sample))


def decoder(columns: dict[str, str], wanted: Any = None) -> SampleDecoder:
    return read_decoder(shard_info(b"", columns=columns), allow_unsafe_types=False, columns=wanted)


def schema(names: Any, encoding_names: Any, sizes: Any) -> dict[str, Any]:
    return {"column_names": names, "column_encodings": encoding_names, "column_sizes": sizes}


@given(st.dictionaries(st.text(), st.sampled_from(sorted(VALUES)), min_size=1, max_size=6), st.data())
def test_any_columns_of_a_sample_come_back_as_they_were(columns: dict[str, str], data: st.DataObject) -> None:
    sample = {name: data.draw(VALUES[encoding_name]) for name, encoding_name in columns.items()}
    encoded = encode(columns, sample)
    wanted = data.draw(st.none() | st.lists(st.sampled_from(sorted(columns)), min_size=1, unique=True))
    found = decoder(columns, wanted).decode(encoded)
    assert found == {name: sample[name] for name in (wanted or columns)}
    assert list(found) == [name for name in columns if name in found]  # as they are stored


@pytest.mark.parametrize("kind", [["uint8", "int", "float32"], ["str", "uint8", "bytes"]])
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_not_wanted_is_not_decoded(kind: list[str], count: int) -> None:
    columns = dict(zip("abc", kind, strict=True))
    sample = {name: b"\xff" * {"uint8": 1, "int": 8, "float32": 4}.get(kind, 3) for name, kind in columns.items()}
    for wanted in combinations("abc", count):
        if "a" in wanted and columns["a"] == "str":
            with pytest.raises(EncodingError, match="column 'a': expected UTF-8"):
                decoder(columns, wanted).decode(encode(columns, sample))
        else:
            assert sorted(decoder(columns, wanted).decode(encode(columns, sample))) == sorted(wanted)


def test_what_is_not_wanted_need_not_be_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    names = ("a", "image", "later", "pickle")
    unreadable = schema(names, ("int", "jpeg", "an encoding to come", "pkl"), (8, None, 3, None))
    info = shard_info(b"", schema=unreadable)
    sample = bytes.fromhex("02000000 01000000 0700000000000000") + b"JJ" + b"lll" + b"p"
    found = read_decoder(info, allow_unsafe_types=False, columns=["a"])
    assert found.decode(memoryview(sample)) == {"a": 7}
    for name, error in [("image", MissingDependencyError), ("later", IndexFormatError), ("pickle", ConfigError)]:
        with pytest.raises(error, match=r"^shard\.mds|shard\.mds cannot be read"):
            read_decoder(info, allow_unsafe_types=False, columns=[name])


@pytest.mark.parametrize("kind", ["int", "int8", "uint64", "float16", "float32", "float64"])
@pytest.mark.parametrize("wanted", [None, ("b", "c"), ("a", "c"), ("d", "e")])
def test_numbers_that_follow_each_other_are_as_if_each_were_alone(kind: str, wanted: Any) -> None:
    columns = dict.fromkeys("abcde", kind) | {"d": "str"}
    size = encoding(kind).size or 0
    numbers = {name: np.random.default_rng(place).bytes(size) for place, name in enumerate("abce")}
    if kind.startswith("float"):
        numbers["b"] = b"\x01" * (size - 2) + b"\xff\x7f"  # one of the many NaNs
    found = decoder(columns, wanted).decode(encode(columns, {**numbers, "d": "x"}))
    assert list(found) == [name for name in columns if wanted is None or name in wanted]
    for name in set(found) - {"d"}:
        alone = encoding(kind).decode(numbers[name])
        assert type(found[name]) is type(alone)
        assert np.asarray(found[name]).tobytes() == np.asarray(alone).tobytes() == numbers[name]


@pytest.mark.parametrize("wanted", [None, ("a",), ("b",)])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(8),  # the fixed column is missing
        bytes(10),  # a byte too many
        b"\x01" + bytes(8),  # a size goes beyond the sample
        b"\xff" * 4 + bytes(5),
        b"\xff" * 8 + bytes(1),  # the sum does not wrap
    ],
)
def test_sizes_that_do_not_add_up_are_refused(data: bytes, wanted: Any) -> None:
    with pytest.raises(ShardCorruptError, match=r"expected .* bytes.*, but found"):
        decoder(COLUMNS, wanted).decode(memoryview(data))


@pytest.mark.parametrize("size", [0, 8, 10])
def test_a_sample_of_fixed_columns_has_one_size(size: int) -> None:
    with pytest.raises(ShardCorruptError, match=f"but found {size}"):
        decoder({"a": "int", "b": "uint8"}).decode(memoryview(bytes(size)))


@pytest.mark.parametrize("columns", [{"a": "str", "b": "str_int"}, {"a": "str_float", "b": "str_int", "c": "int"}])
def test_the_column_of_a_wrong_payload_is_named(columns: dict[str, str]) -> None:
    sample = {"a": b"1.5", "b": b"x", "c": 3}
    with pytest.raises(EncodingError, match="column 'b': expected the text of a int"):
        decoder(columns).decode(encode(columns, sample))


@pytest.mark.parametrize(
    ("names", "encoding_names", "sizes", "words"),
    [
        ((), (), (), "at least one column"),
        (("a",), ("int", "int"), (8, 8), "at least one column"),
        (("a", "a"), ("int", "int"), (8, 8), "its own name"),
        (("a",), ("int",), (), "column_sizes must be 1"),
        (("a",), ("int",), (None,), "column_sizes has None for encoding int, which has 8"),
        (("a", "b"), ("int", "str"), (8, 3), "column_sizes has 3 for encoding str, which has None"),
        (("a",), ("text",), (None,), "but got 'text'"),
    ],
)
def test_columns_that_cannot_be_are_refused(names: Any, encoding_names: Any, sizes: Any, words: str) -> None:
    with pytest.raises(IndexFormatError, match=words):
        read_decoder(shard_info(b"", schema=schema(names, encoding_names, sizes)), allow_unsafe_types=False)


@pytest.mark.parametrize(
    "columns", [COLUMNS, {"a": "uint8", "b": "uint8"}, {"a": "ndarray:uint8:2"}], ids=["varying", "run", "array"]
)
def test_a_sample_amid_other_bytes_is_read(columns: dict[str, str]) -> None:
    sample: dict[str, Any] = {name: SAMPLE[name] if columns is COLUMNS else 7 for name in columns}
    if columns["a"].startswith("ndarray"):
        sample = {"a": np.array([1, 2], np.uint8)}
    encoded = bytes(encode(columns, sample))
    amid = memoryview(b"###" + encoded + b"##")
    found = decoder(columns).decode(amid, 3, 3 + len(encoded))
    assert {name: np.array_equal(value, sample[name]) for name, value in found.items()} == dict.fromkeys(columns, True)
    with pytest.raises(ShardCorruptError, match="found"):
        decoder(columns).decode(amid, 3, len(amid))
