"""How whole shard files are compressed.

An algorithm is written ``family`` or ``family:level``, for example ``zstd`` or ``zstd:19``. A file is compressed as one
unit, its name ends in the family, and the level does not matter when it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from lightning_streaming.errors import ConfigError, MissingDependencyError, ShardCorruptError, UnsupportedError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Transform:
    """The work of one family."""

    compress: Callable[[bytes, int], bytes]
    """(raw data, level) to compressed data."""
    decompress: Callable[[bytes, int], bytes]
    """(compressed data, most bytes to return) to raw data, which may be cut there."""
    require: Callable[[], object]
    """Raises MissingDependencyError if the package behind it is not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """One family of compression."""

    levels: range
    """Levels that may be asked for; empty where the family has none."""
    default_level: int
    """The level when none is asked for."""
    transform: _Transform | None = None
    """None while this version does not serve the family."""


def _require_zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise MissingDependencyError(
            "zstd compression needs the zstandard package; run: pip install 'lightning-streaming[zstd]'"
        ) from None
    return zstandard


def _compress_zstd(data: bytes, level: int) -> bytes:
    compressed: bytes = _require_zstandard().ZstdCompressor(level=level).compress(data)
    return compressed


def _decompress_zstd(data: bytes, most_bytes: int) -> bytes:
    zstandard = _require_zstandard()
    try:
        # As a stream: decompressing in one call would trust the size that the data itself declares.
        raw: bytes = zstandard.ZstdDecompressor().stream_reader(data).read(most_bytes)
    except zstandard.ZstdError as error:
        raise ShardCorruptError(f"not sound zstd data ({error})") from None
    return raw


_ZSTD = _Transform(compress=_compress_zstd, decompress=_decompress_zstd, require=_require_zstandard)

_CODECS = {
    "br": Codec(levels=range(12), default_level=11),
    "bz2": Codec(levels=range(1, 10), default_level=9),
    "gz": Codec(levels=range(10), default_level=9),
    "snappy": Codec(levels=range(0), default_level=0),
    "zstd": Codec(levels=range(1, 23), default_level=3, transform=_ZSTD),
}


def check_algorithm(algorithm: str) -> None:
    """Refuse an algorithm that cannot be used here.

    Raises:
        ConfigError: There is no such algorithm or level.
        UnsupportedError: This version does not serve it.
        MissingDependencyError: The package it needs is not installed.
    """
    _transform(algorithm).require()


def extension(algorithm: str) -> str:
    """What a compressed file's name ends in, without the dot: ``zstd`` for ``zstd:19``.

    Raises:
        ConfigError: There is no such algorithm or level.
    """
    family, _, _ = _find(algorithm)
    return family


def compress(algorithm: str, data: bytes) -> bytes:
    """Compress a whole file.

    Raises:
        ConfigError: There is no such algorithm or level.
        UnsupportedError: This version does not serve it.
        MissingDependencyError: The package it needs is not installed.
    """
    _, _, level = _find(algorithm)
    return _transform(algorithm).compress(data, level)


def decompress(algorithm: str, data: bytes, raw_bytes: int) -> bytes:
    """Decompress a whole file, never into more than it should hold.

    Args:
        algorithm: How it was compressed; the level does not matter.
        data: The compressed file.
        raw_bytes: Size of the raw file, as the index tells it.

    Raises:
        ShardCorruptError: The data is damaged, or the raw file has another size.
        ConfigError: There is no such algorithm or level.
        UnsupportedError: This version does not serve it.
        MissingDependencyError: The package it needs is not installed.
    """
    raw = _transform(algorithm).decompress(data, raw_bytes + 1)  # one more shows data that is too long
    if len(raw) != raw_bytes:
        found = "more" if len(raw) > raw_bytes else f"only {len(raw)}"
        raise ShardCorruptError(f"{len(data)} bytes of {algorithm} data must hold {raw_bytes} bytes, but hold {found}")
    return raw


def _transform(algorithm: str) -> _Transform:
    family, codec, _ = _find(algorithm)
    if codec.transform is None:
        served = ", ".join(name for name, codec in _CODECS.items() if codec.transform)
        raise UnsupportedError(f"{family} compression is not served by this version, only {served}")
    return codec.transform


def _find(algorithm: str) -> tuple[str, Codec, int]:
    """The family, its codec, and the level that ``algorithm`` asks for."""
    family, colon, level = algorithm.partition(":")
    codec = _CODECS.get(family)
    if codec is None:
        raise ConfigError(f"compression must be one of {', '.join(_CODECS)}, but got {algorithm!r}")
    if not colon:
        return family, codec, codec.default_level
    if level not in map(str, codec.levels):
        levels = f"{codec.levels[0]} to {codec.levels[-1]}" if codec.levels else "none"
        raise ConfigError(f"{family} compression has levels {levels}, but got {algorithm!r}")
    return family, codec, int(level)
