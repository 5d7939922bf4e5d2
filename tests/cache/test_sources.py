"""Where shards come from: hashes to check, and compressed files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.shard_cache import ShardCache
from lightning_streaming.cache.shared_files import write_no_link
from lightning_streaming.cache.sources import check_hash, choose_hash, find_size, unpack
from lightning_streaming.errors import ConfigError, IntegrityError, StorageError
from lightning_streaming.formats.algorithms import compress, hash_bytes, hash_names
from lightning_streaming.formats.index import FileInfo
from lightning_streaming.storage import Location
from tests.helpers import assert_error, write_dataset


def file_info(*hashes: str, data: bytes = b"data") -> FileInfo:
    recorded = {name: hash_bytes(name, data) for name in hashes}
    return FileInfo(basename="x", bytes=len(data), hashes=recorded)


@pytest.mark.parametrize(
    ("recorded", "chosen"),
    [
        (("md5", "sha1", "xxh64"), "xxh64"),
        (("md5", "sha1"), "sha1"),
        (("sha3_512",), "sha3_512"),
        ((), None),
    ],
)
def test_the_cheapest_recorded_hash_is_chosen(recorded: tuple[str, ...], chosen: str | None) -> None:
    assert choose_hash(file_info(*recorded), None) == choose_hash(file_info(*recorded), "") == chosen


@pytest.mark.parametrize("name", hash_names())
def test_any_recorded_hash_is_used(name: str) -> None:
    assert choose_hash(file_info(name), None) == name


def test_a_hash_of_the_future_is_passed_over() -> None:
    assert choose_hash(FileInfo(basename="x", bytes=1, hashes={"xxh9": "00"}), None) is None


def test_a_hash_whose_package_is_missing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert choose_hash(file_info("sha1"), None) == "sha1"
    assert choose_hash(FileInfo(basename="x", bytes=1, hashes={"xxh64": "00"}), None) is None


def test_the_hash_asked_for_must_be_recorded() -> None:
    assert choose_hash(file_info("md5", "sha1"), "md5") == "md5"
    with assert_error(ConfigError, option="validate_hash", path="x") as caught:
        choose_hash(file_info("md5", "sha1"), "xxh64")
    assert "'xxh64'" in str(caught.value)


def test_a_hash_that_differs_is_told_with_both_values(tmp_path: Path) -> None:
    path, file = tmp_path / "x", file_info("md5")
    path.write_bytes(b"data")
    check_hash(path, "s3://b/x", file, "md5")
    check_hash(path, "s3://b/x", file, None)
    path.write_bytes(b"Data")
    found, expected = hash_bytes("md5", b"Data"), hash_bytes("md5", b"data")
    with assert_error(IntegrityError, path="/x") as caught:
        check_hash(path, "s3://b/x", file, "md5")
    assert [value for value in ("md5", found, expected) if value not in str(caught.value)] == []


def test_a_compressed_file_is_unpacked_or_told(tmp_path: Path) -> None:
    path, target = tmp_path / "x.zstd", tmp_path / "x"
    path.write_bytes(compress("zstd", b"data"))
    target.touch()
    unpack(path, "s3://b/x.zstd", file_info(), "zstd", target)
    assert target.read_bytes() == b"data"
    unpack(path, "s3://b/x.zstd", file_info(), "zstd", tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == b"data"
    with assert_error(IntegrityError, path="x.zstd") as caught:
        unpack(path, "s3://b/x.zstd", file_info(data=b"longer"), "zstd", target)
    assert "decompressed" in str(caught.value)


def test_a_file_that_is_unpacked_stays_the_one_that_is_locked(tmp_path: Path) -> None:
    path, target = tmp_path / "x.zstd", tmp_path / "x"
    path.write_bytes(compress("zstd", b"data"))
    target.write_bytes(bytes(4))
    with target.open("rb") as locked:
        unpack(path, "s3://b/x.zstd", file_info(), "zstd", target)
        assert locked.read() == b"data"


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    outside, link, path = tmp_path / "outside", tmp_path / "link", tmp_path / "x.zstd"
    outside.write_bytes(b"of the user")
    path.write_bytes(compress("zstd", b"data"))
    link.symlink_to(outside)
    with assert_error(StorageError, path="link"):
        unpack(path, "s3://b/x.zstd", file_info(), "zstd", link)
    with assert_error(StorageError, path="link"):
        Location(str(path)).download(link)
    with pytest.raises(OSError, match="symbolic link"):
        write_no_link(link, b"data")
    assert outside.read_bytes() == b"of the user"


def test_the_version_of_data_in_place_is_read_once_and_covers_no_inode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version() -> str:
        return (cache := ShardCache(config)).data_version(cache.read_index())

    config, inspect = CacheConfig(name="0", local=write_dataset(tmp_path / "data")), os.stat
    cache = ShardCache(config)
    before = cache.data_version(cache.read_index())

    def renumbered(path: Any, **how: Any) -> os.stat_result:
        found = inspect(path, **how)
        changed = (found.st_mode, found.st_ino + 1, *found[2:])
        return os.stat_result(changed, {name: getattr(found, name) for name in ("st_mtime_ns", "st_ctime_ns")})

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", renumbered)
        assert version() == before
    os.utime(tmp_path / "data/shard.00000.mds", ns=(0, 0))
    assert cache.data_version(cache.read_index()) == before
    assert version() != before


def test_a_missing_file_has_no_size(tmp_path: Path) -> None:
    assert find_size(tmp_path / "x") is None
    (tmp_path / "x").write_bytes(b"data")
    assert find_size(tmp_path / "x") == 4
