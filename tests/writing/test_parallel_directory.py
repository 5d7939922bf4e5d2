from __future__ import annotations

from pathlib import Path

from lightning_streaming.writing.part_directory import has_all_files, remove_half_part
from tests.formats.golden_datasets import read_index
from tests.helpers import write_dataset


def test_only_what_a_writer_makes_is_removed(tmp_path: Path) -> None:
    foreign = ["notes.txt", "index.json.bak", "shard.1.mds", "my.shard.00000.mds", "shard.00000.mds.txt"]
    written = ["index.json", "shard.00000.mds", "shard.123456.mds.zstd", "shard.00001.mds.node-a-7-8.part"]
    for name in [*foreign, *written]:
        (tmp_path / name).touch()
    remove_half_part(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(foreign)


def test_files_that_are_missing_or_short_are_seen(tmp_path: Path) -> None:
    index = read_index(write_dataset(tmp_path, 12))
    assert has_all_files(tmp_path, index)
    shard = tmp_path / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert not has_all_files(tmp_path, index)
    shard.unlink()
    assert not has_all_files(tmp_path, index)


def test_compressed_files_are_those_looked_for(tmp_path: Path) -> None:
    index = read_index(write_dataset(tmp_path, 12, compression="zstd"))
    assert has_all_files(tmp_path, index)
