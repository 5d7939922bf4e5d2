from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_streaming import StreamingDataset
from lightning_streaming.errors import ConfigError, IndexFormatError, MissingDependencyError, ObjectNotFoundError
from lightning_streaming.formats.index import DatasetIndex
from lightning_streaming.storage import Location
from lightning_streaming.writing.merging import dataset_location, merge, merge_recursive, path_below
from tests.formats.golden_datasets import read_index
from tests.golden import golden_path
from tests.helpers import assert_error, write_dataset
from tests.servers import S3Store


@pytest.mark.parametrize(
    ("given", "directory"),
    [
        ("a/b", "a/b"),
        ("a/b/", "a/b"),
        ("a/b/index.json", "a/b"),
        ("s3://x/a/index.json", "s3://x/a"),
        ("a/myindex.json", "a/myindex.json"),
        (Path("a/index.json"), "a"),
    ],
)
def test_a_dataset_is_named_by_its_directory_or_its_index(given: str | Path, directory: str) -> None:
    assert dataset_location(given) == directory


@pytest.mark.parametrize(
    ("location", "root", "path"),
    [
        ("s3://x/a/b/c", "s3://x/a", "b/c"),
        ("s3://x/a/b/", "s3://x/a/", "b"),
        ("s3://x/a", "s3://x", "a"),
        ("s3://x/ab", "s3://x/a", None),
        ("s3://x/a", "s3://x/a", None),
        ("s3://x/a/../b", "s3://x/a", None),
        ("s3://x/a//b", "s3://x/a", None),
        ("s3://x/a/b", "gs://x/a", None),
        ("s3://x/a/b", "x/a", None),
        ("/d/a/b", "s3://d/a", None),
        ("/d/a/./b/../c", "/d/a", "c"),
        ("file:///d/a/b", "/d/a", "b"),
        ("/d/ab", "/d/a", None),
        ("/d/a", "/", "d/a"),
        ("/d/a", "/d/a", None),
        ("d/a", ".", "d/a"),
    ],
)
def test_a_path_below(location: str, root: str, path: str | None) -> None:
    assert path_below(location, root) == path


def ids(dataset: Path | str, **options: Any) -> list[int]:
    read = StreamingDataset(remote=str(dataset), **options)
    return [int(read[index]["id"]) for index in range(read.size)]


def write_parts(root: Path, *paths: str, samples: int = 7) -> list[Path]:
    """A dataset at each path, two shards each; ids go on from one to the next."""
    return [write_dataset(root / path, samples, first_id=number * samples) for number, path in enumerate(paths)]


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def basenames(index: DatasetIndex) -> list[str]:
    return [file.basename for shard in index.shards for pair in shard.files for file in pair if file is not None]


def upload_all(root: Path, url: str, options: dict[str, Any]) -> None:
    for path in contents(root):
        Location(f"{url}/{path}", options).upload(root / path)


def test_a_golden_dataset_is_merged_byte_for_byte_as_the_original_does(tmp_path: Path) -> None:
    golden = golden_path("mds", "merged")
    out = shutil.copytree(
        golden, tmp_path / "out", ignore=lambda folder, _: {"index.json"} if Path(folder) == golden else []
    )
    assert not (out / "index.json").exists()
    merged = merge([out / "part0", out / "part1"], out)
    assert contents(out) == contents(golden)
    assert merged == read_index(golden)


def test_golden_datasets_of_every_format_are_merged(tmp_path: Path) -> None:
    names = sorted(path.name for path in golden_path("mds").iterdir() if path.is_dir())
    out = shutil.copytree(golden_path("mds"), tmp_path / "out")
    before = contents(out)
    merged = merge([out / name for name in names], out)
    assert {shard.format for shard in merged.shards} == {"mds", "json", "csv", "tsv", "xsv"}
    assert [name for name in basenames(merged) if not (out / name).is_file()] == raw_names_of_compressed(merged)
    for name in names:  # nothing but the names has changed, and the other files not at all
        of_part = [shard for shard in merged.shards if shard.raw_data.basename.startswith(f"{name}/")]
        assert [strip(shard, f"{name}/") for shard in dumped(of_part)] == dumped(read_index(out / name).shards)
    assert {path: data for path, data in contents(out).items() if path != "index.json"} == before


def raw_names_of_compressed(index: DatasetIndex) -> list[str]:
    pairs = [pair for shard in index.shards for pair in shard.files]
    return [raw.basename for raw, compressed in pairs if compressed is not None]


def dumped(shards: Any) -> list[str]:
    return [repr(shard) for shard in shards]


def strip(text: str, prefix: str) -> str:
    return text.replace(f"basename='{prefix}", "basename='")


def test_samples_are_those_of_the_parts_in_the_order_given(tmp_path: Path) -> None:
    a, b, c = write_parts(tmp_path, "a", "b", "c")
    merge([c, a, str(b)], tmp_path)
    assert ids(tmp_path) == [*range(14, 21), *range(14)]


