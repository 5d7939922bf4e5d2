"""Merge datasets below one directory into one dataset, by an index over the shards of all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_streaming.errors import ConfigError, ObjectNotFoundError
from lightning_streaming.escaping import short_repr
from lightning_streaming.files import remove_partials
from lightning_streaming.formats.index import INDEX_BASENAME, DatasetIndex, ShardInfo, dump_merged_index, parse_index
from lightning_streaming.formats.shard import raw_forms, was_written_for
from lightning_streaming.formats.shard_format import described
from lightning_streaming.formats.shard_table import FILE_FIELDS, OTHER_FORMATS
from lightning_streaming.storage import Location, StorageOptions, local_path
from lightning_streaming.writing.destination import WRITING, parse_out

_LIST_ATTEMPTS = 3
_LIST_SECONDS = 60.0
_READERS = 16
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class _MergedPart:
    """A part, and the locations of its index."""

    path: str
    """Path from the merged dataset's directory to the part's."""
    sources: tuple[Location, ...]
    """Directories that may hold the part; the first that does is read."""

    def read(self) -> DatasetIndex:
        for source in self.sources:
            data = (source / INDEX_BASENAME).read_if_there()
            if data is not None:
                return parse_index(data, str(source / INDEX_BASENAME))
        shown = " or ".join(map(str, self.sources))
        raise ObjectNotFoundError(
            f"there is no {INDEX_BASENAME} in {shown}", hint="a part has one once its writer has finished", path=shown
        )


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
    """Return the index that :func:`merge` would publish; arguments and errors are the same."""
    options = StorageOptions(storage_options)
    roots = _roots(out, options)
    if isinstance(parts, str | Path) or not parts:
        raise ConfigError(
            f"parts must be a list of at least one, but got {short_repr(parts)}",
            hint="merge_recursive finds those below out",
            option="parts",
        )
    by_path: dict[str, _MergedPart] = {}
    for location in parts:
        part = _find_part(location, roots, options)
        by_path.setdefault(part.path, part)
    needed: dict[str, Location] = {}
    for part in by_path.values():
        for source in part.sources:
            needed[source.url] = source
            if source.path is not None and (source.path / INDEX_BASENAME).is_file():
                break  # the other one is not read
    for source in needed.values():
        source.prepare()
    with ThreadPoolExecutor(_READERS) as readers:
        indexes = list(readers.map(_MergedPart.read, by_path.values()))
    return joined(dict(zip(by_path, indexes, strict=True)))


def publish(
    index: DatasetIndex, out: str | Path | tuple[str, str], *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Write a merged index to ``out``; whole, replacing an older one.

    Raises:
        ConfigError: ``out`` cannot be written to, or holds shards that ``index`` does not name, or files of another
            dataset that have the names of decompressed shards.
        StorageError: The upload failed.
    """
    roots = _roots(out, StorageOptions(storage_options))
    for root in roots:
        _check_shards_stay_named(index, root)
        if root.path is not None:
            _check_raw_forms(index, root.path)
    for root in roots:
        if root.path is not None:
            remove_partials(root.path / INDEX_BASENAME)
        (root / INDEX_BASENAME).put(dump_merged_index(index.shards))


def _check_shards_stay_named(index: DatasetIndex, root: Location) -> None:
    """Check that the new index names all shards of the old one in ``out`` itself: no reader would find them."""
    text = (root / INDEX_BASENAME).read_if_there()
    if text is None:
        return
    named = {shard.raw_data.basename for shard in index.shards}
    old = (shard.raw_data.basename for shard in parse_index(text, INDEX_BASENAME).shards)
    lost = [name for name in old if "/" not in name and name not in named]
    if lost:
        raise ConfigError(
            f"{root} is itself a dataset, with {lost[0]}, which the merged one would not name",
            hint="move it into a separate directory below, and merge that too",
            option="out",
            path=str(root),
        )


