from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_streaming.errors import ConfigError, MissingDependencyError, UnsupportedError
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
    with pytest.raises(ConfigError, match="encoding pkl, which can run any code") as caught:
        check_shard(shard_info(b"", schema=UNSAFE))
    assert not isinstance(caught.value, UnsupportedError)
    with pytest.raises(UnsupportedError, match="the encoding pkl is not served"):
        check_shard(shard_info(b"", schema=UNSAFE), allow_unsafe_types=True)


def test_a_format_or_compression_to_come_is_named_before_anything_is_read() -> None:
    with pytest.raises(UnsupportedError, match="format csv"):
        check_shard(shard_info(b"", format="csv", schema={}))
    with pytest.raises(UnsupportedError, match="bz2 compression"):
        check_shard(shard_info(b"", compression="bz2", zip_data=ZIP))


def test_a_missing_package_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingDependencyError, match="zstd"):
        check_shard(shard_info(b"", compression="zstd", zip_data=ZIP))
