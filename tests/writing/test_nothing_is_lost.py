"""What writers, merging and parts refuse because somebody's samples would be lost, and that nothing is touched then."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from lightning_streaming import MDSWriter, StreamingDataset, merge, merge_under, write_parallel
from lightning_streaming.errors import ConfigError, StorageError
from lightning_streaming.storage.transfer import upload_bytes
from lightning_streaming.writing.names import WRITING
from tests.helpers import write_dataset
from tests.loading.processes import wait_until
from tests.servers import S3Store
from tests.writing import part_functions


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def write(out: Any, samples: range, **settings: Any) -> None:
    with MDSWriter(out=out, columns={"id": "int"}, size_limit=230, **settings) as writer:
        for sample in samples:
            writer.write({"id": sample})


@pytest.mark.parametrize("mode", ["resume", "append"])
def test_a_published_directory_is_no_copy_of_another_place(tmp_path: Path, mode: Literal["resume", "append"]) -> None:
    own = write_dataset(tmp_path / "own", 20)
    (own / WRITING).mkdir()  # as an older writer may have left it
    if mode == "append":
        write(str(tmp_path / "other"), range(6))
    before = contents(own)
    with pytest.raises(ConfigError, match="dataset of its own"):
        MDSWriter(
            out=(str(own), str(tmp_path / "other")), columns={"id": "int"}, size_limit=230, keep_local=True, mode=mode
        )
    assert contents(own) == before


def test_an_unfinished_directory_is_no_copy_of_another_place(tmp_path: Path) -> None:
    writer = MDSWriter(out=str(tmp_path / "own"), columns={"id": "int"}, size_limit=230, mode="resume")
    for sample in range(20):
        writer.write({"id": sample})
    writer.close()
    before = contents(tmp_path / "own")
    assert len(before) > 3
    with pytest.raises(ConfigError, match="dataset of its own"):
        MDSWriter(
            out=(str(tmp_path / "own"), str(tmp_path / "other")),
            columns={"id": "int"},
            size_limit=230,
            keep_local=True,
            mode="resume",
        )
    assert contents(tmp_path / "own") == before


def test_a_copy_of_the_same_sizes_is_not_taken_for_the_dataset(tmp_path: Path) -> None:
    write(str(tmp_path / "copy"), range(1000, 1020))
    write(str(tmp_path / "truth"), range(20))
    pair = (str(tmp_path / "copy"), str(tmp_path / "truth"))
    write(pair, range(20, 25), keep_local=True, mode="append")
    assert contents(tmp_path / "copy") == contents(tmp_path / "truth")
    dataset = StreamingDataset(remote=str(tmp_path / "copy"))
    assert [sample["id"] for sample in dataset[:]] == list(range(25))


def test_the_second_directory_of_a_pair_must_be_empty_too(tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    (second / "shard.00000.mds").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="must be empty"):
        write((str(tmp_path / "first"), str(second)), range(6))
    assert contents(second) == {"shard.00000.mds": b"precious"}


@pytest.mark.parametrize("joins", ["merge", "merge_under"])
def test_a_dataset_is_not_merged_over(tmp_path: Path, joins: str) -> None:
    root = write_dataset(tmp_path / "root", 20)
    extra = write_dataset(root / "extra", 5, first_id=20)
    before = contents(root)
    with pytest.raises(ConfigError, match="is itself a dataset"):
        merge([str(extra)], str(root)) if joins == "merge" else merge_under(str(root))
    assert contents(root) == before


def test_foreign_parts_in_a_bucket_are_not_taken_over(s3: S3Store) -> None:
    url = f"{s3.make_bucket()}/corpus"
    upload_bytes(b"whatever", f"{url}/part.000000/shard.00000.mds", s3.options, retry=1)
    with pytest.raises(ConfigError, match=r"part\.000000"):
        write_parallel(
            [range(3)], part_functions.count, url, progress_bar=False, storage_options=s3.options, num_workers=1
        )


def test_a_writer_that_was_closed_does_not_say_that_it_finished(tmp_path: Path) -> None:
    writer = MDSWriter(out=str(tmp_path / "a"), columns={"id": "int"})
    writer.write({"id": 1})
    writer.close()
    with pytest.raises(ConfigError, match="closed before it was finished"):
        writer.finish()
    write(str(tmp_path / "b"), range(3))


@pytest.mark.parametrize("damage", ["gone", "other"])
def test_a_new_dataset_is_not_published_over_shards_that_changed(damage: str, tmp_path: Path) -> None:
    writer = MDSWriter(out=str(tmp_path / "a"), columns={"id": "int"}, size_limit=230)
    for sample in range(20):
        writer.write({"id": sample})
    shard = tmp_path / "a" / "shard.00001.mds"
    assert wait_until(shard.exists)
    if damage == "gone":
        shard.unlink()
    else:
        (tmp_path / "other").write_bytes(b"of another writer")
        (tmp_path / "other").rename(shard)
    with pytest.raises(StorageError, match=r"shard\.00001\.mds was stored and (is not there|has another size)"):
        writer.finish()
    writer.close()
    left = contents(tmp_path)
    assert left == ({} if damage == "gone" else {"a/shard.00001.mds": b"of another writer"})


def test_an_index_is_not_published_over_shards_that_are_gone(tmp_path: Path) -> None:
    writer = MDSWriter(out=str(tmp_path / "a"), columns={"id": "int"}, size_limit=230, mode="resume")
    for sample in range(20):
        writer.write({"id": sample})
    assert wait_until((tmp_path / "a" / WRITING / "00001.json").exists)
    (tmp_path / "a" / "shard.00001.mds").unlink()
    with pytest.raises(StorageError, match=r"shard\.00001\.mds was stored and is not there"):
        writer.finish()
    writer.close()
    assert not (tmp_path / "a" / "index.json").exists()
    write(str(tmp_path / "a"), range(5, 20), mode="resume")  # goes on behind the first shard
    assert [sample["id"] for sample in StreamingDataset(remote=str(tmp_path / "a"))[:]] == list(range(20))
