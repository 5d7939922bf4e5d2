"""``strict=True``: what is written is the same; what would come back as something else is refused."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import StreamingDataset
from lightning_streaming.errors import ConfigError, EncodingError, PartError
from lightning_streaming.writing.core import ShardWriter
from lightning_streaming.writing.parallel import write_parallel
from lightning_streaming.writing.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter
from tests.writing.test_merge import contents

COLUMNS = {"a": "int8", "b": "float32", "c": "str", "d": "json", "e": "ndarray", "f": "int", "g": "bytes"}
SAMPLE = {"a": 1, "b": 0.1, "c": "x", "d": {"k": [1]}, "e": np.arange(3), "f": 7, "g": b"z"}
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
    assert write(tmp_path / "strict", SAMPLE, strict=True) == write(tmp_path / "loose", SAMPLE)


@pytest.mark.parametrize(("name", "value"), CHANGES)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_value_that_would_change_is_refused_and_names_its_column(tmp_path: Path, name: str, value: Any) -> None:
    sample = {**SAMPLE, name: value}
    write(tmp_path / "loose", sample)
    with MDSWriter(out=tmp_path / "strict", columns=COLUMNS, strict=True) as writer:
        with pytest.raises(EncodingError, match=f"^column '{name}': "):
            writer.write(sample)
        writer.write(SAMPLE)
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
        write(tmp_path, SAMPLE, size_limit=1)
    else:
        begun = MDSWriter(columns=COLUMNS, **settings)
        for _ in range(4):
            begun.write(SAMPLE)
        begun.close()
    with MDSWriter(strict=True, **settings) as writer:
        assert writer.num_samples == 3
        with pytest.raises(EncodingError, match="column 'a'"):
            writer.write({**SAMPLE, "a": 1.5})
        writer.write(SAMPLE)
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
    with pytest.raises(ConfigError, match="strict is False, but was True when writing began"):
        write_parallel([range(2)], halves, tmp_path / "strict", mode="resume", **settings)


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
        assert "from which this one was forked; make another one here" in answers.get(timeout=30)
        child.join()
        writer.write({"id": 2})
    assert [sample["id"] for sample in samples(tmp_path / "out")] == [0, 2]
