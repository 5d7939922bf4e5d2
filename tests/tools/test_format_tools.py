"""Tools on data of other formats that has no index of ours: convert, inspect, verify, copy."""

from __future__ import annotations

import gzip
import json
import shutil
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from pyarrow.parquet import encryption

from lightning_streaming import StreamingDataset
from lightning_streaming.cache.config import CACHE_VARIABLE
from lightning_streaming.formats.index import INDEX_BASENAME
from tests.formats.tar_data import as_plain, image_sample, text_samples, write_members, write_samples
from tests.formats.test_megatron import write as write_documents
from tests.golden import golden_path
from tests.servers import S3Bucket
from tests.tools.running import Outcome, options, run

PARTS = ("--part-size", "1kb", "--workers", 1)
"""Each shard of the source a part, and so a shard."""


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "caches"))


def make(root: Path, kind: str) -> tuple[Path, list[Any]]:
    """Data of a kind, of shards of at least a kilobyte, and what says what it is."""
    source = root / "source"
    source.mkdir()
    if kind == "npy":
        for number, count in enumerate((30, 50, 7)):
            np.save(source / f"{number}.npy", np.random.default_rng(number).standard_normal((count, 40), np.float32))
    elif kind == "npy records":
        records = np.zeros(90, [("label", "<i4"), ("pixels", "u1", (4, 4)), ("name", "U5")])
        records["label"], records["name"] = np.arange(90), "é"
        np.save(source / "a.npy", records[:50])
        np.save(source / "b.npy", records[50:])
    elif kind.startswith("megatron"):
        documents = [[list(range(number, number + 1 + number % 70))] for number in range(90)]
        write_documents(source, documents[:40], "a")
        write_documents(source, documents[40:], "b")
    elif kind.startswith("webdataset"):
        ending = "tar.gz" if "gz" in kind else "tar"
        write_samples(source / f"00.{ending}", text_samples(20))
        write_samples(source / f"more/01.{ending}", text_samples(9, 20))
        return source, ["--format", "webdataset"]
    elif kind == "images":
        write_samples(source / "00.tar", map(image_sample, range(5)))
        return source, ["--format", "webdataset"]
    else:
        shutil.rmtree(source)
        shutil.copytree(golden_path("litdata_0_2_76", kind), source)
        return source, ["--format", "litdata", *(["--block-length", 5] if kind.startswith("tokens") else [])]
    return source, ["--format", kind.split()[0], *(["--block-length", 16] if "blocks" in kind else [])]


KINDS = [
    *("npy", "npy records", "megatron", "megatron blocks", "webdataset", "webdataset gz"),
    *("rows", "records", "mixed", "mixed_chunk", "mixed_batch", "tokens"),
]
LARGE = [kind for kind in KINDS if not kind.startswith(("records", "mixed", "tokens"))]
"""Those of which each shard has a kilobyte, but for the last."""


def columns_of(kind: str) -> tuple[list[str] | None, list[str]]:
    """The columns that are converted, for a dataset and for the tool: MDS has no empty arrays, and no text of None."""
    if kind == "records":
        return None, ["--columns", "id", "--columns", "turns", "--columns", "maybe:json"]
    columns = ["text", "number", "raw", "yes"] if kind.startswith("mixed") else None
    return columns, [word for name in columns or () for word in ("--columns", name)]


