"""``convert --resume``, gone on with what is the same and refused where it is not; and values that must not change."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from lightning_streaming import StreamingDataset
from lightning_streaming.writing.writers import MDSWriter
from tests.servers import S3Store
from tests.tokenizing.test_tokenizer import word_tokenizer
from tests.tools.converting.test_sources_files import image, write_tar
from tests.tools.running import options, run
from tests.tools.test_convert import PARTS, convert, files, samples, write_rows

PARTS_OF_2KB = ("--part-size", "2kb", "--workers", 1, "--size-limit", "1kb")
IN_ONE_PART = ("--size-limit", "1kb")


def test_a_conversion_that_failed_goes_on_once_its_source_is_mended(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", 200)
    whole = source.read_bytes()
    source.write_bytes(whole.replace(b'"text 150"', b"5"))
    args = (source, tmp_path / "out", "--size-limit", "1kb")
    failed = run("convert", *args)
    assert (failed.code, "run: " in failed.err) == (1, True)
    stored = sorted((tmp_path / "out").glob("shard.*"))
    written = [path.stat().st_mtime_ns for path in stored]
    assert len(stored) > 3
    source.write_bytes(whole)
    assert "must be new or empty" in run("convert", *args).err
    convert(*args, "--resume")
    assert [path.stat().st_mtime_ns for path in stored] == written
    convert(source, tmp_path / "in_one_go", "--size-limit", "1kb")
    assert files(tmp_path / "out") == files(tmp_path / "in_one_go")
    convert(*args, "--resume")
    assert files(tmp_path / "out") == files(tmp_path / "in_one_go")
    told = f"{tmp_path / 'out'} is a finished dataset already; choose another location, or remove it first: rm -r "
    assert told in run("convert", *args).err


@pytest.mark.rotate(1)
@pytest.mark.parametrize("part_size", ["2kb", "256mb"])
def test_a_line_that_cannot_be_read_is_named_with_what_is_left_and_how_to_go_on(tmp_path: Path, part_size: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", 60)
    whole = source.read_bytes()
    source.write_bytes(whole.replace(b'"text 45"}', b'"text'))
    args = (source, tmp_path / "out", "--size-limit", "1kb", "--part-size", part_size)
    failed = run("convert", *args)
    assert failed.code == 1
    assert ", line 46 is not JSON: Invalid control character at column " in failed.err
    assert f"\nWhat was written before it is in {tmp_path / 'out'}: fix the source" in failed.err
    source.write_bytes(whole)
    convert(*args, "--resume")


def test_of_a_conversion_that_has_written_nothing_nothing_is_left(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"a": 1}\n{"a": "x"}\n')
    failed = run("convert", source, tmp_path / "out")
    assert failed.code == 1
    assert "rm -r" not in failed.err
    assert not (tmp_path / "out").exists()
    source.write_text('{"a": 1}\n{"a": 2}\n')
    convert(source, tmp_path / "out")


@pytest.mark.parametrize("out", [".", "link"])
def test_a_directory_that_was_there_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": "x"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty" if out == "." else tmp_path)
    failed = run("convert", tmp_path / "a.jsonl", out)
    assert (failed.code, "line 2" in failed.err, "rm -r" in failed.err) == (1, True, False), failed.err
    assert list((tmp_path / "empty").iterdir()) == []


def _stop_in_the_middle(tmp_path: Path) -> tuple[Path, Path]:
    """A source of 200 rows, and what its conversion has left that met a bad one."""
    source, out = write_rows(tmp_path / "a.jsonl", 200), tmp_path / "out"
    whole = source.read_bytes()
    source.write_bytes(whole.replace(b'"text 150"', b"5"))
    assert run("convert", source, out, "--size-limit", "1kb").code == 1
    source.write_bytes(whole)
    return source, out


def test_a_source_that_is_shorter_by_now_is_not_taken_for_the_rest(tmp_path: Path) -> None:
    source, out = _stop_in_the_middle(tmp_path)
    before = files(out)
    write_rows(source, 50)
    outcome = run("convert", source, out, "--size-limit", "1kb", "--resume")
    assert outcome.code == 2
    assert "samples already, but SOURCE gives only 50" in outcome.err
    assert files(out) == before
    convert(write_rows(source, 200), out, "--size-limit", "1kb", "--resume")
    assert [sample["id"] for sample in samples(out)] == list(range(200))


def test_a_source_that_is_longer_than_what_is_finished_is_told_in_words_of_the_command(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", 3)
    convert(source, tmp_path / "out")
    before = files(tmp_path / "out")
    outcome = run("convert", write_rows(source, 5), tmp_path / "out", "--resume")
    assert outcome.code == 2
    assert "is finished with 3 samples, but SOURCE gives more by now; convert it to another location" in outcome.err
    assert "mode=" not in outcome.err
    assert run("convert", write_rows(source, 2), tmp_path / "out", "--resume").code == 2
    assert files(tmp_path / "out") == before


def test_parts_go_on_only_with_the_same_source_and_options(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", 200)
    tokenizer = word_tokenizer(tmp_path / "t.json")
    args = ["--part-size", "1kb", "--tokenize", "--tokenizer", tokenizer, "--block-length", 16]
    convert(source, tmp_path / "out", *args)
    told = run("convert", source, tmp_path / "out", *args, "--resume", "--eot", 3).err
    assert "--eot is 3, but was none when writing began" in told
    tokenizer.write_text(tokenizer.read_text().replace('"cat"', '"dog"'))
    assert "--tokenizer is " in run("convert", source, tmp_path / "out", *args, "--resume").err


OTHER_OPTIONS: list[tuple[tuple[object, ...], str]] = [
    (("--limit", 190), "--limit is 190, but was none when writing began"),
    (("--part-size", "1gb"), "--part-size is 1073741824, but was 2048 when writing began"),
    (("--part-size", "1kb"), "--part-size is 1024, but was 2048 when writing began"),
    (("--columns", "id"), "--columns text is none, but was str when writing began"),
    (("--columns", "id:uint32", "--columns", "text"), "--columns id is uint32, but was int when writing began"),
    (("--compression", "gz"), "--compression is gz, but was none when writing began"),
    (("--hashes", "sha1"), "--hashes is ['sha1'], but was none when writing began"),
    (("--size-limit", "2kb"), "--size-limit is 2048, but was 1024 when writing began"),
    (("--tokenize", "--tokenizer", "bytes", "--block-length", 16), "--tokenize is True, but was False when writing"),
    (("--from", "text"), "the kind of SOURCE is TextFolder, but was JsonLines when writing began"),
]


def _fail_late(tmp_path: Path, *more: object) -> tuple[Path, Path]:
    """A source of 200 rows, and what its conversion has left that met a bad one near the end."""
    source, out = write_rows(tmp_path / "a.jsonl", 200), tmp_path / "out"
    whole = source.read_bytes()
    source.write_bytes(whole.replace(b'"text 198"', b"12345678  "))
    assert run("convert", source, out, *more).code == 1
    source.write_bytes(whole)
    return source, out


@pytest.mark.rotate(1)
@pytest.mark.parametrize("begun", [PARTS_OF_2KB, IN_ONE_PART], ids=["parts", "one_part"])
def test_what_was_begun_with_other_options_is_not_gone_on_with(tmp_path: Path, begun: tuple[object, ...]) -> None:
    source, out = _fail_late(tmp_path, *begun)
    before = files(out)
    for more, words in OTHER_OPTIONS:
        outcome = run("convert", source, out, *begun, "--resume", *more)
        assert outcome.code == 2
        expected = words.replace("was 2048", "was 268435456") if begun == IN_ONE_PART else words
        assert expected in outcome.err
        assert "resume with the same options, or convert to another location" in outcome.err
        assert files(out) == before
    convert(source, out, *begun, "--resume")
    convert(source, tmp_path / "in_one_go", *begun)
    assert files(out) == files(tmp_path / "in_one_go")
    outcome = run("convert", source, out, *begun, "--resume", "--limit", 300)
    assert outcome.code == 2
    assert "--limit is 300" in outcome.err


def test_all_options_that_differ_are_named(tmp_path: Path) -> None:
    source, out = _fail_late(tmp_path, *PARTS_OF_2KB)
    told = run("convert", source, out, "--resume", "--limit", 5, "--hashes", "sha1").err
    for name in ("--limit", "--hashes", "--part-size", "--size-limit", "the number of parts"):
        assert f"{name} is " in told


def test_a_source_that_shrank_to_one_part_is_not_written_over_several(tmp_path: Path) -> None:
    source, out = _fail_late(tmp_path, *PARTS_OF_2KB)
    before = files(out)
    outcome = run("convert", write_rows(source, 5), out, *PARTS_OF_2KB, "--resume")
    assert outcome.code == 2
    assert "the number of parts is one, but was several when writing began" in outcome.err
    assert files(out) == before


def test_a_single_part_goes_on_with_the_same_files_and_those_added_behind(tmp_path: Path) -> None:
    source, out = _write_texts(tmp_path / "raw", "bcd"), tmp_path / "out"
    (source / "2.csv").write_text("id,text\nx,y\n")
    again = ("--size-limit", 400, "--resume")
    assert run("convert", source, out, *again[:2]).code == 1
    assert list(out.glob("shard.*"))
    _write_texts(source, "bcd")
    (source / "00.csv").write_text("id,text\n1,a\n")
    outcome = run("convert", source, out, *again)
    assert outcome.code == 2
    assert "the files of SOURCE have other names, or others are before them (4 files, was 3)" in outcome.err
    (source / "00.csv").rename(source / "9.csv")
    convert(source.rename(tmp_path / "moved"), out, *again)
    assert len(samples(out)) == 16


def test_what_no_conversion_began_is_not_gone_on_with(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "a.jsonl", 20), tmp_path / "out"
    convert(source, out)
    (out / "convert.plan").unlink()
    outcome = run("convert", source, out, "--resume")
    assert outcome.code == 2
    assert "holds index.json, but no convert.plan with the options of a conversion" in outcome.err
    for text in ("", "{}", '{"version": 9, "plan": {}}'):
        (out / "convert.plan").write_text(text)
        assert run("convert", source, out, "--resume").code == 2


def test_a_plan_that_a_kill_left_half_written_is_as_good_as_none(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "a.jsonl", 200), tmp_path / "out"
    out.mkdir()
    (out / f"convert.plan.{socket.gethostname()}-999999999-1.part").write_text("{")
    convert(source, out, *PARTS, "--resume")
    assert sorted(path.name for path in out.iterdir() if path.is_file()) == [
        "convert.plan",
        "index.json",
        "parts.plan",
    ]


def test_a_converted_dataset_can_be_replaced_and_added_to(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "a.jsonl", 20), tmp_path / "out"
    convert(source, out)
    with MDSWriter(out=out, columns={"id": "int", "text": "str"}, mode="append") as writer:
        writer.write({"id": 20, "text": "text 20"})
    assert len(samples(out)) == 21
    with MDSWriter(out=out, columns={"id": "int"}, exist_ok=True) as writer:
        writer.write({"id": 7})
    assert sorted(files(out)) == ["index.json", "shard.00000.mds"]


def _write_texts(folder: Path, texts: str) -> Path:
    """A folder of CSV files, one for each letter, whose rows have it."""
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.csv").write_text("id,text\n" + "".join(f"{i},{text * 250}\n" for i in range(5)))
    return folder


def _fail_in_part(number: int, source: Path, out: Path) -> None:
    """A conversion that fails in a part, since a row of its file does not fit, which is then mended."""
    path = source / f"{number}.csv"
    whole = path.read_text()
    path.write_text(f"{whole}x,y\n")
    assert run("convert", source, out, *PARTS).code == 1
    path.write_text(whole)


def _times(out: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("part.*/shard.*")}


@pytest.mark.nightly
def test_only_parts_whose_input_changed_begin_again(tmp_path: Path) -> None:
    source, out = _write_texts(tmp_path / "raw", "abcd"), tmp_path / "out"
    _fail_in_part(3, source, out)
    before = _times(out)
    changed = source / "1.csv"
    stat = changed.stat()
    changed.write_text(changed.read_text().replace("b", "B"))  # of the same size, and as old
    os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.utime(source / "0.csv")
    told = convert(source, out, *PARTS, "--resume").err
    assert "2 parts of 4 start over, because their input changed; the first is part 1\n" in told
    assert [name for name, time in sorted(_times(out).items()) if before.get(name) == time] == [
        "part.000000",
        "part.000002",
    ]
    convert(source, tmp_path / "in_one_go", *PARTS)
    assert files(out) == files(tmp_path / "in_one_go")


@pytest.mark.nightly
def test_parts_before_a_mended_line_are_kept_and_those_after_it_begin_again(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "a.jsonl", 200), tmp_path / "out"
    whole = source.read_text()
    source.write_text(whole.replace('"text 150"', "5"))
    assert run("convert", source, out, "--part-size", "1kb", "--workers", 1).code == 1
    before = _times(out)
    source.write_text(whole)
    told = convert(source, out, "--part-size", "1kb", "--workers", 1, "--resume").err
    assert "start over, because their input changed; the first is part 4\n" in told
    assert {name for name, time in _times(out).items() if before.get(name) == time} == {
        f"part.{number:06}" for number in range(4)
    }
    convert(source, tmp_path / "in_one_go", "--part-size", "1kb", "--workers", 1)
    assert files(out) == files(tmp_path / "in_one_go")


def test_a_finished_dataset_is_not_changed_by_a_resume(tmp_path: Path) -> None:
    source, out = _write_texts(tmp_path / "raw", "ab"), tmp_path / "out"
    convert(source, out, *PARTS)
    before = files(out)
    path = source / "1.csv"
    path.write_text(path.read_text().replace("b", "c"))
    outcome = run("convert", source, out, *PARTS, "--resume")
    assert outcome.code == 2
    assert "is a finished dataset, which does not change, but its source did since" in outcome.err
    assert files(out) == before


@pytest.mark.nightly
def test_a_class_that_was_added_since_is_refused_because_it_changes_the_numbers_of_others(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(20):
            (tmp_path / "pets" / name / f"{number}.png").write_bytes(image((1, 2, number)))
    convert(tmp_path / "pets", tmp_path / "out", *PARTS)
    (tmp_path / "out" / "index.json").unlink()
    convert(tmp_path / "pets", tmp_path / "out", *PARTS, "--resume")
    (tmp_path / "pets" / "bat").mkdir()
    outcome = run("convert", tmp_path / "pets", tmp_path / "out", *PARTS, "--resume")
    assert "the classes of SOURCE is ['bat', 'cat', 'dog'], but was ['cat', 'dog'] when writing began" in outcome.err


@pytest.mark.nightly
def test_a_source_that_was_moved_is_gone_on_with(tmp_path: Path) -> None:
    source, out = _write_texts(tmp_path / "raw", "abc"), tmp_path / "out"
    _fail_in_part(2, source, out)
    before = _times(out)
    moved = source.rename(tmp_path / "elsewhere")
    assert "1 part of 3 start over" in convert(moved, out, *PARTS, "--resume").err  # the one that failed
    assert len(before) == 2
    assert before.items() <= _times(out).items()


@pytest.mark.nightly
def test_changed_parts_begin_again_on_a_bucket_too(tmp_path: Path, s3: S3Store) -> None:
    bucket, stores = s3.make_bucket(), options(s3.options)
    source = _write_texts(tmp_path / "raw", "abc")
    (source / "2.csv").write_text("id,text\n1,a\nx,y\n")
    assert run("convert", source, f"{bucket}/out", *stores, *PARTS).code == 1
    _write_texts(source, "aBc")
    assert "2 parts of 3 start over" in convert(source, f"{bucket}/out", *stores, *PARTS, "--resume").err
    found = StreamingDataset(
        remote=f"{bucket}/out", local=str(tmp_path / "cache"), batch_size=1, storage={"options": s3.options}
    )
    assert [sample["text"][0] for sample in found[:]] == list("aaaaaBBBBBccccc")


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
