"""Algorithms that an index names: hashes and compression of whole files.

Hashes are those of hashlib and of the xxhash package.

A compression is ``family`` or ``family:level``, for example ``zstd`` or ``zstd:19``. A file is compressed as one
unit, its name ends in the family, and the level does not matter when it is read.

Every family decompresses piece by piece, or checks the size that the data states first, so that neither a bomb nor a
wrong index allocates more memory than the data fills. Except for snappy, whose blocks are read as a whole, a large file
needs no more memory than a small one.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from lightning_streaming.errors import ConfigError, MissingDependencyError, ShardCorruptError
from lightning_streaming.escaping import short_repr
from lightning_streaming.formats.values import brief

# Both cheapest first.
_HASHLIB_NAMES = (
    "sha1",
    "sha256",
    "sha224",
    "blake2b",
    "md5",
    "sha512",
    "sha384",
    "blake2s",
    "sha3_224",
    "sha3_256",
    "sha3_384",
    "sha3_512",
)
_XXHASH_NAMES = ("xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32")
CHEAPEST_FIRST = _XXHASH_NAMES + _HASHLIB_NAMES
"""Names of all hashes an index may record."""
_READ_BYTES = 2**20


class _Hasher(Protocol):
    def update(self, data: memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


def hash_names() -> tuple[str, ...]:
    """Return the names of all hashes an index may record, sorted; those that start with xxh need the xxhash package."""
    return tuple(sorted(CHEAPEST_FIRST))


def hash_bytes(name: str, *pieces: bytes | memoryview) -> str:
    """Hash bytes, in one or several pieces; return lowercase hexadecimal digits.

    Raises:
        ConfigError: No hash has this name.
        MissingDependencyError: The hash needs the xxhash package, which is not installed.
    """
    hasher = _new_hasher(name)
    for piece in pieces:
        hasher.update(memoryview(piece))
    return hasher.hexdigest()


def hash_file(name: str, path: Path) -> str:
    """Hash a whole file, one mebibyte at a time; return lowercase hexadecimal digits.

    Raises:
        ConfigError: No hash has this name.
        MissingDependencyError: The hash needs the xxhash package, which is not installed.
    """
    hasher = _new_hasher(name)
    block = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
    return hasher.hexdigest()


def _new_hasher(name: str) -> _Hasher:
    if name in _HASHLIB_NAMES:
        # Without the flag, md5 fails on machines that follow FIPS.
        return hashlib.new(name, usedforsecurity=False)
    if name in _XXHASH_NAMES:
        try:
            import xxhash
        except ImportError:
            raise MissingDependencyError(
                f"the hash {name} needs the xxhash package", hint="run: pip install 'lightning-streaming[xxhash]'"
            ) from None
        hasher: _Hasher = getattr(xxhash, name)()
        return hasher
    raise ConfigError(f"a hash must be one of {', '.join(hash_names())}, but got {brief(name)}", option="hashes")


def check_algorithm(algorithm: str) -> None:
    """Raise if an algorithm cannot be used here.

    Raises:
        ConfigError: The algorithm or level is unknown.
        MissingDependencyError: The package it needs is not installed.
    """
    _package(extension(algorithm))


def extension(algorithm: str) -> str:
    """Return the suffix of a compressed file's name, without the dot: ``zstd`` for ``zstd:19``.

    Raises:
        ConfigError: The algorithm or level is unknown.
    """
    return _find(algorithm)[0]


def compress(algorithm: str, data: bytes | memoryview) -> bytes:
    """Compress a whole file.

    Raises:
        ConfigError: The algorithm or level is unknown.
        MissingDependencyError: The package it needs is not installed.
    """
    _, codec, level = _find(algorithm)
    return codec.compress(data, level)


def decompress(algorithm: str, data: bytes, raw_bytes: int) -> bytes:
    """Decompress a whole file in memory, never into more than its raw size.

    Args:
        algorithm: Its algorithm; the level does not matter.
        data: The compressed file.
        raw_bytes: Size of the raw file according to the index.

    Raises:
        StreamingError: As for :func:`decompressed_pieces`.
    """
    whole = io.BytesIO()
    for piece in decompressed_pieces(algorithm, io.BytesIO(data), raw_bytes):
        whole.write(piece)
    return whole.getvalue()


def decompressed_pieces(algorithm: str, file: BinaryIO, raw_bytes: int) -> Iterator[bytes]:
    """Decompress a file piece by piece, never into more than its raw size.

    That takes a few MiB for any size of the file; snappy takes as much as both forms of it.

    Args:
        algorithm: Its algorithm; the level does not matter.
        file: The compressed file.
        raw_bytes: Size of the raw file according to the index.

    Yields:
        The next piece of the raw file.

    Raises:
        ShardCorruptError: The data is damaged, or the raw file has another size.
        ConfigError: The algorithm or level is unknown.
        MissingDependencyError: The package it needs is not installed.
    """
    _, codec, _ = _find(algorithm)
    size = 0
    for piece in codec.decompress(file, raw_bytes + 1):  # one more shows data that is too long
        size += len(piece)
        if size > raw_bytes:
            raise ShardCorruptError(f"{algorithm} data must hold {raw_bytes} bytes, but holds more")
        yield piece
    if size < raw_bytes:
        raise ShardCorruptError(f"{algorithm} data must hold {raw_bytes} bytes, but holds only {size}")


ZSTD_HEAD_BYTES = 18
"""Most bytes of a zstd frame's head."""


