"""The work behind each family of compression: bytes to fewer bytes, and back into no more than was promised.

Every family unpacks piece by piece, or looks at what the data says of itself first, so that neither a bomb nor an index
that lies makes us set aside more memory than the data fills. All but snappy, whose blocks are read as a whole, need no
more memory for a large file than for a small one.
"""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import BinaryIO, Protocol

from lightning_streaming.errors import MissingDependencyError, ShardCorruptError

_PIECE_BYTES = 2**20
_SMALLEST_ZSTD_WINDOW = 2**23
"""What a zstd frame may ask for, however little it holds; any decoder must grant it."""
_MOST_SNAPPY_RATIO = 64 / 3
"""A copy of 64 bytes takes 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """One family of compression."""

    levels: range
    """Levels that may be asked for; empty where the family has none."""
    default_level: int
    """The level when none is asked for."""
    compress: Callable[[bytes | memoryview, int], bytes]
    """(raw data, level) to compressed data. Raises MissingDependencyError."""
    decompress: Callable[[BinaryIO, int], Iterator[bytes]]
    """(compressed file, most bytes to give) to pieces of the raw data, which may be cut there.

    Raises ShardCorruptError where the data is damaged, and MissingDependencyError.
    """
    require: Callable[[], object] = lambda: None
    """Raises MissingDependencyError if the package behind it is not installed."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _read_up_to(file: _Readable, most_bytes: int) -> Iterator[bytes]:
    """Read a file of decompressed data."""
    while piece := file.read(min(_PIECE_BYTES, most_bytes)):
        most_bytes -= len(piece)
        yield piece


def _compress_gz(data: bytes | memoryview, level: int) -> bytes:
    return gzip.compress(data, level)


def _decompress_gz(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    try:
        yield from _read_up_to(gzip.GzipFile(fileobj=file), most_bytes)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged("gz", error) from None


def _compress_bz2(data: bytes | memoryview, level: int) -> bytes:
    return bz2.compress(data, level)


def _decompress_bz2(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    try:
        yield from _read_up_to(bz2.BZ2File(file), most_bytes)
    except (OSError, EOFError, ValueError) as error:
        raise _damaged("bz2", error) from None


def _require_zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise _missing("zstd", "zstandard") from None
    return zstandard


def _compress_zstd(data: bytes | memoryview, level: int) -> bytes:
    compressed: bytes = _require_zstandard().ZstdCompressor(level=level).compress(data)
    return compressed


def _decompress_zstd(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    zstandard = _require_zstandard()
    window = max(_SMALLEST_ZSTD_WINDOW, 1 << most_bytes.bit_length())
    try:
        # As a stream: decompressing in one call would trust the size that the data itself declares.
        decompressor = zstandard.ZstdDecompressor(max_window_size=min(window, 2**31))
        yield from _read_up_to(decompressor.stream_reader(file, closefd=False), most_bytes)
    except zstandard.ZstdError as error:
        raise _damaged("zstd", error) from None


def _require_brotli() -> ModuleType:
    try:
        import brotli
    except ImportError:
        raise _missing("br", "brotli") from None
    module: ModuleType = brotli
    return module


def _compress_br(data: bytes | memoryview, level: int) -> bytes:
    compressed: bytes = _require_brotli().compress(data, quality=level)
    return compressed


def _decompress_br(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    brotli = _require_brotli()
    decompressor = brotli.Decompressor()
    try:
        while most_bytes and not decompressor.is_finished():
            data = file.read(_PIECE_BYTES) if decompressor.can_accept_more_data() else b""
            piece = decompressor.process(data, output_buffer_limit=min(_PIECE_BYTES, most_bytes))
            if not piece and not data:
                break
            most_bytes -= len(piece)
            yield piece
    except brotli.error as error:
        raise _damaged("br", error) from None


def _require_cramjam() -> ModuleType:
    try:
        import cramjam
    except ImportError:
        raise _missing("snappy", "cramjam") from None
    return cramjam


def _compress_snappy(data: bytes | memoryview, _level: int) -> bytes:
    return bytes(_require_cramjam().snappy.compress_raw(data))


def _decompress_snappy(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    cramjam = _require_cramjam()
    data = file.read()
    declared = _declared_snappy_bytes(data)
    if declared > most_bytes or declared > len(data) * _MOST_SNAPPY_RATIO:
        raise ShardCorruptError(f"{len(data)} bytes of snappy data cannot or must not hold {declared} bytes")
    try:
        yield bytes(cramjam.snappy.decompress_raw(data))
    except cramjam.DecompressionError as error:
        raise _damaged("snappy", error) from None


def _declared_snappy_bytes(data: bytes) -> int:
    """The raw size with which a snappy block begins: 7 bits a byte, the lowest first."""
    declared = 0
    for place, byte in enumerate(data[:5]):
        declared |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return declared
    raise ShardCorruptError(f"not sound snappy data (it begins with {data[:5]!r})")


def _missing(family: str, package: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"{family} compression needs the {package} package; run: pip install 'lightning-streaming[{family}]'"
    )


def _damaged(family: str, error: Exception) -> ShardCorruptError:
    return ShardCorruptError(f"not sound {family} data ({error})")


CODECS = {
    "br": Codec(
        levels=range(12),
        default_level=11,
        compress=_compress_br,
        decompress=_decompress_br,
        require=_require_brotli,
    ),
    "bz2": Codec(levels=range(1, 10), default_level=9, compress=_compress_bz2, decompress=_decompress_bz2),
    "gz": Codec(levels=range(10), default_level=9, compress=_compress_gz, decompress=_decompress_gz),
    "snappy": Codec(
        levels=range(0),
        default_level=0,
        compress=_compress_snappy,
        decompress=_decompress_snappy,
        require=_require_cramjam,
    ),
    "zstd": Codec(
        levels=range(1, 23),
        default_level=3,
        compress=_compress_zstd,
        decompress=_decompress_zstd,
        require=_require_zstandard,
    ),
}
"""Every family, by the name that its files end in."""
