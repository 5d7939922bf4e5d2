"""A part in a local directory: what a writer that was killed left there."""

from __future__ import annotations

from pathlib import Path

from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex
from lightning_streaming.writing.names import is_shard_file, whole_name
from lightning_streaming.writing.system_errors import system_errors


@system_errors("remove what a writer left")
def remove_half_part(directory: Path) -> None:
    """Remove an index, first, and shards, whole or partial; nothing that no writer of a part makes.

    Must be called by the sole writer.
    """
    names = [path.name for path in directory.iterdir() if _is_of_writer(path.name)]
    for name in sorted(names, key=lambda name: (not name.startswith(INDEX_BASENAME), name)):
        (directory / name).unlink()


@system_errors("look for files of a part")
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
