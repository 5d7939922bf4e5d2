"""Samples written and read, and as a table, which must hold what decoding them one by one gives."""

from __future__ import annotations

import mmap
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming import MDSWriter
from lightning_streaming.errors import (
    ConfigError,
    EncodingError,
    IndexFormatError,
    MissingDependencyError,
    SampleIndexError,
    ShardCorruptError,
)
from lightning_streaming.formats import mds as mds_samples
from lightning_streaming.formats import register_encoding
from lightning_streaming.formats.encodings import encode_value, encoding
from lightning_streaming.formats.index import parse_index
from lightning_streaming.formats.mds import MDSReader, SampleDecoder, compile_layout, plain_schema, read_decoder
from tests.formats.small_shards import shard_info
from tests.helpers import assert_error, descriptors_under

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
    monkeypatch.setattr(mds_samples, "MAX_RAW_BYTES", 10)
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


DECODED_VALUES = {
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


@given(st.dictionaries(st.text(), st.sampled_from(sorted(DECODED_VALUES)), min_size=1, max_size=6), st.data())
def test_any_columns_of_a_sample_come_back_as_they_were(columns: dict[str, str], data: st.DataObject) -> None:
    sample = {name: data.draw(DECODED_VALUES[encoding_name]) for name, encoding_name in columns.items()}
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
        with assert_error(error, path="shard.mds"):
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
        (("a",), ("int",), (), "column_sizes must have 1"),
        (("a",), ("int",), (None,), "encoding int"),
        (("a", "b"), ("int", "str"), (8, 3), "encoding str"),
        (("a",), ("text",), (None,), "but got 'text'"),
    ],
)
def test_columns_that_cannot_be_read_are_refused(names: Any, encoding_names: Any, sizes: Any, words: str) -> None:
    with assert_error(IndexFormatError, path="shard.mds") as caught:
        read_decoder(shard_info(b"", schema=schema(names, encoding_names, sizes)), allow_unsafe_types=False)
    assert words in str(caught.value)


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


