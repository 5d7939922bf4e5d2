from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_streaming.errors import ConfigError, MissingDependencyError
from lightning_streaming.formats.algorithms import hash_bytes, hash_file, hash_names
from tests.helpers import assert_error


def test_the_names_are_those_of_the_format() -> None:
    assert " ".join(hash_names()) == (
        "blake2b blake2s md5 sha1 sha224 sha256 sha384 sha3_224 sha3_256 sha3_384 sha3_512 sha512 "
        "xxh128 xxh32 xxh3_128 xxh3_64 xxh64"
    )


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("md5", "900150983cd24fb0d6963f7d28e17f72"),
        ("sha1", "a9993e364706816aba3e25717850c26c9cd0d89d"),
        ("xxh32", "32d153ff"),
        ("xxh64", "44bc2cf5ad770999"),
    ],
)
def test_published_digests_of_abc(name: str, digest: str) -> None:
    assert hash_bytes(name, b"abc") == digest


@pytest.mark.parametrize("name", hash_names())
def test_a_file_hashes_like_its_bytes_however_long(name: str, tmp_path: Path) -> None:
    for size in (0, 1, 2**20, 2**20 + 1):
        data = bytes(range(251)) * (size // 251 + 1)
        (tmp_path / "file").write_bytes(data[:size])
        assert hash_file(name, tmp_path / "file") == hash_bytes(name, data[:size])


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with assert_error(ConfigError, option="hashes") as caught:
        hash_bytes("crc32", b"")
    assert "'crc32'" in str(caught.value)


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'lightning-streaming\[xxhash\]'"):
        hash_bytes("xxh64", b"")
    assert hash_bytes("sha1", b"")
