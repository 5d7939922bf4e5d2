"""``lightning-streaming verify``, what it repairs, and what nobody meant to be read: refused in words."""

from __future__ import annotations

import gzip
import io
import os
import random
import shutil
import struct
import tarfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from PIL import Image
from pyarrow import parquet

from lightning_streaming.formats.index import dump_index
from lightning_streaming.tools import verify
from lightning_streaming.tools.console import first_few
from lightning_streaming.tools.stored.stored_dataset import unnamed_files
from lightning_streaming.writing.writers import MDSWriter
from tests.golden import golden_path
from tests.servers import S3Store
from tests.tools.running import contents, flip_byte, options, put, read_index, run, run_process, write_texts

GOLDEN = sorted(path.name for path in golden_path("mds").iterdir() if path.is_dir())


def problems(directory: Path | str, *args: object) -> dict[int, list[str]]:
    """What verify reports, by shard."""
    found = run("verify", directory, "--json", *args)
    assert found.code == (1 if found.json["bad_shards"] else 0)
    assert found.json["sound"] == (not found.json["bad_shards"])
    return {bad["shard"]: [one["problem"] for one in bad["problems"]] for bad in found.json["bad_shards"]}


@pytest.mark.rotate(9)
@pytest.mark.parametrize("dataset", GOLDEN)
def test_golden_datasets_are_sound(dataset: str) -> None:
    args = ["--allow-unsafe-types"] if dataset == "pickle" else []
    found = run("verify", golden_path("mds", dataset), "--json", *args)
    assert (found.code, found.err) == (0, "")
    assert found.json["sound"] is True
    assert problems(golden_path("mds", dataset), "--quick") == {}


def test_a_sound_dataset_is_one_line(tmp_path: Path) -> None:
    index = write_texts(tmp_path)
    found = run("verify", tmp_path)
    assert found.code == 0
    assert found.out.startswith(f"{tmp_path}: {len(index.shards)} shards, 25 samples, ")
    assert found.out.endswith("; everything checked, all sound\n")
    assert run("verify", tmp_path, "--quick").out.endswith("; sizes and hashes checked, all sound\n")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_no_hashes_leave_unchecked_is_said(tmp_path: Path, compression: str | None) -> None:
    write_texts(tmp_path / "none", hashes=None, compression=compression)
    full, quick = run("verify", tmp_path / "none"), run("verify", tmp_path / "none", "--quick")
    assert (full.code, quick.code) == (0, 0)
    assert "; sizes and samples checked, nothing wrong found\nno hashes are recorded, so changed bytes " in full.out
    assert "write with --hashes sha1" in full.out
    assert "; sizes checked, nothing wrong found\nno hashes are recorded, so changed bytes " in quick.out
    assert "sound" not in full.out + quick.out
    assert run("verify", tmp_path / "none", "--json").json["shards_without_hashes"] > 0
    write_texts(tmp_path / "some", compression=compression)
    assert run("verify", tmp_path / "some", "--json").json["shards_without_hashes"] == 0
    first, *others = read_index(tmp_path / "some").shards
    packed = first.zip_data and replace(first.zip_data, hashes={})
    mixed = [replace(first, raw_data=replace(first.raw_data, hashes={}), zip_data=packed), *others]
    (tmp_path / "some" / "index.json").write_bytes(dump_index(mixed))
    shown = run("verify", tmp_path / "some").out
    assert "; everything checked, nothing wrong found\n" in shown
    assert f"no hashes are recorded of 1 of the {len(mixed)} shards" in shown


def test_every_bad_shard_is_told_with_what_is_wrong(tmp_path: Path) -> None:
    index = write_texts(tmp_path, 60)
    paths = [tmp_path / shard.raw_data.basename for shard in index.shards]
    assert len(paths) >= 5
    paths[0].unlink()
    flip_byte(paths[2])
    with paths[4].open("ab") as file:
        file.write(b"more")
    found = problems(tmp_path)
    assert found.keys() == {0, 2, 4}
    assert found[0] == ["the file is missing"]
    assert found[2][0].startswith("sha1 of shard.00002.mds must be ")
    size = index.shards[4].raw_data.bytes
    assert found[4] == [f"must have {size:,} bytes, but has {size + 4:,}"]
    shown = run("verify", tmp_path)
    assert shown.code == 1
    assert f"3 of {len(paths)} shards bad; everything checked" in shown.out
    first = index.shards[0].samples
    assert f"shard 0, samples 0 to {first - 1}" in " ".join(shown.out.split())


