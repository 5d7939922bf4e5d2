"""Which files of an old index are other files in a new one."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_streaming.formats.index import DatasetIndex, FileInfo


def changed_files(old: DatasetIndex, new: DatasetIndex) -> Iterator[str]:
    """Names that both indexes have, for files that differ in size or hashes, raw or compressed.

    Where one file of a pair has changed, the other counts as changed too: it may have no hash that would tell.
    """
    if old.shards.starts_like(new.shards, min(len(old.shards), len(new.shards))):
        return  # shards were added at the end, as mostly
    known = {name: content for name, content, _ in _pairs(old)}
    for name, content, names in _pairs(new):
        if known.get(name, content) != content:
            yield from names


def _pairs(index: DatasetIndex) -> Iterator[tuple[str, int, list[str]]]:
    """Each raw file's name, a number that tells its content and its compressed form's, and the names of both."""
    for shard in index.shards:
        for pair in shard.files:
            files = [file for file in pair if file is not None]
            yield pair[0].basename, hash(tuple(map(_content, files))), [file.basename for file in files]


def _content(file: FileInfo) -> tuple[int, tuple[tuple[str, str], ...]]:
    return file.bytes, tuple(sorted(file.hashes.items()))
