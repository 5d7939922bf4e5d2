from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, MissingDependencyError, ShardCorruptError, UnsupportedError
from lightning_streaming.formats.compression import check_algorithm, compress, decompress, extension


@given(st.binary(), st.sampled_from(["zstd", "zstd:1", "zstd:22"]))
def test_data_comes_back_as_it_was(data: bytes, algorithm: str) -> None:
    assert decompress("zstd", compress(algorithm, data), len(data)) == data


def test_a_frame_that_does_not_declare_its_size_is_read() -> None:
    data = zstandard.ZstdCompressor(write_content_size=False).compress(b"shard" * 100)
    assert decompress("zstd", data, 500) == b"shard" * 100


def test_the_level_reaches_the_compressor() -> None:
    text = " ".join(str(number**2) for number in range(3000)).encode()
    assert compress("zstd:1", text) != compress("zstd:19", text)
    assert compress("zstd", text) == compress("zstd:3", text)


@pytest.mark.parametrize("raw_bytes", [0, 99, 101])
def test_another_size_than_the_index_says_is_refused(raw_bytes: int) -> None:
    with pytest.raises(ShardCorruptError, match=f"must hold {raw_bytes} bytes"):
        decompress("zstd", compress("zstd", bytes(100)), raw_bytes)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = compress("zstd", bytes(2**28))
    with pytest.raises(ShardCorruptError, match="but hold more"):
        decompress("zstd", bomb, 1000)


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: b"", lambda data: b"\0" + data])
def test_damaged_data_is_refused(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ShardCorruptError, match="zstd data"):
        decompress("zstd", damage(compress("zstd", bytes(range(256)))), 256)


@pytest.mark.parametrize(("algorithm", "ending"), [("zstd", "zstd"), ("zstd:19", "zstd"), ("gz:0", "gz"), ("br", "br")])
def test_the_extension_has_no_level(algorithm: str, ending: str) -> None:
    assert extension(algorithm) == ending


@pytest.mark.parametrize(
    "algorithm", ["", "lz4", "ZSTD", "zstd:", "zstd:0", "zstd:23", "zstd:03", "zstd:1:2", "snappy:1", "gz:10", "bz2:0"]
)
def test_an_unknown_algorithm_or_level_is_refused(algorithm: str) -> None:
    for refuse in (check_algorithm, extension):
        with pytest.raises(ConfigError, match="but got") as caught:
            refuse(algorithm)
        assert not isinstance(caught.value, UnsupportedError)


@pytest.mark.parametrize("algorithm", ["br", "br:0", "bz2", "gz:9", "snappy"])
def test_an_algorithm_to_come_is_named_as_such(algorithm: str) -> None:
    for refuse in (
        lambda: check_algorithm(algorithm),
        lambda: compress(algorithm, b""),
        lambda: decompress(algorithm, b"", 0),
    ):
        with pytest.raises(UnsupportedError, match=algorithm.partition(":")[0]):
            refuse()


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'lightning-streaming\[zstd\]'"):
        check_algorithm("zstd")
