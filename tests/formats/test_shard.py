from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.formats.index import FileInfo
from lightning_streaming.formats.shard import check_shard, open_shard
from tests.formats.small_shards import SAMPLES, put_shard, shard_info

UNSAFE = {"column_names": ("p",), "column_encodings": ("pkl",), "column_sizes": (None,)}
ZIP = FileInfo(basename="shard.mds.x", bytes=9, hashes={})


def test_an_mds_shard_is_opened(tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    check_shard(info)
    reader = open_shard(info, tmp_path)
    assert [reader[index] for index in range(len(reader))] == SAMPLES
    reader.close()


def test_pickles_are_refused_unless_they_were_allowed() -> None:
    with pytest.raises(ConfigError, match="encoding pkl, which can run any code"):
        check_shard(shard_info(b"", schema=UNSAFE))
    check_shard(shard_info(b"", schema=UNSAFE), allow_unsafe_types=True)


def test_only_wanted_columns_are_read(tmp_path: Path) -> None:
    info = put_shard(tmp_path)
    check_shard(info, columns=["text"])
    reader = open_shard(info, tmp_path, columns=["text"])
    assert [reader[index] for index in range(3)] == [{"text": sample["text"]} for sample in SAMPLES]
    reader.close()


@pytest.mark.parametrize("columns", [["label"], ["text", "label"]])
def test_a_column_that_is_not_there_is_refused_before_anything_is_read(tmp_path: Path, columns: list[str]) -> None:
    info = put_shard(tmp_path)
    with pytest.raises(ConfigError, match=r"shard\.mds has no column 'label'; it has 'id', 'text'"):
        check_shard(info, columns=columns)
    with pytest.raises(ConfigError, match="no column 'label'"):
        open_shard(info, tmp_path / "nowhere", columns=columns)


def test_a_missing_package_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingDependencyError, match="zstd"):
        check_shard(shard_info(b"", compression="zstd", zip_data=ZIP))
