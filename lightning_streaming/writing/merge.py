"""Joins datasets that lie under one directory into one dataset, by an index over the shards of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_streaming.errors import ConfigError, ObjectNotFoundError
from lightning_streaming.files import remove_partials
from lightning_streaming.formats.index import (
    INDEX_BASENAME,
    DatasetIndex,
    FileInfo,
    ShardInfo,
    dump_merged_index,
    parse_index,
)
from lightning_streaming.formats.raw_forms import raw_forms, was_written_for
from lightning_streaming.storage import join_url, local_path, mask_url, prepare
from lightning_streaming.storage.listing import list_files
from lightning_streaming.storage.options import StorageOptions
from lightning_streaming.writing.destination import parse_out
from lightning_streaming.writing.locations import dataset_location, path_below, place_at
from lightning_streaming.writing.names import WRITING

_RETRY = 3
_TIMEOUT = 60.0
_READERS = 16
_MOST_NAMED = 5

Part = str | Path | tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A part, and where its index may be read."""

    path: str
    """From the merged dataset's directory down to the part's."""
    sources: tuple[str, ...]
    """Directories or URLs that may hold it; the first that does is read."""


def merge(
    parts: Sequence[Part], out: str | Path | tuple[str, str], *, storage_options: Mapping[str, Any] | None = None
) -> DatasetIndex:
    """Publish the index of a dataset whose samples are those of its parts, one part after the other.

    No shard is read, moved or removed; an index that ``out`` already has is replaced. Shards keep their format, columns
    and compression, which may differ. A part may itself be merged. What is named twice counts once, at its first place.

    Args:
        parts: Datasets that lie below ``out``, at any depth, in the order of their samples. Each is a directory or URL,
            or that of its ``index.json``; or a pair (directory, URL) whose URL is asked only if the directory has none.
        out: The merged dataset: a directory; or a URL; or (directory, URL or second directory) for both.
        storage_options: Arguments for the filesystem of the URLs.

    Returns:
        The index that was published.

    Raises:
        ConfigError: There are no parts, one does not lie below ``out``, or files of another dataset lie under the names
            that compressed shards have uncompressed.
        ObjectNotFoundError: A part has no index.
        IndexFormatError: An index cannot be read.
        StorageError: A store did not answer.
    """
    merged = join(parts, out, storage_options=storage_options)
    publish(merged, out, storage_options=storage_options)
    return merged


def join(
    parts: Sequence[Part], out: str | Path | tuple[str, str], *, storage_options: Mapping[str, Any] | None = None
) -> DatasetIndex:
    """The index that :func:`merge` would publish; arguments and errors are the same."""
    storage_options = StorageOptions(storage_options)
    roots = _roots(out)
    if isinstance(parts, str | Path) or not parts:
        raise ConfigError(f"parts must be a list of at least one, but got {parts!r}; merge_under finds those below out")
    placed: dict[str, _Placed] = {}
    for part in parts:
        one = _place(part, roots)
        placed.setdefault(one.path, one)
    return _joined(placed, _read_all(list(placed.values()), storage_options or {}))


