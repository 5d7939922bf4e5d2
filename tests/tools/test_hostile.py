"""Sources and datasets that nobody meant to be read: each is refused in words, and leaves no dataset."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.tools.running import run, write_texts

ENDINGS = ["jsonl", "jsonl.gz", "csv", "csv.gz", "tsv", "parquet", "tar", "tar.gz", "txt"]
_NOISE = random.Random(7).randbytes(600)
_LINES = b'{"a": 1, "t": "x"}\n' * 50


def _parquet(stop: int) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table({"a": list(range(1000))}), file)
    return file.getvalue()[:stop]


def _tar(name: str, stop: int | None = None, data: bytes = b"junk") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return file.getvalue()[:stop]


SOURCES: dict[str, bytes] = {
    **{f"noise.{ending}": _NOISE for ending in ENDINGS},
    **{f"empty.{ending}": b"" for ending in ENDINGS if ending != "txt"},
    **{f"zeros.{ending}": bytes(1000) for ending in ENDINGS if ending != "txt"},
    **{f"cut{stop}.parquet": _parquet(stop) for stop in (4, 20, 1000, -9, -1)},
    **{f"cut{stop}.tar": _tar("1.txt", stop) for stop in (100, 512, 513, 1024)},
    "cut.jsonl": _LINES[:-5],
    "cut.jsonl.gz": gzip.compress(_LINES)[:-7],
    "behind.jsonl.gz": gzip.compress(_LINES) + b"junk",
    "utf16.jsonl": _LINES.decode().encode("utf-16"),
    "utf16.txt": "hé".encode("utf-16"),
    "latin.csv": "a,b\né,ü\n".encode("latin-1"),
    "digits.jsonl": b'{"a": 1' + b"0" * 5000 + b"}\n",
    "deep.jsonl": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "surrogate.jsonl": b'{"a": "\\ud800"}\n',
    "array.jsonl": b"[1]\n",
    "number.jsonl": b"3\n",
    "null.jsonl": b"null\n",
    "nothing.jsonl": b"{}\n",
    "kinds.jsonl": b'{"a": 1}\n[1]\n',
    "open.csv": b'a,b\n"x,1\n',
    "twice.csv": b"a,a\n1,2\n",
    "short.csv": b"a,b\n1\n",
    "headless.csv": b"\n1,2\n",
    "mark.csv": b"\xef\xbb\xbf",
    "nameless.tar": _tar("nameless"),
    "array.tar": _tar("1.npy"),
    "json.tar": _tar("1.json"),
    "image.tar": _tar("1.png", data=b"\x89PNG\r\n\x1a\n"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_cannot_be_read_is_refused_in_words(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(SOURCES[name])
    outcome = run("convert", tmp_path / name, tmp_path / "out")
    assert outcome.code in (1, 2)
    assert "lightning-streaming convert: error: " in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("kind", ["folder", "dangling", "loop", "nowhere", "long"])
def test_what_is_no_file_is_refused_in_words(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x" * 5000 if kind == "long" else f"{kind}.jsonl")
    if kind == "folder":
        path.mkdir()
    elif kind in ("dangling", "loop"):
        path.symlink_to(path if kind == "loop" else tmp_path / "gone")
    outcome = run("convert", path, tmp_path / "out")
    assert outcome.code == 2
    assert "error: " in outcome.err
    for tool in ("inspect", "verify", "merge"):
        assert run(tool, path).code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["-dash.jsonl", "glob[1].jsonl", "a b.jsonl", "é ☃.jsonl", "line\nbreak.jsonl", "x\udcff.jsonl"]
)
def test_a_source_may_have_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(_LINES)
    assert run("convert", tmp_path / name, tmp_path / "out", "--json").json["samples"] == 50


INDEXES = [
    "{}",
    "[]",
    "null",
    '{"version": 99, "shards": []}',
    '{"version": 2, "shards": [{}]}',
    "\ufeff{}",
    "[" * 100_000,
]


@pytest.mark.parametrize("text", INDEXES, ids=range(len(INDEXES)))
def test_an_index_that_is_none_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    for tool in ("inspect", "verify"):
        outcome = run(tool, tmp_path)
        assert outcome.code == 1
        assert f"{tmp_path}/index.json" in outcome.err


@pytest.mark.parametrize("compression", [None, "gz"])
@pytest.mark.parametrize("damage", ["cut", "noise", "nothing", "flip", "more", "folder"])
def test_a_damaged_shard_is_told_and_never_a_traceback(tmp_path: Path, damage: str, compression: str | None) -> None:
    write_texts(tmp_path, compression=compression)
    shard = sorted(tmp_path.glob("shard.*"))[0]
    data = shard.read_bytes()
    changed = {"cut": data[:-9], "noise": _NOISE, "nothing": b"", "flip": data[:-1] + bytes([data[-1] ^ 1])}
    shard.unlink()
    if damage == "folder":
        shard.mkdir()
    else:
        shard.write_bytes(changed.get(damage, data + b"junk"))
    assert run("verify", tmp_path, "--json").code in ((1, 2) if damage == "folder" else (1,))
    assert run("inspect", tmp_path).code in (0, 1, 2)
