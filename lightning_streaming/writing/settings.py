"""What a writer does with every shard, checked before the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.compression import check_algorithm
from lightning_streaming.formats.hashing import hash_bytes
from lightning_streaming.formats.index import INDEX_VERSION, MAX_RAW_BYTES
from lightning_streaming.units import parse_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSettings:
    """How shards are cut, compressed and hashed."""

    compression: str | None
    """Algorithm, for example ``zstd:7``."""
    hashes: tuple[str, ...]
    """Names of the hashes to record of each file; sorted."""
    size_limit: int | None
    """Most raw bytes per shard; None for one shard of any size."""

    def __post_init__(self) -> None:
        if self.compression is not None:
            check_algorithm(self.compression)
        if list(self.hashes) != sorted(set(self.hashes)):
            raise ConfigError(f"hashes must be sorted and each be there once, but got {list(self.hashes)}")
        for name in self.hashes:
            hash_bytes(name, b"")  # raises where it could not be computed
        if self.size_limit is not None and not 0 < self.size_limit <= MAX_RAW_BYTES:
            raise ConfigError(f"size_limit must be in (0, {MAX_RAW_BYTES}] bytes, but got {self.size_limit}")


def config_of_shards(format_name: str, settings: ShardSettings, schema: Mapping[str, Any]) -> dict[str, Any]:
    """What an index says of all shards of one writer, as JSON has it.

    Args:
        format_name: For example ``"mds"``.
        settings: How they are cut, compressed and hashed.
        schema: What the format says of the columns; empty where they are not known yet.
    """
    columns = {name: list(value) if isinstance(value, tuple) else value for name, value in schema.items()}
    return {
        "version": INDEX_VERSION,
        "format": format_name,
        "compression": settings.compression,
        "hashes": list(settings.hashes),
        "size_limit": settings.size_limit,
        **columns,
    }


def parse_settings(
    compression: str | None, hashes: Sequence[str] | None, size_limit: int | float | str | None
) -> ShardSettings:
    """Settings as a user writes them: empty for none, sizes like ``"64mb"``; of sizes None and 0 mean none.

    Raises:
        ConfigError: One of them cannot work.
        UnsupportedError: This version does not serve the compression.
        MissingDependencyError: A package that one of them needs is not installed.
    """
    if isinstance(hashes, str):
        raise ConfigError(f"hashes must be a list of names, but got the text {hashes!r}; write [{hashes!r}]")
    if not isinstance(hashes or (), Sequence) or not all(isinstance(name, str) for name in hashes or ()):
        raise ConfigError(f"hashes must be a list of names, but got {hashes!r}")
    if not isinstance(compression or "", str):
        raise ConfigError(f"compression must be a name like 'zstd' or 'zstd:19', but got {compression!r}")
    return ShardSettings(
        compression=compression or None,
        hashes=tuple(hashes or ()),
        size_limit=_parse_size_limit(size_limit),
    )


def _parse_size_limit(size_limit: int | float | str | None) -> int | None:
    """Bytes; None for no limit, which is written None or 0, and not as what only comes to 0."""
    if size_limit is None:
        return None
    if isinstance(size_limit, bool) or not isinstance(size_limit, Real | str):
        raise ConfigError(f"size_limit must be a size like '64mb', or None for no limit, but got {size_limit!r}")
    found = parse_bytes(size_limit, "size_limit")
    if not found and any(digit in str(size_limit) for digit in "123456789"):
        raise ConfigError(f"size_limit must be at least 1 byte, or None for no limit, but got {size_limit!r}")
    return found or None
