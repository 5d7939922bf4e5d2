"""Joins datasets that lie under one directory into one dataset, by an index over the shards of all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_streaming.errors import ConfigError, ObjectNotFoundError
from lightning_streaming.escaping import short_repr
from lightning_streaming.files import remove_partials
from lightning_streaming.formats.index import (
    INDEX_BASENAME,
    DatasetIndex,
    FileInfo,
    ShardInfo,
    dump_merged_index,
    parse_index,
)
from lightning_streaming.formats.shard import raw_forms, was_written_for
from lightning_streaming.formats.shard_format import described
from lightning_streaming.formats.shard_table import OTHER_FORMATS
from lightning_streaming.storage import Location, StorageOptions, local_path
from lightning_streaming.writing.destination import WRITING, parse_out

_LIST_ATTEMPTS = 3
_LIST_SECONDS = 60.0
_READERS = 16
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class _MergedPart:
    """A part, and where its index may be read."""

    path: str
    """From the merged dataset's directory down to the part's."""
    sources: tuple[Location, ...]
    """Directories that may hold it; the first that does is read."""


def merge(
    parts: Sequence[str | Path | tuple[str, str]],
    out: str | Path | tuple[str, str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> DatasetIndex:
    """Merge datasets by an index over their shards, in the order given.

    No shard is read, moved or removed; an existing index of ``out`` is replaced. Shards keep their format, columns and
    compression, which may differ. A part may itself be a merged dataset. A part that is listed twice counts once.

    Args:
        parts: Datasets below ``out``, at any depth, in the order of their samples. Each is a directory or URL, or that
            of its ``index.json``; or a pair (directory, URL), whose URL is read only if the directory has no index.
        out: The merged dataset: a directory; or a URL; or (directory, URL or second directory) for both.
        storage_options: Arguments for the filesystem of the URLs.

    Returns:
        The published index.

    Raises:
        ConfigError: There are no parts; a part is not below ``out``; parts of other libraries do not all have the same
            format; or files of another dataset have the names of decompressed shards.
        ObjectNotFoundError: A part has no index.
        IndexFormatError: An index cannot be read.
        StorageError: A store did not answer.
    """
    merged = join(parts, out, storage_options=storage_options)
    publish(merged, out, storage_options=storage_options)
    return merged


def join(
    parts: Sequence[str | Path | tuple[str, str]],
    out: str | Path | tuple[str, str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> DatasetIndex:
    """The index that :func:`merge` would publish; arguments and errors are the same."""
    options = StorageOptions(storage_options)
    roots = _roots(out, options)
    if isinstance(parts, str | Path) or not parts:
        raise ConfigError(
            f"parts must be a list of at least one, but got {short_repr(parts)}",
            hint="merge_recursive finds those below out",
            option="parts",
        )
    placed: dict[str, _MergedPart] = {}
    for part in parts:
        one = _find_part(part, roots, options)
        placed.setdefault(one.path, one)
    return joined(dict(zip(placed, _read_all(list(placed.values())), strict=True)))


def publish(
    index: DatasetIndex, out: str | Path | tuple[str, str], *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Put a merged index where readers find it; whole, in place of an older one.

    Raises:
        ConfigError: ``out`` is no place to write to, or holds shards itself that ``index`` does not name, or files of
            another dataset under the names that compressed shards have uncompressed.
        StorageError: The upload failed.
    """
    roots = _roots(out, StorageOptions(storage_options))
    for root in roots:
        _check_nothing_is_lost(index, root)
        if root.path is not None:
            _check_raw_forms(index, root.path)
    for root in roots:
        if root.path is not None:
            remove_partials(root.path / INDEX_BASENAME)
        (root / INDEX_BASENAME).put(dump_merged_index(index.shards))


def _check_nothing_is_lost(index: DatasetIndex, root: Location) -> None:
    """Refuse to replace the index of shards that lie in ``out`` itself: nobody would find them any more."""
    text = (root / INDEX_BASENAME).read_if_there()
    if text is None:
        return
    named = {shard.raw_data.basename for shard in index.shards}
    found = (shard.raw_data.basename for shard in parse_index(text, INDEX_BASENAME).shards)
    lost = [name for name in found if "/" not in name and name not in named]
    if lost:
        raise ConfigError(
            f"{root} is itself a dataset, with {lost[0]}, which the merged one would not name",
            hint="move it into a directory of its own below, and merge that too",
            option="out",
            path=str(root),
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
            f"their raw forms: {', '.join(foreign[:_MOST_NAMED])}{', ...' * (len(foreign) > _MOST_NAMED)}",
            hint="remove them",
            option="out",
            path=str(directory),
        )


def merge_recursive(
    out: str | Path | tuple[str, str], *, storage_options: Mapping[str, Any] | None = None
) -> DatasetIndex:
    """Merge all datasets below a directory, sorted by path; a dataset comes before those inside it.

    The search reads only files named ``index.json``, so shards may have any format. It does not follow links to
    directories.

    Args:
        out: As for :func:`merge`; of a pair, the second location is searched.
        storage_options: Arguments for the filesystem of the URL.

    Returns:
        The published index.

    Raises:
        ConfigError: There is no dataset below ``out``.
        IndexFormatError: An index cannot be read.
        StorageError: A store did not answer.
    """
    root = _roots(out, StorageOptions(storage_options))[-1]
    files = replace(root, attempts=_LIST_ATTEMPTS, timeout=_LIST_SECONDS).walk()
    # The index in a writer's own folder, of an earlier version, is one of shards that are not all in their places yet.
    found = (file for file in files if file.endswith(f"/{INDEX_BASENAME}") and WRITING not in file.split("/"))
    parts = _outermost_first(found)
    if not parts:
        raise ConfigError(
            f"there is no dataset to merge below {root}: no {INDEX_BASENAME} in any directory",
            option="out",
            path=str(root),
        )
    return merge([(root / part).url for part in parts], out, storage_options=storage_options)


