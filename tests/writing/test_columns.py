from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.writing.columns import columns_of, infer_columns, infer_text_columns
from lightning_streaming.writing.core import ShardWriter
from lightning_streaming.writing.writer import CSVWriter, JSONWriter, MDSWriter
from tests.formats.golden_datasets import read_index, read_samples

SAMPLE = {
    "array": np.arange(4, dtype=np.int16).reshape(2, 2),
    "bool": True,
    "bytes": b"\xff",
    "decimal": Decimal("1.50"),
    "dict": {"a": [1]},
    "float": 0.1,
    "float16": np.float16(1.5),
    "float64": np.float64(0.1),
    "int": -3,
    "list": [1, "a", None],
    "str": "é",
    "uint8": np.uint8(3),
}


def test_each_type_has_an_encoding() -> None:
    assert infer_columns(SAMPLE) == {
        "array": "ndarray",
        "bool": "json",
        "bytes": "bytes",
        "decimal": "str_decimal",
        "dict": "json",
        "float": "float64",
        "float16": "float16",
        "float64": "float64",
        "int": "int",
        "list": "json",
        "str": "str",
        "uint8": "uint8",
    }


def test_what_is_inferred_comes_back_equal(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "out") as writer:
        writer.write(SAMPLE)
    (found,) = read_samples(tmp_path / "out", tmp_path / "scratch")
    assert np.array_equal(found.pop("array"), SAMPLE["array"])
    assert found == {name: value for name, value in SAMPLE.items() if name != "array"}


@pytest.mark.parametrize("value", [None, (1, 2), {1}, 1j, np.bool_(True), np.datetime64("2020")])
def test_other_types_are_refused_with_their_column(value: object) -> None:
    with pytest.raises(ConfigError, match=r"column 'x', a .*; pass columns={'id': 'int', 'x': '\.\.\.'}"):
        infer_columns({"id": 1, "x": value})


def test_all_columns_without_an_encoding_are_named_and_the_others_with_theirs() -> None:
    with pytest.raises(ConfigError) as told:
        infer_columns({"a": None, "b": 1.5, "c": {1}})
    assert "'a', a NoneType, 'c', a set; pass columns={'a': '...', 'b': 'float64', 'c': '...'}" in str(told.value)
    with pytest.raises(ConfigError, match="'a' is a NoneType, 'c' is a set, but this format knows"):
        infer_text_columns({"a": None, "b": 1.5, "c": {1}})


def test_text_formats_know_three_types() -> None:
    assert infer_text_columns({"a": "x", "b": 1, "c": 0.5}) == {"a": "str", "b": "int", "c": "float"}


@pytest.mark.parametrize("value", [True, None, b"x", [1], np.int64(1), np.float64(1)])
def test_text_formats_refuse_other_types_with_their_column(value: object) -> None:
    with pytest.raises(ConfigError, match=r"column 'x' is a .*, but this format knows str, int and float only"):
        infer_text_columns({"id": 1, "x": value})


@pytest.mark.parametrize("writer", [MDSWriter, JSONWriter, CSVWriter])
def test_columns_are_found_in_an_index(writer: type[ShardWriter], tmp_path: Path) -> None:
    columns = {"b": "int", "a": "str"}
    with writer(out=tmp_path, columns=columns) as written:
        written.write({"a": "x", "b": 1})
    assert columns_of(read_index(tmp_path).shards[0].schema) == columns
