"""How whole shard files are compressed.

An algorithm is written ``family`` or ``family:level``, for example ``zstd`` or ``zstd:19``. A file is compressed as one
unit, its name ends in the family, and the level does not matter when it is read.
"""

from __future__ import annotations

from lightning_streaming.errors import ConfigError, ShardCorruptError
from lightning_streaming.formats.codecs import CODECS, Codec


def check_algorithm(algorithm: str) -> None:
    """Refuse an algorithm that cannot be used here.

    Raises:
        ConfigError: There is no such algorithm or level.
        MissingDependencyError: The package it needs is not installed.
    """
    _, codec, _ = _find(algorithm)
    codec.require()


def extension(algorithm: str) -> str:
    """What a compressed file's name ends in, without the dot: ``zstd`` for ``zstd:19``.

    Raises:
        ConfigError: There is no such algorithm or level.
    """
    family, _, _ = _find(algorithm)
    return family


def compress(algorithm: str, data: bytes | memoryview) -> bytes:
    """Compress a whole file.

    Raises:
        ConfigError: There is no such algorithm or level.
        MissingDependencyError: The package it needs is not installed.
    """
    _, codec, level = _find(algorithm)
    return codec.compress(data, level)


def decompress(algorithm: str, data: bytes, raw_bytes: int) -> bytes:
    """Decompress a whole file, never into more than it should hold.

    Args:
        algorithm: How it was compressed; the level does not matter.
        data: The compressed file.
        raw_bytes: Size of the raw file, as the index tells it.

    Raises:
        ShardCorruptError: The data is damaged, or the raw file has another size.
        ConfigError: There is no such algorithm or level.
        MissingDependencyError: The package it needs is not installed.
    """
    _, codec, _ = _find(algorithm)
    raw = codec.decompress(data, raw_bytes + 1)  # one more shows data that is too long
    if len(raw) != raw_bytes:
        found = "more" if len(raw) > raw_bytes else f"only {len(raw)}"
        raise ShardCorruptError(f"{len(data)} bytes of {algorithm} data must hold {raw_bytes} bytes, but hold {found}")
    return raw


def _find(algorithm: str) -> tuple[str, Codec, int]:
    """The family, its codec, and the level that ``algorithm`` asks for."""
    family, colon, level = algorithm.partition(":")
    codec = CODECS.get(family)
    if codec is None:
        raise ConfigError(f"compression must be one of {', '.join(CODECS)}, but got {algorithm!r}")
    if not colon:
        return family, codec, codec.default_level
    if level not in map(str, codec.levels):
        levels = f"{codec.levels[0]} to {codec.levels[-1]}" if codec.levels else "none"
        raise ConfigError(f"{family} compression has levels {levels}, but got {algorithm!r}")
    return family, codec, int(level)