def test_the_path_below_is_kept_at_any_depth(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, "x/2024/a", "x/2025/a", "b")
    merged = merge(parts, tmp_path)
    assert basenames(merged)[::2] == ["x/2024/a/shard.00000.mds", "x/2025/a/shard.00000.mds", "b/shard.00000.mds"]
    assert ids(tmp_path) == list(range(21))


def test_a_merged_dataset_may_be_a_part(tmp_path: Path) -> None:
    a, b, c = write_parts(tmp_path, "x/a", "x/b", "c")
    merge([b, a], tmp_path / "x")
    merge([c, tmp_path / "x"], tmp_path)
    assert ids(tmp_path) == [*range(14, 21), *range(7, 14), *range(7)]


def test_merging_again_replaces_the_index(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, "a", "b", "c")
    merge(parts[:2], tmp_path)
    first = contents(tmp_path)
    merge(parts[:2], tmp_path)
    assert contents(tmp_path) == first
    merge(parts, tmp_path)
    assert ids(tmp_path) == list(range(21))


def test_a_part_named_twice_counts_once(tmp_path: Path) -> None:
    a, b = write_parts(tmp_path, "a", "b")
    merge([a, b, f"{a}/", a / "index.json", tmp_path / "b" / ".." / "a"], tmp_path)
    assert ids(tmp_path) == list(range(14))


def test_a_shard_named_by_two_parts_counts_once(tmp_path: Path) -> None:
    a, b = write_parts(tmp_path, "x/a", "x/b")
    merge([a, b], tmp_path / "x")
    merge([b, tmp_path / "x"], tmp_path)
    assert ids(tmp_path) == [*range(7, 14), *range(7)]


def test_paths_may_be_relative_and_lead_through_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = write_parts(tmp_path, "real/a")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    merge(["a"], tmp_path / "link")
    assert ids(tmp_path / "real") == list(range(7))
    assert basenames(merge([a], tmp_path / "link"))[0] == "a/shard.00000.mds"


def test_a_part_that_is_a_link_keeps_the_name_of_the_link(tmp_path: Path) -> None:
    (elsewhere,) = write_parts(tmp_path, "disk2/a")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(elsewhere)
    merge([tmp_path / "out" / "a"], tmp_path / "out")
    assert ids(tmp_path / "out") == list(range(7))


@pytest.mark.parametrize("outside", ["elsewhere/a", "out", "out-of-it", "s3://bucket/a", "out/../elsewhere/a"])
def test_a_part_outside_is_refused_with_the_way_out(outside: str, tmp_path: Path) -> None:
    write_parts(tmp_path, "out/a", "elsewhere/a", "out-of-it")
    with assert_error(ConfigError, option="parts") as caught:
        merge([tmp_path / "out" / "a", outside if "://" in outside else tmp_path / outside], tmp_path / "out")
    assert "above" in str(caught.value)
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("nothing", [[], (), "part"])
def test_no_list_of_parts_is_refused(nothing: Any, tmp_path: Path) -> None:
    with assert_error(ConfigError, option="parts") as caught:
        merge(nothing, tmp_path)
    assert "least" in str(caught.value)
    assert not contents(tmp_path)


def test_a_part_without_an_index_is_named_and_nothing_published(tmp_path: Path) -> None:
    a, b = write_parts(tmp_path, "a", "b")
    (b / "index.json").unlink()
    with assert_error(ObjectNotFoundError, path="/b"):
        merge([a, b], tmp_path)
    assert not (tmp_path / "index.json").exists()


def test_an_index_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    a, b = write_parts(tmp_path, "a", "b")
    merge([a], tmp_path)
    before = (tmp_path / "index.json").read_bytes()
    (b / "index.json").write_bytes(b"{")
    with assert_error(IndexFormatError, path="index.json"):
        merge([a, b], tmp_path)
    assert (tmp_path / "index.json").read_bytes() == before


def test_all_below_are_merged_in_the_order_of_their_paths(tmp_path: Path) -> None:
    write_parts(tmp_path, "a", "a.b", "b/deep/er", "part.000002", "part.000010")
    merged = merge_recursive(tmp_path)
    # As texts of whole paths are sorted: "a.b/index.json" before "a/index.json".
    parts = [name.rpartition("/")[0] for name in basenames(merged)[::2]]
    assert parts == ["a.b", "a", "b/deep/er", "part.000002", "part.000010"]
    assert sorted(ids(tmp_path)) == list(range(35))


def test_all_below_may_be_merged_again(tmp_path: Path) -> None:
    write_parts(tmp_path, "a", "b")
    merge_recursive(tmp_path)
    first = contents(tmp_path)
    merge_recursive(tmp_path)
    assert contents(tmp_path) == first
    write_dataset(tmp_path / "c", 1, first_id=14)
    merge_recursive(tmp_path)
    assert ids(tmp_path) == list(range(15))


