"""``lightning-streaming convert``, run as a user would, docs/convert.md too; what it writes is read again."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from examples.byte_transformer import ByteTransformer
from lightning_streaming import StreamingDataLoader, StreamingDataset
from lightning_streaming.cache.config import CACHE_VARIABLE
from lightning_streaming.storage import Location
from lightning_streaming.tokenizing.documents import DocumentTokenizer
from tests.servers import S3Store, http_server
from tests.tokenizing.test_chat import CONVERSATION, TOOLS, model_folder
from tests.tokenizing.test_tokenizer import word_tokenizer
from tests.tools.converting.test_sources_files import image, write_tar
from tests.tools.running import Outcome, options, run

PARTS = ("--part-size", "1kb", "--workers", 1)
"""Each file a part."""


def convert(*args: object) -> Outcome:
    """Run the command in this process; it must end well."""
    outcome = run("convert", *args)
    assert outcome.code == 0, outcome.err
    return outcome


def samples(out: Path | str) -> list[Any]:
    """Every sample of a dataset."""
    found: list[Any] = StreamingDataset(remote=str(out), batch_size=1)[:]
    return found


def tokens(out: Path) -> np.ndarray[Any, Any]:
    """The blocks of a dataset, one row each."""
    return np.stack([sample["tokens"] for sample in samples(out)])


def files(out: Path) -> dict[str, bytes]:
    """All files of a dataset, by their path in it."""
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def write_rows(path: Path, count: int, text: str = "text {}") -> Path:
    """JSON lines with an ``id`` that counts from 0 and a ``text``."""
    path.write_text("".join(json.dumps({"id": i, "text": text.format(i)}) + "\n" for i in range(count)))
    return path


def test_json_lines_become_a_dataset_with_columns_told(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", 3)
    outcome = convert(source, tmp_path / "out")
    assert f"columns, from {source}, line 1: id int, text str\n" in outcome.err
    assert outcome.out.startswith(f"{tmp_path / 'out'}: 3 samples in 1 shard, ")
    assert samples(tmp_path / "out") == [{"id": i, "text": f"text {i}"} for i in range(3)]


def test_the_shards_are_as_asked_for(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", 200)
    args = ["--compression", "zstd:1", "--hashes", "xxh3_64,sha1", "--size-limit", "2kb", "--columns", "text", "--json"]
    found = convert(source, tmp_path / "out", *args).json
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    first = index["shards"][0]
    assert (first["compression"], first["hashes"], first["size_limit"]) == ("zstd:1", ["sha1", "xxh3_64"], 2048)
    assert found["samples"] == 200
    assert found["shards"] == len(index["shards"]) > 1
    assert found["columns"] == {"text": "str"}
    assert samples(tmp_path / "out")[7] == {"text": "text 7"}


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl.gz"])
def test_tables_of_every_kind_give_the_same_rows(tmp_path: Path, kind: str) -> None:
    rows = [{"id": i, "text": f"a,b {i}", "score": i + 0.5} for i in range(5)]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    else:
        cell = '"{}"' if kind == "csv" else "{}"
        lines = [
            ["id", "text", "score"],
            *([str(row["id"]), cell.format(row["text"]), str(row["score"])] for row in rows),
        ]
        path.write_text("\n".join(("," if kind == "csv" else "\t").join(line) for line in lines))
    convert(path, tmp_path / "out")
    assert samples(tmp_path / "out") == rows


def test_images_stay_the_files_they_were(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "a.png").write_bytes(image((len(name), 7, 0)))
    convert(tmp_path / "images", tmp_path / "out")
    cat, dog = samples(tmp_path / "out")
    assert (cat["label"], cat["class"], dog["label"], dog["class"]) == (0, "cat", 1, "dog")
    assert dog["image"].getpixel((0, 0)) == (3, 7, 0)
    shard = (tmp_path / "out" / "shard.00000.mds").read_bytes()
    assert image((3, 7, 0)) in shard


def test_a_tar_set_with_jpegs_and_arrays(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    for number in range(2):
        members = {f"{number}{i}.{end}": data for i in range(3) for end, data in _members(number, i).items()}
        write_tar(tmp_path / "tars" / f"{number}.tar", members)
    convert(tmp_path / "tars", tmp_path / "out", "--part-size", "1kb", "--workers", "2")
    found = samples(tmp_path / "out")
    assert [sample["cls"] for sample in found] == [0, 1, 2, 10, 11, 12]
    assert [sample["__key__"] for sample in found][4] == "11"
    assert found[4]["jpg"].size == (4, 4)


def _members(number: int, i: int) -> dict[str, bytes]:
    return {"jpg": image((number, i, 0), "JPEG"), "cls": str(10 * number + i).encode()}


def test_parts_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", 500)
    for workers in (1, 2):
        convert(source, tmp_path / f"by{workers}", "--part-size", "4kb", "--workers", workers)
    assert files(tmp_path / "by1") == files(tmp_path / "by2")
    assert [sample["id"] for sample in samples(tmp_path / "by2")] == list(range(500))
    assert len(list((tmp_path / "by2").glob("part.*"))) > 3


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", 100)
    convert(source, tmp_path / "out", "--limit", 7, "--part-size", "1kb")
    assert [sample["id"] for sample in samples(tmp_path / "out")] == list(range(7))


@pytest.mark.parametrize("part_size", ["1kb", "1gb"])
def test_a_row_that_cannot_be_written_is_an_error_that_names_its_line(tmp_path: Path, part_size: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", 200)
    lines = source.read_text().splitlines()
    lines[120] = '{"id": "x", "text": ""}'
    source.write_text("\n".join(lines))
    outcome = run("convert", source, tmp_path / "out", "--part-size", part_size, "--workers", 2)
    assert outcome.code == 1
    assert f"error: {source}, line 121: the column 'id' is int: expected an integer, but got 'x'" in outcome.err
    assert not (tmp_path / "out" / "index.json").exists()


def _kill_when(found: str, out: Path, *args: object) -> int:
    """Run the command in a process of its own, and kill it when a number of such files are in ``out``; how it ended."""
    command = [sys.executable, "-m", "lightning_streaming", "convert", *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and len(list(out.glob(found))) < 2:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        return process.wait()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("more", "found"),
    [
        (("--size-limit", "8kb"), "shard.*.mds"),
        (("--part-size", "80kb", "--workers", 2), "part.*/index.json"),
        (
            ("--part-size", "80kb", "--workers", 2, "--tokenize", "--tokenizer", "bytes", "--block-length", 64),
            "part.*/index.json",
        ),
    ],
    ids=["one_part", "parts", "tokens"],
)
def test_a_killed_conversion_goes_on_to_the_same_dataset(tmp_path: Path, more: tuple[object, ...], found: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", 12_000)
    out = tmp_path / "out"
    while _kill_when(found, out, source, out, *more) != -signal.SIGKILL:
        shutil.rmtree(out)  # a busy machine let it come to its end before anybody saw that there were two
    assert not (out / "index.json").exists()
    assert run("convert", source, out, *more).code == 2
    # By one worker, which starts faster than two; the dataset is the same.
    convert(source, out, *more, "--resume", "--workers", 1)
    convert(source, tmp_path / "in_one_go", *more, "--workers", 1)
    assert files(out) == files(tmp_path / "in_one_go")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("more", "found"),
    [(("--size-limit", "8kb"), "shard.*.mds"), (("--part-size", "80kb", "--workers", 2), "part.*/index.json")],
    ids=["one_part", "parts"],
)
def test_so_does_one_of_another_format(
    tmp_path: Path, more: tuple[object, ...], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for number in range(12):
        np.save(source / f"{number:02}.npy", np.arange(number * 40_000, number * 40_000 + 40_000).reshape(1000, 40))
    words = ("--format", "npy", *more)
    while _kill_when(found, out, source, out, *words) != -signal.SIGKILL:
        shutil.rmtree(out)
    assert not (out / "index.json").exists()
    convert(source, out, *words, "--resume", "--workers", 1)
    convert(source, tmp_path / "in_one_go", *words, "--workers", 1)
    assert files(out) == files(tmp_path / "in_one_go")


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), ("--part-size", "2mb", "--workers", 2)], ids=["one_part", "parts"])
def test_a_conversion_that_is_told_to_end_leaves_nothing_in_the_temporary_directory(
    tmp_path: Path, more: tuple[object, ...]
) -> None:
    source, temporary = tmp_path / "a.jsonl", tmp_path / "tmp"
    source.write_text('{"text": "some text that goes on for a while"}\n' * 500_000)
    temporary.mkdir()
    words = (source, tmp_path / "out", "--tokenize", "--tokenizer", "bytes", "--block-length", 64, *more)
    command = [sys.executable, "-m", "lightning_streaming", "convert", *map(str, words)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as process:
        # Under way: within tempfile, between making the directory and noting it, nobody could remove it.
        while process.poll() is None and not any((tmp_path / "out").rglob("shard.*")):
            time.sleep(0.005)
        assert any(temporary.glob("lightning_streaming_*"))
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
        assert process.stderr is not None
        assert process.stderr.read().splitlines() == ["lightning-streaming convert: columns: tokens ndarray:uint8:64"]
    assert not list(temporary.glob("lightning_streaming_*"))
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_url_is_named_and_not_the_copy_of_it(tmp_path: Path, s3: S3Store) -> None:
    bucket, stores = s3.make_bucket(), options(s3.options, "--source-options")
    source = write_rows(tmp_path / "a.jsonl", 100)
    Location(f"{bucket}/a.jsonl", s3.options).upload(source)
    assert (
        f"columns, from {bucket}/a.jsonl, line 1: id" in convert(f"{bucket}/a.jsonl", tmp_path / "whole", *stores).err
    )
    source.write_text(source.read_text().replace('"text 70"', "7"))
    Location(f"{bucket}/b.jsonl", s3.options).upload(source)
    for part_size in ("1kb", "1gb"):
        words = (f"{bucket}/b.jsonl", tmp_path / part_size, *stores, "--part-size", part_size, "--workers", 1)
        outcome = run("convert", *words)
        assert outcome.code == 1
        assert f"error: {bucket}/b.jsonl, line 71: the column 'text' is str" in outcome.err
        assert "lightning_streaming_" not in outcome.err


def test_a_dataset_without_samples_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", 2)
    words = (source, tmp_path / "out", "--tokenize", "--tokenizer", "bytes", "--block-length", 4096)
    outcome = run("convert", *words)
    assert outcome.code == 1
    assert "error: the text of no part fills a block of 4096 tokens" in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "tar", "huggingface", "parquets", "blocks"])
def test_a_source_without_samples_leaves_nothing(tmp_path: Path, kind: str) -> None:
    source = tmp_path / f"none.{kind}"
    more: tuple[object, ...] = ()
    schema = pa.schema({f"column {number}": pa.int64() for number in range(30)})
    if kind == "jsonl":
        source.write_text("\n\n")
    elif kind in ("csv", "tsv"):
        source.write_text("id\n")
    elif kind == "parquet":
        parquet.write_table(schema.empty_table(), source)
    elif kind == "tar":
        write_tar(source, {})
    elif kind == "huggingface":
        source.mkdir()
        with pa.OSFile(str(source / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, schema):
            pass
        (source / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    elif kind == "parquets":
        source.mkdir()
        for name in "ab":
            with parquet.ParquetWriter(source / f"{name}.parquet", schema) as writer:
                writer.write_table(schema.empty_table(), row_group_size=1)
        more = PARTS
    else:
        source = write_rows(tmp_path / "a.jsonl", 200)
        more = ("--tokenize", "--tokenizer", "bytes", "--block-length", 10**6, *PARTS)
    outcome = run("convert", source, tmp_path / "out", *more)
    assert outcome.code == 1
    assert "error: " in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["id:int,text:str"], "--columns id:int --columns text:str"),
        (["id,text"], "--columns id --columns text"),
        (["id:ndarray:int32:2,3,text"], "--columns id:ndarray:int32:2,3 --columns text"),
        (["text", "x:int, id:int"], "--columns x:int --columns id:int"),
    ],
)
def test_several_columns_in_one_option_are_told_apart(tmp_path: Path, asked: list[str], words: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", 2)
    outcome = run("convert", source, tmp_path / "out", *(word for one in asked for word in ("--columns", one)))
    assert outcome.code == 2
    command = f"run: lightning-streaming convert {source} {tmp_path / 'out'} {words}\n"
    assert f"--columns takes one column each time; {command}" in outcome.err


def test_names_and_shapes_may_have_commas(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a,b": [[1, 2]], "c": 3}\n')
    convert(tmp_path / "a.jsonl", tmp_path / "out", "--columns", "a,b:ndarray:uint8:1,2", "--columns", "c")
    assert samples(tmp_path / "out")[0]["a,b"].tolist() == [[1, 2]]


def test_a_separator_that_is_no_comma_is_told_and_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("name;height\nBonn;2,5\n")
    outcome = run("convert", path, tmp_path / "out")
    assert outcome.code == 1
    assert "begins with a row of one cell, 'name;height'; give --separator ';' if" in outcome.err
    convert(path, tmp_path / "out", "--separator", ";")
    assert samples(tmp_path / "out") == [{"name": "Bonn", "height": "2,5"}]
    path.write_text("a;b\n1\n")
    convert(path, tmp_path / "one", "--separator", ",")
    assert samples(tmp_path / "one") == [{"a;b": 1}]
    path.write_text("a\tb\n1\t2\n")
    assert "give --from tsv if" in run("convert", path, tmp_path / "tabs").err
    for wrong in (";;", "", '"'):
        assert "--separator must be one character" in run("convert", path, tmp_path / "no", "--separator", wrong).err
    source = write_rows(tmp_path / "a.jsonl", 2)
    assert "--separator is for CSV" in run("convert", source, tmp_path / "no", "--separator", ";").err


def test_texts_become_full_blocks_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("hello")
    (tmp_path / "texts" / "b.txt").write_text("")
    (tmp_path / "texts" / "c.txt").write_text("wörld")
    args = ["--tokenize", "--tokenizer", "bytes", "--block-length", 4, "--eot", 0]
    outcome = convert(tmp_path / "texts", tmp_path / "out", *args)
    assert tokens(tmp_path / "out").tobytes() == "hello\0\0wörl".encode()
    assert tokens(tmp_path / "out").dtype == np.uint8
    assert "14 tokens of 3 documents; dropped 2," in outcome.out


@pytest.mark.nightly
def test_each_part_is_packed_alone_whatever_the_workers(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", 100, text="x" * 9 + "{}")
    args = ["--tokenize", "--tokenizer", "bytes", "--block-length", 64, "--part-size", "1kb", "--json"]
    found = [convert(source, tmp_path / str(workers), *args, "--workers", workers).json for workers in (1, 2)]
    assert files(tmp_path / "1") == files(tmp_path / "2")
    assert [one.pop("out") for one in found] == [str(tmp_path / "1"), str(tmp_path / "2")]
    assert found[0] == found[1]
    assert found[0]["tokens"] == 64 * found[0]["samples"] + found[0]["dropped_tokens"]
    assert found[0]["documents"] == 100


def test_a_tokenizer_file_its_end_token_and_a_dtype(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,body\n1,the cat\n2,sat the cat sat\n")
    args = ["--tokenize", "--tokenizer", word_tokenizer(tmp_path / "t.json"), "--block-length", 4]
    args += ["--text-column", "body", "--eot", "<end>"]
    found = convert(path, tmp_path / "out", *args, "--json").json
    assert found["columns"] == {"tokens": "ndarray:uint8:4"}
    assert tokens(tmp_path / "out").tolist() == [[0, 1, 9, 2], [0, 1, 2, 9]]
    convert(path, tmp_path / "wide", *args, "--dtype", "int64")
    assert tokens(tmp_path / "wide").dtype == np.int64


def test_documents_are_samples_that_are_packed_at_once(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("the cat", "", "sat the cat")))
    args = ["--tokenize", "--tokenizer", word_tokenizer(tmp_path / "t.json"), "--documents"]
    outcome = convert(source, tmp_path / "out", *args, "--bos", 7, "--eot", "<end>")
    assert "columns: tokens ndarray:uint8\n" in outcome.err
    assert "11 tokens of 3 documents\n" in outcome.out
    written = [sample["tokens"].tolist() for sample in samples(tmp_path / "out")]
    assert written == [[7, 0, 1, 9], [7, 9], [7, 2, 0, 1, 9]]
    outcome = convert(source, tmp_path / "bare", *args)
    assert "5 tokens of 3 documents; left out 1 document without tokens\n" in outcome.out
    assert [len(sample["tokens"]) for sample in samples(tmp_path / "bare")] == [2, 3]
    packed = StreamingDataset(remote=str(tmp_path / "out"), packing={"column": "tokens", "capacity": 16})
    (batch,) = StreamingDataLoader(packed, batch_size=1)
    assert batch["input_ids"][0].tolist() == [*written[0], *written[1], *written[2], *5 * [0]]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_conversations_become_tokens_and_a_mask(tmp_path: Path, form: str) -> None:
    model_folder(tmp_path / "model", "chatml")
    rows = [{"messages": CONVERSATION[:1] + CONVERSATION[number : number + 2]} for number in (4, 5)]
    write_lines(tmp_path / "a.jsonl", rows)
    if form == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    args = ["--chat", "--tokenizer", tmp_path / "model"]
    outcome = convert(tmp_path / f"a.{form}", tmp_path / "out", *args)
    assert "columns: tokens ndarray:uint16, loss_mask ndarray:uint8\n" in outcome.err
    tokenizer = DocumentTokenizer(tokenizer=str(tmp_path / "model"), chat="messages")
    expected: list[Any] = [tokenizer.encode(row) for row in rows]
    written = samples(tmp_path / "out")
    assert [(sample["tokens"].tolist(), sample["loss_mask"].tolist()) for sample in written] == [
        (tokens.tolist(), loss_mask.tolist()) for tokens, loss_mask in expected
    ]
    trained = sum(int(loss_mask.sum()) for _, loss_mask in expected)
    assert f"of 2 documents; the loss counts {trained:,}\n" in outcome.out
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}")
    assert (
        "the chat template is"
        in run("convert", tmp_path / f"a.{form}", tmp_path / "out", *args, "--resume", "--template", other).err
    )
    write_lines(tmp_path / "a.jsonl", [*rows, {"messages": [{"role": "user"}, 3]}])
    error = run("convert", tmp_path / "a.jsonl", tmp_path / "no", *args).err
    assert f"{tmp_path / 'a.jsonl'}, line 3: message 1 must have role and content" in error


@pytest.mark.parametrize("args", [[], ["--tools-column", "tools"]])
def test_tools_of_conversations_are_in_the_tokens(tmp_path: Path, args: list[str]) -> None:
    model_folder(tmp_path / "model", "chatml")
    rows: list[dict[str, Any]] = [{"messages": CONVERSATION[:2], "tools": TOOLS}, {"messages": CONVERSATION[:2]}]
    write_lines(tmp_path / "a.jsonl", rows[::-1] if args else rows)  # the first row decides on the default
    convert(tmp_path / "a.jsonl", tmp_path / "out", "--chat", "--tokenizer", tmp_path / "model", *args)
    tokenizer = DocumentTokenizer(tokenizer=str(tmp_path / "model"), chat="messages", tools="tools")
    expected = sorted(tokenizer.encode(row).tokens.tolist() for row in rows)
    assert sorted(sample["tokens"].tolist() for sample in samples(tmp_path / "out")) == expected
    assert len(expected[0]) != len(expected[1])


def test_the_example_model_trains_on_blocks_as_they_are(tmp_path: Path) -> None:
    convert(
        Path(__file__), tmp_path / "out", "--from", "text", "--tokenize", "--tokenizer", "bytes", "--block-length", 129
    )
    loader = StreamingDataLoader(StreamingDataset(remote=str(tmp_path / "out"), batch_size=4, shuffle=True))
    batch = next(iter(loader))
    assert (batch["tokens"].shape, batch["tokens"].dtype) == ((4, 129), torch.uint8)
    model = ByteTransformer(width=16, depth=1, heads=2)
    loss = model._loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--tokenize", "--tokenizer", "bytes"], "needs either --documents, for packing, or --block-length"),
        (["--tokenize", "--tokenizer", "bytes", "--documents", "--block-length", "4"], "needs either --documents"),
        (["--tokenize", "--block-length", "4"], "needs --tokenizer"),
        (["--block-length", "4"], "--block-length is for --tokenize"),
        (["--documents"], "--documents is for --tokenize"),
        (["--chat-column", "id"], "--chat-column is for --chat"),
        (["--chat", "--tokenize", "--tokenizer", "bytes"], "--chat and --tokenize are for different columns"),
        (["--chat", "--tokenizer", "bytes", "--eot", "1"], "--eot is for --tokenize"),
        (["--chat", "--tokenizer", "bytes"], "there is no column 'messages' to tokenize"),
        (["--chat", "--tokenizer", "bytes", "--chat-column", "text"], "the tokenizer has no chat template"),
        (["--tokenize", "--tokenizer", "bytes", "--block-length", "4", "--columns", "id"], "omit --columns"),
        (
            ["--tokenize", "--tokenizer", "bytes", "--block-length", "4", "--text-column", "x"],
            "are id, text",
        ),
        (
            ["--tokenize", "--tokenizer", "bytes", "--block-length", "4", "--dtype", "uint8", "--eot", "256"],
            "tokens up to 256, but uint8 ends at 255; uint16 is enough",
        ),
        (["--columns", "id:nothing"], "must be one of"),
        (["--columns", "text:pkl"], "convert does not write the encoding pkl"),
        (["--part-size", "0"], "--part-size must be at least 1024 bytes"),
        (["--part-size", "1b"], "--part-size must be at least 1024 bytes, but got '1b'"),
        (["--hashes", "md6"], "md6"),
        (["--from", "parquet"], "cannot be read as Parquet"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_written(tmp_path: Path, args: list[str], words: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", 3)
    outcome = run("convert", source, tmp_path / "out", *args)
    assert outcome.code in (1, 2)
    assert words in outcome.err
    assert not (tmp_path / "out" / "index.json").exists()


def test_what_is_no_source_is_told_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "the folder" in run("convert", tmp_path / "empty", tmp_path / "out").err
    (tmp_path / "a.json").write_text('[{"a": 1}]\n')
    assert "must be written as one object a line" in run("convert", tmp_path / "a.json", tmp_path / "out").err
    convert(write_rows(tmp_path / "a.jsonl", 3), tmp_path / "data")
    assert "is a dataset already" in run("convert", tmp_path / "data", tmp_path / "out").err
    assert "the name is empty" in run("convert", tmp_path / "a.jsonl", "").err
    assert not (tmp_path / "out").exists()


def test_a_dataset_cannot_be_written_into_its_own_source(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", 3)
    assert "OUT must not be in SOURCE" in run("convert", tmp_path, tmp_path / "out").err
    assert not (tmp_path / "out").exists()


def test_a_column_that_is_no_text_cannot_be_tokenized(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", 3)
    args = ["--tokenize", "--tokenizer", "bytes", "--block-length", "4", "--text-column", "id"]
    outcome = run("convert", source, tmp_path / "out", *args)
    assert outcome.code == 1
    assert "line 1: the column 'id' must be text to be tokenized, but is int" in outcome.err


@pytest.mark.nightly
@pytest.mark.parametrize("part_size", ["2kb", "1gb"])
def test_from_a_bucket_to_a_bucket(tmp_path: Path, s3: S3Store, part_size: str) -> None:
    bucket = s3.make_bucket()
    Location(f"{bucket}/raw/a.jsonl", s3.options).upload(write_rows(tmp_path / "a.jsonl", 100))
    stores = options(s3.options) + options(s3.options, "--source-options")
    args = (f"{bucket}/raw/a.jsonl", f"{bucket}/out", *stores, "--part-size", part_size, "--workers", 1)
    assert convert(*args).out.startswith(f"{bucket}/out: 100 samples in ")
    found = StreamingDataset(
        remote=f"{bucket}/out", local=str(tmp_path / "cache"), batch_size=1, storage={"options": s3.options}
    )
    assert [sample["id"] for sample in found[:]] == list(range(100))
    assert "/out is a finished dataset already; " in run("convert", *args).err
    convert(*args, "--resume")


ODD_NAMES = ["a b", "it's", "a:b", "-x", "$HOME", "*", 'say "hi"', "back\\slash", "é", "--columns", "a;b", "a\nb"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def suggested(*words: object) -> str:
    outcome = run("convert", *words)
    assert outcome.code in (1, 2), outcome.err
    return outcome.err.partition("run: ")[2].partition("\nWhat was written before")[0].removesuffix("\n")


def typed(command: str) -> None:
    """Have a shell understand a command, and run ours with the words that it makes of it."""
    shell = f"lightning-streaming() {{ printf '%s\\0' \"$@\"; }}\n{command}"
    words = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.split("\0")
    outcome = run(*words[:-1])
    assert outcome.code == 0, (command, outcome.err)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_column_without_an_encoding(name: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "it's raw.jsonl", [{"id": 1, name: None}, {"id": 2, name: 3}])
    typed(suggested(source.name, "my out"))
    assert samples("my out") == [{"id": 1, name: None}, {"id": 2, name: 3}]


def test_several_columns_without_an_encoding_at_once(tmp_path: Path) -> None:
    table = pa.table({"when": [date(2024, 1, 2)], "none": pa.nulls(1), "id": [1], "at": pa.array([5], pa.time32("s"))})
    parquet.write_table(table, tmp_path / "a.parquet")
    typed(suggested("a.parquet", "out"))
    assert samples("out") == [{"when": "2024-01-02", "none": None, "id": 1, "at": "00:00:05"}]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("more", [(), ("--part-size", "1kb", "--workers", 1), ("--hashes=sha1", "--resume")])
@pytest.mark.parametrize("name", ["id", "a b", "a:b"])
def test_a_row_that_does_not_fit_after_others_were_written(name: str, more: tuple[object, ...], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{name: number, "text": "x" * 20} for number in range(200)]
    write_lines(tmp_path / "a.jsonl", [*rows, {name: "three", "text": ""}])
    typed(suggested("a.jsonl", "my out", *more))
    assert [sample[name] for sample in samples("my out")] == [*range(200), "three"]


def test_only_what_was_written_is_to_be_removed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_lines(tmp_path / "a.jsonl", [{"id": 300}])
    command = suggested("a.jsonl", "out", "--columns", "id:int8")
    assert command.startswith("lightning-streaming convert a.jsonl out ")
    typed(command)


def test_a_column_that_the_first_row_lacks(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": 1, "a b": 2}, {"id": 1, "a b": 2, "new": 3}])
    typed(suggested("a.jsonl", "out"))
    assert samples("out") == [{"id": 1, "a b": 2}] * 2


def test_several_columns_in_one_option(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": 1, "a b": 2}])
    typed(suggested("a.jsonl", "out", "--columns", "id:int8,a b"))
    assert samples("out") == [{"id": 1, "a b": 2}]


def test_secrets_are_left_out_of_the_command(tmp_path: Path, s3: S3Store) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": 1}, {"id": "x"}])
    bucket = s3.make_bucket()
    told = run("convert", "a.jsonl", f"{bucket}/out", *options({**s3.options, "secret": s3.options["secret"]})).err
    assert f"remove the files in {bucket}/out, and run: lightning-streaming convert a.jsonl {bucket}/out " in told
    assert "--storage-options secret=..." in told
    assert s3.options["secret"] not in told


EDITS: list[Callable[[list[str]], list[str]]] = [lambda words: words, lambda words: [f"--columns={words[1]}"]]


@pytest.mark.parametrize("edit", EDITS, ids=["apart", "joined"])
def test_columns_that_were_given_are_replaced(edit: Callable[[list[str]], list[str]], tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": 300, "n": None}])
    command = suggested("a.jsonl", "out", *edit(["--columns", "n"]), *edit(["--columns", "id:uint16"]))
    assert command == "lightning-streaming convert a.jsonl out --columns n:json --columns id:uint16"
    typed(command)


@pytest.mark.parametrize("name", ["a.jsonl", "b.csv"])
def test_a_file_on_a_web_server(name: str, tmp_path: Path) -> None:
    rows = [{"id": 1, "text": "a b"}, {"id": 2, "text": "ü"}]
    served = tmp_path / "served"
    served.mkdir()
    write_lines(served / "a.jsonl", rows)
    (served / "b.csv").write_text("id,text\n1,a b\n2,ü\n", encoding="utf-8")
    with http_server(served) as url:
        convert(f"{url}/{name}", "out")
    assert samples("out") == rows


DOCUMENT = Path(__file__).parents[2] / "docs" / "convert.md"
_BLOCK = re.compile(r"^```(?P<kind>python|console|text)\n(?P<content>.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (?P<command>.*)\n(?P<prints>(?:^[^$].*\n)*)", re.MULTILINE)


def test_every_command_prints_what_the_document_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _follow(DOCUMENT.read_text(), {"__name__": "__main__"}, capsys) >= 5


def _follow(document: str, names: dict[str, str], capsys: pytest.CaptureFixture[str]) -> int:
    """Run a document, and give the number of its commands."""
    printed, commands = "", 0
    for block in _BLOCK.finditer(document):
        if block["kind"] == "python":
            exec(compile(block["content"], str(DOCUMENT), "exec"), names)
            printed = capsys.readouterr().out
        elif block["kind"] == "text":
            assert printed == block["content"]
        else:
            for shown in _COMMAND.finditer(block["content"]):
                program, *args = shlex.split(shown["command"])
                assert program == "lightning-streaming"
                outcome = run(*args)
                # Notes come before results. Images depend on the version of Pillow, so their size is not shown.
                assert (outcome.err + outcome.out).startswith(shown["prints"])
                commands += 1
    return commands
