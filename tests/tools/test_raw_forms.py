"""Files under the names that compressed shards have uncompressed: another dataset's are never read for this one's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming import JSONWriter, MDSWriter, StreamingDataset
from lightning_streaming.errors import ConfigError, ObjectNotFoundError, ShardCorruptError
from lightning_streaming.writing.merging import merge
from tests.servers import S3Store
from tests.tools.running import contents, options, put, read_index, run
from tests.tools.test_copy import on_store

Writer = Callable[..., Any]
FORMATS = {"mds": MDSWriter, "json": JSONWriter}


def write_ids(
    out: str | Path, first: int, *, shard_format: str = "mds", count: int = 40, large: bool = False, **settings: Any
) -> None:
    """Ids from ``first``, so many that there are several shards; sizes are alike unless they are to be large."""
    made = FORMATS[shard_format](out=out, columns={"id": "int", "x": "str"}, size_limit=400, **settings)
    with made as writer:
        for number in range(first, first + count):
            writer.write({"id": number, "x": "x" * (1 + large)})


def ids(**where: Any) -> list[int]:
    """All ids of a dataset."""
    dataset = StreamingDataset(**where)
    return [dataset[number]["id"] for number in range(dataset.size)]


NEW = list(range(5000, 5040))


@pytest.fixture(params=["mds", "json"])
def shard_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[(), ("sha1",)], ids=["plain", "hashed"])
def hashes(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(request.param)


@pytest.mark.rotate(4)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("has_index", [False, True])
def test_a_copy_over_uncompressed_shards_is_refused_or_removes_them(
    has_index: bool, large: bool, shard_format: str, hashes: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_ids(out, 1000, shard_format=shard_format, large=large, hashes=hashes)
    write_ids(tmp_path / "new", 5000, shard_format=shard_format, compression="gz", hashes=hashes)
    if not has_index:
        (out / "index.json").unlink()
    before = contents(out)
    refused = run("copy", tmp_path / "new", out)
    assert (refused.code, contents(out)) == (2, before)
    assert has_index or f"shard.00000.{shard_format}" in refused.err
    done = run("copy", tmp_path / "new", out, "--exist-ok")
    assert done.code == 0
    assert "removed, because they could be mistaken for shards of this dataset" in done.out
    left = contents(out).keys() - contents(tmp_path / "new").keys()
    assert all(int(name.split(".")[1]) >= len(read_index(out).shards) for name in left), "of no shard of the new one"
    assert ids(remote=str(out)) == NEW
    assert run("verify", out).code == 0


def test_a_copy_over_uncompressed_shards_of_a_store_removes_them(tmp_path: Path, s3: S3Store) -> None:
    write_ids(tmp_path / "old", 1000)
    write_ids(tmp_path / "new", 5000, compression="gz")
    bucket = s3.make_bucket()
    put(tmp_path / "old", bucket, s3.options)
    (tmp_path / "old" / "index.json").unlink()
    assert run("copy", tmp_path / "new", bucket, *options(s3.options)).code == 2
    assert run("copy", tmp_path / "new", bucket, "--exist-ok", *options(s3.options)).code == 0
    assert on_store(bucket, s3) == contents(tmp_path / "new")


def test_raw_forms_that_hashes_prove_stay(tmp_path: Path) -> None:
    write_ids(tmp_path / "new", 5000, compression="gz", hashes=["sha1"])
    out = tmp_path / "out"
    dataset = StreamingDataset(remote=str(tmp_path / "new"), local=str(out), keep_zip=True)
    assert [dataset[number]["id"] for number in range(40)] == NEW
    raw = {name for name in contents(out) if name.endswith(".mds")}
    assert run("copy", tmp_path / "new", out).code == 0
    assert contents(out).keys() >= raw


@pytest.mark.parametrize("mode", ["create", "resume"])
def test_a_writer_refuses_uncompressed_shards_of_a_store_or_removes_them(
    mode: str, tmp_path: Path, s3: S3Store
) -> None:
    write_ids(tmp_path / "old", 1000)
    bucket = s3.make_bucket()
    (tmp_path / "old" / "index.json").unlink()
    put(tmp_path / "old", bucket, s3.options)
    with pytest.raises(ConfigError, match=r"uncompressed shards, like shard.00000.mds"):
        write_ids(bucket, 5000, compression="gz", mode=mode, storage_options=s3.options)
    write_ids(bucket, 5000, compression="gz", exist_ok=True, storage_options=s3.options)
    assert all(name.endswith(".gz") for name in on_store(bucket, s3).keys() - {"index.json"})


@pytest.mark.parametrize("mode", ["create", "resume", "exist_ok"])
@pytest.mark.parametrize("has_index", [False, True])
def test_a_writer_leaves_no_uncompressed_shards_in_a_directory(
    has_index: bool, mode: str, hashes: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_ids(out, 1000, hashes=hashes)
    if not has_index:
        (out / "index.json").unlink()
    how = {"exist_ok": True} if mode == "exist_ok" else {"mode": mode}
    if mode == "exist_ok" and has_index:
        write_ids(out, 5000, compression="gz", hashes=hashes, **how)
        assert ids(remote=str(out)) == NEW
    else:
        with pytest.raises(ConfigError):
            write_ids(out, 5000, compression="gz", hashes=hashes, **how)


@pytest.mark.parametrize("large", [False, True])
def test_a_merge_of_a_part_with_uncompressed_shards_of_others_is_refused(
    large: bool, shard_format: str, tmp_path: Path
) -> None:
    write_ids(tmp_path / "all" / "part", 1000, shard_format=shard_format, large=large)
    write_ids(tmp_path / "new", 5000, shard_format=shard_format, compression="gz")
    shutil.copytree(tmp_path / "new", tmp_path / "all" / "part", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match=rf"part/shard.00000.{shard_format}.*; remove them"):
        merge([str(tmp_path / "all" / "part")], str(tmp_path / "all"))
    assert not (tmp_path / "all" / "index.json").exists()
    for path in (tmp_path / "all" / "part").glob("shard.*"):
        if path.suffix != ".gz":
            path.unlink()
    assert run("merge", tmp_path / "all").code == 0
    assert ids(remote=str(tmp_path / "all")) == NEW


@pytest.fixture(params=["mds-compressed", "mds", "json", "json-large"])
def mixed(request: pytest.FixtureRequest, hashes: tuple[str, ...], tmp_path: Path) -> Path:
    """A compressed dataset among raw files of another, put there by something else than our tools."""
    shard_format, _, kind = request.param.partition("-")
    old = {"hashes": hashes, "shard_format": shard_format, "large": kind == "large"}
    write_ids(tmp_path / "old", 1000, **old, compression="gz" if kind == "compressed" else None)
    assert ids(remote=str(tmp_path / "old"), local=str(tmp_path / "mixed"))[0] == 1000
    write_ids(tmp_path / "new", 5000, hashes=hashes, shard_format=shard_format, compression="gz")
    for path in (tmp_path / "mixed").iterdir():
        if not path.name.startswith("shard."):
            path.unlink() if path.is_file() else shutil.rmtree(path)
    shutil.copytree(tmp_path / "new", tmp_path / "mixed", dirs_exist_ok=True)
    return tmp_path / "mixed"


@pytest.mark.rotate(4)
@pytest.mark.parametrize("argument", ["remote", "local"])
def test_in_place_the_compressed_files_are_read(argument: str, mixed: Path) -> None:
    before = contents(mixed)
    assert ids(**{argument: str(mixed)}) == NEW
    assert contents(mixed) == before, "nothing is written where it is read in place"


@pytest.mark.rotate(2)
def test_in_a_cache_the_compressed_files_are_read(mixed: Path, tmp_path: Path) -> None:
    assert ids(remote=str(tmp_path / "new"), local=str(mixed)) == NEW


@pytest.mark.rotate(2)
def test_verify_names_them(mixed: Path) -> None:
    name = f"shard.00000.{read_index(mixed).shards[0].format}"
    done = run("verify", mixed)
    assert done.code == 1
    assert name in done.out
    assert name in run("verify", mixed, "--quick").out


@pytest.mark.rotate(2)
def test_verify_repairs_them(mixed: Path, tmp_path: Path) -> None:
    assert run("verify", mixed, "--repair", tmp_path / "new").code == 0
    assert run("verify", mixed).code == 0
    assert ids(remote=str(mixed)) == NEW


@pytest.mark.rotate(2)
def test_inspect_shows_what_the_compressed_files_hold(mixed: Path) -> None:
    assert "5000" in run("inspect", mixed).out


@pytest.mark.rotate(2)
@pytest.mark.parametrize("keep_zip", [False, True])
def test_a_cache_directory_is_read_in_place_as_it_is(
    keep_zip: bool, shard_format: str, hashes: tuple[str, ...], tmp_path: Path
) -> None:
    """Our own records, or hashes, say whose the raw files are; without the compressed ones they say it themselves."""
    write_ids(tmp_path / "new", 5000, hashes=hashes, shard_format=shard_format, compression="gz")
    local = tmp_path / "local"
    assert ids(remote=str(tmp_path / "new"), local=str(local), keep_zip=keep_zip) == NEW
    dataset = StreamingDataset(remote=str(local))
    assert [dataset[number]["id"] for number in range(40)] == NEW
    assert dataset.cache_usage == 0, "nothing is decompressed elsewhere"
    assert run("verify", local).code == 0
    for path in local.iterdir():  # as a cache of MosaicML Streaming is
        if path.name.startswith("."):
            path.unlink() if path.is_file() else shutil.rmtree(path)
    assert ids(remote=str(local)) == NEW


def test_a_raw_file_that_says_it_is_another_dataset_s_is_refused(shard_format: str, tmp_path: Path) -> None:
    write_ids(tmp_path / "data", 1000, shard_format=shard_format)
    write_ids(tmp_path / "new", 5000, shard_format=shard_format, compression="gz")
    shutil.copy(tmp_path / "new" / "index.json", tmp_path / "data" / "index.json")
    with pytest.raises(ShardCorruptError, match=r"is of another dataset"):
        ids(remote=str(tmp_path / "data"))
    assert run("verify", tmp_path / "data").code == 1


def test_what_was_decompressed_before_is_not_used_without_the_compressed_file(tmp_path: Path) -> None:
    write_ids(tmp_path / "data", 1000, compression="gz")
    assert ids(remote=str(tmp_path / "data"))[0] == 1000
    write_ids(tmp_path / "data", 5000, compression="gz", exist_ok=True)
    (tmp_path / "data" / "shard.00000.mds.gz").unlink()
    with pytest.raises(ObjectNotFoundError, match=r"shard.00000.mds.gz does not exist"):
        ids(remote=str(tmp_path / "data"))


def test_a_second_copy_says_why_it_copies_again(tmp_path: Path) -> None:
    write_ids(tmp_path / "data", 0)
    first = run("copy", tmp_path / "data", tmp_path / "out")
    again = run("copy", tmp_path / "data", tmp_path / "out")
    assert "copied again" not in first.out
    assert "existing files copied again, because the index records no hashes" in again.out
