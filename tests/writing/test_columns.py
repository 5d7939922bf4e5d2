from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.writing.columns import infer_columns
from lightning_streaming.writing.writer import MDSWriter
from tests.formats.golden_datasets import read_samples

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
    with pytest.raises(ConfigError, match=r"column 'x', a .*; pass columns="):
        infer_columns({"id": 1, "x": value})
