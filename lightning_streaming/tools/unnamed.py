"""Files that look like shards of a dataset, and that its index does not name: of no use, and in nobody's way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex
from lightning_streaming.tools.console import counted
from lightning_streaming.tools.repair import DAMAGED
from lightning_streaming.writing.names import is_shard_file, whole_name

_MOST_SHOWN = 5


def unnamed_files(names: Iterable[str], index: DatasetIndex) -> list[str]:
    """Those that look like a shard, also an unfinished or a damaged one, and are not named.

    Directories that have an index of their own are left out, and so are hidden ones: what is there is not for this
    index to name.

    Args:
        names: Files where the dataset is, relative to it.
        index: Its index.
    """
    found = {PurePosixPath(name) for name in names}
    named = {PurePosixPath(file.basename) for shard in index.shards for pair in shard.files for file in pair if file}
    others = {path.parent for path in found if path.name == INDEX_BASENAME} - {PurePosixPath()}
    stray = [path for path in found - named if _looks_like_shard(path.name) and not _is_elsewhere(path, others)]
    return sorted(map(str, stray))


def shown(files: Sequence[str]) -> str:
    """How many, and the first ones."""
    more = ", ..." if len(files) > _MOST_SHOWN else ""
    return f"{counted(len(files), 'file')} ({', '.join(files[:_MOST_SHOWN])}{more})"


def _looks_like_shard(name: str) -> bool:
    return is_shard_file(name) or whole_name(name) is not None or is_shard_file(name.partition(DAMAGED)[0])


def _is_elsewhere(path: PurePosixPath, others: set[PurePosixPath]) -> bool:
    return any(parent in others or parent.name.startswith(".") for parent in path.parents)
