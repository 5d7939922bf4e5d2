"""Is this file the one that the index promises?"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from lightning_streaming.errors import (
    ConfigError,
    DiskFullError,
    IntegrityError,
    MissingDependencyError,
    ShardCorruptError,
    StorageError,
)
from lightning_streaming.formats.checks import shortened
from lightning_streaming.formats.compression import decompressed_pieces
from lightning_streaming.formats.hashing import hash_bytes, hash_file
from lightning_streaming.formats.index import FileInfo

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CHEAPEST_FIRST = (
    "xxh3_64",
    "xxh3_128",
    "xxh128",
    "xxh64",
    "xxh32",
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


def find_size(path: Path) -> int | None:
    """Bytes of a file; None if there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def choose_hash(file: FileInfo, wanted: str | None) -> str | None:
    """Which recorded hash a file is checked by.

    Args:
        file: The file, with the hashes that the index records of it.
        wanted: The hash the user asks for; None or empty for the cheapest recorded one that can be computed here.

    Returns:
        Its name; None if none is recorded, or only those of a package that is not installed.

    Raises:
        ConfigError: The hash the user asks for is not recorded.
    """
    if wanted:
        if wanted not in file.hashes:
            recorded = shortened(", ".join(sorted(file.hashes)) or "none")
            raise ConfigError(
                f"validate_hash is {wanted!r}, but the hashes recorded of {file.basename} are: {recorded}; "
                "name one of these, or leave validate_hash out"
            )
        return wanted
    return next((name for name in _CHEAPEST_FIRST if name in file.hashes and _can_compute(name)), None)


def check_hash(path: Path, shown: str, file: FileInfo, name: str | None) -> None:
    """Compare a file with its recorded hash.

    Args:
        path: The file to look at.
        shown: What to call it in an error.
        file: What the index records of it.
        name: The recorded hash to compare; None to skip the check.

    Raises:
        IntegrityError: They differ.
    """
    if name is None:
        return
    found = hash_file(name, path)
    if found != file.hashes[name]:
        raise IntegrityError(f"{name} of {shown} must be {shortened(file.hashes[name], 150)}, but is {found}")


def unpack(path: Path, shown: str, raw: FileInfo, algorithm: str, destination: Path) -> None:
    """Decompress a file into another, with little memory but for snappy.

    One that exists is written to where it is: it keeps its inode and locks, and its size, if that is right. One that
    does not is made, in an existing directory.

    Args:
        path: The compressed file.
        shown: What to call it in an error.
        raw: What the index records of the raw file.
        algorithm: How it was compressed.
        destination: The raw file to write.

    Raises:
        IntegrityError: The data is damaged, or the raw file has another size than recorded.
        DiskFullError: There is no room for the raw file.
        StorageError: It cannot be written.
        MissingDependencyError: The package that decompresses it is not installed.
    """
    with path.open("rb") as packed:
        try:
            with os.fdopen(os.open(destination, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
                for piece in decompressed_pieces(algorithm, packed, raw.bytes):
                    file.write(piece)
        except ShardCorruptError as error:
            raise IntegrityError(f"{shown} cannot be decompressed: {error}") from error
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise DiskFullError(f"no room to decompress {shown} into {destination.parent}: {error}") from error
            raise StorageError(f"could not decompress {shown} into {destination}: {error}") from error


def _can_compute(name: str) -> bool:
    try:
        hash_bytes(name, b"")
    except MissingDependencyError:
        return False
    return True
