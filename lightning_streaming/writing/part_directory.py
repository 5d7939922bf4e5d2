"""A part in a local directory: one writer at a time, and what a writer that was killed left there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex
from lightning_streaming.writing.names import is_shard_file, whole_name


@contextmanager
def sole_writer(directory: Path | None) -> Iterator[None]:
    """Make a directory, and wait until no other process on this machine is in this block with it.

    The lock is on the directory itself, so no file is left; the kernel gives it back when its owner dies. A worker
    whose program was killed may live a moment longer: the next run waits for it. Some network filesystems lock no
    directories; there nothing is waited for. None for a place that is no directory.
    """
    if directory is None:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_half_part(directory: Path) -> None:
    """Remove an index, first, and shards, whole or partial; nothing that no writer of a part makes.

    Must be called by the sole writer.
    """
    names = [path.name for path in directory.iterdir() if _is_of_writer(path.name)]
    for name in sorted(names, key=lambda name: (not name.startswith(INDEX_BASENAME), name)):
        (directory / name).unlink()


def has_all_files(directory: Path, index: DatasetIndex) -> bool:
    """Whether every stored file of an index is there in its size; after a crash of the machine it may not be."""
    pairs = [pair for shard in index.shards for pair in shard.files]
    stored = [compressed or raw for raw, compressed in pairs]
    return all(_size(directory / file.basename) == file.bytes for file in stored)


def _is_of_writer(name: str) -> bool:
    whole = whole_name(name) or name
    return whole == INDEX_BASENAME or is_shard_file(whole)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
