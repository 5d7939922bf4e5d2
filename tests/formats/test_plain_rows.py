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
from lightning_streaming.formats.index import ShardInfo, parse_index
from lightning_streaming.formats.mds import MDSReader
from lightning_streaming.formats.plain_rows import plain_rows

NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
PLAIN = ["int", *NUMBERS, *(f"ndarray:{dtype}:3,2" for dtype in NUMBERS), "ndarray:uint16:5"]


def values_of(encoding: str, count: int) -> list[Any]:
    """Some values of a column."""
    rng = np.random.default_rng(len(encoding))
    if encoding == "int":
        return [int(value) for value in rng.integers(-(2**62), 2**62, count)]
    _, _, config = encoding.partition(":")
    dtype, _, shape = (config or encoding).partition(":")
    drawn = rng.integers(0, 100, (count, *map(int, shape.split(",") if shape else ()))).astype(dtype)
    return list(drawn)


def rows_of(reader: MDSReader, info: ShardInfo, indexes: list[int]) -> dict[str, NDArray[Any]]:
    """The columns of some samples."""
    plain = plain_rows(info)
    assert plain is not None
    rows = np.empty(len(indexes), plain.row)
    reader.copy_rows(np.array(indexes), rows)
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
    reader, info = open_written(tmp_path_factory.mktemp("rows"), columns, 7)
    table = rows_of(reader, info, indexes)
    samples = [reader[index] for index in indexes]
    assert list(table) == list(samples[0])
    for name, values in table.items():
        expected = np.stack([np.asarray(sample[name]) for sample in samples])
        assert values.dtype == expected.dtype
        assert values.flags.c_contiguous
        assert values.flags.writeable
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize(
    "encoding", ["bytes", "str", "json", "str_int", "ndarray", "ndarray:int32", "pkl", "png", "no such"]
)
def test_other_columns_have_no_rows(tmp_path: Path, encoding: str) -> None:
    _, info = open_written(tmp_path, {"a": "int"}, 1)
    schema = {"column_names": ("a", "b"), "column_encodings": ("int", encoding), "column_sizes": (8, None)}
    assert plain_rows(replace(info, schema=schema)) is None
    fixed = {**schema, "column_sizes": (8, 8)}
    assert plain_rows(replace(info, schema=fixed)) is None


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
    assert plain_rows(info) is None


def test_rows_outlive_their_reader(tmp_path: Path) -> None:
    reader, info = open_written(tmp_path, {"a": "int32"}, 3)
    expected = [reader[index]["a"] for index in range(3)]
    kept = rows_of(reader, info, [0, 1, 2])
    reader.close()
    assert kept["a"].tolist() == expected


def test_a_shard_whose_samples_have_another_size_is_corrupt(tmp_path: Path) -> None:
    _, info = open_written(tmp_path, {"a": "int64"}, 3)
    for encoding, size, expected in (("int32", 4, "no more than 4"), ("ndarray:int64:2", 16, "at least 16")):
        schema = {**info.schema, "column_encodings": (encoding,), "column_sizes": (size,)}
        with pytest.raises(ShardCorruptError, match=f"sample 0: expected {expected} bytes, but the offsets say 8"):
            MDSReader(replace(info, schema=schema), tmp_path)
