"""``strict=True``: what is written is the same; what would be read as another value is refused."""

from __future__ import annotations

import multiprocessing
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import StreamingDataset
from lightning_streaming.errors import ConfigError, EncodingError, MissingDependencyError, PartError
from lightning_streaming.writing.parallel import write_parallel
from lightning_streaming.writing.shards import (
    ShardSettings,
    columns_of,
    infer_columns,
    infer_text_columns,
    parse_settings,
)
from lightning_streaming.writing.writers import CSVWriter, JSONWriter, MDSWriter, ShardWriter, TSVWriter, XSVWriter
from tests.formats.golden_datasets import read_index, read_samples
from tests.helpers import assert_error
from tests.writing.test_merge import contents


def test_nothing_may_be_written_in_several_ways() -> None:
    nothing = ShardSettings(compression=None, hashes=(), size_limit=None)
    assert parse_settings(None, None, None) == nothing
    assert parse_settings("", [], 0) == nothing
    for no_limit in (None, 0, 0.0, "0", "0b", "0mb", " 0 "):
        assert parse_settings(None, (), no_limit) == nothing


@pytest.mark.parametrize(
    ("written", "size"), [("64mb", 2**26), (1000.9, 1000), ("1.5kb", 1536), (2**32 - 1, 2**32 - 1)]
)
def test_a_size_limit_is_bytes(written: Any, size: int) -> None:
    assert parse_settings(None, None, written).size_limit == size


@pytest.mark.parametrize(
    ("compression", "hashes", "size_limit", "words"),
    [
        ("lz4", None, None, "but got 'lz4'"),
        ("zstd:0", None, None, "levels 1 to 22"),
        (None, ["crc32"], None, "but got 'crc32'"),
        (None, ["sha1", "md5"], None, r"must be sorted, .* but got \['sha1', 'md5'\]"),
        (None, ["md5", "md5"], None, "without duplicates"),
        (None, "md5", None, r"write \['md5'\]"),
        (None, None, 2**32, "size_limit must be in"),
        (None, None, "4gb", "size_limit must be in"),
        (None, None, -1, "size_limit"),
        (None, None, "much", "size_limit"),
        (None, None, "", "size_limit"),
        (None, None, " ", "size_limit"),
        (None, None, True, "or None for no limit, but got True"),
        (None, None, False, "or None for no limit, but got False"),
        (None, None, [], "or None for no limit"),
        (None, None, b"64mb", "or None for no limit"),
        (None, None, 0.5, "at least 1 byte"),
        (None, None, "0.0001kb", "at least 1 byte"),
        (None, None, float("nan"), "size_limit"),
        (None, None, float("inf"), "size_limit"),
    ],
)
def test_settings_that_cannot_work_are_refused(compression: Any, hashes: Any, size_limit: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_settings(compression, hashes, size_limit)


@pytest.mark.parametrize(("package", "given"), [("zstandard", ("zstd", None, 0)), ("xxhash", (None, ["xxh64"], 0))])
def test_a_missing_package_is_named_at_once(package: str, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        parse_settings(*given)


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
    with assert_error(ConfigError, option="columns") as caught:
        infer_columns({"id": 1, "x": value})
    assert "'x'" in str(caught.value)


def test_all_columns_without_an_encoding_are_named_and_the_others_with_theirs() -> None:
    with pytest.raises(ConfigError) as told:
        infer_columns({"a": None, "b": 1.5, "c": {1}})
    assert "'a', a NoneType, 'c', a set; pass columns={'a': '...', 'b': 'float64', 'c': '...'}" in str(told.value)
    with assert_error(ConfigError, option="columns") as caught:
        infer_text_columns({"a": None, "b": 1.5, "c": {1}})
    assert "'a'" in str(caught.value)


def test_text_formats_know_three_types() -> None:
    assert infer_text_columns({"a": "x", "b": 1, "c": 0.5}) == {"a": "str", "b": "int", "c": "float"}


@pytest.mark.parametrize("value", [True, None, b"x", [1], np.int64(1), np.float64(1)])
def test_text_formats_refuse_other_types_with_their_column(value: object) -> None:
    with assert_error(ConfigError, option="columns") as caught:
        infer_text_columns({"id": 1, "x": value})
    assert "'x'" in str(caught.value)


@pytest.mark.parametrize("writer", [MDSWriter, JSONWriter, CSVWriter])
def test_columns_are_found_in_an_index(writer: type[ShardWriter], tmp_path: Path) -> None:
    columns = {"b": "int", "a": "str"}
    with writer(out=tmp_path, columns=columns) as written:
        written.write({"a": "x", "b": 1})
    assert columns_of(read_index(tmp_path).shards[0].schema) == columns


COLUMNS = {"a": "int8", "b": "float32", "c": "str", "d": "json", "e": "ndarray", "f": "int", "g": "bytes"}
EXACT_SAMPLE = {"a": 1, "b": 0.1, "c": "x", "d": {"k": [1]}, "e": np.arange(3), "f": 7, "g": b"z"}
SPLIT = {"id": "int", "score": "float", "text": "str"}
CHANGES: list[tuple[str, Any]] = [
    ("a", 1.5),
    ("a", "3"),
    ("a", True),
    ("b", 1e300),
    ("b", "1.5"),
    ("b", True),
    ("b", 2**24 + 1),
    ("c", b"x"),
    ("d", float("nan")),
    ("d", (1, 2)),
    ("d", {1: 2}),
    ("f", True),
]


def samples(out: Path) -> list[Any]:
    found: list[Any] = StreamingDataset(remote=str(out), batch_size=1)[:]
    return found


def write(out: Path, sample: dict[str, Any], **settings: Any) -> dict[str, bytes]:
    with MDSWriter(out=out, columns=COLUMNS, **settings) as writer:
        for _ in range(3):
            writer.write(sample)
    return contents(out)


def test_what_is_written_is_the_same(tmp_path: Path) -> None:
    assert write(tmp_path / "strict", EXACT_SAMPLE, strict=True) == write(tmp_path / "loose", EXACT_SAMPLE)


@pytest.mark.parametrize(("name", "value"), CHANGES)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_value_that_would_change_is_refused_and_names_its_column(tmp_path: Path, name: str, value: Any) -> None:
    sample = {**EXACT_SAMPLE, name: value}
    write(tmp_path / "loose", sample)
    with MDSWriter(out=tmp_path / "strict", columns=COLUMNS, strict=True) as writer:
        with pytest.raises(EncodingError, match=f"^column '{name}': "):
            writer.write(sample)
        writer.write(EXACT_SAMPLE)
    assert len(samples(tmp_path / "strict")) == 1


def test_columns_that_are_told_are_strict_too(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path, strict=True) as writer:
        writer.write({"id": 3, "score": np.float32(1.5)})
        for sample in ({"id": True, "score": np.float32(1)}, {"id": 4, "score": 1e300}):
            with pytest.raises(EncodingError, match=r"^column '"):
                writer.write(sample)


@pytest.mark.parametrize("mode", ["resume", "append"])
def test_a_writer_that_goes_on_is_strict_too(tmp_path: Path, mode: Any) -> None:
    settings: dict[str, Any] = {"out": tmp_path, "mode": mode, "size_limit": 1}
    if mode == "append":
        write(tmp_path, EXACT_SAMPLE, size_limit=1)
    else:
        begun = MDSWriter(columns=COLUMNS, **settings)
        for _ in range(4):
            begun.write(EXACT_SAMPLE)
        begun.close()
    with MDSWriter(strict=True, **settings) as writer:
        assert writer.num_samples == 3
        with pytest.raises(EncodingError, match="column 'a'"):
            writer.write({**EXACT_SAMPLE, "a": 1.5})
        writer.write(EXACT_SAMPLE)
    assert len(samples(tmp_path)) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda out: JSONWriter(out=out, columns=SPLIT, strict=True),
        lambda out: CSVWriter(out=out, columns=SPLIT, strict=True),
        lambda out: TSVWriter(out=out, columns=SPLIT, strict=True),
        lambda out: XSVWriter(out=out, columns=SPLIT, separator="|", strict=True),
    ],
    ids=["json", "csv", "tsv", "xsv"],
)
def test_shards_of_text_are_strict_too(tmp_path: Path, make: Any) -> None:
    writer: ShardWriter = make(tmp_path / "out")
    with writer:
        writer.write({"id": 1, "score": 0.5, "text": "x"})
        with pytest.raises(EncodingError, match=r"^column 'id': expected an integer, but got bool True"):
            writer.write({"id": True, "score": 0.5, "text": "x"})
    assert [sample["id"] for sample in samples(tmp_path / "out")] == [1]


