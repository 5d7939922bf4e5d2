"""``lightning-streaming inspect``, what an index adds up to, and where a dataset is."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, IndexFormatError, ObjectNotFoundError
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.tools.stored.stored_dataset import find_dataset
from lightning_streaming.tools.stored.summary import histogram, summarize
from lightning_streaming.writing.writers import MDSWriter
from tests.golden import golden_path
from tests.servers import HttpStore, S3Store
from tests.tiers import examples
from tests.tools.running import options, put, read_index, run, write_texts

GOLDEN = sorted(path.name for path in golden_path("mds").iterdir() if path.is_dir())


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.rotate(3)
@pytest.mark.parametrize("dataset", GOLDEN)
def test_golden_datasets_are_shown_here_and_from_a_store_alike(dataset: str, s3: S3Store) -> None:
    directory, bucket = golden_path("mds", dataset), s3.make_bucket()
    put(directory, bucket, s3.options)
    here = run("inspect", directory, "--json", "--samples", 7)
    there = run("inspect", bucket, "--json", "--samples", 7, *options(s3.options))
    assert (here.code, here.err, there.code, there.err) == (0, "", 0, "")
    assert here.json | {"dataset": bucket} == there.json
    expected = json.loads(golden_path("mds", "expected.json").read_bytes())[dataset]
    assert here.json["samples"] == len(expected["samples"])
    for shown, written in zip(here.json["first_samples"], expected["samples"], strict=False):
        assert shown["values"].keys() == written.keys()
    assert len(here.json["first_samples"]) == min(7, here.json["samples"])


def test_numbers_are_those_of_the_index(tmp_path: Path) -> None:
    index = write_texts(tmp_path / "data", compression="zstd:3", hashes=["md5", "sha1"])
    shown = run("inspect", tmp_path / "data" / "index.json", "--json").json
    assert shown["dataset"] == str(tmp_path / "data")
    assert (shown["samples"], shown["shards"]) == (25, len(index.shards))
    assert shown["raw_bytes"] == sum(shard.raw_data.bytes for shard in index.shards)
    assert shown["compressions"] == [{"compression": "zstd:3", "shards": len(index.shards)}]
    assert shown["hashes"] == [{"hashes": ["md5", "sha1"], "shards": len(index.shards)}]
    assert shown["columns"][0] == {"name": "id", "encoding": "int", "bytes": 8, "shards": len(index.shards)}
    assert [sample["values"] for sample in shown["first_samples"]] == [
        {"id": "0", "text": "'text 000'"},
        {"id": "1", "text": "'text 001'"},
    ]


def test_samples_go_on_in_the_next_shard(tmp_path: Path) -> None:
    index = write_texts(tmp_path)
    first = index.shards[0].samples
    samples = run("inspect", tmp_path, "--json", "--samples", first + 2).json["first_samples"]
    assert [sample["sample"] for sample in samples] == list(range(first + 2))
    assert [sample["shard"] for sample in samples[first - 1 :]] == ["shard.00000.mds", *["shard.00001.mds"] * 2]


def test_tables_show_what_a_person_wants_to_know(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path, columns={"id": "int", "note": "str"}, compression="zstd") as writer:
        writer.write({"id": 7, "note": "[red]no markup[/red] " + "x" * 200})
    shown = run("inspect", tmp_path)
    assert shown.code == 0
    for line in ("samples            1", "compression        zstd", "hashes             none"):
        assert f" {line}" in shown.out
    assert "id int 8 note str varies" in " ".join(shown.out.split())
    assert "[red]no markup[/red]" in shown.out
    assert "(221 characters)" in " ".join(shown.out.split())
    assert not any(line.endswith(" ") for line in shown.out.splitlines())


def test_shards_that_differ_are_counted(tmp_path: Path) -> None:
    write_texts(tmp_path / "a", 3)
    write_texts(tmp_path / "b", 3, compression="zstd", columns={"id": "int"})
    assert run("merge", tmp_path).code == 0
    shown = run("inspect", tmp_path).out
    assert "none (1 shard); zstd (1 shard)" in shown
    assert "column   encoding    bytes   shards" in shown


def test_no_samples_are_read_if_none_are_wanted(tmp_path: Path) -> None:
    index = write_texts(tmp_path)
    (tmp_path / index.shards[0].raw_data.basename).unlink()
    assert run("inspect", tmp_path, "--samples", 0).code == 0
    missing = run("inspect", tmp_path)
    assert missing.code == 2
    assert "samples            25" in missing.out, "what is known is shown all the same"
    assert "shard.00000.mds" in missing.err


@pytest.mark.nightly
def test_of_an_uncompressed_shard_on_a_store_only_the_samples_bytes_are_read(tmp_path: Path, s3: S3Store) -> None:
    """The object is cut off after its first sample, which only a reader of ranges does not notice."""
    write_texts(tmp_path, size_limit=None)
    path = tmp_path / "shard.00000.mds"
    data = path.read_bytes()
    path.write_bytes(data[: int.from_bytes(data[8:12], "little")])
    bucket = s3.make_bucket()
    put(tmp_path, bucket, s3.options)
    whole = run("inspect", bucket, "--samples", 1, "--json", *options(s3.options))
    assert whole.code == 0
    assert whole.json["first_samples"][0]["values"] == {"id": "0", "text": "'text 000'"}
    cut = run("inspect", bucket, "--samples", 2, "--json", *options(s3.options))
    assert cut.code == 1
    assert "shard.00000.mds has 315 bytes, but index.json says 335" in cut.err


def test_a_store_without_ranges_sends_the_shard(tmp_path: Path, http_store: HttpStore) -> None:
    write_texts(http_store.root)
    shown = run("inspect", http_store.url, "--json")
    assert shown.code == 0
    assert len(shown.json["first_samples"]) == 2
    assert set(http_store.requests()) == {"index.json", "shard.00000.mds"}


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    write_texts(tmp_path / "data", compression="zstd")
    before = sorted(tmp_path.rglob("*"))
    assert run("inspect", tmp_path / "data").code == 0
    assert sorted(tmp_path.rglob("*")) == before


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("import sys; sys.modules['went_off'] = sys",)


def test_pickles_stay_shut_unless_they_are_allowed(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path, columns={"id": "int", "any": "pkl"}) as writer:
        writer.write({"id": 7, "any": Bomb()})
    shown = run("inspect", tmp_path, "--json")
    assert shown.code == 0
    values = shown.json["first_samples"][0]["values"]
    assert values["id"] == "7"
    assert values["any"].startswith("pkl, not decoded; pass --allow-unsafe-types")
    assert "went_off" not in sys.modules
    assert run("inspect", tmp_path, "--json", "--allow-unsafe-types").code == 0
    assert sys.modules.pop("went_off") is sys


def test_a_directory_that_is_no_dataset_says_what_to_do(tmp_path: Path) -> None:
    write_texts(tmp_path / "train")
    write_texts(tmp_path / "val")
    refused = run("inspect", tmp_path)
    assert refused.code == 2
    assert f"{tmp_path} has no index.json" in refused.err
    assert "train, val" in refused.err
    assert "is not a directory" in run("inspect", tmp_path / "trian").err
    assert run("inspect", "").code == 2
    (tmp_path / "val" / "index.json").unlink()
    assert "shards like shard.00000.mds are there, but not the index" in run("inspect", tmp_path / "val").err


def test_a_damaged_index_is_told_from_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("{")
    assert run("inspect", tmp_path).code == 1


def test_secrets_are_not_shown(s3: S3Store) -> None:
    wrong = {**s3.options, "endpoint_url": "http://127.0.0.1:9", "secret": "opensesame"}
    refused = run("inspect", "https://user:opensesame@127.0.0.1:9/data?sig=opensesame", *options(wrong))
    assert refused.code == 2
    assert "opensesame" not in refused.out + refused.err


def test_a_missing_bucket_is_told(s3: S3Store) -> None:
    refused = run("inspect", "s3://no-such-bucket-at-all/data", *options(s3.options))
    assert refused.code == 2
    assert "does not exist" in refused.err


def test_a_dataset_of_one_bad_sample_is_bad(tmp_path: Path) -> None:
    index = write_texts(tmp_path, size_limit=None)
    path = tmp_path / index.shards[0].raw_data.basename
    data = bytearray(path.read_bytes())
    data[data.index(b"text 001") + 1] = 0xFF
    path.write_bytes(data)
    shown = run("inspect", tmp_path, "--json")
    assert shown.code == 1
    assert "sample 1" in shown.err
    assert len(shown.json["first_samples"]) == 1
    assert read_index(tmp_path) == index


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_dataset_of_unsafe_columns_alone_is_shown_without_them(tmp_path: Path, more: tuple[str, ...]) -> None:
    with MDSWriter(out=tmp_path, columns={"a": "pkl", "b": "pkl"}) as writer:
        writer.write({"a": 1, "b": 2})
    outcome = run("inspect", tmp_path, *more)
    assert outcome.code == 0
    assert outcome.out.count("not decoded; pass --allow-unsafe-types") == 2
    assert "not decoded" not in run("inspect", tmp_path, "--allow-unsafe-types", *more).out


def test_of_a_compressed_dataset_both_sizes_are_told() -> None:
    directory = golden_path("mds", "comp-zstd")
    summary = summarize(read_index(directory))
    stored = sum(path.stat().st_size for path in directory.iterdir() if path.name != "index.json")
    assert summary["stored_bytes"] == stored < summary["raw_bytes"]
    assert summary["compressions"] == [{"compression": "zstd", "shards": summary["shards"]}]


def test_meta_files_count_too() -> None:
    directory = golden_path("mds", "csv")
    summary = summarize(read_index(directory))
    assert summary["raw_bytes"] == summary["stored_bytes"]
    assert summary["raw_bytes"] == sum(path.stat().st_size for path in directory.iterdir() if path.name != "index.json")
    columns = [(column["name"], column["encoding"], column["bytes"]) for column in summary["columns"]]
    assert columns == [("f", "float", None), ("n", "int", None), ("name", "str", None)]


def test_columns_that_only_some_shards_have_are_counted(tmp_path: Path) -> None:
    one = write_texts(tmp_path / "one")
    other = write_texts(tmp_path / "other", columns={"id": "int"})
    summary = summarize(DatasetIndex(one.shards + other.shards))
    here, there = len(one.shards), len(other.shards)
    assert summary["columns"] == [
        {"name": "id", "encoding": "int", "bytes": 8, "shards": here + there},
        {"name": "text", "encoding": "str", "bytes": None, "shards": here},
    ]


def test_no_shards_are_a_dataset_too(tmp_path: Path) -> None:
    summary = summarize(DatasetIndex(()))
    assert (summary["samples"], summary["shard_sizes"], summary["columns"]) == (0, [], [])
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    shown = run("inspect", tmp_path)
    assert shown.code == 0
    assert "samples per shard -" in " ".join(shown.out.split())


@pytest.mark.parametrize(
    ("sizes", "bins"),
    [
        ([], []),
        ([7], [(7, 7, 1)]),
        ([0, 0], [(0, 0, 2)]),
        ([100, 100, 99, 97], [(97, 100, 4)]),  # hardly differ
        ([0, 10, 4], [(0, 3, 1), (3, 6, 1), (6, 10, 1)]),
        ([100, 100, 100, 20], [(20, 60, 1), (60, 100, 3)]),
    ],
)
def test_sizes_are_sorted_into_bins(sizes: list[int], bins: list[tuple[int, int, int]]) -> None:
    assert [(one["smallest"], one["largest"], one["shards"]) for one in histogram(sizes)] == bins


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 2**33), min_size=1, max_size=50))
def test_every_shard_is_in_one_bin(sizes: list[int]) -> None:
    bins = histogram(sizes)
    assert sum(one["shards"] for one in bins) == len(sizes)
    assert (bins[0]["smallest"], bins[-1]["largest"]) == (min(sizes), max(sizes))
    assert len(bins) <= 8
    assert all(before["largest"] == after["smallest"] for before, after in pairwise(bins))


@pytest.mark.parametrize(
    ("typed", "location"),
    [
        ("data", "data"),
        ("data/", "data"),
        ("data/index.json", "data"),
        ("index.json", "."),
        ("file:///data/index.json", "/data"),
        ("~/data", str(Path("~/data").expanduser())),
        ("s3://bucket/data/index.json", "s3://bucket/data"),
        ("https://host/data/index.json?sig=x", "https://host/data?sig=x"),
    ],
)
def test_a_dataset_is_named_by_its_place_or_its_index(typed: str, location: str) -> None:
    place = find_dataset(typed, {"secret": "opensesame"})
    assert place.location == location
    assert (place.options == {}) == (place.directory is not None)


def test_secrets_of_a_location_are_not_shown() -> None:
    place = find_dataset("https://me:opensesame@host/data?sig=opensesame", {"secret": "opensesame"})
    assert "opensesame" not in f"{place!r} {place.shown}"


def test_a_file_that_is_no_dataset_is_told_from_one_that_is_in_one(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(ObjectNotFoundError, match=r"is a file, .*lightning-streaming convert creates one from it"):
        find_dataset(str(tmp_path / "rows.jsonl"), {}).read_index()
    write_texts(tmp_path / "data")
    with pytest.raises(ObjectNotFoundError, match=r"is one file of a dataset; give its directory, .*/data$"):
        find_dataset(str(tmp_path / "data" / "shard.00000.mds"), {}).read_index()


def test_names_that_leave_the_dataset_are_refused() -> None:
    with pytest.raises(IndexFormatError):
        find_dataset("data", {}).path("../x")
    with pytest.raises(ConfigError):
        find_dataset("", {})


@pytest.mark.parametrize("tool", ["inspect", "verify"])
def test_a_name_that_no_file_has_is_refused(tool: str) -> None:
    outcome = run(tool, "a\0b")
    assert outcome.code == 2
    assert "has a null character" in outcome.err


@pytest.mark.parametrize("words", [["--samples", 3], ["--allow-unsafe-types"]])
def test_a_configuration_takes_no_options_of_a_dataset(words: list[Any]) -> None:
    refused = run("inspect", "--config", "run.yaml", *words)
    assert refused.code != 0
    assert "--config defines what is read" in refused.err


@pytest.mark.parametrize("words", [[], ["somewhere", "--config", "run.yaml"]])
def test_one_thing_is_inspected(words: list[str]) -> None:
    refused = run("inspect", *words)
    assert refused.code != 0
    assert "either DATASET, a directory or URL, or --config run.yaml" in refused.err