def declared_zstd_bytes(data: bytes) -> int:
    """Return the raw size that a zstd frame states in its head; it may be wrong.

    Raises:
        ShardCorruptError: It does not begin like a frame, or does not state the size.
        MissingDependencyError: The package that decompresses it is not installed.
    """
    zstandard = _package("zstd")
    with _checked("zstd", zstandard.ZstdError):
        size = int(zstandard.frame_content_size(data))
    if size < 0:
        raise ShardCorruptError("zstd data must state its raw size, but does not")
    return size


def _find(algorithm: str) -> tuple[str, _Codec, int]:
    """Return the family, its codec, and the level of an algorithm."""
    family, colon, level = algorithm.partition(":")
    codec = CODECS.get(family)
    if codec is None:
        raise ConfigError(
            f"compression must be one of {', '.join(CODECS)}, but got {short_repr(algorithm)}", option="compression"
        )
    if not colon:
        return family, codec, codec.default_level
    if level not in map(str, codec.levels):
        levels = f"{codec.levels[0]} to {codec.levels[-1]}" if codec.levels else "none"
        raise ConfigError(
            f"{family} compression has levels {levels}, but got {short_repr(algorithm)}", option="compression"
        )
    return family, codec, int(level)


# --- families ---

_PACKAGES = {"br": "brotli", "snappy": "cramjam", "zstd": "zstandard"}
_PIECE_BYTES = 2**20
_SMALLEST_ZSTD_WINDOW = 2**23
"""Window that any zstd frame may use, and every decoder must support."""
_MAX_SNAPPY_RATIO = 64 / 3
"""A copy of 64 bytes takes 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Codec:
    """One family of compression."""

    levels: range
    """Valid levels; empty if the family has none."""
    default_level: int
    """The level by default."""
    compress: Callable[[bytes | memoryview, int], bytes]
    """(raw data, level) to compressed data. Raises MissingDependencyError."""
    decompress: Callable[[BinaryIO, int], Iterator[bytes]]
    """(compressed file, most bytes) to pieces of the raw data, which may be truncated there.

    Raises ShardCorruptError if the data is damaged, and MissingDependencyError.
    """


def _package(family: str) -> Any:
    """Return the module of a family; None if it is built into Python."""
    name = _PACKAGES.get(family)
    try:
        return name and import_module(name)
    except ImportError:
        raise MissingDependencyError(
            f"{family} compression needs the {name} package", hint=f"run: pip install 'lightning-streaming[{family}]'"
        ) from None


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@contextmanager
def _checked(family: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise ShardCorruptError for the errors of a decompressor."""
    try:
        yield
    except errors as error:
        raise ShardCorruptError(f"not valid {family} data ({error})") from None