@pytest.mark.rotate(2)
@pytest.mark.parametrize("compression", [None, "zstd", "gz"])
def test_every_byte_of_a_shard_is_watched_over(tmp_path: Path, compression: str | None) -> None:
    index = write_texts(tmp_path, 3, compression=compression)
    (path,) = tmp_path.glob("shard.*")
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        flip_byte(path, position)
        assert problems(tmp_path).keys() == {0}
        path.write_bytes(whole)
    assert problems(tmp_path) == {}
    assert len(index.shards) == 1


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_without_hashes_offsets_and_samples_tell(tmp_path: Path, compression: str | None) -> None:
    write_texts(tmp_path / "other", 3, hashes=None, compression=compression)
    index = write_texts(tmp_path / "data", 3, hashes=None, size_limit=None)
    path = tmp_path / "data" / index.shards[0].raw_data.basename
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + struct.pack("<I", 5) + whole[8:])
    assert "must hold its samples between" in problems(tmp_path / "data")[0][0]
    assert problems(tmp_path / "data", "--quick") == {}, "sizes are right, and there are no hashes"
    start = whole.index(b"text 001")
    path.write_bytes(whole[:start] + b"\xff" + whole[start + 1 :])
    (words,) = problems(tmp_path / "data")[0]
    assert words.startswith("sample 1: ")


def test_of_many_bad_samples_a_few_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    index = write_texts(tmp_path, 10, hashes=None, size_limit=None)
    path = tmp_path / index.shards[0].raw_data.basename
    path.write_bytes(path.read_bytes().replace(b"text", b"\xff\xff\xff\xff"))
    words = problems(tmp_path)[0]
    assert [one[:9] for one in words[:3]] == ["sample 0:", "sample 1:", "sample 2:"]
    assert words[3:] == ["and 7 more of 10 samples cannot be decoded"]


def test_a_compressed_shard_that_holds_something_else_is_bad(tmp_path: Path) -> None:
    """The stored file is as promised; what is in it is not."""
    write_texts(tmp_path / "data", 5, compression="zstd")
    other = write_texts(tmp_path / "other", 6, compression="zstd")
    index = read_index(tmp_path / "data")
    mixed = replace(index.shards[0], zip_data=other.shards[0].zip_data)
    shutil.copy(tmp_path / "other" / "shard.00000.mds.zstd", tmp_path / "data")
    (tmp_path / "data" / "index.json").write_bytes(dump_index([mixed]))
    assert "cannot be decompressed" in problems(tmp_path / "data")[0][0]
    assert problems(tmp_path / "data", "--quick") == {}


def test_pixels_of_images_are_decoded(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path, columns={"image": "png", "images": "list[png]"}) as writer:
        picture = Image.effect_noise((64, 64), 50)
        writer.write({"image": picture, "images": [picture]})
    (path,) = tmp_path.glob("shard.*")
    assert problems(tmp_path) == {}
    data = path.read_bytes()
    for position in (data.index(b"IDAT") + 60, data.rindex(b"IDAT") + 60):
        flip_byte(path, position)
        assert problems(tmp_path)[0][0].startswith("sample 0: ")
        path.write_bytes(data)


@pytest.mark.parametrize("cut", [1, 4, 8, 12, 16, 20])
def test_an_image_that_was_cut_behind_its_pixels_is_named(tmp_path: Path, cut: int) -> None:
    file = io.BytesIO()
    Image.effect_noise((32, 32), 50).save(file, "PNG")
    with MDSWriter(out=tmp_path, columns={"image": "png"}) as writer:
        writer.write({"image": file.getvalue()})
        writer.write({"image": file.getvalue()[:-cut]})
    assert "sample 1: expected a whole PNG file, but this one was cut off" in problems(tmp_path)[0][0]