def _roots(out: str | Path | tuple[str, str], options: Mapping[str, Any]) -> list[Location]:
    """The places of the merged dataset, the one that readers use last."""
    roots = [Location(str(root), options) for root in parse_out(out) if root is not None]
    roots[-1].prepare_to_write()
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


def _find_part(
    part: str | Path | tuple[str, str], roots: Sequence[Location], options: Mapping[str, Any]
) -> _MergedPart:
    """Find where a part lies below the merged dataset."""
    sources = tuple(dataset_location(one) for one in (part if isinstance(part, tuple | list) else [part]))
    paths = {path for source in sources for root in roots if (path := path_below(source, root.url)) is not None}
    asked = tuple(Location(source, options) for source in sources)
    if len(paths) == 1 and len(sources) <= 2:
        return _MergedPart(paths.pop(), asked)
    shown, places = (" and ".join(map(str, locations)) for locations in (asked, roots))
    if paths:
        raise ConfigError(
            f"the two places of a part must have the same path below {places}, but got {shown}", option="parts"
        )
    raise ConfigError(
        f"a part must lie below {places}, because an index names shards by their path from there, but got {shown}",
        hint="move it there, or merge into a directory above both",
        option="parts",
    )


def _read_all(parts: Sequence[_MergedPart]) -> list[DatasetIndex]:
    for location in {source.url: source for part in parts for source in _asked(part)}.values():
        location.prepare()
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(_read, parts))


def _asked(part: _MergedPart) -> Iterator[Location]:
    """The places that are asked for the index of a part: up to the first directory of this machine that has it."""
    for source in part.sources:
        yield source
        if source.path is not None and (source.path / INDEX_BASENAME).is_file():
            return


def _read(part: _MergedPart) -> DatasetIndex:
    for source in part.sources:
        data = (source / INDEX_BASENAME).read_if_there()
        if data is not None:
            return parse_index(data, str(source / INDEX_BASENAME))
    shown = " or ".join(map(str, part.sources))
    raise ObjectNotFoundError(
        f"there is no {INDEX_BASENAME} in {shown}", hint="a part is there once its writer has finished", path=shown
    )


def joined(parts: Mapping[str, DatasetIndex]) -> DatasetIndex:
    """The index of a dataset over all shards of its parts, which are named by their paths below it.

    Raises:
        ConfigError: They are of several formats, and one of these is of another library.
    """
    shards: dict[str, ShardInfo] = {}
    for path, index in parts.items():
        for shard in index.shards:
            moved = _moved(shard, path)
            shards.setdefault(moved.raw_data.basename, moved)
    merged = DatasetIndex(tuple(shards.values()))
    _check_one_kind(merged)
    return merged


def _check_one_kind(index: DatasetIndex) -> None:
    """Refuse data of another library beside any other, or in blocks of several lengths: no batch could hold both."""
    examples = [shard for _, shard in index.shards.examples()]
    kinds = {(shard.format, described(shard).get("block_length")): shard.raw_data.basename for shard in examples}
    if len(kinds) < 2 or not any(kind in OTHER_FORMATS for kind, _ in kinds):
        return
    told = (f"{name} is of {_in_words(*kind)}" for kind, name in kinds.items())
    raise ConfigError(
        f"a merged dataset must be of one format, but {', '.join(told)}",
        hint="read them as streams of one run (streams=), "
        "or write them as MDS with lightning-streaming convert, and merge that",
        option="parts",
    )


def _in_words(shard_format: str, block_length: int | None) -> str:
    return f"format {shard_format}" + (f" with block_length {block_length}" if block_length else "")


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


def dataset_location(location: str | Path) -> str:
    """The directory of a dataset that is named by it, or by its index: ``s3://x/a`` of ``s3://x/a/index.json``."""
    stripped = str(location).rstrip("/")
    directory, slash, name = stripped.rpartition("/")
    return directory if slash and name == INDEX_BASENAME else stripped


def path_below(location: str, root: str) -> str | None:
    """The path from one directory down to another; None if it is not below.

    For example ``"b/c"`` for ``s3://x/a/b/c`` below ``s3://x/a``. A local path may also lie below by where links lead.
    """
    directory, root_directory = local_path(location), local_path(root)
    if (directory is None) != (root_directory is None):
        return None
    if directory is None or root_directory is None:
        return _rest(location.rstrip("/"), root.rstrip("/") + "/")
    written = _rest(_normal(directory), _normal(root_directory).rstrip("/") + "/")
    return written or _rest(str(directory.resolve()), str(root_directory.resolve()).rstrip("/") + "/")


def _normal(directory: Path) -> str:
    return os.path.normpath(directory.absolute())


def _rest(location: str, root: str) -> str | None:
    rest = location.removeprefix(root)
    is_below = location.startswith(root) and not {"", ".", ".."} & set(rest.split("/"))
    return rest if is_below else None
