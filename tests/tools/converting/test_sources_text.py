"""Sources of text lines: JSON lines, CSV and TSV; read alone, without a writer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, EncodingError, FormatError
from lightning_streaming.tools.converting.sources.csv_and_json import Delimited, JsonLines
from lightning_streaming.tools.converting.sources.row_encoding import choose_columns, encoded_rows, parse_columns
from lightning_streaming.tools.converting.sources.row_source import InputPart, RowSource, group_pieces
from tests.tiers import examples


def rows(source: RowSource, most: int = 2**30) -> list[Any]:
    """All rows of a source, from pieces of a size."""
    return [row for piece in source.pieces(most) for _, row in source.rows(piece, ())]


def encodings(source: RowSource) -> dict[str, str | None]:
    """What follows from the data."""
    return {name: found.encoding for name, found in source.schema().columns.items()}


def encode_all(source: RowSource, *columns: str) -> list[Any]:
    """All samples, with columns as ``--columns`` gives them."""
    plan = choose_columns(source.schema(), parse_columns(columns))
    return list(encoded_rows(source, plan, InputPart(0, tuple(source.pieces(2**30)))))


def json_lines(path: Path, *lines: object) -> JsonLines:
    """A source of a file with these lines, texts as they are."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return JsonLines.open(str(path))


def csv(path: Path, text: str) -> Delimited:
    """A source of a file with this text."""
    path.write_bytes(text.encode())
    return Delimited.open_csv(str(path))


_LINES = st.lists(st.sampled_from(["", '{"a": 1}', '{"a": "é"}', '{"b": [1, 2, 3]}', " "]), min_size=1, max_size=12)


@given(lines=_LINES, ends=st.sampled_from(["\n", "\r\n"]), last=st.booleans(), most=st.integers(1, 40))
@settings(max_examples=examples(60))
def test_a_file_cut_anywhere_has_the_same_rows_at_the_same_places(
    lines: list[str], ends: str, last: bool, most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes((ends.join(lines) + ends * last).encode())
    source = JsonLines.open(str(path))
    found = [
        (source.place(piece, number), row) for piece in source.pieces(most) for number, row in source.rows(piece, ())
    ]
    assert found == [
        (f"{path}, line {number}", json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()
    ]


def test_json_lines_in_gzip_and_several_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"x": 2}\n') + gzip.compress(b'{"x": 3}'))
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"x": 1}\r\n')
    (tmp_path / "notes.md").write_text("not data")
    assert rows(JsonLines.open(str(tmp_path))) == [{"x": 1}, {"x": 2}, {"x": 3}]
    assert rows(JsonLines.open(str(tmp_path / "*.gz"))) == [{"x": 2}, {"x": 3}]


def test_a_gzip_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    whole = gzip.compress("".join(json.dumps({"x": x}) + "\n" for x in range(1000)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="not a whole gzip file"):
        rows(JsonLines.open(str(tmp_path)))


def test_columns_follow_from_the_first_row(tmp_path: Path) -> None:
    first = {"i": 1, "f": 1.5, "s": "x", "b": True, "l": [1], "d": {"k": None}, "n": None}
    source = json_lines(tmp_path / "a.jsonl", "", first)
    assert encodings(source) == {
        "i": "int",
        "f": "float64",
        "s": "str",
        "b": "json",
        "l": "json",
        "d": "json",
        "n": None,
    }
    assert source.schema().origin == f"{tmp_path / 'a.jsonl'}, line 2"


def test_a_column_without_an_encoding_must_be_given_one(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", {"a": 1, "n": None}, {"a": 2, "n": 5})
    with pytest.raises(ConfigError, match=r"'n', which holds null .*line 1.*--columns a --columns n:json"):
        encode_all(source)
    assert [sample["n"] for sample in encode_all(source, "a", "n:json")] == [b"null", b"5"]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"x": 1.5}, "line 2: the column 'x' is int: expected an integer, but got 1.5 .*--columns x:float64"),
        ({"x": True}, "expected an integer, but got True"),
        ({"x": "1"}, "expected an integer, but got '1'"),
        ({"x": None}, "expected an integer, but there is no value.*--columns x:json"),
        ({"x": 2**63}, "line 2: the column 'x' is int"),
        ({}, "line 2: the column 'x' is missing"),
        ({"x": 1, "y": 2}, "line 2: the column 'y' is not in the first row.*--columns x:int"),
    ],
)
def test_a_row_unlike_the_first_is_an_error_with_its_line(tmp_path: Path, second: object, words: str) -> None:
    with pytest.raises(EncodingError, match=words):
        encode_all(json_lines(tmp_path / "a.jsonl", {"x": 1}, second))


def test_whole_numbers_fit_a_column_of_floats_if_no_digit_is_lost(tmp_path: Path) -> None:
    assert len(encode_all(json_lines(tmp_path / "a.jsonl", {"x": 1.5}, {"x": 2}))) == 2
    with pytest.raises(EncodingError, match="lose digits"):
        encode_all(json_lines(tmp_path / "b.jsonl", {"x": 1.5}, {"x": 2**53 + 1}))


