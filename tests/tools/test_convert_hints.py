"""The columns that ``convert`` suggests, typed into a shell as it prints them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lightning_streaming import StreamingDataset
from tests.servers import S3Store
from tests.tools.running import options, run

ODD_NAMES = ["a b", "it's", "a:b", "-x", "$HOME", "*", 'say "hi"', "back\\slash", "é", "--columns", "a;b", "a\nb"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def suggested(*words: object) -> str:
    outcome = run("convert", *words)
    assert outcome.code in (1, 2), outcome.err
    return outcome.err.partition("run: ")[2].removesuffix("\n")


def typed(command: str) -> None:
    """Have a shell understand a command, and run ours with the words that it makes of it."""
    shell = f"lightning-streaming() {{ printf '%s\\0' \"$@\"; }}\n{command}"
    words = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.split("\0")
    outcome = run(*words[:-1])
    assert outcome.code == 0, (command, outcome.err)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def samples(out: str) -> list[Any]:
    found: list[Any] = StreamingDataset(remote=out, batch_size=1)[:]
    return found


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
    assert f"remove what is in {bucket}/out, and run: lightning-streaming convert a.jsonl {bucket}/out " in told
    assert "--storage-options secret=..." in told
    assert s3.options["secret"] not in told


EDITS: list[Callable[[list[str]], list[str]]] = [lambda words: words, lambda words: [f"--columns={words[1]}"]]


@pytest.mark.parametrize("edit", EDITS, ids=["apart", "joined"])
def test_columns_that_were_given_are_replaced(edit: Callable[[list[str]], list[str]], tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": 300, "n": None}])
    command = suggested("a.jsonl", "out", *edit(["--columns", "n"]), *edit(["--columns", "id:uint16"]))
    assert command == "lightning-streaming convert a.jsonl out --columns n:json --columns id:uint16"
    typed(command)
