"""Values that another program would change in silence: ``convert`` takes them as they are, or refuses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from lightning_streaming import StreamingDataset
from tests.tools.running import run
from tests.tools.test_sources_files import write_tar


def refused(source: Path, *more: object) -> str:
    out = source.parent / "out"
    outcome = run("convert", source, out, *more)
    assert outcome.code == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert not (out / "index.json").exists()
    return outcome.err


@pytest.mark.parametrize(
    ("row", "columns", "words"),
    [
        ('{"a": 1e400}', (), "1e400 is too large for a float, where it would be inf; write it as text"),
        ('{"a": [0.5, -1e999]}', (), "-1e999 is too large for a float"),
        ('{"a": {"b": 1e-400}}', (), "1e-400 would lose digits as a float, where it is 0.0"),
        ('{"a": 3.14159265358979323846}', (), "3.14159265358979323846 would lose digits as a float"),
        ('{"a": 1e300}', ("a:float32",), "1e+300 is too large for float32, where it would be inf"),
        ('{"a": 1e-300}', ("a:float16",), "1e-300 is too small for float16, where it would be 0"),
        ('{"a": 16777217}', ("a:float32",), "16777217 would lose digits as float32"),
        ('{"a": 9007199254740993}', ("a:float64",), "9007199254740993 would lose digits as float64"),
        ('{"a": 9223372036854775808}', ("a:int",), "expected a signed integer of 64 bits"),
        ('{"a": true}', ("a:float64",), "expected a number, but got True (bool)"),
        ('{"a": true}', ("a:int",), "expected an integer, but got True (bool)"),
        ('{"a": [true, 2]}', ("a:ndarray",), "expected a list of numbers, but got [True, 2] (list)"),
        ('{"a": [[1, 2], [3, false]]}', ("a:ndarray:int8",), "expected a list of numbers"),
        ('{"a": [9007199254740993, 0.5]}', ("a:ndarray",), "9007199254740993 would lose digits as float64"),
        ('{"a": [16777217]}', ("a:ndarray:float32",), "expected numbers that float32 can hold, but got 16777217"),
        (
            '{"a": [0.5, 1e300]}',
            ("a:ndarray:float32",),
            "expected numbers that float32 can hold, but got 0.5 to 1e+300",
        ),
        ('{"a": [300]}', ("a:ndarray:uint8",), "expected numbers that uint8 can hold, but got 300 to 300"),
    ],
)
def test_json_that_would_change_is_refused_with_its_line(
    tmp_path: Path, row: str, columns: tuple[str, ...], words: str
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(f"\n{row}\n")
    told = refused(source, *(word for column in columns for word in ("--columns", column)))
    assert f"error: {source}, line 2" in told
    assert words in told


@pytest.mark.parametrize(
    ("cells", "encoding", "words"),
    [
        (["0.5", "3.14159265358979323846"], "float64", "3.14159265358979323846 would lose digits as a float"),
        (["0.5", "9007199254740993"], "float64", "9007199254740993 would lose digits as a float"),
        (["0.5", "1e400"], "float64", "1e400 is too large for a float"),
        (["0.5", "007"], "float64", "expected a number without leading zeros, but got '007'"),
        (["0.5", "1e300"], "float32", "too large for float32"),
        (["1", "9223372036854775808"], "int", "expected a signed integer of 64 bits"),
        (["1", "9" * 5000], "int", "expected an integer that Python can read, but got 5000 digits"),
        (["1", "-0"], "int", "expected an integer without leading zeros, but got '-0'"),
        (["[1]", "[1e400]"], "json", "1e400 is too large for a float"),
    ],
)
def test_cells_that_would_change_are_refused_with_their_line(
    tmp_path: Path, cells: list[str], encoding: str, words: str
) -> None:
    source = tmp_path / "a.csv"
    source.write_text("\n".join(["id,x", *(f"{number},{cell}" for number, cell in enumerate(cells))]))
    told = refused(source, "--columns", f"x:{encoding}")
    assert f"{source}, line 3: the column 'x' is {encoding}: " in told
    assert words in told


@pytest.mark.parametrize("cell", ["3.14159265358979323846", "1.0e400", "9223372036854775808", "-0", "01.5", "9" * 5000])
def test_a_first_cell_that_no_number_gives_back_is_text(tmp_path: Path, cell: str) -> None:
    (tmp_path / "a.csv").write_text(f"x,y\n{cell},0.1000000000000000055511151231257827\n")
    assert run("convert", tmp_path / "a.csv", tmp_path / "out").code == 0
    assert StreamingDataset(remote=str(tmp_path / "out"), batch_size=1)[0] == {"x": cell, "y": np.float64(0.1)}


@pytest.mark.parametrize("text", ["a\n1\n\n2\n", "a\n\n1\n", "a\n1\n\n", "a\r\n1\r\n\r\n"])
def test_a_blank_line_in_a_file_of_one_column_is_no_row_and_no_cell(tmp_path: Path, text: str) -> None:
    source = tmp_path / "a.csv"
    source.write_bytes(text.encode())
    told = refused(source)
    assert "is blank, which in a file of one column may be an empty cell or nothing at all" in told
    source.write_text('a\nx\n""\n')
    assert run("convert", source, tmp_path / "quoted").code == 0
    assert [one["a"] for one in StreamingDataset(remote=str(tmp_path / "quoted"), batch_size=1)[:]] == ["x", ""]


def test_blank_lines_between_several_columns_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n\n3,4\n\n")
    assert run("convert", tmp_path / "a.csv", tmp_path / "out", "--json").json["samples"] == 2


@pytest.mark.parametrize(
    ("values", "column", "words"),
    [
        (pa.array([1e300]), "x:float32", "row 1: the column 'x' is float32: 1e+300 is too large for float32"),
        (pa.array([2**60 + 1]), "x:float64", "would lose digits as float64"),
        (pa.array([[1e300, 0.5]]), "x:ndarray:float16", "expected numbers that float16 can hold"),
        (pa.array([[2**60 + 1]]), "x:ndarray:float64", "expected numbers that float64 can hold"),
        (pa.array([True]), "x:int", "expected an integer, but got True"),
    ],
)
def test_parquet_that_would_change_is_refused(tmp_path: Path, values: pa.Array, column: str, words: str) -> None:
    parquet.write_table(pa.table({"x": values}), tmp_path / "a.parquet")
    assert words in refused(tmp_path / "a.parquet", "--columns", column)


def test_integers_of_tar_sets_are_read_as_they_stand(tmp_path: Path) -> None:
    source = write_tar(tmp_path / "a.tar", {"1.cls": b"1_000", "1.txt": b""})
    assert "1.cls cannot be decoded: '1_000' is not an integer" in refused(source)