def test_columns_asked_for_leave_others_out(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", {"x": 1, "y": "a"}, {"x": 2, "z": 0})
    assert [list(sample) for sample in encode_all(source, "x")] == [["x"], ["x"]]
    with pytest.raises(ConfigError, match=r"no column 'w'; the columns of .* are x, y"):
        encode_all(source, "w")
    with pytest.raises(ConfigError, match="another column each time"):
        encode_all(source, "x", "x:int")


def test_lists_become_arrays_where_asked_for(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", {"t": [1, 2]}, {"t": [3, 65535]})
    assert [sample["t"] for sample in encode_all(source, "t:ndarray:uint16:2")] == [b"\1\0\2\0", b"\3\0\xff\xff"]
    for bad in ([1, 65536], [-1, 0], [1.0, 2.0], [True, False], ["a", "b"], [[1], [2, 3]], 5):
        with pytest.raises(EncodingError, match=r"line 2: the column 't'"):
            encode_all(json_lines(tmp_path / "b.jsonl", {"t": [1, 2]}, {"t": bad}), "t:ndarray:uint16:2")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{'x': 1}", "line 2 is not JSON"),
        ("[1, 2]", "line 2 must be a JSON object.*is a list"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("[{", "must be written as one object a line"),
        ('{"x": 1, "y": 0, "x": 2}', "a.jsonl, line 2: the key 'x' is there twice"),
        ('{"x": {"y": [{"z": 0, "z": 0}]}}', "a.jsonl, line 2: the key 'z' is there twice"),
    ],
)
def test_a_line_that_is_no_object_is_an_error(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        rows(json_lines(tmp_path / "a.jsonl", {"x": 1}, line))


def test_a_file_without_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no row in"):
        json_lines(tmp_path / "a.jsonl", "").schema()
    with pytest.raises(FormatError, match="no row in"):
        csv(tmp_path / "a.csv", "x,y\n").schema()


def test_csv_with_quotes_line_breaks_and_long_cells(tmp_path: Path) -> None:
    long = "x" * 200_000
    source = csv(tmp_path / "a.csv", f'\ufeffid,text\r\n1,"a ""b"", c\nd"\r\n\r\n2,{long}\r\n')
    assert rows(source) == [{"id": "1", "text": 'a "b", c\nd'}, {"id": "2", "text": long}]
    assert encodings(source) == {"id": "int", "text": "str"}


def test_numbers_in_csv_are_told_only_where_text_and_number_are_the_same(tmp_path: Path) -> None:
    cells = {"7": "int", "-7": "int", "007": "str", "1.50": "float64", "1e5": "str", "": "str", "nan": "str"}
    cells |= {str(2**63): "str", "1_000": "str", "٣": "str", "+7": "str", "-1.5e-3": "float64"}
    header, row = ",".join(f"c{number}" for number in range(len(cells))), ",".join(cells)
    found = encodings(csv(tmp_path / "a.csv", f"{header}\n{row}\n"))
    assert list(found.values()) == list(cells.values())


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (
            "x",
            "line 3: the column 'a' is int: .*without leading zeros, but got 'x'.*--columns a:str --columns b:str",
        ),
        ("01234", "without leading zeros, but got '01234'"),
        ("1.5", "but got '1.5'"),
    ],
)
def test_a_cell_unlike_the_first_is_an_error_with_its_line(tmp_path: Path, cell: str, words: str) -> None:
    with pytest.raises(EncodingError, match=words):
        encode_all(csv(tmp_path / "a.csv", f"a,b\n1,x\n{cell},y\n"))


def test_cells_are_parsed_as_their_encoding_says(tmp_path: Path) -> None:
    source = csv(tmp_path / "a.csv", 'a,b,c,d,e\n7,7,"{""k"": [1]}","[1, 2]",1.10\n')
    (sample,) = encode_all(source, "a:uint8", "b:float32", "c:json", "d:ndarray:uint8", "e:str_decimal")
    assert sample["a"] == b"\7"
    assert sample["c"] == b'{"k": [1]}'
    assert sample["d"].endswith(b"\1\2")
    assert sample["e"] == b"1.10"
    with pytest.raises(EncodingError, match="expected JSON"):
        encode_all(csv(tmp_path / "b.csv", "a\nx\n"), "a:json")
    with pytest.raises(ConfigError, match="cannot become bytes"):
        encode_all(source, "a:bytes")


def test_a_key_that_is_twice_in_a_cell_of_json_is_an_error(tmp_path: Path) -> None:
    source = csv(tmp_path / "a.csv", """a\n"{""x"": 1, ""x"": 2}"\n""")
    with pytest.raises(EncodingError, match=r"a.csv, line 2: .*the key 'x' is there twice"):
        encode_all(source, "a:json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1\n", "line 2 has 1 cells, but the header has 2"),
        ('a,b\n1,"x\n', "line 2 cannot be parsed"),
        ('a,b\n1,"x"y\n', "line 2 cannot be parsed"),
        ("a,a\n1,2\n", "row of different names"),
        ("", "row of different names"),
    ],
)
def test_a_damaged_csv_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        rows(csv(tmp_path / "a.csv", text))


def test_text_that_is_not_utf_8_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a\n1\n\xff\n")
    with pytest.raises(FormatError, match="not UTF-8"):
        rows(Delimited.open_csv(str(tmp_path)))
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(FormatError, match="line 2 is not JSON"):
        rows(JsonLines.open(str(tmp_path)))


def test_files_of_one_source_have_the_same_columns_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("x\ty\n1\ta\n")
    (tmp_path / "b.tsv").write_text("y\tx\nb\t2\n")
    source = Delimited.open_tsv(str(tmp_path))
    assert [sample["y"] for sample in encode_all(source)] == [b"a", b"b"]
    (tmp_path / "c.tsv").write_text("y\tz\nb\t2\n")
    with pytest.raises(EncodingError, match=r"c.tsv, line 2: the column 'x' is missing"):
        encode_all(Delimited.open_tsv(str(tmp_path)))


def test_pieces_are_put_together_until_they_are_large_enough(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", *[{"x": x} for x in range(10)])
    groups = list(group_pieces(source.pieces(20), 50))
    assert [sum(piece.size for piece in group) for group in groups] == [60, 30]
    assert [piece.start for group in groups for piece in group] == [0, 20, 40, 60, 80]