def _read_up_to(file: _Readable, most_bytes: int) -> Iterator[bytes]:
    """Read a file of decompressed data."""
    while piece := file.read(min(_PIECE_BYTES, most_bytes)):
        most_bytes -= len(piece)
        yield piece


def _decompress_gz(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    with _checked("gz", OSError, EOFError, zlib.error):
        yield from _read_up_to(gzip.GzipFile(fileobj=file), most_bytes)


def _decompress_bz2(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    with _checked("bz2", OSError, EOFError, ValueError):
        yield from _read_up_to(bz2.BZ2File(file), most_bytes)


def _compress_zstd(data: bytes | memoryview, level: int) -> bytes:
    return bytes(_package("zstd").ZstdCompressor(level=level).compress(data))


def _decompress_zstd(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    zstandard = _package("zstd")
    window = max(_SMALLEST_ZSTD_WINDOW, 1 << most_bytes.bit_length())
    with _checked("zstd", zstandard.ZstdError):
        # As a stream: decompressing in one call would trust the size that the data states.
        decompressor = zstandard.ZstdDecompressor(max_window_size=min(window, 2**31))
        yield from _read_up_to(decompressor.stream_reader(file, closefd=False), most_bytes)


def _compress_br(data: bytes | memoryview, level: int) -> bytes:
    return bytes(_package("br").compress(data, quality=level))


def _decompress_br(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    brotli = _package("br")
    decompressor = brotli.Decompressor()
    with _checked("br", brotli.error):
        while most_bytes and not decompressor.is_finished():
            data = file.read(_PIECE_BYTES) if decompressor.can_accept_more_data() else b""
            piece = decompressor.process(data, output_buffer_limit=min(_PIECE_BYTES, most_bytes))
            if not piece and not data:
                break
            most_bytes -= len(piece)
            yield piece


def _compress_snappy(data: bytes | memoryview, _level: int) -> bytes:
    return bytes(_package("snappy").snappy.compress_raw(data))


def _decompress_snappy(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    cramjam = _package("snappy")
    data = file.read()
    declared = _declared_snappy_bytes(data)
    if declared > most_bytes or declared > len(data) * _MAX_SNAPPY_RATIO:
        raise ShardCorruptError(f"{len(data)} bytes of snappy data cannot or must not hold {declared} bytes")
    with _checked("snappy", cramjam.DecompressionError):
        yield bytes(cramjam.snappy.decompress_raw(data))


def _declared_snappy_bytes(data: bytes) -> int:
    """Return the raw size at the start of a snappy block: 7 bits per byte, the lowest first."""
    declared = 0
    for place, byte in enumerate(data[:5]):
        declared |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return declared
    raise ShardCorruptError(f"not valid snappy data (it begins with {data[:5]!r})")


CODECS: Mapping[str, _Codec] = {
    "br": _Codec(levels=range(12), default_level=11, compress=_compress_br, decompress=_decompress_br),
    "bz2": _Codec(levels=range(1, 10), default_level=9, compress=bz2.compress, decompress=_decompress_bz2),
    "gz": _Codec(levels=range(10), default_level=9, compress=gzip.compress, decompress=_decompress_gz),
    "snappy": _Codec(levels=range(0), default_level=0, compress=_compress_snappy, decompress=_decompress_snappy),
    "zstd": _Codec(levels=range(1, 23), default_level=3, compress=_compress_zstd, decompress=_decompress_zstd),
}
"""Every family, by the suffix of its files."""