def plain(value: Any) -> Any:
    """Something that can be compared, whichever of MDS and the format gave it."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in sorted(value.items())}
    if isinstance(value, Image.Image):
        return value.mode, value.size, value.tobytes()
    if hasattr(value, "tolist"):  # a tensor, an array, a number of numpy
        return np.asarray(value).tolist()
    return value


def read(place: Path, told: list[Any] | None = None, **more: Any) -> list[Any]:
    names = dict(zip(told[::2], told[1::2], strict=True)) if told else {}
    how: dict[str, Any] = {"format": names.get("--format"), "block_length": names.get("--block-length")}
    more = {"shuffle": False, "num_canonical_nodes": 1, "batch_size": 1, **more}
    return [plain(sample) for sample in StreamingDataset(remote=str(place), **how, **more)]


def done(*args: object) -> Outcome:
    outcome = run(*args)
    assert outcome.code == 0, outcome.err
    return outcome


def unpacked(root: Path) -> list[Path]:
    """What tools left in the cache of what they had to unpack."""
    return [path for path in (root / "caches").rglob("*") if path.suffix in (".tar", ".bin")]


# --- convert ---


@pytest.mark.rotate(2)
@pytest.mark.parametrize("kind", LARGE)
def test_what_was_converted_is_read_in_the_same_order(kind: str, tmp_path: Path) -> None:
    source, told = make(tmp_path, kind)
    columns, words = columns_of(kind)
    done("convert", source, tmp_path / "out", *told, *PARTS, *words)
    for settings in ({"num_canonical_nodes": 2}, {"num_canonical_nodes": 1, "shuffle_algo": "py1e"}):
        there = read(source, told, shuffle=True, shuffle_seed=5, columns=columns, **settings)
        assert there == read(tmp_path / "out", shuffle=True, shuffle_seed=5, **settings)
    assert there != read(source, told, columns=columns)


@pytest.mark.rotate(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_converted_has_the_same_samples(kind: str, tmp_path: Path) -> None:
    source, told = make(tmp_path, kind)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    columns, words = columns_of(kind)
    words += ["--json", "--compression", "zstd", "--hashes", "sha1"]
    made = done("convert", source, tmp_path / "out", *told, *words).json
    assert not unpacked(tmp_path)
    found = read(tmp_path / "out")
    assert found == read(source, told, columns=columns)
    assert len(found) == made["samples"]
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


def test_image_files_stay_as_they_are(tmp_path: Path) -> None:
    source, told = make(tmp_path, "images")
    columns = ("png", "left.jpg", "npy", "text", "more.json", "index", "bin")
    words = [word for name in columns for word in ("--columns", name)]
    done("convert", source, tmp_path / "out", *told, *words)
    done("convert", source, tmp_path / "files", *told, "--columns", "png:bytes", "--columns", "left.jpg:bytes")
    files = read(tmp_path / "files")
    assert [sample["png"][:4] for sample in files] == [b"\x89PNG"] * 5
    jpegs = {path.read_bytes() for path in _members(source / "00.tar", tmp_path / "x") if path.name.endswith("jpg")}
    assert {sample["left.jpg"] for sample in files} == jpegs
    assert read(tmp_path / "out") == read(source, told, columns=list(columns))
    failed = run("convert", source, tmp_path / "all", *told)
    assert failed.code == 2
    assert "'npz', which holds what only pickle can hold" in failed.err


def _members(tar: Path, out: Path) -> Iterator[Path]:
    shutil.unpack_archive(tar, out)
    return out.rglob("*")


@pytest.mark.parametrize("limit", [None, 7])
def test_a_conversion_that_was_stopped_goes_on(limit: int | None, tmp_path: Path) -> None:
    source, told = make(tmp_path, "webdataset")
    path = source / "more" / "01.tar"
    sound = path.read_bytes()
    path.write_bytes(sound.replace(b'"number"', b'"number'))  # the index can be made, the samples cannot be read
    parts = PARTS if limit is None else ("--limit", 20 + limit)
    failed = run("convert", source, tmp_path / "out", *told, *parts)
    assert failed.code == 1
    assert "more/01.tar" in failed.err
    assert not (tmp_path / "out" / INDEX_BASENAME).exists()
    path.write_bytes(sound)
    done("convert", source, tmp_path / "out", *told, *parts, "--resume")
    assert read(tmp_path / "out") == read(source, told)[: None if limit is None else 20 + limit]
    other = run("convert", source, tmp_path / "out", "--format", "npy", *parts, "--resume")
    assert other.code == 2


@pytest.mark.nightly
def test_data_on_a_store_is_converted_by_several_processes(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    source, told = make(tmp_path, "npy")
    for path in source.iterdir():
        s3_bucket.put(f"in/{path.name}", path.read_bytes())
    given = options(s3_bucket.options, "--source-options")
    parts = ("--part-size", "1kb", "--workers", 2)
    done("convert", f"{s3_bucket.url}/in", tmp_path / "out", *told, *given, *parts)
    assert read(tmp_path / "out") == read(source, told)
    assert not list((tmp_path / "caches").rglob("*.npy"))


def test_text_of_another_format_is_tokenized(tmp_path: Path) -> None:
    source, told = make(tmp_path, "webdataset")
    words = ("--tokenize", "--tokenizer", "bytes", "--block-length", 64, "--text-column", "txt")
    made = done("convert", source, tmp_path / "out", *told, *words, "--json").json
    assert made["documents"] == 29
    text = "".join(sample["txt"] for sample in read(source, told)).encode()
    assert b"".join(bytes(sample["tokens"]) for sample in read(tmp_path / "out")) == text[: len(text) // 64 * 64]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--from", "csv"], "--from csv and --format npy both define the kind of SOURCE"),
        (["--separator", ";"], "--separator is for CSV"),
        (["--columns", "x"], "there is no column 'x'; the columns of the npy files are values"),
        (["--block-length", 3], "block_length requires arrays of one dimension"),
        (["--eot", "0"], "--eot is for --tokenize"),
    ],
)
def test_what_goes_not_together_is_refused(more: list[Any], words: str, tmp_path: Path) -> None:
    source, told = make(tmp_path, "npy")
    failed = run("convert", source, tmp_path / "out", *told, *more)
    assert failed.code in (1, 2)
    assert words in failed.err


def test_what_no_encoding_of_mds_holds_is_told(tmp_path: Path) -> None:
    source, told = make(tmp_path, "arrays")
    failed = run("convert", source, tmp_path / "out", *told)
    assert failed.code == 2
    assert "'complex64', which holds ndarray:complex64" in failed.err
    write_documents(tmp_path / "empty", [[[1]], [[]]])
    failed = run("convert", tmp_path / "empty", tmp_path / "out", "--format", "megatron")
    assert failed.code == 1
    assert "x.bin, sample 2: the column 'tokens' is ndarray:uint16: expected 1 to 63 dimensions" in failed.err


# --- inspect ---


@pytest.mark.parametrize("kind", KINDS)
def test_data_is_inspected_as_it_lies(kind: str, tmp_path: Path) -> None:
    source, told = make(tmp_path, kind)
    before = sorted(source.rglob("*"))
    shown = done("inspect", source, *told, "--json").json
    assert not unpacked(tmp_path)
    assert shown["samples"] == len(read(source, told))
    assert len(shown["first_samples"]) == 2
    assert [one["format"] for one in shown["formats"]] == [told[1]]
    assert sorted(source.rglob("*")) == before


def test_pickles_are_shown_where_that_is_allowed(tmp_path: Path) -> None:
    write_samples(tmp_path / "s" / "0.tar", [{"__key__": "0", "pyd": {1}, "txt": "x"}])
    shown = done("inspect", tmp_path / "s", "--format", "webdataset", "--json").json["first_samples"][0]["values"]
    assert "--allow-unsafe-types" in shown["pyd"]
    args = ("--format", "webdataset", "--json", "--allow-unsafe-types")
    assert done("inspect", tmp_path / "s", *args).json["first_samples"][0]["values"]["pyd"] == "{1}"
    failed = run("verify", tmp_path / "s", "--format", "webdataset")
    assert failed.code == 2
    assert "column 'pyd' is of encoding pkl" in failed.err
    done("verify", tmp_path / "s", "--format", "webdataset", "--allow-unsafe-types")


def test_a_block_length_needs_a_format(tmp_path: Path) -> None:
    for tool in ("inspect", "verify"):
        failed = run(tool, tmp_path, "--block-length", 5)
        assert failed.code == 2
        assert "give --format with it" in failed.err


# --- verify ---


def encrypted(path: Path) -> None:
    """Write a Parquet file whose footer is plain, and one column of which is encrypted."""

    class Keys(encryption.KmsClient):  # type: ignore[misc]  # pyarrow has no types for it
        def __init__(self, _: object) -> None:
            super().__init__()

        def wrap_key(self, key_bytes: bytes, _: str) -> bytes:
            return b64encode(key_bytes)

    table = pa.table({"id": [1, 2], "secret": [3, 4]})
    how = encryption.EncryptionConfiguration(footer_key="a", column_keys={"b": ["secret"]}, plaintext_footer=True)
    made = encryption.CryptoFactory(Keys).file_encryption_properties(encryption.KmsConnectionConfig(), how)
    with parquet.ParquetWriter(path, table.schema, encryption_properties=made) as writer:
        writer.write_table(table)


def of_later_version(path: Path, before: bytes, after: bytes) -> None:
    """Write a Parquet file with another value in its footer."""
    parquet.write_table(pa.table({"s": ["a", "b"]}), path, store_schema=False)
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert data[start:].count(before) == 1
    path.write_bytes(data[:start] + data[start:].replace(before, after))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (encrypted, "ecrypt"),
        # A list of one column name, then the codec, in Thrift's compact protocol.
        (partial(of_later_version, before=b"\x19\x18\x01s\x15\x02", after=b"\x19\x18\x01s\x15\x28"), "codec"),
        # The type of the only column in the schema.
        (partial(of_later_version, before=b"\x15\x0c%\x02", after=b"\x15\x12%\x02"), "physical column type"),
    ],
)
def test_what_pyarrow_does_not_read_is_not_called_damaged(
    write: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.parquet")
    found = run("verify", tmp_path, "--format", "parquet")
    assert found.code == 2, found
    assert "is not read by pyarrow" in found.err
    assert words in found.err
    assert "damaged" not in found.err


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 1) for kind in KINDS), ("npy", 2), ("webdataset gz", 2), ("mixed_chunk", 2)]
)
def test_sound_data_is_verified(kind: str, workers: int, tmp_path: Path) -> None:
    source, told = make(tmp_path, kind)
    report = done("verify", source, *told, "--json", "--workers", workers).json
    assert not unpacked(tmp_path)
    assert report["sound"]
    assert report["samples"] == len(read(source, told))


@pytest.mark.parametrize("kind", ["webdataset", "webdataset gz"])
def test_a_damaged_member_is_named(kind: str, tmp_path: Path) -> None:
    source, told = make(tmp_path, "webdataset")
    damaged = source / "more" / "01.tar"
    damaged.write_bytes(damaged.read_bytes().replace(b'"number": 21', b'"number": x1'))
    if "gz" in kind:
        for path in sorted(source.rglob("*.tar")):
            path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    report = run("verify", source, *told, "--json")
    assert report.code == 1
    (bad,) = report.json["bad_shards"]
    assert (bad["shard"], bad["first_sample"]) == (1, 20)
    assert bad["problems"][0]["file"] == "more/01.tar"
    assert bad["problems"][0]["problem"].startswith("sample 1, member 'some/000021.json': expected JSON")


def test_data_on_a_store_is_verified_and_damage_named(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    source, told = make(tmp_path, "webdataset gz")
    for path in source.rglob("*.tar.gz"):
        s3_bucket.put(path.relative_to(source).as_posix(), path.read_bytes())
    given = options(s3_bucket.options)
    assert done("verify", s3_bucket.url, *told, *given, "--json").json["samples"] == 29
    assert not (tmp_path / "caches").exists()


def test_what_an_index_says_of_files_that_have_changed_is_told(tmp_path: Path) -> None:
    source, told = make(tmp_path, "npy")
    done("index", source, *told)
    np.save(source / "1.npy", np.zeros((50, 20), np.float64))  # as many bytes
    report = run("verify", source, *told, "--json")
    assert report.code == 1
    assert [bad["shard"] for bad in report.json["bad_shards"]] == [1]
    repaired = run("verify", source, *told, "--repair", tmp_path)
    assert repaired.code == 2
    assert "format='npy'" in repaired.err


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["webdataset gz", "megatron"])
def test_bad_files_are_fetched_again_where_there_is_an_index(kind: str, tmp_path: Path) -> None:
    source, told = make(tmp_path, kind)
    done("index", source, *told)
    shutil.copytree(source, tmp_path / "sound")
    bad = source / ("00.tar.gz" if "gz" in kind else "b.idx")
    bad.write_bytes(bad.read_bytes()[:-30] + bytes(30))
    assert run("verify", source).code == 1
    report = done("verify", source, "--repair", tmp_path / "sound", "--json").json
    assert [one["repaired"] for one in report["bad_shards"]] == [True]
    assert bad.read_bytes() == (tmp_path / "sound" / bad.name).read_bytes()
    assert (source / f"{bad.name}.damaged").is_file()
    done("verify", source)


# --- copy ---


@pytest.mark.rotate(3)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_read_like_their_source(kind: str, tmp_path: Path) -> None:
    source, told = make(tmp_path, kind)
    (source / "notes.md").write_text("of no part")
    report = done("copy", source, tmp_path / "copy", *told, "--json").json
    assert report["complete"]
    assert not (tmp_path / "copy" / "notes.md").exists()
    assert read(tmp_path / "copy", told) == read(source, told)
    if told[1] != "litdata":
        assert read(tmp_path / "copy") == read(source, told)  # by the index that came along
        assert not (source / INDEX_BASENAME).exists()
    again = done("copy", source, tmp_path / "copy", *told, "--json", "--exist-ok").json
    assert again["complete"]
    done("verify", tmp_path / "copy", *told)


def test_a_file_that_holds_several_shards_is_copied_once(tmp_path: Path) -> None:
    source, told = make(tmp_path, "npy")
    done("index", source, *told)
    index = json.loads((source / INDEX_BASENAME).read_text())
    whole = gzip.compress(b"of all")
    (source / "whole").write_bytes(whole)
    for number, shard in enumerate(index["shards"]):
        shard["raw_data"] = {"basename": f"whole.rows/{number}", "bytes": 6, "hashes": {}}
        shard["zip_data"] = {"basename": "whole", "bytes": len(whole), "hashes": {}}
        shard["compression"] = "gz"
    (source / INDEX_BASENAME).write_text(json.dumps(index))
    report = done("copy", source, tmp_path / "copy", "--json").json
    assert (report["files"], report["copied"], report["copied_bytes"]) == (1, 1, len(whole))
    assert (tmp_path / "copy" / "whole").read_bytes() == whole


def test_of_several_shards_the_damaged_one_is_not_copied(tmp_path: Path) -> None:
    source, told = make(tmp_path, "webdataset gz")
    (source / "00.tar.gz").write_bytes((source / "00.tar.gz").read_bytes()[:-5])
    failed = run("copy", source, tmp_path / "copy", *told)
    assert failed.code == 1
    assert "00.tar.gz" in failed.err


def test_samples_that_lack_a_member_are_told(tmp_path: Path) -> None:
    write_members(tmp_path / "s" / "0.tar", [("0.txt", b"a"), ("0.cls", b"1"), ("1.txt", b"b")])
    assert done("verify", tmp_path / "s", "--format", "webdataset", "--json").json["sound"]
    failed = run("convert", tmp_path / "s", tmp_path / "out", "--format", "webdataset")
    assert failed.code == 1
    assert "0.tar, sample 1, '1': it has no member .cls" in failed.err
    assert as_plain(read(tmp_path / "s", ["--format", "webdataset"])[1]) == {"__key__": "1", "txt": "b"}


# --- merge ---


def below(tmp_path: Path, kind: str) -> tuple[Path, list[Any]]:
    """Two parts of a kind below one directory, a and b."""
    for name in "ba":
        (tmp_path / "all" / name).mkdir(parents=True)
        (tmp_path / name).mkdir()
        source, told = make(tmp_path / name, kind)
        shutil.copytree(source, tmp_path / "all" / name, dirs_exist_ok=True)
    return tmp_path / "all", told


@pytest.mark.rotate(2)
@pytest.mark.parametrize("kind", ["npy", "megatron", "webdataset gz", "mixed", "mixed_chunk", "tokens"])
@pytest.mark.parametrize("indexed", ["", "a", "ab"])
def test_parts_become_one_dataset_with_or_without_indexes(kind: str, indexed: str, tmp_path: Path) -> None:
    root, told = below(tmp_path, kind)
    for name in indexed if told[1] != "litdata" else "":
        done("index", root / name, *told)
    merged = done("merge", root, *told, "--json").json
    parts = [read(root / name, told) for name in "ab"]
    assert merged["samples"] == sum(map(len, parts))
    assert read(root) == read(root, told) == [*parts[0], *parts[1]]
    done("merge", root, root / "b", root / "a", *told)
    assert read(root) == [*parts[1], *parts[0]]
    done("verify", root)


def test_parts_on_a_store_are_merged_and_files_that_were_added_noticed(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    root, told = below(tmp_path, "npy")
    for path in root.rglob("*.npy"):
        s3_bucket.put(f"all/{path.relative_to(root).as_posix()}", path.read_bytes())
    given = options(s3_bucket.options)
    assert done("merge", f"{s3_bucket.url}/all", *told, *given, "--json").json["shards"] == 6
    s3_bucket.put("all/c/0.npy", (root / "a" / "0.npy").read_bytes())
    merged = done("merge", f"{s3_bucket.url}/all", *told, *given, "--json").json
    assert (merged["shards"], merged["samples"]) == (7, 204)


def test_what_is_of_two_formats_is_not_merged(tmp_path: Path) -> None:
    root, told = below(tmp_path, "npy")
    (tmp_path / "tars").mkdir()
    tars, _ = make(tmp_path / "tars", "webdataset")
    shutil.copytree(tars, root / "c")
    for name, words in (("a", told), ("c", ["--format", "webdataset"])):
        done("index", root / name, *words)
    failed = run("merge", root)
    assert failed.code == 2
    assert "a/0.npy has format npy, c/00.tar has format webdataset" in failed.err
    assert "lightning-streaming convert" in failed.err
    done("convert", root / "b", root / "d", *told)
    failed = run("merge", root, root / "a", root / "d")
    assert failed.code == 2
    assert "has format npy" in failed.err
    assert "has format mds" in failed.err
    assert not (root / INDEX_BASENAME).exists()


def test_blocks_of_two_lengths_are_not_merged(tmp_path: Path) -> None:
    root, _ = below(tmp_path, "megatron")
    done("index", root / "a", "--format", "megatron", "--block-length", 16)
    done("index", root / "b", "--format", "megatron", "--block-length", 8)
    failed = run("merge", root)
    assert failed.code == 2
    assert "a/a.bin has format megatron with block_length 16" in failed.err
    assert "b/a.bin has format megatron with block_length 8" in failed.err


def test_an_index_of_another_library_is_not_replaced_by_a_merged_one(tmp_path: Path) -> None:
    source, told = make(tmp_path, "mixed")
    shutil.copytree(source, source / "more")
    before = (source / INDEX_BASENAME).read_bytes()
    failed = run("merge", source, source / "more", *told)
    assert failed.code == 2
    assert "is of another library, and is not replaced; read that directory and others as streams" in failed.err
    assert (source / INDEX_BASENAME).read_bytes() == before
    without = run("merge", source)
    assert 'read it with format="litdata"' in without.err


def test_a_part_that_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    root, told = below(tmp_path, "npy")
    failed = run("merge", root, tmp_path / "a" / "source", *told)
    assert failed.code == 2
    assert "a part must be below" in failed.err


def test_samples_and_lengths_are_told_of_data_as_it_lies(tmp_path: Path) -> None:
    rows = pa.table({"id": range(20), "tokens": [[0] * (one % 4) for one in range(20)]})
    parquet.write_table(rows, tmp_path / "a.parquet", row_group_size=5)
    place = [tmp_path / "*.parquet", "--format", "parquet"]
    selected = done("select", *place, "--fraction", "0%:50%", "--json").json
    assert (selected["samples"], selected["shards"]) == (20, 4)
    assert selected["stream"]["format"] == "parquet"
    told = done("lengths", *place, "--column", "tokens", "--json").json
    assert (told["documents"], told["tokens"]) == (20, 30)
    packed = StreamingDataset(remote=str(place[0]), format="parquet", packing={"column": "tokens", "capacity": 6})
    assert packed.size
    assert done("lengths", *place, "--column", "tokens", "--json").json["was_kept"]
    for tool in ("select", "lengths"):
        refused = run(tool, "--config", "run.yaml", "--format", "parquet")
        assert (refused.code, "leave --format out" in refused.err) == (2, True)
    assert "files like a.parquet are read with --format parquet" in run("verify", tmp_path).err


def test_of_row_groups_the_file_is_named(tmp_path: Path) -> None:
    rows = pa.table({"tokens": [[1], [2], [3, None]]})
    parquet.write_table(rows, tmp_path / "a.parquet", row_group_size=1)
    (bad,) = run("verify", tmp_path, "--format", "parquet", "--json").json["bad_shards"]
    assert bad["problems"][0]["file"] == "a.parquet"
    assert bad["problems"][0]["problem"].startswith("row group 2 of a.parquet, sample 0, column 'tokens'")
