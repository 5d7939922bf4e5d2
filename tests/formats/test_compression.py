from __future__ import annotations

import io
import random
import sys
import tracemalloc
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import ConfigError, MissingDependencyError, ShardCorruptError
from lightning_streaming.formats.algorithms import (
    CODECS,
    check_algorithm,
    compress,
    decompress,
    decompressed_pieces,
    extension,
)
from tests.helpers import assert_error

FAMILIES = sorted(CODECS)
ALGORITHMS = [*FAMILIES, *(f"{family}:{level}" for family in FAMILIES for level in CODECS[family].levels)]
TEXT = " ".join(str(number**2) for number in range(3000)).encode()


@given(st.binary(), st.sampled_from(ALGORITHMS))
def test_data_comes_back_as_it_was(data: bytes, algorithm: str) -> None:
    assert decompress(algorithm.partition(":")[0], compress(algorithm, data), len(data)) == data


@pytest.mark.rotate(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_data_of_many_pieces_comes_back_as_it_was(family: str) -> None:
    data = TEXT * 200  # 4 MB
    assert decompress(family, compress(family if family != "br" else "br:1", data), len(data)) == data


def test_a_frame_that_does_not_declare_its_size_is_read() -> None:
    data = zstandard.ZstdCompressor(write_content_size=False).compress(b"shard" * 100)
    assert decompress("zstd", data, 500) == b"shard" * 100


@pytest.mark.parametrize("family", [family for family in FAMILIES if CODECS[family].levels])
def test_the_level_reaches_the_compressor(family: str) -> None:
    least, most = CODECS[family].levels[0], CODECS[family].levels[-1]
    fast, small = (compress(f"{family}:{level}", TEXT * 20) for level in (least, most))
    assert fast[12:] != small[12:]  # the head of gz tells the time
    assert len(compress(family, TEXT)) == len(compress(f"{family}:{CODECS[family].default_level}", TEXT))


@pytest.mark.parametrize("raw_bytes", [0, 99, 101, 2**32 - 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_size_than_the_index_says_is_refused(family: str, raw_bytes: int) -> None:
    with pytest.raises(ShardCorruptError, match=rf"must hold {raw_bytes} bytes|must not hold 100 bytes"):
        decompress(family, compress(family, bytes(100)), raw_bytes)


@pytest.mark.rotate(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("raw_bytes", [1000, 2**32 - 1])
def test_neither_a_bomb_nor_a_lying_index_takes_memory(family: str, raw_bytes: int) -> None:
    """A bomb where the index promises little, and little where it promises a lot."""
    content = bytes(2**26) if raw_bytes == 1000 else bytes(100)
    data = compress("br:1" if family == "br" else family, content)
    content = b""
    tracemalloc.start()
    with pytest.raises(ShardCorruptError, match=r"more|only|must not hold"):
        decompress(family, data, raw_bytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20 + len(data)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "snappy"])
def test_a_large_file_takes_no_more_memory_than_a_small_one(family: str) -> None:
    content = random.Random(0).randbytes(2**20) * 16
    packed = io.BytesIO(compress(f"{family}:1", content))
    tracemalloc.start()
    assert sum(map(len, decompressed_pieces(family, packed, len(content)))) == len(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(content) // 3


def test_a_zstd_frame_that_wants_a_large_window_for_little_is_refused() -> None:
    """Its window is memory that the decoder sets aside, whatever the frame holds."""
    sizes = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    frame = zstandard.ZstdCompressor(compression_params=sizes).compressobj()
    data = frame.compress(bytes(100)) + frame.flush()
    with pytest.raises(ShardCorruptError, match="requires too much memory"):
        decompress("zstd", data, 100)
    assert decompress("zstd", compress("zstd:22", bytes(2**25)), 2**25) == bytes(2**25)


def test_a_snappy_block_that_says_more_than_it_can_hold_is_refused() -> None:
    block = compress("snappy", bytes(1000))
    with pytest.raises(ShardCorruptError, match="cannot or must not hold 268435455 bytes"):
        decompress("snappy", b"\xff\xff\xff\x7f" + block[2:], 2**28 - 1)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-5], lambda data: data[:1], lambda data: b"", lambda data: b"\0" + data]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_data_is_refused(family: str, damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ShardCorruptError, match=f"{family} data"):
        decompress(family, damage(compress(family, bytes(range(256)))), 256)


@pytest.mark.parametrize(("algorithm", "ending"), [("zstd", "zstd"), ("zstd:19", "zstd"), ("gz:0", "gz"), ("br", "br")])
def test_the_extension_has_no_level(algorithm: str, ending: str) -> None:
    assert extension(algorithm) == ending


@pytest.mark.parametrize(
    "algorithm", ["", "lz4", "ZSTD", "zstd:", "zstd:0", "zstd:23", "zstd:03", "zstd:1:2", "snappy:1", "gz:10", "bz2:0"]
)
def test_an_unknown_algorithm_or_level_is_refused(algorithm: str) -> None:
    for refuse in (check_algorithm, extension):
        with assert_error(ConfigError, option="compression") as caught:
            refuse(algorithm)
        assert "but got" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "module", "extra"),
    [("zstd", "zstandard", "zstd"), ("br", "brotli", "br"), ("snappy", "cramjam", "snappy")],
)
def test_a_missing_package_is_named_with_its_install_line(
    family: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_algorithm(family)
    monkeypatch.setitem(sys.modules, module, None)
    for refuse in (
        lambda: check_algorithm(family),
        lambda: compress(family, b""),
        lambda: decompress(family, b"", 0),
    ):
        with pytest.raises(MissingDependencyError, match=rf"pip install 'lightning-streaming\[{extra}\]'"):
            refuse()
