""" """

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_streaming.cache.sources import check_hash, choose_hash, find_size, unpack
from lightning_streaming.errors import ConfigError, IntegrityError
from lightning_streaming.formats.compression import compress
from lightning_streaming.formats.hashing import hash_bytes, hash_names
from lightning_streaming.formats.index import FileInfo
from tests.helpers import assert_error


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


def test_a_missing_file_has_no_size(tmp_path: Path) -> None:
    assert find_size(tmp_path / "x") is None
    (tmp_path / "x").write_bytes(b"data")
    assert find_size(tmp_path / "x") == 4
