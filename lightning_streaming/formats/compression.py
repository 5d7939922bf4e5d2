"""How whole shard files are compressed.

An algorithm is written ``family`` or ``family:level``, for example ``zstd`` or ``zstd:19``. A file is compressed as one
unit, its name ends in the family, and the level does not matter when it is read.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO

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
    """Decompress a whole file in memory, never into more than it should hold.

    Args:
        algorithm: How it was compressed; the level does not matter.
        data: The compressed file.
        raw_bytes: Size of the raw file, as the index tells it.

    Raises:
        StreamingError: As for :func:`decompressed_pieces`.
    """
    whole = io.BytesIO()
    for piece in decompressed_pieces(algorithm, io.BytesIO(data), raw_bytes):
        whole.write(piece)
    return whole.getvalue()


def decompressed_pieces(algorithm: str, file: BinaryIO, raw_bytes: int) -> Iterator[bytes]:
    """Decompress a file piece by piece, together never more than it should hold.

    That takes a few MiB whatever the size of the file, but for snappy, which takes as much as both forms of it.

    Args:
        algorithm: How it was compressed; the level does not matter.
        file: The compressed file.
        raw_bytes: Size of the raw file, as the index tells it.

    Yields:
        What comes next of the raw file.

    Raises:
        ShardCorruptError: The data is damaged, or the raw file has another size.
        ConfigError: There is no such algorithm or level.
        MissingDependencyError: The package it needs is not installed.
    """
    _, codec, _ = _find(algorithm)
    found = 0
    for piece in codec.decompress(file, raw_bytes + 1):  # one more shows data that is too long
        found += len(piece)
        if found > raw_bytes:
            raise ShardCorruptError(f"{algorithm} data must hold {raw_bytes} bytes, but holds more")
        yield piece
    if found < raw_bytes:
        raise ShardCorruptError(f"{algorithm} data must hold {raw_bytes} bytes, but holds only {found}")


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