@pytest.mark.parametrize("compression", [None, "gz"])
def test_an_index_with_a_hash_that_there_is_not_is_named_and_fetched(tmp_path: Path, compression: str | None) -> None:
    write_texts(tmp_path / "good", compression=compression)
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    index = tmp_path / "bad" / "index.json"
    index.write_text(index.read_text().replace("sha1", "md6"))
    for command in (("verify",), ("verify", "--quick"), ("copy", tmp_path / "copied")):
        verb, *more = command
        outcome = run(verb, tmp_path / "bad", *more)
        assert outcome.code == 1
        assert f"{tmp_path / 'bad'}" in outcome.err
        assert "an unknown hash 'md6' of shard.00000.mds" in outcome.err
        assert "an unknown hash 'md6'" in outcome.err
    assert run("verify", tmp_path / "bad", "--repair", tmp_path / "good").code == 0
    assert index.read_bytes() == (tmp_path / "good" / "index.json").read_bytes()
    assert run("verify", tmp_path / "good").code == 0


def test_a_cache_of_raw_files_is_checked_too(tmp_path: Path) -> None:
    """A cache keeps what it decompressed, and not what it fetched."""
    index = write_texts(tmp_path, compression="zstd", hashes=["sha1", "xxh64"])
    for shard in index.shards:
        assert shard.zip_data is not None
        stored = tmp_path / shard.zip_data.basename
        raw = zstandard.ZstdDecompressor().decompress(stored.read_bytes(), max_output_size=shard.raw_data.bytes)
        (tmp_path / shard.raw_data.basename).write_bytes(raw)
        if shard != index.shards[0]:
            stored.unlink()
    assert problems(tmp_path) == {}
    flip_byte(tmp_path / "shard.00001.mds")
    assert problems(tmp_path).keys() == {1}


def test_processes_find_what_one_finds(tmp_path: Path) -> None:
    index = write_texts(tmp_path, 60)
    flip_byte(tmp_path / index.shards[3].raw_data.basename)
    alone = run_process("verify", tmp_path, "--json", "--workers", 1)
    together = run_process("verify", tmp_path, "--json", "--workers", 2)
    assert alone.code == together.code == 1
    assert alone.json == together.json
    assert [bad["shard"] for bad in together.json["bad_shards"]] == [3]
    assert together.err == ""


