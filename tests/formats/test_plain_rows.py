"""Samples of plain numbers as a table, which must hold what decoding them one by one gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming import MDSWriter, register_encoding
from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.formats.index import parse_index
from lightning_streaming.formats.mds import MDSReader
from lightning_streaming.formats.plain_rows import plain_schema

NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
ARRAYS = [f"ndarray:{dtype}{shape}" for dtype in NUMBERS for shape in ("", ":3,2")]
PLAIN = ["int", *NUMBERS, *ARRAYS, "ndarray:uint16:5", "ndarray"]


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
    plain, whole = reader._schema, bytearray(reader._view[-(4 + 8 + 4 + 48) :])
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


def test_rows_outlive_their_reader(tmp_path: Path) -> None:
    reader, _ = open_written(tmp_path, {"a": "int32"}, 3)
    expected = [reader[index]["a"] for index in range(3)]
    kept = rows_of(reader, [0, 1, 2])
    reader.close()
    assert kept["a"].tolist() == expected


def test_a_shard_whose_samples_have_another_size_is_corrupt(tmp_path: Path) -> None:
    _, info = open_written(tmp_path, {"a": "int64"}, 3)
    for encoding, size, expected in (("int32", 4, "no more than 4"), ("ndarray:int64:2", 16, "at least 16")):
        schema = {**info.schema, "column_encodings": (encoding,), "column_sizes": (size,)}
        with pytest.raises(ShardCorruptError, match=f"sample 0: expected {expected} bytes, but the offsets say 8"):
            MDSReader(replace(info, schema=schema), tmp_path)
