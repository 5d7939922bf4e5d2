"""Which files of an old index are the same in a new one, and which are others."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_streaming.formats.index import DatasetIndex, FileInfo


def extends(old: DatasetIndex, new: DatasetIndex) -> bool:
    """Whether a new index has all shards of the old one, and only more at the end, as mostly."""
    return old.shards.starts_like(new.shards, len(old.shards))


def compare_files(old: DatasetIndex, new: DatasetIndex) -> Iterator[tuple[str, bool]]:
    """Names of files of raw files that both indexes have, and whether they are the same: size and hashes.

    Where one file of a pair, raw and compressed, has changed, the other counts as changed too: it may have no hash that
    would tell. Without hashes nothing is the same for sure: sizes of numbers, for example, are always alike.
    """
    known = {name: content for name, content, _ in _pairs(old)}
    for name, content, names in _pairs(new):
        if name in known:
            for one in names:
                yield one, content is not None and known[name] == content


def _pairs(index: DatasetIndex) -> Iterator[tuple[str, int | None, list[str]]]:
    """Each raw file's name, a number that tells its content and its compressed form's, and the names of both.

    There is no number where not all hashes are recorded.
    """
    for shard in index.shards:
        for pair in shard.files:
            files = [file for file in pair if file is not None]
            content = hash(tuple(map(_content, files))) if all(file.hashes for file in files) else None
            yield pair[0].basename, content, [file.basename for file in files]


def _content(file: FileInfo) -> tuple[int, tuple[tuple[str, str], ...]]:
    return file.bytes, tuple(sorted(file.hashes.items()))