class KilledPool(ProcessPoolExecutor):
    """A pool of which a process is dead before it gets work."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        super().submit(os._exit, 1).exception()
        return super().submit(fn, *args, **kwargs)


def test_a_process_that_is_killed_before_it_gets_work_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path)
    monkeypatch.setattr(verify, "ProcessPoolExecutor", KilledPool)
    ended = run("verify", tmp_path, "--workers", 2)
    assert ended.code == 2
    assert "one of 2 processes was killed" in ended.err


@pytest.mark.nightly
def test_on_a_store_as_in_a_directory(tmp_path: Path, s3: S3Store) -> None:
    index = write_texts(tmp_path, compression="zstd")
    bucket = s3.make_bucket()
    put(tmp_path, bucket, s3.options)
    assert problems(bucket, *options(s3.options)) == {}
    flip_byte(tmp_path / "shard.00001.mds.zstd")
    put(tmp_path, bucket, s3.options)
    found = problems(bucket, *options(s3.options))
    assert found.keys() == {1}
    assert "sha1 of shard.00001.mds.zstd must be" in found[1][0]
    assert len(index.shards) > 2


def test_a_store_that_does_not_answer_is_no_bad_dataset(tmp_path: Path, s3: S3Store) -> None:
    bucket = s3.make_bucket()
    refused = run("verify", f"{bucket}/nothing", *options(s3.options))
    assert refused.code == 2
    assert "no such object" in refused.err


def test_pickles_are_not_run_unasked(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path, columns={"any": "pkl"}) as writer:
        writer.write({"any": 1})
    refused = run("verify", tmp_path)
    assert refused.code == 2
    assert "--allow-unsafe-types" in refused.err
    assert problems(tmp_path, "--quick") == {}
    assert problems(tmp_path, "--allow-unsafe-types") == {}


def test_a_damaged_index_is_something_bad(tmp_path: Path) -> None:
    write_texts(tmp_path)
    (tmp_path / "index.json").write_bytes(b'{"version": 2}')
    refused = run("verify", tmp_path)
    assert refused.code == 1
    assert "'shards' is missing" in refused.err


def test_nothing_is_written_where_it_looks(tmp_path: Path) -> None:
    write_texts(tmp_path, compression="gz")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert problems(tmp_path) == {}
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


class TestRepair:
    @pytest.fixture
    def place(self, tmp_path: Path) -> tuple[Path, Path]:
        """A dataset, and a copy of it."""
        write_texts(tmp_path / "source", 60, compression="zstd")
        shutil.copytree(tmp_path / "source", tmp_path / "copy")
        return tmp_path / "source", tmp_path / "copy"

    def test_bad_and_missing_files_are_fetched_again(self, place: tuple[Path, Path]) -> None:
        source, copy = place
        flip_byte(copy / "shard.00001.mds.zstd")
        (copy / "shard.00003.mds.zstd").unlink()
        bad = (copy / "shard.00001.mds.zstd").read_bytes()
        found = run("verify", copy, "--repair", source, "--json")
        assert found.code == 0
        assert found.json["sound"] is True
        assert [shard["kept_aside"] for shard in found.json["bad_shards"]] == [["shard.00001.mds.zstd.damaged"], []]
        assert problems(copy) == {}
        aside = copy / "shard.00001.mds.zstd.damaged"
        assert aside.read_bytes() == bad
        aside.unlink()
        assert contents(copy) == contents(source)

    def test_it_says_so(self, place: tuple[Path, Path]) -> None:
        source, copy = place
        flip_byte(copy / "shard.00001.mds.zstd")
        shown = run("verify", copy, "--repair", source)
        assert shown.code == 0
        assert "repaired: shard 1" in shown.out
        assert "kept aside, to be removed when you like: shard.00001.mds.zstd.damaged" in shown.out
        assert "to write again" not in shown.out

    def test_what_is_kept_aside_is_never_written_over(self, place: tuple[Path, Path]) -> None:
        source, copy = place
        for _ in range(3):
            flip_byte(copy / "shard.00001.mds.zstd")
            assert run("verify", copy, "--repair", source).code == 0
        names = {path.name for path in copy.glob("*damaged*")}
        assert names == {f"shard.00001.mds.zstd.damaged{end}" for end in ("", ".2", ".3")}

    def test_a_source_that_is_no_better_changes_nothing(self, place: tuple[Path, Path]) -> None:
        source, copy = place
        flip_byte(copy / "shard.00001.mds.zstd")
        flip_byte(source / "shard.00001.mds.zstd", 3)
        (copy / "shard.00002.mds.zstd").unlink()
        (source / "shard.00002.mds.zstd").unlink()
        before = contents(copy)
        found = run("verify", copy, "--repair", source, "--json")
        assert found.code == 1
        assert [bad["repaired"] for bad in found.json["bad_shards"]] == [False, False]
        assert "sha1" in found.json["bad_shards"][0]["not_repaired_because"]
        assert contents(copy) == before
        assert "shard 1 not repaired: " in run("verify", copy, "--repair", source).out

    def test_other_samples_of_the_same_size_are_not_taken(self, tmp_path: Path) -> None:
        """No hash tells them apart, but their offsets do not fit the file's promises."""
        index = write_texts(tmp_path / "data", 3, hashes=None, size_limit=None)
        shutil.copytree(tmp_path / "data", tmp_path / "other")
        name = index.shards[0].raw_data.basename
        (tmp_path / "other" / name).write_bytes(bytes(index.shards[0].raw_data.bytes))
        (tmp_path / "data" / name).unlink()
        found = run("verify", tmp_path / "data", "--repair", tmp_path / "other", "--json")
        assert found.code == 1
        assert "has it no better" in found.json["bad_shards"][0]["not_repaired_because"]
        assert not (tmp_path / "data" / name).exists()

    def test_a_missing_or_damaged_index_is_fetched(self, place: tuple[Path, Path]) -> None:
        source, copy = place
        (copy / "index.json").write_text("{")
        found = run("verify", copy, "--repair", source, "--json")
        assert found.code == 0
        assert found.json["index_repaired"] is True
        assert (copy / "index.json.damaged").read_text() == "{"
        (copy / "index.json").unlink()
        assert run("verify", copy, "--repair", source).out.startswith("The index was missing or damaged")
        assert (copy / "index.json").read_bytes() == (source / "index.json").read_bytes()

    def test_from_a_store(self, place: tuple[Path, Path], s3: S3Store) -> None:
        source, copy = place
        bucket = s3.make_bucket()
        put(source, bucket, s3.options)
        flip_byte(copy / "shard.00000.mds.zstd")
        assert run("verify", copy, "--repair", bucket, *options(s3.options)).code == 0
        assert problems(copy) == {}

    def test_raw_files_of_a_cache_are_decompressed_again(self, place: tuple[Path, Path]) -> None:
        source, copy = place
        stored = copy / "shard.00000.mds.zstd"
        raw = zstandard.ZstdDecompressor().decompress(stored.read_bytes())
        stored.unlink()
        (copy / "shard.00000.mds").write_bytes(raw[:-1] + b"?")
        assert run("verify", copy, "--repair", source).code == 0
        assert (copy / "shard.00000.mds").read_bytes() == raw
        assert not stored.exists()

    def test_split_shards_have_both_files_repaired(self, tmp_path: Path) -> None:
        shutil.copytree(golden_path("mds", "csv"), tmp_path / "csv")
        meta, data = sorted((tmp_path / "csv").glob("shard.00001*"), reverse=True)
        flip_byte(meta, 5)
        data.unlink()
        assert run("verify", tmp_path / "csv", "--repair", golden_path("mds", "csv")).code == 0
        assert contents(tmp_path / "csv").items() >= contents(golden_path("mds", "csv")).items()

    @pytest.mark.parametrize("itself", [True, False])
    def test_what_cannot_be_repaired_is_refused(self, place: tuple[Path, Path], itself: bool, s3: S3Store) -> None:
        source, _ = place
        refused = run("verify", source if itself else "s3://bucket/data", "--repair", source, *options(s3.options))
        assert refused.code == 2
        assert ("from itself" if itself else "only a directory can be repaired") in refused.err


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


