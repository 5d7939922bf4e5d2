"""Hashes that an index may record of its files: those of hashlib, and those of the xxhash package."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

from lightning_streaming.errors import ConfigError, MissingDependencyError
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