def test_json_shards_are_not_taken_for_indexes(tmp_path: Path) -> None:
    for name in ("json", "json-gz"):
        shutil.copytree(golden_path("mds", name), tmp_path / name)
    merged = merge_recursive(tmp_path)
    assert {shard.format for shard in merged.shards} == {"json"}


def test_the_folder_of_a_writer_at_work_is_not_taken_for_a_dataset(tmp_path: Path) -> None:
    (part,) = write_parts(tmp_path, "a")
    (part / ".writing").mkdir()
    shutil.copy(part / "index.json", part / ".writing")  # of an append that was decided, and killed
    merge_recursive(tmp_path)
    assert ids(tmp_path) == [*range(7)]


def test_a_merged_dataset_inside_keeps_its_order_and_its_parts_count_once(tmp_path: Path) -> None:
    a, b, _ = write_parts(tmp_path, "x/a", "x/b", "y")
    merge([b, a], tmp_path / "x")
    merge_recursive(tmp_path)
    assert ids(tmp_path) == [*range(7, 14), *range(7), *range(14, 21)]


def test_nothing_below_is_an_error(tmp_path: Path) -> None:
    write_dataset(tmp_path, 3)
    before = contents(tmp_path)
    for place in (tmp_path, tmp_path / "missing"):
        with assert_error(ConfigError, option="out") as caught:
            merge_recursive(place)
        assert "no dataset to merge below" in str(caught.value)
    assert contents(tmp_path) == before


def test_a_bucket_is_merged_without_fetching_shards(s3: S3Store, tmp_path: Path) -> None:
    url = f"{s3.make_bucket()}/corpus"
    write_parts(tmp_path / "here", "a", "x/b")
    upload_all(tmp_path / "here", url, s3.options)
    for _ in range(2):
        merged = merge([f"{url}/x/b", f"{url}/a/"], url, storage_options=s3.options)
        assert basenames(merged) == [f"{part}/shard.0000{n}.mds" for part in ("x/b", "a") for n in (0, 1)]
    read = ids(url, local=str(tmp_path / "cache"), storage={"options": s3.options})
    assert read == [*range(7, 14), *range(7)]


def test_all_of_a_bucket_are_found_also_those_written_since(s3: S3Store, tmp_path: Path) -> None:
    url = s3.make_bucket()
    for number in range(2):
        write_dataset(tmp_path / f"p{number}", 3)
        upload_all(tmp_path / f"p{number}", f"{url}/p{number}", s3.options)
        merged = merge_recursive(url, storage_options=s3.options)
        assert len(merged.shards) == number + 1


def test_an_empty_bucket_has_nothing_to_merge(s3: S3Store) -> None:
    with assert_error(ConfigError, option="out", path="corpus") as caught:
        merge_recursive(f"{s3.make_bucket()}/corpus", storage_options=s3.options)
    assert "no dataset to merge" in str(caught.value)


def test_a_pair_publishes_in_both_places(tmp_path: Path) -> None:
    here, url = tmp_path / "here", "memory://merge/pair"
    write_parts(here, "a", "b")
    upload_all(here, url, {})
    shutil.rmtree(here / "b")
    merge([here / "a", (str(here / "b"), f"{url}/b")], (str(here), url))
    store = fsspec.filesystem("memory")
    published = store.cat("/merge/pair/index.json")
    store.rm("/merge", recursive=True)
    assert published == (here / "index.json").read_bytes()
    assert [shard["samples"] for shard in json.loads(published)["shards"]] == [5, 2, 5, 2]


@pytest.mark.parametrize("scheme", ["oss", "box", "dropbox"])
def test_a_store_is_asked_for_only_where_an_index_is_not_here(tmp_path: Path, scheme: str) -> None:
    parts = [(str(part), f"{scheme}://bucket/{part.name}") for part in write_parts(tmp_path, "a", "b")]
    merge(parts, tmp_path)  # without the package that serves the store
    assert ids(tmp_path) == [*range(14)]
    (tmp_path / "b" / "index.json").unlink()
    with pytest.raises(MissingDependencyError, match=f"{scheme}://bucket/b needs a package"):
        merge(parts, tmp_path)


def test_two_places_of_a_part_must_agree(tmp_path: Path) -> None:
    write_parts(tmp_path, "a", "b")
    with assert_error(ConfigError, option="parts") as caught:
        merge([(str(tmp_path / "a"), "memory://merge/b")], (str(tmp_path), "memory://merge"))
    assert "same path below" in str(caught.value)


def test_what_a_killed_merge_left_goes_away(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    leftover = tmp_path / f"index.json.{socket.gethostname()}-{int(done.stdout)}-1.part"
    write_parts(tmp_path, "a")
    leftover.write_bytes(b"{")
    merge_recursive(tmp_path)
    assert not leftover.exists()