def publish(
    index: DatasetIndex, out: str | Path | tuple[str, str], *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Put a merged index where readers find it; whole, in place of an older one.

    Raises:
        ConfigError: ``out`` is no place to write to, or holds shards itself that ``index`` does not name, or files of
            another dataset under the names that compressed shards have uncompressed.
        StorageError: The upload failed.
    """
    options = storage_options or {}
    for root in _roots(out):
        _check_nothing_is_lost(index, root, options)
        directory = local_path(root)
        if directory is not None:
            _check_raw_forms(index, directory)
    for root in _roots(out):
        directory = local_path(root)
        if directory is not None:
            remove_partials(directory / INDEX_BASENAME)
        place_at(root, options).put(INDEX_BASENAME, dump_merged_index(index.shards))


def _check_nothing_is_lost(index: DatasetIndex, root: str, options: Mapping[str, Any]) -> None:
    """Refuse to replace the index of shards that lie in ``out`` itself: nobody would find them any more."""
    try:
        text = place_at(root, options).get(INDEX_BASENAME)
    except ObjectNotFoundError:
        return
    named = {shard.raw_data.basename for shard in index.shards}
    shards = parse_index(text, INDEX_BASENAME).shards
    lost = [shard.raw_data.basename for shard in shards if "/" not in shard.raw_data.basename]
    lost = [name for name in lost if name not in named]
    if lost:
        raise ConfigError(
            f"{mask_url(root)} is itself a dataset, with {lost[0]}, which the merged one would not name; move it into "
            "a directory of its own below, and merge that too"
        )


def _check_raw_forms(index: DatasetIndex, directory: Path) -> None:
    """Refuse files with the names of raw forms of compressed shards that say they were not made of these.

    They would be taken for these by readers that look for the raw form first. Stores have no such readers.
    """
    foreign = []
    for shard in index.shards if any(shard.compression for _, shard in index.shards.examples()) else ():
        paths = [(directory / raw.basename, raw.bytes) for raw in raw_forms([shard])]
        there = [(path, size) for path, size in paths if path.is_file()]
        wrong = [path for path, size in there if path.stat().st_size != size]
        if there and (wrong or (len(there) == len(paths) and not was_written_for(shard, directory))):
            foreign += [str(path.relative_to(directory)) for path in wrong or [path for path, _ in there]]
    if foreign:
        raise ConfigError(
            f"{directory} holds files that were not made of the compressed shards beside them, but have the names of "
            f"their raw forms: {', '.join(foreign[:_MOST_NAMED])}{', ...' * (len(foreign) > _MOST_NAMED)}; remove them"
        )


def merge_under(out: str | Path | tuple[str, str], *, storage_options: Mapping[str, Any] | None = None) -> DatasetIndex:
    """Merge all datasets below a directory, in the order of their sorted paths; a dataset before those inside it.

    Only files named ``index.json`` are looked at, so shards of any format may lie there. Links to directories are not
    followed.

    Args:
        out: As for :func:`merge`; of a pair, the second place is searched.
        storage_options: Arguments for the filesystem of the URL.

    Returns:
        The index that was published.

    Raises:
        ConfigError: There is no dataset below ``out``.
        IndexFormatError: An index cannot be read.
        StorageError: A store did not answer.
    """
    storage_options = StorageOptions(storage_options)
    root = _roots(out)[-1]
    files = list_files(root, dict(storage_options or {}), retry=_RETRY, timeout=_TIMEOUT)
    # The index in a writer's own folder is one of shards that are not all in their places yet.
    found = (file for file in files if file.endswith(f"/{INDEX_BASENAME}") and WRITING not in file.split("/"))
    parts = _outermost_first(found)
    if not parts:
        raise ConfigError(f"there is no dataset to merge below {mask_url(root)}: no {INDEX_BASENAME} in any directory")
    return merge([join_url(root, part) for part in parts], out, storage_options=storage_options)


def _roots(out: str | Path | tuple[str, str]) -> list[str]:
    """The places of the merged dataset, the one that readers use last."""
    roots = [str(root) for root in parse_out(out) if root is not None]
    prepare(roots[-1])
    return roots


def _outermost_first(index_files: Iterable[str]) -> list[str]:
    """Directories of sorted index files, in order, but each after those around it.

    For example ``["a", "a/b", "c"]`` of a/b/index.json, a/index.json, c/index.json: if ``a`` is merged of ``a/b``, its
    order is the one that counts.
    """
    directories = [str(PurePosixPath(file).parent) for file in index_files]
    known = set(directories)
    ordered: dict[str, None] = {}
    for directory in directories:
        around = [str(parent) for parent in PurePosixPath(directory).parents if str(parent) in known]
        ordered.update(dict.fromkeys([*reversed(around), directory]))
    return list(ordered)


def _place(part: Part, roots: Sequence[str]) -> _Placed:
    """Find where a part lies below the merged dataset."""
    sources = tuple(map(dataset_location, part if isinstance(part, tuple | list) else [part]))
    paths = {path for source in sources for root in roots if (path := path_below(source, root)) is not None}
    if len(paths) == 1 and len(sources) <= 2:
        return _Placed(paths.pop(), sources)
    shown, places = (" and ".join(map(mask_url, locations)) for locations in (sources, roots))
    if paths:
        raise ConfigError(f"the two places of a part must have the same path below {places}, but got {shown}")
    raise ConfigError(
        f"a part must lie below {places}, because an index names shards by their path from there, but got {shown}; "
        "move it there, or merge into a directory above both"
    )


def _read_all(parts: Sequence[_Placed], options: Mapping[str, Any]) -> list[DatasetIndex]:
    for source in {source for part in parts for source in _asked(part)}:
        prepare(source)
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(lambda part: _read(part, options), parts))


def _asked(part: _Placed) -> Iterator[str]:
    """The places that are asked for the index of a part: up to the first directory of this machine that has it."""
    for source in part.sources:
        yield source
        directory = local_path(source)
        if directory is not None and (directory / INDEX_BASENAME).is_file():
            return


def _read(part: _Placed, options: Mapping[str, Any]) -> DatasetIndex:
    for source in part.sources:
        try:
            data = place_at(source, options).get(INDEX_BASENAME)
        except ObjectNotFoundError:
            continue
        return parse_index(data, mask_url(join_url(source, INDEX_BASENAME)))
    shown = " or ".join(map(mask_url, part.sources))
    raise ObjectNotFoundError(f"there is no {INDEX_BASENAME} in {shown}; a part is there once its writer has finished")


def _joined(parts: Iterable[str], indexes: Iterable[DatasetIndex]) -> DatasetIndex:
    shards: dict[str, ShardInfo] = {}
    for path, index in zip(parts, indexes, strict=True):
        for shard in index.shards:
            moved = _moved(shard, path)
            shards.setdefault(moved.raw_data.basename, moved)
    return DatasetIndex(tuple(shards.values()))


def _moved(shard: ShardInfo, path: str) -> ShardInfo:
    """The shard as it is named from further up: ``shard.00000.mds`` becomes ``path/shard.00000.mds``."""

    def moved(file: FileInfo) -> FileInfo:
        return replace(file, basename=f"{path}/{file.basename}")

    return replace(
        shard,
        raw_data=moved(shard.raw_data),
        zip_data=shard.zip_data and moved(shard.zip_data),
        raw_meta=shard.raw_meta and moved(shard.raw_meta),
        zip_meta=shard.zip_meta and moved(shard.zip_meta),
    )