PLAIN_NUMBERS = [
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
ARRAYS = [f"ndarray:{dtype}{shape}" for dtype in PLAIN_NUMBERS for shape in ("", ":3,2")]
PLAIN = ["int", *PLAIN_NUMBERS, *ARRAYS, "ndarray:uint16:5", "ndarray"]


def values_of(encoding: str, count: int) -> list[Any]:
    """Some values of a column."""
    rng = np.random.default_rng(len(encoding))
    if encoding == "int":
        return [int(value) for value in rng.integers(-(2**62), 2**62, count)]
    _, _, config = encoding.partition(":")
    dtype, _, shape = (config or encoding.replace("ndarray", "float32")).partition(":")
    dimensions = tuple(map(int, shape.split(","))) if shape else (4, 300) if encoding.startswith("ndarray") else ()
    drawn = rng.integers(0, 100, (count, *dimensions)).astype(dtype)
    return list(drawn)


def rows_of(reader: MDSReader, indexes: list[int]) -> dict[str, NDArray[Any]]:
    """The columns of some samples."""
    plain = reader.plain_rows()
    assert plain is not None
    rows = np.empty(len(indexes), plain.row)
    reader.copy_rows(np.array(indexes), rows)
    assert plain.are(rows)
    return plain.columns_of(rows)


def open_written(root: Path, columns: dict[str, str], count: int) -> tuple[MDSReader, Any]:
    """A shard of such samples, and how its index describes it."""
    with MDSWriter(out=str(root), columns=columns) as writer:
        drawn = {name: values_of(encoding, count) for name, encoding in columns.items()}
        for index in range(count):
            writer.write({name: values[index] for name, values in drawn.items()})
    (info,) = parse_index((root / "index.json").read_bytes(), "the index").shards
    return MDSReader(info, root), info


@given(st.lists(st.sampled_from(PLAIN), min_size=1, max_size=6), st.lists(st.integers(0, 6), min_size=1, max_size=9))
def test_columns_of_rows_are_those_of_samples(
    tmp_path_factory: pytest.TempPathFactory, encodings: list[str], indexes: list[int]
) -> None:
    columns = {f"c{place}": encoding for place, encoding in enumerate(encodings)}
    reader, _ = open_written(tmp_path_factory.mktemp("rows"), columns, 7)
    table = rows_of(reader, indexes)
    samples = [reader[index] for index in indexes]
    assert list(table) == list(samples[0])
    for name, values in table.items():
        expected = np.stack([np.asarray(sample[name]) for sample in samples])
        assert values.dtype == expected.dtype
        assert values.flags.c_contiguous
        assert values.flags.writeable
        assert values.flags.aligned
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("encoding", ["bytes", "str", "json", "str_int", "pkl", "png", "no such"])
def test_other_columns_are_not_plain(tmp_path: Path, encoding: str) -> None:
    _, info = open_written(tmp_path, {"a": "int"}, 1)
    schema = {"column_names": ("a", "b"), "column_encodings": ("int", encoding), "column_sizes": (8, None)}
    assert plain_schema(replace(info, schema=schema)) is None
    fixed = {**schema, "column_sizes": (8, 8)}
    assert plain_schema(replace(info, schema=fixed)) is None


def write_arrays(root: Path, arrays: list[NDArray[Any]]) -> MDSReader:
    with MDSWriter(out=str(root), columns={"id": "int", "x": "ndarray"}) as writer:
        for number, array in enumerate(arrays):
            writer.write({"id": number, "x": array})
    (info,) = parse_index((root / "index.json").read_bytes(), "the index").shards
    return MDSReader(info, root)


def test_arrays_of_other_sizes_are_no_table(tmp_path: Path) -> None:
    reader = write_arrays(tmp_path, [np.zeros(3), np.zeros(4), np.zeros(3)])
    assert reader.plain_rows() is None
    assert reader.plain_rows() is None


@pytest.mark.parametrize(
    ("array", "other"),
    [
        (np.zeros((1, 4)), np.zeros((2, 2))),
        (np.zeros((4, 2), np.float32), np.zeros((2, 4), np.float32)),
        (np.zeros((4, 4), np.uint16), np.zeros((4, 4), np.int16)),
    ],
)
def test_arrays_of_other_shapes_or_types_in_as_many_bytes_are_found_out(
    tmp_path: Path, array: NDArray[Any], other: NDArray[Any]
) -> None:
    reader = write_arrays(tmp_path, [array, array, other])
    plain = reader.plain_rows()
    assert plain is not None
    rows = np.empty(2, plain.row)
    reader.copy_rows(np.array([0, 1]), rows)
    assert plain.are(rows)
    reader.copy_rows(np.array([1, 2]), rows)
    assert not plain.are(rows)


def test_shards_alike_have_one_way_to_lie(tmp_path: Path) -> None:
    first, second = (write_arrays(tmp_path / name, [np.zeros((2, 3))]) for name in "ab")
    other = write_arrays(tmp_path / "c", [np.zeros((3, 2))])
    assert first.plain_rows() is second.plain_rows()
    assert first.plain_rows() is not other.plain_rows()


def test_a_first_sample_that_cannot_be_read_is_no_plain_one(tmp_path: Path) -> None:
    reader = write_arrays(tmp_path, [np.zeros((2, 3))])
    plain, whole = reader._schema, bytearray(reader._data[-(4 + 8 + 4 + 48) :])
    assert plain is not None
    assert plain.rows_like(memoryview(whole)) is not None
    for place in (0, 3, 12, 13, 14):
        damaged = whole.copy()
        damaged[place] = 255
        assert plain.rows_like(memoryview(damaged)) is None
    for length in (0, 3, 12, 20, len(whole) - 1):
        assert plain.rows_like(memoryview(whole[:length])) is None


class Fixed:
    """An encoding of a user's, of a fixed size."""

    size = 2

    def encode(self, value: int) -> bytes:
        return value.to_bytes(2, "big")

    def decode(self, data: bytes) -> int:
        return int.from_bytes(data, "big")


def test_encodings_of_users_are_theirs_to_decode(tmp_path: Path) -> None:
    register_encoding("fixed_of_rows", Fixed)
    with MDSWriter(out=str(tmp_path), columns={"a": "fixed_of_rows"}) as writer:
        writer.write({"a": 258})
    (info,) = parse_index((tmp_path / "index.json").read_bytes(), "the index").shards
    assert plain_schema(info) is None


FIXED = ["int", *PLAIN_NUMBERS, *(name for name in ARRAYS if ":3" in name), "ndarray:uint16:5"]


@given(
    st.lists(st.sampled_from(FIXED), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
)
def test_samples_of_fixed_columns_are_as_their_encodings_decode_them(
    tmp_path_factory: pytest.TempPathFactory, encodings: list[str], left_out: set[int]
) -> None:
    root = tmp_path_factory.mktemp("fixed")
    columns = {f"c{place}": encoding for place, encoding in enumerate(encodings)}
    wanted = [name for place, name in enumerate(columns) if place not in left_out] if left_out else None
    written, info = open_written(root, columns, 3)
    data, offsets = written.bytes_and_offsets()
    one_by_one = read_decoder(info, allow_unsafe_types=False, columns=wanted)
    reader = MDSReader(info, root, columns=wanted)
    for index, (start, stop) in enumerate(pairwise(offsets.tolist())):
        expected, found = one_by_one.decode(data, start, stop), reader[index]
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert type(found[name]) is type(value)
            assert np.asarray(found[name]).dtype == np.asarray(value).dtype
            np.testing.assert_array_equal(found[name], value)
            if isinstance(value, np.ndarray):
                assert found[name].flags.c_contiguous
                assert found[name].flags.owndata
                assert found[name].flags.aligned
                assert found[name].flags.writeable


def test_samples_too_large_for_an_entry_of_numpy_are_no_table() -> None:
    half = 2**30 + 4
    names, encodings = ("a", "b"), (f"ndarray:uint8:{half}",) * 2
    schema = mds_samples._schema(names, encodings, (half, half), None)
    assert schema is not None
    with mmap.mmap(-1, 2 * half) as memory, memoryview(memory) as sample:  # none of which is touched
        assert schema.rows_like(sample) is None


def test_a_closed_reader_of_fixed_columns_reads_no_more(tmp_path: Path) -> None:
    reader, _ = open_written(tmp_path, {"a": "int32", "b": "ndarray:uint16:5"}, 3)
    kept = reader[1]
    reader.close()
    assert descriptors_under(tmp_path) == 0
    assert kept["b"].tolist() == values_of("ndarray:uint16:5", 3)[1].tolist()
    with pytest.raises(ValueError, match="released"):
        reader[1]
    with pytest.raises(SampleIndexError):
        reader[3]


def test_rows_outlive_their_reader(tmp_path: Path) -> None:
    reader, _ = open_written(tmp_path, {"a": "int32"}, 3)
    expected = [reader[index]["a"] for index in range(3)]
    kept = rows_of(reader, [0, 1, 2])
    reader.close()
    assert kept["a"].tolist() == expected


def test_a_shard_whose_samples_have_another_size_is_corrupt(tmp_path: Path) -> None:
    _, info = open_written(tmp_path, {"a": "int64"}, 3)
    for name, size, expected in (("int32", 4, "no more than 4"), ("ndarray:int64:2", 16, "at least 16")):
        schema = {**info.schema, "column_encodings": (name,), "column_sizes": (size,)}
        with assert_error(ShardCorruptError, path="shard.00000.mds", sample=0) as caught:
            MDSReader(replace(info, schema=schema), tmp_path)
        assert expected in str(caught.value)