def _check_raw_forms(index: DatasetIndex, directory: Path) -> None:
    """Check that files with the names of raw forms of compressed shards do not have other contents.

    Readers that try the raw form first would read them instead. Stores have no such readers.
    """
    foreign = []
    for shard in index.shards if any(shard.compression for _, shard in index.shards.examples()) else ():
        paths = [(directory / raw.basename, raw.bytes) for raw in raw_forms([shard])]
        existing = [(path, size) for path, size in paths if path.is_file()]
        wrong = [path for path, size in existing if path.stat().st_size != size]
        if existing and (wrong or (len(existing) == len(paths) and not was_written_for(shard, directory))):
            foreign += [str(path.relative_to(directory)) for path in wrong or [path for path, _ in existing]]
    if foreign:
        raise ConfigError(
            f"{directory} holds files that have the names of decompressed shards, but other contents than the "
            f"compressed ones: {', '.join(foreign[:_MAX_SHOWN])}{', ...' * (len(foreign) > _MAX_SHOWN)}",
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
    # An index in the folder of a writer of an earlier version names shards that are not all stored.
    indexes = (file for file in files if file.endswith(f"/{INDEX_BASENAME}") and WRITING not in file.split("/"))
    directories = dict.fromkeys(str(PurePosixPath(file).parent) for file in indexes)
    # A directory after those around it: if a is merged of a/b, the order in the index of a is the one that counts.
    parts: dict[str, None] = {}
    for directory in directories:
        around = [str(parent) for parent in PurePosixPath(directory).parents if str(parent) in directories]
        parts.update(dict.fromkeys([*reversed(around), directory]))
    if not parts:
        raise ConfigError(
            f"there is no dataset to merge below {root}: no {INDEX_BASENAME} in any directory",
            option="out",
            path=str(root),
        )
    return merge([(root / part).url for part in parts], out, storage_options=storage_options)


def _roots(out: str | Path | tuple[str, str], options: Mapping[str, Any]) -> list[Location]:
    """Return the locations of the merged dataset, the one that readers use last."""
    roots = [Location(str(root), options) for root in parse_out(out) if root is not None]
    roots[-1].prepare_to_write()
    return roots


def _find_part(
    part: str | Path | tuple[str, str], roots: Sequence[Location], options: Mapping[str, Any]
) -> _MergedPart:
    """Return a part with its path below the merged dataset."""
    urls = tuple(dataset_location(location) for location in (part if isinstance(part, tuple | list) else [part]))
    paths = {path for url in urls for root in roots if (path := path_below(url, root.url)) is not None}
    sources = tuple(Location(url, options) for url in urls)
    if len(paths) == 1 and len(sources) <= 2:
        return _MergedPart(paths.pop(), sources)
    shown, targets = (" and ".join(map(str, locations)) for locations in (sources, roots))
    if paths:
        raise ConfigError(
            f"the two locations of a part must have the same path below {targets}, but got {shown}", option="parts"
        )
    raise ConfigError(
        f"a part must be below {targets}, because an index names shards by their path from there, but got {shown}",
        hint="move it there, or merge into a directory above both",
        option="parts",
    )


def joined(parts: Mapping[str, DatasetIndex]) -> DatasetIndex:
    """Return the index of a dataset over all shards of its parts, given by their paths below it.

    Raises:
        ConfigError: They have several formats, and one of these is of another library, or blocks of several lengths: no
            batch could hold both.
    """
    shards: dict[str, ShardInfo] = {}
    for path, index in parts.items():
        for shard in index.shards:
            # As named from further up: ``shard.00000.mds`` becomes ``path/shard.00000.mds``.
            files = {field: getattr(shard, field) for field in FILE_FIELDS}
            moved: dict[str, Any] = {
                field: replace(file, basename=f"{path}/{file.basename}") for field, file in files.items() if file
            }
            shards.setdefault(moved["raw_data"].basename, replace(shard, **moved))
    merged = DatasetIndex(tuple(shards.values()))
    examples = [shard for _, shard in merged.shards.examples()]
    kinds = {(shard.format, described(shard).get("block_length")): shard.raw_data.basename for shard in examples}
    if len(kinds) > 1 and any(kind in OTHER_FORMATS for kind, _ in kinds):
        shown = (
            f"{name} has format {kind}" + (f" with block_length {block_length}" if block_length else "")
            for (kind, block_length), name in kinds.items()
        )
        raise ConfigError(
            f"all parts of a merged dataset must have the same format, but {', '.join(shown)}",
            hint="read them as streams of one run (streams=), "
            "or write them as MDS with lightning-streaming convert, and merge that",
            option="parts",
        )
    return merged


def dataset_location(location: str | Path) -> str:
    """Return the directory of a dataset given by it, or by its index: ``s3://x/a`` for ``s3://x/a/index.json``."""
    stripped = str(location).rstrip("/")
    directory, slash, name = stripped.rpartition("/")
    return directory if slash and name == INDEX_BASENAME else stripped


def path_below(location: str, root: str) -> str | None:
    """Return the path from one directory down to another; None if it is not below.

    For example ``"b/c"`` for ``s3://x/a/b/c`` below ``s3://x/a``. A local path may also be below after links are
    resolved.
    """

    def rest(location: str, root: str) -> str | None:
        below = location.removeprefix(root.rstrip("/") + "/")
        return None if below == location or {"", ".", ".."} & set(below.split("/")) else below

    directory, root_directory = local_path(location), local_path(root)
    if (directory is None) != (root_directory is None):
        return None
    if directory is None or root_directory is None:
        return rest(location.rstrip("/"), root)
    written = rest(os.path.normpath(directory.absolute()), os.path.normpath(root_directory.absolute()))
    return written or rest(str(directory.resolve()), str(root_directory.resolve()))