def test_only_what_looks_like_a_shard_and_is_not_named_is_found(tmp_path: Path) -> None:
    index = write_texts(tmp_path / "data", compression="zstd")
    named = list(contents(tmp_path / "data"))
    stray = [
        "shard.00009.mds",
        "shard.00000.mds.zstd.damaged",
        "shard.00000.mds.zstd.damaged.2",
        "shard.00003.mds.node-1-2.part",
        "gone/shard.00000.csv.meta",
    ]
    fine = [
        "README.md",
        "shard.00000.mds",  # decompressed, as in a cache
        "index.json.copying",
        "parts.plan",
        ".writing/shard.00000.mds.zstd",
        "val/index.json",
        "val/shard.00000.mds",
        "val/deeper/shard.00000.mds",
    ]
    assert unnamed_files([*named, *stray, *fine], index) == sorted(stray)
    assert unnamed_files([], index) == []


def test_a_few_are_shown() -> None:
    assert first_few(["a"]) == "1 file (a)"
    assert first_few(list("abcdefg")) == "7 files (a, b, c, d, e, ...)"


def test_a_dataset_in_parts_names_all(tmp_path: Path) -> None:
    for part in ("one", "two"):
        write_texts(tmp_path / "all" / part)
    run("merge", tmp_path / "all")
    found = run("verify", tmp_path / "all", "--json")
    assert (found.code, found.json["unnamed_files"]) == (0, [])
    (tmp_path / "all" / "shard.00000.mds").write_bytes(b"")
    assert run("verify", tmp_path / "all", "--json").json["unnamed_files"] == ["shard.00000.mds"]