def halves(numbers: range) -> Any:
    for number in numbers:
        yield {"id": number / 2}


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_parts_are_strict_too_and_a_resume_keeps_to_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"columns": {"id": "int32"}, "progress_bar": False, "start_method": "fork"}
    write_parallel([range(2)], halves, tmp_path / "loose", **settings)
    with pytest.raises(PartError, match=r"column 'id': expected an integer, but got float 0.0"):
        write_parallel([range(2)], halves, tmp_path / "strict", strict=True, **settings)
    with assert_error(ConfigError, path="parts.plan") as caught:
        write_parallel([range(2)], halves, tmp_path / "strict", mode="resume", **settings)
    assert "writing" in str(caught.value)


def _use(writer: MDSWriter, verb: str, answers: Any) -> None:
    try:
        writer.write({"id": 1}) if verb == "write" else writer.finish()
    except ConfigError as error:
        answers.put(str(error))
    else:
        answers.put("")


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("verb", ["write", "finish"])
def test_a_forked_process_is_told_at_once_that_the_writer_is_not_its_own(tmp_path: Path, verb: str) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with MDSWriter(out=tmp_path / "out", columns={"id": "int"}) as writer:
        writer.write({"id": 0})
        child = context.Process(target=_use, args=(writer, verb, answers))
        child.start()
        assert "from which this one was forked; create another one here" in answers.get(timeout=30)
        child.join()
        writer.write({"id": 2})
    assert [sample["id"] for sample in samples(tmp_path / "out")] == [0, 2]
